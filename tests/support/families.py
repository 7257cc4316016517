"""Families of models in processes of their own, as `bench.families` runs them."""

from bench.families.cells import Cell
from bench.families.engines import run_family


def serve(family: str, ways: tuple[str, ...]) -> list[Cell]:
    """The cells of a family, served in this process."""
    return list(run_family(family, ways))
