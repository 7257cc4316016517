"""Answers from a cache that keeps a part of a prompt, and a long text through a window.

python -m research.compaction answers --model models/needle-8m --output needle-8m.jsonl
python -m research.compaction stream --model models/needle-8m --output stream_needle-8m.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.common.console import open_console
from bench.common.models import NEEDLE_8M, load_tokenizer
from bench.common.options import Commit, Output, Seed, make_app, parse_sizes, usable_device
from bench.common.results import ResultFile
from vllm_sparse_plugin.tools.arguments import run_app
from vllm_sparse_plugin.tools.provenance import describe_run

app = make_app("Answers from a cache that keeps a part of a prompt, and a long text through a window.")

_Model = Annotated[Path, typer.Option("--model", help="needle-8m's folder, or another of its format.")]
_Device = Annotated[str, typer.Option("--device", help="Torch device.")]


@app.command()
def answers(
    output: Output,
    folder: _Model = NEEDLE_8M,
    grid: Annotated[
        list[str] | None, typer.Option(help="Context and documents of each task, repeatable; 4K=4, 8K=2, 16K=2.")
    ] = None,
    device: _Device = "cpu",
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Ask needle questions of every method with every budget."""
    from research.compaction.questions import Asker, measure

    console, asker = open_console(), Asker(folder, usable_device(device))
    with ResultFile(output, describe_run(folder, commit)) as file:
        for text in grid or ("4K=4", "8K=2", "16K=2"):
            context, count = parse_sizes("grid", text.split("=", 1))
            for row in measure(asker, folder, context, count, seed):
                file.write(row)
            console.print(f"{context:,} tokens: done")


@app.command()
def engine(
    output: Output,
    folder: _Model = NEEDLE_8M,
    method: Annotated[str, typer.Option(help="Of compaction.")] = "snapkv",
    pool_tokens: Annotated[int | None, typer.Option(help="Of methods that pool votes.")] = None,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="Of the prompt that is kept.")] = 0.125,
    context: Annotated[str, typer.Option(help="In tokens.")] = "4K",
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Ask a vLLM engine some of the same questions; its answers should be those of the model in torch."""
    from research.compaction.settings import Setting
    from research.compaction.verify import verify

    (context_tokens,) = parse_sizes("context", [context])
    row = verify(folder, Setting(method, share, pool_tokens), context_tokens, seed)
    with ResultFile(output, describe_run(folder, commit)) as file:
        file.write(row)
    open_console().print(row)


@app.command()
def stream(
    output: Output,
    folder: _Model = NEEDLE_8M,
    tokens: Annotated[str, typer.Option(help="Of the text.")] = "64K",
    cache_tokens: Annotated[int, typer.Option(min=32, help="Of the cache, the sinks included.")] = 1024,
    sink_tokens: Annotated[int, typer.Option(min=1, help="First tokens that are kept.")] = 4,
    device: _Device = "cpu",
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Read a long text through a window, with and without its first tokens."""
    from research.compaction.stream import StreamingModel, measure, read_text, windows

    (length,) = parse_sizes("tokens", [tokens])
    console, model = open_console(), StreamingModel(folder, usable_device(device))
    text = read_text(load_tokenizer(folder), length, seed)
    with ResultFile(output, describe_run(folder, commit)) as file:
        for window in windows(cache_tokens, sink_tokens):
            row = measure(model, text, window, part_tokens=4096)
            file.write(row)
            console.print(f"{window.name}: {row['perplexity']}")


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
