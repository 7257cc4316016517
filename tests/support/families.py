"""Families of models in processes of their own, as `bench.families` runs them."""

from bench.families import multimodal, speculation
from bench.families.cells import Cell
from bench.families.engines import run_family


def serve(family: str, ways: tuple[str, ...]) -> list[Cell]:
    """The cells of a family, served in this process."""
    return list(run_family(family, ways))


def try_speculation(name: str) -> list[str]:
    """What is wrong with a method of speculation, tried in this process."""
    return list(speculation.faults_of(name))


def try_modality(name: str) -> list[str]:
    """What is wrong with images or audio, tried in this process."""
    return list(multimodal.faults_of(name))
