"""Blocks about the families of models and the features of vLLM that whole engines were run with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_run
from bench.families.cells import FAILED, NOT_SERVED, OK, REFUSED
from bench.families.table import FAMILIES, FEATURES, FEATURES_OF, WAYS

FILES: Mapping[str, Path] = {
    "CPU": RESULTS / "cpu-2core" / "families" / "all.jsonl",
    "GPU": RESULTS / "h200" / "families" / "all.jsonl",
}
"""The result files by device; one that is not there was not measured yet."""
_NOT_RUN = "not run"
_SIGNS = {OK: "yes", REFUSED: "refused", NOT_SERVED: "not in vLLM", FAILED: "fails", _NOT_RUN: _NOT_RUN}

_Cells = dict[tuple[str, str], Row]


def read_cells(path: Path) -> _Cells:
    """The cells of a result file by family and way, the latest of each; none of a file that is not there."""
    if not path.exists():
        return {}
    return {(row["family"], row["way"]): row for row in read_run(path).rows}


def _sources() -> list[Path]:
    return [path for path in FILES.values() if path.exists()]


def families() -> Block:
    """What became of each family with each preset, by device."""
    parts = []
    for device, path in FILES.items():
        cells = read_cells(path)
        if not cells:
            continue
        rows = []
        for key, family in FAMILIES.items():
            signs = [_SIGNS[cells.get((key, way), {"status": _NOT_RUN})["status"]] for way in WAYS]
            # One word stands for a row of the same.
            shown = [signs[0], *[""] * (len(signs) - 1)] if len(set(signs)) == 1 and signs[0] != "yes" else signs
            rows.append([family.name, family.special, *shown])
        parts += [f"### On a {device}", table(["family", "what is special", *(f"`{way}`" for way in WAYS)], rows)]
        parts += _reasons(cells)
    return Block("\n\n".join(parts), _sources())


def _reasons(cells: _Cells) -> list[str]:
    """A list of why something is not served; families with the same reason stand together."""
    ways: dict[tuple[str, str, str], list[str]] = {}
    for key, family in FAMILIES.items():
        for way in WAYS:
            row = cells.get((key, way), {})
            if row.get("reason"):
                # The name of the backend is the only difference between presets.
                reason = row["reason"].replace(f"attention backend {WAYS[way].backend}", "attention backend NAME")
                ways.setdefault((family.name, row["status"], reason), []).append(way)
    lines = []
    for (name, status, reason), found in ways.items():
        which = "" if len(found) == len(WAYS) else " with " + ", ".join(f"`{way}`" for way in found)
        what = {REFUSED: "refused", NOT_SERVED: "vLLM does not serve it here, without this plugin either"}
        lines.append(wrap(f"- {name}{which}: {what.get(status, status)}: `{reason}`.", "  "))
    return ["\n".join(lines)] if lines else []


def features() -> Block:
    """What became of features of vLLM under `unique`, by device."""
    cells = {device: read_cells(path) for device, path in FILES.items()}
    rows = [
        [
            feature,
            *(_SIGNS[of.get((FEATURES_OF, feature), {"status": _NOT_RUN})["status"]] for of in cells.values()),
        ]
        for feature in FEATURES
    ]
    return Block(table(["feature", *cells], rows), _sources())
