"""Blocks about the families of models and the features of vLLM that whole engines were run with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_run
from bench.robustness.families.cells import FAILED, NOT_SERVED, OK, REFUSED
from bench.robustness.families.table import FAMILIES, FEATURES, FEATURES_OF, WAYS

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
    """What became of each family by device, and why something is not served."""
    cells = {device: read_cells(path) for device, path in FILES.items()}
    rows = [
        [family.name, family.special, *(_summary(of, key) for of in cells.values())] for key, family in FAMILIES.items()
    ]
    parts = [table(["family", "what is special", *cells], rows)]
    for device, of in cells.items():
        if reasons := _reasons(of):
            parts += [f"On a {device}:", reasons]
    return Block("\n\n".join(parts), _sources())


def _summary(cells: _Cells, family: str) -> str:
    """What became of a family: one word, or what most ways have, and the others."""
    signs = {way: _sign(cells, family, way) for way in WAYS}
    most = Counter(signs.values()).most_common(1)[0][0]
    others = [f"`{way}` {sign}" for way, sign in signs.items() if sign != most]
    return ", ".join([most, *others])


def _sign(cells: _Cells, family: str, way: str) -> str:
    return _SIGNS[cells.get((family, way), {"status": _NOT_RUN})["status"]]


def _reasons(cells: _Cells) -> str:
    """A list of why something is not served, with the preset for one reason that several have."""
    ways: dict[tuple[str, str, str], list[str]] = {}
    for key, family in FAMILIES.items():
        for way in WAYS:
            row = cells.get((key, way), {})
            if row.get("reason"):
                # Sentences of different presets differ by the backend's name alone.
                reason = row["reason"].replace(f"attention backend {WAYS[way].backend}", "attention backend NAME")
                ways.setdefault((family.name, row["status"], reason), []).append(way)
    lines = []
    for (name, status, reason), found in ways.items():
        which = "" if len(found) == len(WAYS) else f" with {', '.join(f'`{way}`' for way in found)}"
        what = {REFUSED: "refused", NOT_SERVED: "not served by vLLM there, whatever the attention backend"}
        lines.append(wrap(f"- {name}{which}: {what.get(status, status)}: `{reason}`.", "  "))
    return "\n".join(lines)


def features() -> Block:
    """What became of features of vLLM under `unique`, by device."""
    cells = {device: read_cells(path) for device, path in FILES.items()}
    rows = [[feature, *(_sign(of, FEATURES_OF, feature) for of in cells.values())] for feature in FEATURES]
    return Block(table(["feature", *cells], rows), _sources())
