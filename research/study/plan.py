"""Which settings are measured at which lengths, most wanted first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from research.study.documents import TASKS
from research.study.scores import Interval, Mean, MeanFormat, Moments, Newest, Oracle, PageScore, Parts, TwoLevel
from research.study.settings import Setting, Stress
from vllm_sparse_plugin.tools.needles import STRESS_TASKS

BUDGETS = (2048, 1024, 512, 256, 128, 64)
SMALL_BUDGETS = (128, 64)
PAGE_SIZES = (4, 8, 16, 32)
LAMBDAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
FORMATS: tuple[MeanFormat, ...] = get_args(MeanFormat)
MAIN_CONTEXT = 16384
CONTEXTS = (4096, 8192, 16384, 32768)

PAIRS = Parts(4, 4, steps=2, dropped=2)
"""Four means of two tokens in 4 bits, two of them to a step: two bytes per element of a key. The default,
`statistics: quarters`."""
DIFFERENCES = Parts(4, 2, dropped=4, base=True)
"""The mean in int8 and four differences from it in 2 bits, and two steps: as many bytes."""
HALF = Parts(4, 2)
"""Four means of two tokens in 2 bits: as many bytes as UNIQUE's int8 mean."""
SKETCH = Parts(4, 2, rotated=True)
"""The same after a rotation, as `statistics: sketch` keeps them."""
CANDIDATES: tuple[PageScore, ...] = (SKETCH, PAIRS, DIFFERENCES, HALF)
RIVALS: tuple[PageScore, ...] = (
    Mean("int8", 0.75),
    Mean("int8", 1.0),
    Mean("bf16", 1.0),
    Mean("int8", 0.0),
    Interval(16),
    Interval(8),
    Oracle("logit"),
    Oracle("mass"),
)


def streaming_llm(page_size: int, budget_tokens: int) -> Setting:
    """One sink page, and the newest pages for the rest of the budget."""
    return Setting(Newest(), page_size, budget_tokens, recent_pages=budget_tokens // page_size - 1)


def grid(scores: Iterable[PageScore], page_sizes: Iterable[int], budgets: Iterable[int]) -> Iterator[Setting]:
    """Every score with every page size and every budget that leaves it a choice of two pages."""
    for score, page_size, budget in product(scores, page_sizes, budgets):
        if budget // page_size >= 4:
            yield Setting(score, page_size, budget)


@dataclass(frozen=True)
class Stage:
    """Settings that are measured at the same lengths."""

    name: str
    contexts: tuple[int, ...]
    settings: tuple[Setting, ...]
    of_text: bool = False
    """Whether the newest tokens of the documents are decoded instead of the questions."""
    tasks: tuple[str, ...] = TASKS
    """Of the documents."""


def _core() -> Iterator[Setting]:
    """The fewest that tell whether a score meets its targets."""
    yield Setting()
    scores = (SKETCH, Mean("int8", 0.75), Mean("int8", 1.0), Interval(16), PAIRS, DIFFERENCES)
    yield from grid(scores, (8,), (512, 128, 64))
    yield from grid((HALF, Interval(8), Moments("diag", 3.0, 8)), (8,), (128, 64))
    yield streaming_llm(4, 512)


def _text() -> Iterator[Setting]:
    """The newest text instead of needles: what a window is good for."""
    yield Setting()
    yield from (streaming_llm(4, budget) for budget in (4096, 2048, 1024))
    for budget in (512, 128, 64):
        yield streaming_llm(4, budget)
        yield from grid((SKETCH, Mean("int8", 0.75), PAIRS), (8,), (budget,))


def _targets() -> Iterator[Setting]:
    """What the shipped default is judged by: pages of 8 tokens."""
    yield Setting()
    for budget in (512, 128, 64, 256, 1024, 2048):
        yield from grid((*CANDIDATES, *RIVALS), (8,), (budget,))
        # Pages of 4 make its sinks the four tokens of the paper.
        yield streaming_llm(4, budget)


def _search() -> Iterator[Setting]:
    """Other scores, and other ways to choose by them, where budgets are small enough to tell them apart."""
    runs = (
        Parts(count, bits, rotated) for count, bits in ((1, 16), (2, 8), (4, 4), (8, 2)) for rotated in (False, True)
    )
    scores: list[PageScore] = [
        *runs,
        Parts(2, 8, steps=2),
        Parts(4, 4, steps=4),
        Parts(4, 4, steps=4, dropped=4),
        Parts(4, 4, rotated=True, steps=4, dropped=4),
        Parts(8, 2, rotated=True, steps=2, dropped=2),
        Parts(8, 2, rotated=True, steps=8),
        *(Parts(2, 4, rotated) for rotated in (False, True)),
        *(Parts(4, 2, rotated) for rotated in (False, True)),
        *(Parts(8, 1, rotated, steps) for rotated in (False, True) for steps in (1, 8)),
        Parts(4, 1, rotated=True),
        Parts(2, 2, rotated=True),
        *(Parts(4, 2, rotated, base=True) for rotated in (False, True)),
        *(Parts(8, 1, rotated, base=True) for rotated in (False, True)),
        *(Parts(4, 1, rotated, base=True) for rotated in (False, True)),
        *(Parts(count, 16) for count in (2, 4, 8)),
        *(Interval(8, factor) for factor in (0.35, 0.5, 0.7, 0.85)),
        *(Interval(4, factor) for factor in (0.5, 0.7, 1.0)),
        *(Moments("diag", weight, 8) for weight in (1.0, 2.0, 3.0, 4.0)),
        *(Moments("gauss", weight, 8) for weight in (0.125, 0.25, 0.5)),
        Moments("diag", 3.0, 4),
        Moments("gauss", 0.25, 4),
    ]
    yield from grid(scores, (8,), SMALL_BUDGETS)
    for score, budget in product((PAIRS, DIFFERENCES, Interval(8), Oracle("mass")), SMALL_BUDGETS):
        yield Setting(score, 8, budget, group="softmax")
        yield Setting(score, 8, budget, group="softmax-max")
    for score, budget in product((PAIRS, DIFFERENCES, Interval(8), Mean("int8", 1.0)), SMALL_BUDGETS):
        yield Setting(score, 8, budget, dense_layers=1)
        yield Setting(score, 8, budget, dense_layers=2)
        yield Setting(score, 8, budget, recent_pages=0)
    for score, share in product((PAIRS, Oracle("mass")), (0.9, 0.95, 0.99)):
        yield Setting(score, 8, 512, group="softmax", mass=share)
    yield from grid((*CANDIDATES, Parts(2, 8), Interval(8), Oracle("logit")), (4, 16, 32), SMALL_BUDGETS)
    # As many bytes per token as pages of 8 have, or half as many.
    wider = (Parts(8, 4, steps=8, dropped=4), Parts(8, 2), Parts(8, 2, rotated=True), Parts(16, 2, rotated=True))
    yield from grid((*wider, Parts(16, 1, rotated=True)), (16,), SMALL_BUDGETS)
    for coarse, fine in product((Mean("int8", 1.0), PAIRS), (PAIRS, Interval(8))):
        yield from grid((TwoLevel(coarse, fine, share=share) for share in (0.125, 0.25)), (8,), SMALL_BUDGETS)
    yield from grid((Mean("int8", weight, slow=True) for weight in (0.5, 1.0, 1.5, 2.0)), (8,), SMALL_BUDGETS)


def _stress() -> Iterator[Setting]:
    """Keys with outlying channels or a common offset."""
    scores: tuple[PageScore, ...] = (
        *CANDIDATES,
        Parts(4, 4, rotated=True),
        Parts(8, 2, rotated=True),
        *(Parts(4, 2, rotated, base=True) for rotated in (False, True)),
        *(Parts(8, 1, rotated, base=True) for rotated in (False, True)),
        Parts(8, 1, rotated=True, steps=8),
        Parts(2, 8),
        *(Mean(kind, 1.0) for kind in FORMATS),
        Interval(16),
        Interval(8),
        Moments("diag", 3.0, 8),
        Oracle("logit"),
    )
    settings = [Setting(), *grid(scores, (8,), (128, 64))]
    yield from (replace(setting, stress=kind) for kind in get_args(Stress)[1:] for setting in settings)


def _factorial() -> Iterator[Setting]:
    """UNIQUE: lambda x page size x budget in int8; page size x budget x format for two lambdas."""
    yield from grid((Mean("int8", weight) for weight in LAMBDAS), PAGE_SIZES, BUDGETS)
    yield from grid((Mean(kind, weight) for kind in FORMATS for weight in (0.75, 1.0)), PAGE_SIZES, BUDGETS)


def _lengths() -> Iterator[Setting]:
    """The targets, and lambda for the default page size, at other lengths."""
    yield from _targets()
    yield from grid((Mean("int8", weight) for weight in LAMBDAS), (8,), BUDGETS)


def _distinct(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    return tuple({setting.name: setting for setting in settings}.values())


STAGES = (
    Stage("core", (MAIN_CONTEXT,), _distinct(_core())),
    Stage("text", (MAIN_CONTEXT,), _distinct(_text()), of_text=True),
    Stage("targets", (MAIN_CONTEXT,), _distinct(_targets())),
    Stage("look-alikes", (MAIN_CONTEXT,), _distinct(_targets()), tasks=STRESS_TASKS),
    Stage("search", (MAIN_CONTEXT,), _distinct(_search())),
    Stage("stress", (MAIN_CONTEXT,), _distinct(_stress())),
    Stage("factorial", (MAIN_CONTEXT,), _distinct(_factorial())),
    Stage("lengths", (4096, 8192, 32768), _distinct(_lengths())),
)
