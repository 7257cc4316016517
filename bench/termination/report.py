"""The page of results."""

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "art_cpu.jsonl"
PAGE = Path(__file__).parent / "README.md"


def render() -> str:
    """x"""
    return ""
