"""Finds rules that keep the answers of a pretrained model.

python -m research.real prepare --model MODEL --output prompts.jsonl.gz
python -m research.real run --model MODEL --prompts prompts.jsonl.gz --output real.jsonl
python -m research.real table real.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.common.console import print_tables
from bench.common.results import ResultFile
from research.real import adaptive, contributions, decode, pages, prefill, reuse, routing, rules, selection, sinks
from research.real.answers import measure_answers
from research.real.model import Llama
from research.real.report import tables
from research.real.texts import RULER, TASK_NAMES, Prompt, read_prompts, ruler_prompts, text_prompts, write_prompts
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import open_tokenizer, run_app
from vllm_sparse_plugin.tools.needles import library_text
from vllm_sparse_plugin.tools.provenance import describe_run

STUDIES = ("answers", "prefill", "routing", "pages", "decode", "reuse", "sinks")
"""Studies that run by default. They read everything in each layer."""
SELECTION, ADAPTIVE, CONTRIBUTIONS = "selection", "adaptive", "contributions"
"""Studies that run if they are named."""
PROSE, CODE = "prose", "code"
PAGE_ARMS = (pages.ORACLE, *pages.KINDS_OF_PAGES, *pages.LEVELS)
DECODE_ARMS = (pages.ORACLE, *pages.KINDS_OF_PAGES)
REUSE_ARMS = tuple(pages.KINDS_OF_PAGES)
_LIBRARY_CHARS = 4_000_000
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")
_AGAIN = "<|im_end|>\n<|im_start|>user\nRepeat the previous context exactly.<|im_end|>\n<|im_start|>assistant\n"
_WORD = "the"

app = typer.Typer(
    help="Rules that keep the answers of a pretrained model.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode="markdown",
)  # fmt: skip
Model = Annotated[Path, typer.Option(help="Folder of a Llama or a Gemma 3 in transformers' format.")]


@app.command()
def prepare(
    model: Model,
    output: Annotated[Path, typer.Option(help="Compressed JSON lines to write.")],
    contexts: Annotated[str, typer.Option(help="Tokens of questions and texts.")] = "4096,7680",
    tasks: Annotated[str, typer.Option(help="Of RULER; may be empty.")] = ",".join(TASK_NAMES),
    questions: Annotated[int, typer.Option(min=1, help="Questions per task at the first context.")] = 25,
    more_questions: Annotated[int, typer.Option(min=1, help="Questions per task at further contexts.")] = 2,
    texts: Annotated[int, typer.Option(min=1, help="Texts per kind and context.")] = 10,
    prose: Annotated[Path | None, typer.Option(help="Text file. Default: Python's documentation.")] = None,
    seed: Annotated[int, typer.Option(help="Of questions.")] = 0,
) -> None:
    """Write the model's inputs as tokens."""
    tokenizer = open_tokenizer(model)
    if prose is None:
        from pydoc_data.topics import topics

        documentation = "\n".join(topics.values())
    else:
        documentation = prose.read_text(encoding="utf-8")
    found: list[Prompt] = []
    for number, context in enumerate(map(int, contexts.split(","))):
        count = more_questions if number else questions
        if tasks:  # they need a chat template
            found += ruler_prompts(tokenizer, tasks.split(","), context, count, seed)
        found += text_prompts(tokenizer, PROSE, documentation, context, texts)
        found += text_prompts(tokenizer, CODE, library_text(0, _LIBRARY_CHARS), context, texts)
    write_prompts(output, found)
    typer.echo(f"{len(found)} prompts, {sum(len(each.tokens) for each in found)} tokens")


@app.command()
def run(
    model: Model,
    prompts: Annotated[Path, typer.Option(help="File of `prepare`.")],
    output: Annotated[Path, typer.Option(help="JSON lines to write.")],
    study: Annotated[str, typer.Option(help="Studies, in this order.")] = ",".join(STUDIES),
    arms: Annotated[str, typer.Option(help="Arms of these studies. Default: all.")] = "",
    ratios: Annotated[str, typer.Option(help="Shares of a prompt that eviction keeps.")] = "0.25,0.125",
    shares: Annotated[str, typer.Option(help="Shares of the groups that routing skips.")] = "0.05,0.1,0.2",
    reduces: Annotated[str, typer.Option(help="How to combine the page scores of a group.")] = "max,share",
    budgets: Annotated[str, typer.Option(help="Pages that a decode step reads.")] = "64,128,192,256",
    first_dense: Annotated[str, typer.Option(help="Number of first layers that read everything.")] = "0",
    context: Annotated[int, typer.Option(help="Context of the questions to answer, in tokens.")] = 4096,
    questions: Annotated[int, typer.Option(min=1, help="Maximum questions per task.")] = 25,
    texts: Annotated[int, typer.Option(min=1, help="Maximum texts per kind and context.")] = 10,
    longest: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 128,
    prefixes: Annotated[str, typer.Option(help="First tokens of a text that `selection` also measures.")] = "",
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds after which the command ends.")] = 480,
    commit: Annotated[str | None, typer.Option(help="Commit to record.")] = None,
) -> None:
    """Measure arms and write each result at once. Exit code 3 if time runs out."""
    end = time.monotonic() + time_limit
    studies, chosen = _names("study", study, (*STUDIES, SELECTION, ADAPTIVE, CONTRIBUTIONS)), choose_arms(arms)
    if dtype not in ("bfloat16", "float32"):
        raise ConfigurationError(f"dtype: got {dtype!r}, allowed: bfloat16, float32")
    loaded = Llama.load(model, device, getattr(torch, dtype))
    if any(loaded.windows) and studies != [SELECTION]:
        raise ConfigurationError(f"study: got {study!r} for a model with windows, allowed: {SELECTION}")
    exact = None if dtype == "float32" else Llama.load(model, device, torch.float32)
    everything = read_prompts(prompts)
    asked = _first([each for each in everything if each.kind == RULER and each.context_tokens == context], questions)
    written = _first([each for each in everything if each.kind != RULER], texts + 1)
    # The first text of each kind and context sets thresholds. It is not measured.
    held_out, measured = _first(written, 1), [each for each in written if each not in _first(written, 1)]
    few = _first([each for each in everything if each.kind == RULER], 1)
    text_of, end_tokens, encode = _tokenizer(model)
    measurements: Mapping[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "answers": lambda: measure_answers(
            loaded, asked, chosen["answers"], _numbers(ratios), text_of, end_tokens, encode(_AGAIN), longest
        ),
        "prefill": lambda: prefill.measure_prefill(loaded, exact, measured, chosen["prefill"]),
        "routing": lambda: routing.measure_routing(
            loaded, exact, held_out, measured, chosen["routing"], _numbers(shares)
        ),
        "pages": lambda: pages.measure_pages(loaded, [*few, *measured], chosen["pages"], reduces.split(",")),
        "decode": lambda: decode.measure_decode(
            loaded,
            exact,
            measured,
            chosen["decode"],
            reduces.split(","),
            list(map(int, budgets.split(","))),
            list(map(int, first_dense.split(","))),
        ),
        "reuse": lambda: reuse.measure_reuse(
            loaded, exact, held_out, measured, chosen["reuse"], list(map(int, budgets.split(",")))
        ),
        "sinks": lambda: sinks.measure_sinks(loaded, measured, chosen["sinks"], encode(_WORD)[0]),
        ADAPTIVE: lambda: adaptive.measure_adaptive(
            adaptive.Reader(loaded, text_of, end_tokens, longest), exact, measured, asked, chosen[ADAPTIVE]
        ),
        CONTRIBUTIONS: lambda: contributions.measure_contributions(loaded, measured),
        SELECTION: lambda: selection.measure_selection(
            loaded, _first(written, texts), chosen[SELECTION], [int(each) for each in prefixes.split(",") if each]
        ),
    }
    with torch.inference_mode(), ResultFile(output, describe_run(model, commit)) as file:
        for name in studies:
            if not chosen[name]:
                continue
            for row in measurements[name]():
                file.write(row)
                if "seconds" in row and "text" not in row:
                    typer.echo(f"{row['arm']} {row.get('ratio', '')}: {row['seconds']} s", err=True)
                if time.monotonic() > end:
                    typer.echo("time is up", err=True)
                    raise typer.Exit(3)
            if device.startswith("cuda"):
                torch.cuda.empty_cache()


@app.command("table")
def show(
    results: Annotated[list[Path], typer.Argument(help="Files of `run`, for one model.")],
) -> None:
    """Print the tables of result files."""
    print_tables(results, tables)


def choose_arms(arms: str) -> dict[str, list[str]]:
    """Return the arms of each study: those in `arms`, or all if it is empty.

    Raises:
        ConfigurationError: no study has an arm of this name.
    """
    known: dict[str, Sequence[str]] = {
        "answers": tuple(rules.RULES), "prefill": tuple(prefill.FORMS), "routing": tuple(routing.ROUTINGS),
        "pages": PAGE_ARMS, "decode": DECODE_ARMS, "reuse": REUSE_ARMS, "sinks": sinks.ARMS,
        SELECTION: selection.ARMS, ADAPTIVE: tuple(adaptive.ARMS), CONTRIBUTIONS: ("layer",),
    }  # fmt: skip
    names = _names("arms", arms, [name for each in known.values() for name in each]) if arms else None
    return {study: [name for name in each if names is None or name in names] for study, each in known.items()}


def _names(option: str, value: str, allowed: Sequence[str]) -> list[str]:
    names = value.split(",")
    for name in names:
        if name not in allowed:
            raise ConfigurationError(f"{option}: got {name!r}, allowed: {', '.join(allowed)}")
    return names


def _numbers(value: str) -> list[float]:
    return [float(part) for part in value.split(",")]


def _first(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return the first prompts of each kind, task and context."""
    seen: dict[tuple[str, str, int], int] = {}
    found = []
    for prompt in prompts:
        key = prompt.kind, prompt.task, prompt.context_tokens
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= count:
            found.append(prompt)
    return found


def _tokenizer(folder: Path) -> tuple[Callable[[list[int]], str], list[int], Callable[[str], list[int]]]:
    """Return a decoder, the end tokens, and an encoder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(token) for token in _END_TOKENS]

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return tokenizer.decode, [token for token in ends if token is not None], encode


def main() -> None:
    """Run the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
