"""Which settings are measured on which documents, most wanted first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from research.prefill.rules import Coverage, Density, Newest, Queries, Rule, Setting, ZipVL
from research.prefill.summaries import (
    BlockMean,
    Bounds,
    Box,
    Keys,
    MeanAndSpread,
    Quarters,
    Representatives,
)
from research.study.documents import TASKS
from research.study.plan import PAIRS
from research.study.settings import Setting as Policy
from vllm_sparse_plugin.tools.needles import QUESTIONS_PER_DOCUMENT, STRESS_TASKS

MAIN_CONTEXT = 16384
CONTEXTS = (4096, 8192, 16384, 32768)
DOCUMENTS = 7
"""Per task and context; a stage may take fewer."""
DENSE_DECODE = Policy()
SPARSE_DECODE = Policy(PAIRS, 8, 512)
"""The default policy: quarters, 64 pages of 8 tokens."""

TILES = (64, 128)
STRIDES = (1, 2, 4, 8, 16)
LAMBDAS = (0.0, 0.5, 1.0, 1.5, 2.0)
DENSITIES = (0.025, 0.05, 0.1, 0.2)
NARROW = (0.025, 0.05)
"""Densities that tell rules apart."""
FLOORS = (4, 8, 16)
COVERAGES = (0.9, 0.95, 0.99)
ZIPVL_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

MEAN, HALVES, ALL = Quarters(), Quarters(vectors=2), Quarters(vectors=4)
"""Quarters as one, two and four vectors of a page."""
SCORE, SCORE_ALL = Rule(MEAN, 1.0), Rule(ALL, 0.0)
MASS, MASS_ALL = Rule(MEAN, 0.5, "mass"), Rule(ALL, 0.0, "mass")
BEST, BEST_ALL = replace(MASS, form="best"), replace(MASS_ALL, form="best")
BEST_HALVES, BEST_UNIQUE = Rule(HALVES, 0.5, "best"), Rule(MeanAndSpread(), 0.5, "best")
DEFAULT = replace(BEST_ALL, queries=Queries(stride=8))
"""The rule of the plugin's sparse prefill, which reads a density of 0.1."""
ORACLE_MASS, ORACLE_PEAK = Rule(Keys(), 0.0, "mass"), Rule(Keys(), 0.0, "peak")
ORACLE_LOGIT = Rule(Keys(), 0.0)
PROBES = replace(ORACLE_MASS, queries=Queries("random"))
POOLED = Rule(BlockMean(), 0.0, "mass", Queries("mean"))
POOLED_SCORE = replace(SCORE, queries=Queries("mean"))


@dataclass(frozen=True)
class Stage:
    """Settings that are measured on the same documents."""

    name: str
    contexts: tuple[int, ...]
    settings: tuple[Setting | ZipVL, ...]
    documents: int = DOCUMENTS
    """Per task and context."""
    questions: int = QUESTIONS_PER_DOCUMENT
    """Of a document."""
    kind: Literal["needles", "text", "zipvl"] = "needles"
    """Whether questions are answered after a prefill in tiles, the newest tokens of the documents are decoded after
    one, or questions are answered after ZipVL's prefill."""
    tasks: tuple[str, ...] = (*TASKS, *STRESS_TASKS)


def with_strides(rule: Rule, strides: Iterable[int]) -> Iterator[Rule]:
    """The rule with fewer and fewer queries."""
    return (replace(rule, queries=Queries(stride=stride)) for stride in strides)


def _at(rules: Iterable[Rule | Newest], densities: Iterable[float] = NARROW, tile: int = 64) -> Iterator[Setting]:
    shares = tuple(densities)
    return (Setting(rule, Density(share), tile) for rule in rules for share in shares)


def summaries() -> Iterator[Rule]:
    """Every summary with every weight that is of interest, scored by the largest product."""
    yield from (Rule(MEAN, weight) for weight in LAMBDAS)
    yield from (Rule(HALVES, weight) for weight in LAMBDAS[:3])
    yield SCORE_ALL
    for weight, vectors in ((0.0, 4), (0.5, 2), (1.0, 1)):
        yield Rule(Quarters("sketch", vectors), weight)
    yield from (Rule(MeanAndSpread(), weight) for weight in LAMBDAS[:4])
    yield from (Rule(MeanAndSpread(kind), 1.0) for kind in ("bf16", "fp8"))
    yield from (Rule(Box(), weight) for weight in (0.5, 1.0))
    yield from (Rule(Bounds(kind), 0.0) for kind in ("int8", "bf16"))
    yield Rule(Representatives(), 0.0)


def masses() -> Iterator[Rule]:
    """Estimated masses, their largest share in place of the sum, and what the softmax is over."""
    yield from (Rule(MEAN, weight, "mass") for weight in (0.0, 0.5, 1.0))
    yield Rule(Quarters(squared=True), 0.5, "mass")
    yield Rule(HALVES, 0.5, "mass")
    yield MASS_ALL
    yield Rule(MeanAndSpread(), 0.5, "mass")
    for rule in (MASS, MASS_ALL):
        yield replace(rule, form="peak")
        yield replace(rule, over="past")
        yield replace(rule, queries=Queries(stride=4))


def queries() -> Iterator[Rule]:
    """Fewer queries of a tile, from either end, and queries in 8 bits."""
    yield from with_strides(SCORE, STRIDES)
    yield from with_strides(SCORE_ALL, STRIDES)
    for stride in (4, 8):
        yield replace(SCORE, queries=Queries(stride=stride, from_oldest=True))
        yield replace(SCORE_ALL, queries=Queries(stride=stride, from_oldest=True))
    for stride in (1, 4):
        yield replace(SCORE, queries=Queries(stride=stride, int8=True))
        yield replace(SCORE_ALL, queries=Queries(stride=stride, int8=True))


def wide_tiles() -> Iterator[Rule]:
    """What is tried with tiles of 128 tokens too."""
    for rule in (SCORE, SCORE_ALL):
        yield from with_strides(rule, (1, 2, 4, 8))
    yield MASS
    yield MASS_ALL


BOUNDS: tuple[Rule | Newest, ...] = (
    ORACLE_MASS, ORACLE_PEAK, ORACLE_LOGIT, PROBES, POOLED, POOLED_SCORE, Newest(),
)  # fmt: skip
"""What no rule can beat, and what rules have to beat."""


def coverages() -> Iterator[Setting]:
    """As many blocks as a share of the estimated mass takes."""
    for rule in (MASS, MASS_ALL, ORACLE_MASS):
        yield from (Setting(rule, Coverage(share)) for share in COVERAGES)


def floors() -> Iterator[Setting]:
    """More blocks where there are few."""
    return (Setting(SCORE_ALL, Density(share, floor)) for share in NARROW for floor in FLOORS)


def _wide() -> Iterator[Setting]:
    yield Setting()
    yield from _at((*BOUNDS, SCORE, SCORE_ALL, MASS_ALL))
    yield from _at((POOLED, Newest(), SCORE, SCORE_ALL, MASS_ALL), (0.1, 0.2))
    yield from _at(summaries(), (0.05,))
    yield from _at(queries(), (0.05,))
    yield from _at(masses(), (0.05,))
    yield from _at(wide_tiles(), (0.05,), tile=128)
    yield from coverages()
    yield from floors()


def finalists() -> Iterator[Setting]:
    """What the default is chosen from."""
    yield Setting()
    yield from _at((DEFAULT,), (0.1, 0.05))
    yield from _at((POOLED, Newest()), (0.1, 0.05))
    yield from _at((replace(MASS, queries=Queries(stride=4)), replace(BEST, queries=Queries(stride=4))), (0.1, 0.05))
    yield from _at((replace(BEST_HALVES, queries=Queries(stride=8)),), (0.1,))
    yield from _at((replace(MASS_ALL, queries=Queries(stride=4)),), (0.1, 0.05))
    yield from _at((replace(BEST_ALL, queries=Queries(stride=16)),), (0.1,))
    yield from _at((DEFAULT,), (0.1,), tile=128)
    yield from _at((replace(BEST_UNIQUE, queries=Queries(stride=8)), SCORE, ORACLE_MASS), (0.1,))
    yield Setting(DEFAULT, Density(0.05, 16))
    yield from (Setting(DEFAULT, Coverage(share)) for share in (0.9, 0.8))


COMPARED: dict[str, Setting] = {
    "the default": Setting(DEFAULT),
    "half as many blocks": Setting(DEFAULT, Density(0.05)),
    "half as many, at least 16": Setting(DEFAULT, Density(0.05, 16)),
    "a coverage of 0.8": Setting(DEFAULT, Coverage(0.8)),
    "a coverage of 0.9": Setting(DEFAULT, Coverage(0.9)),
    "tiles of 128": Setting(DEFAULT, tile=128),
    "every sixteenth query": Setting(replace(BEST_ALL, queries=Queries(stride=16))),
    "every fourth query, all vectors of a block": Setting(replace(MASS_ALL, queries=Queries(stride=4))),
    "two vectors of a page": Setting(replace(BEST_HALVES, queries=Queries(stride=8))),
    "one vector, every fourth query": Setting(replace(BEST, queries=Queries(stride=4))),
    "UNIQUE's record": Setting(replace(BEST_UNIQUE, queries=Queries(stride=8))),
    "the largest score, as UNIQUE's": Setting(SCORE),
    "pooled queries and keys": Setting(POOLED),
    "the newest blocks": Setting(Newest()),
    "an oracle: the true mass": Setting(ORACLE_MASS),
}
"""Finalists beside the default, and in what they differ from it."""


def _zipvl() -> Iterator[ZipVL]:
    yield from (ZipVL(tau) for tau in (0.975, 0.95, 0.99))
    yield from (ZipVL(share=share) for share in ZIPVL_SHARES)
    yield ZipVL(0.975, newest_probes=0, random_probes=128)


def _distinct(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    return tuple({setting.name: setting for setting in settings}.values())


STAGES = (
    Stage("wide", (MAIN_CONTEXT,), _distinct(_wide()), documents=2),
    Stage("finalists", (MAIN_CONTEXT,), _distinct(finalists())),
    Stage("lengths", (4096, 8192, 32768), _distinct(finalists()), documents=3),
    Stage("floors", (4096, 8192), (Setting(), *floors()), documents=3),
    Stage("text", (MAIN_CONTEXT,), _distinct(finalists()), kind="text", tasks=TASKS),
    Stage("zipvl", (MAIN_CONTEXT,), tuple(_zipvl()), documents=2, questions=5, kind="zipvl"),
)
