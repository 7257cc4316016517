"""Packages of the distribution, found where they lie; everything else about it is in pyproject.toml.

pyproject.toml could either find packages or name them. It cannot name the one whose folder lies elsewhere, the presets
in `configs/`, beside those that are found, so a list there would have to be kept by hand.
"""

from pathlib import Path

from setuptools import find_packages, setup

PRESETS = "vllm_sparse_plugin.configs"


def packages_under(folder: str, top: str) -> dict[str, str]:
    """Name and folder of the package `top` in `folder` and of every package within it."""
    names = find_packages(folder, include=[top, f"{top}.*"])
    return {name: str(Path(folder, *name.split("."))) for name in names}


FOLDERS = {
    **packages_under(".", "vllm_sparse_plugin"),
    **packages_under("kernels", "sparse_kernels"),
    PRESETS: "configs",
}
setup(packages=sorted(FOLDERS), package_dir=FOLDERS)
