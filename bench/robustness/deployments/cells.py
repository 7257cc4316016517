"""The outcome of a deployment: a line of the result file."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from bench.common.continuations import Continuation, gap_at_first_difference, logprob_error
from bench.common.engine import DENSE as DENSE_VARIANT
from bench.common.engine import Variant
from bench.common.models import NEEDLE_8M, load_tokenizer
from bench.common.results import Row
from bench.robustness.deployments.table import DENSE, DEPLOYMENTS, PLAIN, Deployment
from bench.robustness.families.cells import FAILED, REFUSED, refusal_of, sentence
from vllm_sparse_plugin.tools.server import ServerError

EQUAL, TIE, NOT_HERE = "equal", "parted at a tie", "not on this platform"
ONE_STEP = 0.125
"""The step of a bfloat16 logit between 16 and 32, the range of needle-8m's largest logits."""
OUTCOMES = EQUAL, TIE, REFUSED, NOT_HERE, FAILED


@dataclass(frozen=True)
class Cell:
    """One deployment, tried once."""

    deployment: str
    outcome: str
    """One of `OUTCOMES`."""
    reason: str = ""
    """Reason of the outcome; empty if answers were equal."""
    asked: int = 0
    """Number of compared answers."""
    parted: int = 0
    """Number of answers that differ from the plain answers."""
    gap: float | None = None
    """Largest value, over first different tokens, of how much likelier the plain engine found its own token."""
    logprob_error: float | None = None
    """Largest change of a log probability up to the first different token."""
    seconds: float = 0.0
    answers: Sequence[Continuation] = ()
    """Answers of the plain deployments, to compare others with."""

    def with_answers(self, answers: Sequence[Continuation]) -> Cell:
        """Returns the cell with answers to compare others with."""
        return replace(self, answers=answers)

    def as_row(self) -> Row:
        """Returns the cell as a line of a result file."""
        kept = {name: value for name, value in vars(self).items() if value is not None and name != "answers"}
        if self.answers:
            kept["answers"] = [vars(answer) for answer in self.answers]
        return kept


def answers_of(row: Mapping[str, Any]) -> list[Continuation]:
    """The answers in the line of a plain deployment."""
    return [Continuation(each["tokens"], list(map(_by_token, each["logprobs"]))) for each in row["answers"]]


def _by_token(step: Mapping[str, float]) -> dict[int, float]:
    return {int(token): logprob for token, logprob in step.items()}


def compare(name: str, expected: Sequence[Continuation], found: Iterable[Continuation], tie: float = ONE_STEP) -> Cell:
    """Compares answers with the expected ones, which may be given several times.

    Args:
        name: of the deployment.
        expected: the plain answers.
        found: the answers of the deployment.
        tie: largest difference of log probabilities, in nats, between tokens that may replace each other.
    """
    pairs = [(expected[index % len(expected)], each) for index, each in enumerate(found)]
    gaps = [gap for gap in (gap_at_first_difference(*pair) for pair in pairs) if gap is not None]
    error = max(logprob_error(*pair) for pair in pairs)
    cell = Cell(name, EQUAL, asked=len(pairs), parted=len(gaps), logprob_error=round(error, 4))
    if not gaps:
        return cell
    cell = replace(cell, gap=round(max(gaps), 4))
    if max(gaps) <= tie:
        return replace(cell, outcome=TIE, reason=f"log probabilities of the tokens differ by {max(gaps):.2g}")
    return replace(cell, outcome=FAILED,
                   reason=f"an answer parts where the tokens' log probabilities differ by {max(gaps):.3g}")  # fmt: skip


def before_the_end(answers: Iterable[Continuation], end: int) -> list[Continuation]:
    """Answers cut at their end token, for answers that continue after it."""
    cut = [answer.tokens.index(end) + 1 if end in answer.tokens else len(answer.tokens) for answer in answers]
    return [Continuation(each.tokens[:to], each.logprobs[:to]) for each, to in zip(answers, cut, strict=True)]


def unavailable(deployment: Deployment) -> str:
    """Reason why this machine cannot run a deployment; empty if it can."""
    from vllm.platforms import current_platform

    if deployment.package and importlib.util.find_spec(deployment.package) is None:
        return f"the package {deployment.package} is not installed"
    if current_platform.is_cpu():
        return deployment.needs_gpu and f"a CPU has no {deployment.needs_gpu}"
    there = current_platform.device_count()
    return "" if there >= deployment.gpus else f"it takes {deployment.gpus} GPUs and there are {there}"


def run_cell(name: str, rows: Mapping[str, Row]) -> Cell:
    """Tries a deployment in this process.

    Args:
        name: of `DEPLOYMENTS`.
        rows: the lines of the plain deployments tried so far.
    """
    start = time.monotonic()
    return replace(_try(name, rows), seconds=round(time.monotonic() - start, 1))


def _try(name: str, rows: Mapping[str, Row]) -> Cell:
    from bench.robustness.deployments.trials import TRIALS, Launcher, plainly

    deployment, trial = DEPLOYMENTS[name], TRIALS.get(name, plainly)
    if reason := unavailable(deployment):
        return Cell(name, NOT_HERE, reason)
    if deployment.gpus > 1:
        # By default vLLM gives each CPU worker a separate NUMA node.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

    def answers(variant: str) -> list[Continuation]:
        launcher = Launcher(deployment.arguments, Variant.parse(variant))
        return [each for said in trial(launcher) for each in said.continuations]

    if name == DENSE:
        found = answers(DENSE_VARIANT)
        return compare(name, found, found).with_answers(found)
    beside = DENSE if name == PLAIN else PLAIN
    if beside not in rows or "answers" not in rows[beside]:
        return Cell(name, FAILED, f"there are no answers of the deployment {beside!r} to compare with")
    expected = answers_of(rows[beside])
    try:
        found = answers("unique")
    except Exception as error:  # vLLM may raise anything
        return blame(name, error, lambda: answers(DENSE_VARIANT))
    if name == PLAIN:
        end = int(load_tokenizer(NEEDLE_8M).eos_token_id)
        return compare(name, before_the_end(expected, end), before_the_end(found, end)).with_answers(found)
    return compare(name, expected, found)


def blame(name: str, error: Exception, serve_densely: Callable[[], object]) -> Cell:
    """The outcome for an exception: a failure of the plugin if `serve_densely` raises nothing."""
    from bench.robustness.deployments.trials import IdleError

    if isinstance(error, IdleError):
        return Cell(name, FAILED, str(error))
    if refusal := refusal_of(error):
        return Cell(name, REFUSED, refusal)
    try:
        serve_densely()
    except Exception:
        return Cell(name, NOT_HERE, _told(error))
    return Cell(name, FAILED, _told(error))


def _told(error: Exception) -> str:
    """The message of an exception in one line, without paths of this machine."""
    if isinstance(error, ServerError):
        return " ".join(str(error).partition("; its log")[0].split())
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"])
    return sentence(error)
