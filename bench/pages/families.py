"""The block about families of models and features of vLLM that were run in whole engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.common.pages import Block, group_rows, table
from bench.common.results import RESULTS, Row, read_run
from bench.robustness.families.cells import FAILED, NOT_SERVED, OK, REFUSED
from bench.robustness.families.table import FAMILIES, FEATURES, FEATURES_OF, WAYS

FILES: Mapping[str, Path] = {
    "CPU": RESULTS / "cpu-2core" / "families" / "all.jsonl",
    "GPU": RESULTS / "h200" / "families" / "all.jsonl",
}
"""The result files by device. A missing file is not measured yet."""
_NOT_RUN = "not run"
_SIGNS = {OK: "yes", REFUSED: "refused", NOT_SERVED: "not in vLLM", FAILED: "fails", _NOT_RUN: _NOT_RUN}

_EVICTING = tuple(name for name, way in WAYS.items() if way.evicts)
_READING = tuple(name for name in WAYS if name not in _EVICTING)

_Cells = dict[tuple[str, str], Row]


def read_cells(path: Path) -> _Cells:
    """The latest cell of each family and way in a result file; empty for a missing file."""
    if not path.exists():
        return {}
    return {(row["family"], row["way"]): row for row in read_run(path).rows}


def families() -> Block:
    """The outcome of each family and feature by device; families and features with the same outcome share a row."""
    cells = [read_cells(path) for path in FILES.values()]
    rows = [_family_row(key, cells) for key in FAMILIES]
    rows += [
        ["compaction", FAMILIES[key].name, *(_summary(of, key, _EVICTING) for of in cells)]
        for key in FAMILIES
        if any((key, way) in of for of in cells for way in _EVICTING)
    ]
    rows += [["feature", name, *(_sign(of, FEATURES_OF, name) for of in cells)] for name in FEATURES]
    lines: list[list[str]] = []
    for kind in dict.fromkeys(row[0] for row in rows):
        grouped = group_rows(row[1:] for row in rows if row[0] == kind)
        lines += [[kind, *row] for row in grouped]
    sources = [path for path in FILES.values() if path.exists()]
    return Block(table(["kind", "family or feature", *FILES], lines), sources)


def _family_row(key: str, cells: list[_Cells]) -> list[str]:
    family = FAMILIES[key]
    outcomes = [_summary(of, key, _READING) for of in cells]
    kind = "hybrid" if family.special.startswith("hybrid") else "attention"
    is_served = any(outcome.startswith(_SIGNS[OK]) for outcome in outcomes)
    return [kind, family.name if is_served else f"{family.name} ({family.special})", *outcomes]


def _summary(cells: _Cells, family: str, ways: Sequence[str]) -> str:
    """The outcome of a family: one word, or the most frequent word and the exceptions."""
    # A file may be older than a way.
    run = [way for way in ways if any(of == way for _, of in cells)] or ways
    signs = {way: _sign(cells, family, way) for way in run}
    most = Counter(signs.values()).most_common(1)[0][0]
    others = [f"`{way}` {sign}" for way, sign in signs.items() if sign != most]
    return ", ".join([most, *others])


def _sign(cells: _Cells, family: str, way: str) -> str:
    return _SIGNS[cells.get((family, way), {"status": _NOT_RUN})["status"]]
