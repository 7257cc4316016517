"""Asks two questions about one document, of which compaction has seen the first only.

python -m bench.quality turns --model MODEL --variant snapkv,h2o --budget 512 --output turns.jsonl

The document begins with a system prompt. The first question asks for a number behind it, the second for a code in it,
each by the beginning of the sentence that has the answer. The second question comes in the same request, token by
token, with and without protection of the system prompt, and as a request of its own, whose prompt has the whole
conversation.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, TypeAdapter
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import end_with, open_console
from bench.common.engine import DENSE, Variant, engine, exits_for_wrong_backend, parse_variants
from bench.common.models import CHARS_PER_TOKEN, NEEDLE_8M, load_tokenizer, open_model
from bench.common.options import Commit, Output, Seed, TimeLimit
from bench.common.results import ResultFile, Row, read_run
from vllm_sparse_plugin.config import KEY, resolve
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.requests.arguments import PROTECT
from vllm_sparse_plugin.requests.protected import protected_ranges
from vllm_sparse_plugin.tools.eval import FORCED_TOKENS_ARGUMENT, FORCED_TOKENS_PROCESSOR
from vllm_sparse_plugin.tools.needles import Needle, library_text, longest_fit, magic_needles, with_needles
from vllm_sparse_plugin.tools.provenance import describe_run

FIRST, SECOND, PROTECTED, ALONE = TURNS = ("first", "second", "second, protected", "second, a new request")
"""What is asked."""
_ANSWER_TOKENS = 16
_LEAST_SYSTEM_TOKENS = 64


class Conversation(BaseModel):
    """A document, two questions, and their answers."""

    model_config = ConfigDict(frozen=True)

    prompt: list[int]
    """The document and the first question, in tokens."""
    follow_up: list[int]
    """The first answer and the second question."""
    answers: tuple[str, str]
    system_tokens: int
    """First tokens, which have the answer to the second question."""


_CONVERSATIONS = TypeAdapter(list[Conversation])


class Job(BaseModel):
    """The input of a process with an engine."""

    model_config = ConfigDict(frozen=True)

    model: str
    """Name or folder."""
    variant: str
    budget: int
    """Tokens that a compaction keeps."""
    conversations: str
    """JSON file."""
    output: str
    """JSON file to write: the right answers of each turn."""


def build_conversation(tokenizer: Any, context_tokens: int, system_tokens: int, index: int, seed: int) -> Conversation:
    """Returns a conversation whose first turn has at most `context_tokens` tokens."""
    rng = random.Random(f"{seed} turns {context_tokens} {index}")
    number, other = magic_needles(rng, 2)
    # A small model answers a second question in the words of the first with the first answer.
    code = replace(other, text=f"\nThe access code of {other.key} is: {other.value}.\n")
    text = library_text(rng.randrange(1 << 30), context_tokens * CHARS_PER_TOKEN)

    def question(needle: Needle) -> str:
        return needle.text.partition(f" {needle.value}")[0]

    def system(size: int) -> str:
        return with_needles(text[:size], [(0.5, code.text)]) + "\n"

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    of_system = longest_fit(len(text), lambda size: tokens(system(size)), system_tokens)
    rest, depth = text[of_system:], rng.uniform(0.1, 0.9)

    def prompt(size: int) -> str:
        return system(of_system) + with_needles(rest[:size], [(depth, number.text)]) + question(number)

    size = longest_fit(len(rest), lambda size: tokens(prompt(size)), context_tokens)
    return Conversation(
        prompt=tokenizer.encode(prompt(size)),
        follow_up=tokenizer.encode(f" {number.value}.{question(code)}", add_special_tokens=False),
        answers=(number.value, code.value),
        system_tokens=tokens(system(of_system)),
    )


def turns(
    output: Output,
    model: Annotated[str, typer.Option(help="needle-8m or a folder.")] = NEEDLE_8M.name,
    variant: Annotated[list[str] | None, typer.Option(help="Repeatable. Default: snapkv.")] = None,
    budget: Annotated[int, typer.Option(min=_LEAST_SYSTEM_TOKENS, help="Tokens that a compaction keeps.")] = 1024,
    context: Annotated[int, typer.Option(min=512, help="Tokens of the document with the first question.")] = 4096,
    system: Annotated[int, typer.Option(min=_LEAST_SYSTEM_TOKENS, help="Tokens of the system prompt.")] = 128,
    questions: Annotated[int, typer.Option(min=1, help="Conversations.")] = 25,
    seed: Seed = 0,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Ask two questions about documents with dense attention and each variant; exit code 3 if an engine fails."""
    end, failed = time.monotonic() + time_limit, []
    variants = parse_variants(variant or ["snapkv"])
    with open_model(model) as opened, tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        for each in variants:
            _check(each, budget, system, int(opened.config["num_hidden_layers"]))
        asked, written = (Path(folder) / f"{name}.json" for name in ("conversations", "answers"))
        tokenizer = load_tokenizer(opened.folder)
        conversations = [build_conversation(tokenizer, context, system, index, seed) for index in range(questions)]
        asked.write_bytes(_CONVERSATIONS.dump_json(conversations))
        about = {"context_tokens": context, "system_tokens": system, "budget_tokens": budget}
        with ResultFile(output, describe_run(opened.folder, commit)) as file:
            for each in [Variant.parse(DENSE), *variants]:
                job = Job(
                    model=str(opened.folder), variant=each.name, budget=budget, conversations=str(asked),
                    output=str(written),
                )  # fmt: skip
                if run_python("bench.quality", ["turns-engine", job.model_dump_json()], end - time.monotonic()) != 0:
                    failed.append(f"{each.name}: its engine failed, or was not done by the deadline")
                    continue
                for turn, right in json.loads(written.read_text(encoding="utf-8")).items():
                    file.write({"variant": each.name, "turn": turn, "right": right, "questions": questions, **about})
    open_console().print(table(read_run(output).rows))
    end_with(failed)


def _check(variant: Variant, budget: int, system_tokens: int, num_layers: int) -> None:
    """Raises ConfigurationError unless a variant gives tokens back and can keep a system prompt."""
    backend = variant.backend or DENSE
    if not variant.sparse:
        raise ConfigurationError(f"variant: got {variant.name}, allowed: a backend with a compaction")
    config = resolve({"compaction": {"budget_tokens": budget}}, BACKENDS[backend])
    try:
        protected_ranges({PROTECT: f"0:{system_tokens}"}, config, num_layers)
    except ValueError as error:
        raise ConfigurationError(f"system: got {system_tokens} tokens with {variant.name} ({error})") from None


def turns_engine(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Ask the questions in this process for `turns`."""
    job = Job.model_validate_json(text)
    conversations = _CONVERSATIONS.validate_json(Path(job.conversations).read_bytes())
    longest = max(len(each.prompt) + len(each.follow_up) for each in conversations)
    options = {
        "max_num_seqs": 8, "max_model_len": longest + _ANSWER_TOKENS, "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 2 << 30, "logits_processors": [FORCED_TOKENS_PROCESSOR],
    }  # fmt: skip
    variant = Variant.parse(job.variant)
    section = {"compaction": {"budget_tokens": job.budget}}
    with (
        exits_for_wrong_backend(),
        open_model(job.model) as model,
        engine(model, variant, json.dumps({KEY: section}), **options) as (llm, _),
    ):
        right = {turn: _count_right(llm, conversations, turn) for turn in TURNS if turn != PROTECTED or variant.sparse}
    Path(job.output).write_text(json.dumps(right), encoding="utf-8")


def _count_right(llm: Any, conversations: Sequence[Conversation], turn: str) -> int:
    """Returns how many answers of a turn have the number that was asked for."""
    from vllm import SamplingParams

    prompts, sampling = [], []
    for each in conversations:
        forced = each.follow_up if turn in (SECOND, PROTECTED) else []
        arguments: dict[str, Any] = {FORCED_TOKENS_ARGUMENT: forced} if forced else {}
        if turn == PROTECTED:
            arguments[PROTECT] = f"0:{each.system_tokens}"
        prompts.append({"prompt_token_ids": each.prompt + (each.follow_up if turn == ALONE else [])})
        most = len(forced) + _ANSWER_TOKENS
        sampling.append(SamplingParams(temperature=0, max_tokens=most, extra_args=arguments or None))
    tokenizer, outputs = llm.get_tokenizer(), llm.generate(prompts, sampling, use_tqdm=False)
    texts = [
        tokenizer.decode(output.outputs[0].token_ids[params.max_tokens - _ANSWER_TOKENS :])
        for output, params in zip(outputs, sampling, strict=True)
    ]
    number = 0 if turn == FIRST else 1
    return sum(each.answers[number] in text for each, text in zip(conversations, texts, strict=True))


def table(rows: Sequence[Row]) -> Table:
    """The right answers of each variant and turn."""
    shown = Table(title="Right answers")
    for heading in ("variant", *TURNS):
        shown.add_column(heading)
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = {row["turn"]: f"{row['right']}/{row['questions']}" for row in rows if row["variant"] == variant}
        shown.add_row(variant, *(cells.get(turn, "") for turn in TURNS))
    return shown
