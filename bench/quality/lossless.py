"""Compares lossless mode with dense decoding, one engine per setting: equal tokens, and the share of right drafts.

python -m bench.quality lossless --output lossless.jsonl
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, TypeAdapter
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import end_with, open_console
from bench.common.continuations import Continuation, continuation
from bench.common.engine import DECODE_GRAPHS, Variant, engine, exits_for_wrong_backend
from bench.common.models import CHARS_PER_TOKEN, NEEDLE_8M, library_tokens, load_tokenizer, manual_tokens, open_model
from bench.common.options import Commit, Output, Seed, TimeLimit, parse_sizes, split_values
from bench.common.results import ResultFile, Row, read_run
from bench.quality.questions import check
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.tools.needles import answer_tokens, build_questions
from vllm_sparse_plugin.tools.provenance import describe_run

if TYPE_CHECKING:
    from vllm import LLM

PIECES = {"code": library_tokens, "text": manual_tokens}
"""Prompts in addition to needle tasks: source code and prose to continue."""
TIE = 1.01 * 2**-3
"""Largest log-probability lead of a token that another order of sums can reverse: one bfloat16 step between 16 and 32.
Half of the largest logits of needle-8m on source code are in this range, and none is higher."""
_MAX_NUM_SEQS = 4
_ANSWER = TypeAdapter(Continuation)
_CACHE_BYTES = 2 << 30
"""KV cache of an engine. The rest of a GPU stays free."""


class Prompt(BaseModel):
    """A text for an engine to continue."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """A needle task, or a name in `PIECES`."""
    context_tokens: int
    tokens: list[int]
    max_tokens: int

    @property
    def group(self) -> tuple[str, int]:
        """Prompts of one group are asked together."""
        return self.kind, self.context_tokens


class Job(BaseModel):
    """The input of a process with an engine."""

    model_config = ConfigDict(frozen=True)

    model: str
    """Folder of the model."""
    budget_tokens: int | None
    draft_tokens: int | None
    """None for dense decoding."""
    score_every: int
    """Steps of a draft that read pages of one choice."""
    block_size: int | None
    prompts: str
    """JSON lines file of `Prompt`."""
    answers: str
    """JSON lines file of `Continuation`. Dense decoding writes it; lossless mode is compared with it."""
    output: str
    """JSON lines file to append to."""

    @property
    def setting(self) -> str:
        """Name in tables."""
        if self.draft_tokens is None:
            return "dense"
        name = f"{self.budget_tokens} x {self.draft_tokens}"
        return name if self.score_every == 1 else f"{name}, scored every {self.score_every}"

    @property
    def additional_config(self) -> str:
        """The JSON for vLLM's `--additional-config`."""
        if self.draft_tokens is None:
            return json.dumps({KEY: {"selection": {"policy": "dense"}}})
        lossless = {
            "draft_tokens": self.draft_tokens,
            "draft_length": "fixed",
            "min_context_tokens": 0,
            "score_every": self.score_every,
        }
        return json.dumps({KEY: {"selection": {"budget_tokens": self.budget_tokens}, "lossless": lossless}})


@dataclass(frozen=True)
class Drafts:
    """vLLM's counts of drafts so far."""

    drafts: int
    drafted: int
    accepted: int
    by_place: tuple[int, ...]

    def since(self, before: Drafts) -> Drafts:
        """The counts since an earlier state."""
        places = tuple(now - then for now, then in zip(self.by_place, before.by_place, strict=True))
        return Drafts(
            self.drafts - before.drafts, self.drafted - before.drafted, self.accepted - before.accepted, places
        )


def lossless(
    output: Output,
    model: Annotated[str, typer.Option(help="needle-8m or a folder.")] = NEEDLE_8M.name,
    budget: Annotated[
        list[str] | None, typer.Option(help="Tokens that a draft reads, repeatable. Default: 512,2048.")
    ] = None,
    draft_tokens: Annotated[list[str] | None, typer.Option(help="Tokens of a draft, repeatable. Default: 4,8.")] = None,
    score_every: Annotated[
        list[str] | None, typer.Option(help="Steps of a draft that read pages of one choice, repeatable. Default: 1.")
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(help="Context in tokens, repeatable. Default: 4K,8K,16K.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Needle task to add, repeatable. Default: kv, multikey.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts for each context and kind.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode after code or text.")] = 96,
    seed: Seed = 0,
    block_size: Annotated[int | None, typer.Option(min=1, help="As for vLLM.")] = None,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Continue the same prompts densely and in lossless mode; exit code 3 if tokens differ at more than ties."""
    end = time.monotonic() + time_limit
    tasks, contexts = split_values(task or ["kv", "multikey"]), parse_sizes("context", context or ["4K,8K,16K"])
    budgets = parse_sizes("budget", budget or ["512,2048"])
    lengths = parse_sizes("draft_tokens", draft_tokens or ["4,8"])
    choices = parse_sizes("score_every", score_every or ["1"])
    console = open_console()
    failed = []
    with open_model(model) as opened, tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        check(opened, contexts, tasks, prompts)
        with ResultFile(output, describe_run(opened.folder, commit)):
            pass
        asked, answers = Path(folder) / "prompts.jsonl", Path(folder) / "answers.jsonl"
        with console.status("Writing the prompts"):
            found = _prompts(opened.folder, tasks, contexts, prompts, new_tokens, seed)
            _write_lines(asked, (prompt.model_dump_json() for prompt in found))
        # Dense decoding comes first, for the comparison.
        for size, drafts, every in [(None, None, 1), *product(budgets, lengths, choices)]:
            job = Job(
                model=str(opened.folder),
                budget_tokens=size,
                draft_tokens=drafts,
                score_every=every,
                block_size=block_size,
                prompts=str(asked),
                answers=str(answers),
                output=str(output.absolute()),
            )
            code = run_python("bench.quality", ["lossless-engine", job.model_dump_json()], end - time.monotonic())
            if code is None:
                failed.append(f"{job.setting} and all later settings: not done by the deadline")
                break
            if code:
                failed.append(f"{job.setting}: ended with exit code {code}")
                if drafts is None:
                    break
    rows = read_run(output).rows
    console.print(table(rows))
    failed += [
        f"{row['setting']}, {row['kind']}, {row['context_tokens']}: an answer parts where its token is behind by {lead}"
        for row in rows
        for _, _, lead in row["parted"]
        if lead > TIE
    ]
    end_with(failed)


def _prompts(
    folder: Path, tasks: Sequence[str], contexts: Sequence[int], count: int, new_tokens: int, seed: int
) -> Iterator[Prompt]:
    """Needle questions, and truncated source code and prose."""
    tokenizer = load_tokenizer(folder)
    for context in contexts:
        for task in tasks:
            for question in build_questions(tokenizer, task, context, count, seed):
                tokens = tokenizer.encode(question.prompt)
                yield Prompt(kind=task, context_tokens=context, tokens=tokens, max_tokens=answer_tokens(task))
        for kind, piece in PIECES.items():
            for index in range(count):
                # Pieces of the library do not overlap. Those of the manual have different ends.
                start = (seed * count + index) * context * CHARS_PER_TOKEN
                tokens = piece(tokenizer, start, context - new_tokens)
                yield Prompt(kind=kind, context_tokens=context, tokens=tokens, max_tokens=new_tokens)


def lossless_engine(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Continue prompts in this process for `lossless`, and append a row for each context and kind."""
    job = Job.model_validate_json(text)
    prompts = [Prompt.model_validate_json(line) for line in Path(job.prompts).read_text(encoding="utf-8").splitlines()]
    options = {
        "max_model_len": max(prompt.context_tokens for prompt in prompts),
        "max_num_seqs": _MAX_NUM_SEQS,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": _CACHE_BYTES,
        "compilation_config": DECODE_GRAPHS,
        "disable_log_stats": False,
        "block_size": job.block_size,
    }
    with (
        exits_for_wrong_backend(),
        open_model(job.model) as model,
        ResultFile(Path(job.output)) as file,
        engine(model, Variant.parse("unique"), job.additional_config, **options) as (llm, _),
    ):
        for row in _measure(llm, job, prompts):
            file.write(row)


def _measure(llm: LLM, job: Job, prompts: Sequence[Prompt]) -> Iterator[Row]:
    """Continues all prompts, those of one kind and context at once; yields a row for each."""
    from vllm import SamplingParams

    path, found = Path(job.answers), list[Continuation]()
    dense = job.draft_tokens is None
    lines = [] if dense else path.read_text(encoding="utf-8").splitlines()
    expected = [_ANSWER.validate_json(line) for line in lines]
    for group in dict.fromkeys(prompt.group for prompt in prompts):
        here = [(index, prompt) for index, prompt in enumerate(prompts) if prompt.group == group]
        sampling = SamplingParams(
            temperature=0,
            max_tokens=here[0][1].max_tokens,
            ignore_eos=group[0] in PIECES,
            logprobs=20 if dense else None,
        )
        inputs: Any = [{"prompt_token_ids": prompt.tokens} for _, prompt in here]
        before, begin = _drafts(llm), time.perf_counter()
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        seconds, drafts = time.perf_counter() - begin, _drafts(llm).since(before)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        if dense:
            found += map(continuation, outputs)
            parts = []
        else:
            compared = enumerate(zip(here, answers, strict=True))
            parts = [(number, expected[index].first_difference(tokens)) for number, ((index, _), tokens) in compared]
        yield {
            "setting": job.setting,
            "kind": group[0],
            "context_tokens": group[1],
            "budget_tokens": job.budget_tokens,
            "draft_tokens": job.draft_tokens,
            "score_every": job.score_every,
            "prompts": len(here),
            "tokens": sum(map(len, answers)),
            "parted": [[number, part[0], round(part[1], 4)] for number, part in parts if part is not None],
            "drafts": drafts.drafts,
            "drafted": drafts.drafted,
            "accepted": drafts.accepted,
            "accepted_by_place": drafts.by_place,
            "seconds": round(seconds, 2),
        }
    if dense:
        _write_lines(path, (_ANSWER.dump_json(answer).decode() for answer in found))


def _drafts(llm: LLM) -> Drafts:
    """vLLM's counts of drafts; zeros without speculation."""
    counted = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (int(getattr(counted.get(name), "value", 0)) for name in names)
    places = getattr(counted.get("accepted_tokens_per_pos"), "values", ())
    return Drafts(drafts, drafted, accepted, tuple(int(count) for count in places))


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def table(rows: Sequence[Row]) -> Table:
    """A line for each setting, kind and context."""
    lines = Table("budget x drafts", "kind", "context", "same", "largest lead", "accepted", "tokens a step", "seconds")
    for row in rows:
        cells = [row["setting"], row["kind"], str(row["context_tokens"])]
        if row["draft_tokens"] is None:
            cells += ["-"] * 4
        else:
            leads = [lead for _, _, lead in row["parted"]]
            cells += [
                f"{row['prompts'] - len(leads)}/{row['prompts']}",
                f"{max(leads):.3f}" if leads else "-",
                f"{row['accepted'] / row['drafted']:.3f}" if row["drafted"] else "-",
                f"{1 + row['accepted'] / row['drafts']:.2f}" if row["drafts"] else "-",
            ]
        lines.add_row(*cells, f"{row['seconds']:.1f}")
    return lines
