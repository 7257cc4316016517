"""Finds the packages of the distribution and writes its description; everything else about it is in pyproject.toml.

pyproject.toml could either find packages or name them. It cannot name the one whose folder lies elsewhere, the presets
in `configs/`, beside those that are found, so a list there would have to be kept by hand.

The description is README.md. Its links are relative, for readers of the checkout; a package index needs absolute ones.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PRESETS = "vllm_sparse_plugin.configs"


def packages_under(folder: str, top: str) -> dict[str, str]:
    """Name and folder of the package `top` in `folder` and of every package within it."""
    names = find_packages(folder, include=[top, f"{top}.*"])
    return {name: str(Path(folder, *name.split("."))) for name in names}


def description() -> str:
    """README.md with absolute links: pages and files of the tag of this version, and pictures as raw files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home, tag = project["urls"]["Homepage"], f"v{project['version']}"

    def absolute(link: re.Match[str]) -> str:
        form = "raw" if link["mark"] == "!" else "blob"
        return f"{link['mark']}[{link['text']}]({home}/{form}/{tag}/{link['path']})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)\s]+)\)", absolute, text)


FOLDERS = {
    **packages_under(".", "vllm_sparse_plugin"),
    **packages_under("kernels", "sparse_kernels"),
    PRESETS: "configs",
}
setup(
    packages=sorted(FOLDERS),
    package_dir=FOLDERS,
    long_description=description(),
    long_description_content_type="text/markdown",
)
