"""A model's page: everything in it comes from the log of its training and from its measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.common.pages import recorded_commit, table, wrap
from bench.common.results import Run, read_run
from research.witness.data import ASKED_TASKS, SOURCES
from research.witness.model import FIRST_PRICED
from vllm_sparse_plugin.tools.diagnostics.forward import SINK_MASS

LOG = "training.jsonl"
MEASUREMENTS = "measurements.jsonl"
PAGE = "README.md"


def render(folder: Path) -> str:
    """The page of a model folder.

    Raises:
        ConfigurationError: if it has no log of a training run.
    """
    log = read_run(folder / LOG)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parts = [_about(folder, log, config), "## Training", _training(log)]
    if (folder / MEASUREMENTS).exists():
        parts += ["## Measurements", *_measurements(read_run(folder / MEASUREMENTS))]
    paragraphs = "\n\n".join(parts).split("\n\n")
    return "\n\n".join(text if text.startswith(("#", "|")) else wrap(text, "") for text in paragraphs) + "\n"


def _about(folder: Path, log: Run, config: dict[str, Any]) -> str:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return (
        f"# {folder.name}: a small real model to show attention sinks and heads that look at the newest tokens\n\n"
        f"{log.about['parameters'] / 1e6:.1f} M parameters, Llama architecture ({config['num_hidden_layers']} layers, "
        f"hidden {config['hidden_size']}, MLP {config['intermediate_size']}, {heads} query heads, {kv_heads} KV heads, "
        f"head size {config['head_dim']}, RoPE theta {config['rope_parameters']['rope_theta']:g}, tied embeddings), "
        f"{config['dtype']}. The tokenizer and the formats of questions are needle-8m's; `<|bos|>` begins every "
        f"sequence. Loads in transformers and vLLM ({config['max_position_embeddings']} positions).\n\n"
        "For methods that live on where attention goes: SinkRouter skips groups of heads that attend to token 0, ART "
        "stops reading when older blocks change nothing."
    )


def _training(log: Run) -> str:
    recipe, data = log.about["recipe"], log.about["data"]
    end = next((row for row in log.rows if "trained_seconds" in row), None)
    stages = " / ".join(f"{length:,}" for length, _ in recipe["stages"])
    shares = "/".join(f"{100 * share:g}" for _, share in recipe["stages"])
    parts = [
        f"AdamW, peak learning rate {recipe['learning_rate']:g}, cosine by time, weight decay "
        f"{recipe['weight_decay']:g}, {recipe['tokens_per_step']:,} tokens a step, sequences of {stages} tokens "
        f"({shares} % of the time). {recipe['text_share']:.0%} of the sequences are stretches of text, the others "
        f"documents with questions, whose answers are {recipe['answer_share']:.0%} of the loss. "
        f"{_price(recipe)}Text: "
        f"{data['files']:,} files of Python source code and documentation, {data['tokens'] / 1e6:.1f} M tokens, from "
        f"the interpreter's environment or the folders of the command; {data['held_out_characters']:,} characters "
        "more are held out.",
    ]
    losses = [row for row in log.rows if "loss" in row]
    if end and losses:
        memory = f", {end['gpu_memory_gib']} GiB of GPU memory" if "gpu_memory_gib" in end else ""
        parts.append(
            f"{end['steps']:,} steps, {end['tokens'] / 1e6:.1f} M tokens in {end['trained_seconds']:.0f} s{memory}; "
            f"{'compiled' if end['compiled'] else 'not compiled'}, {end['skipped_steps']} steps skipped. "
            + "Loss at the end: "
            + ", ".join(f"{name} {losses[-1]['loss'][name]:.3f}" for name in SOURCES if name in losses[-1]["loss"])
            + "."
        )
    return "\n\n".join([*parts, _origin(log)])


def _price(recipe: dict[str, Any]) -> str:
    if not recipe["head_price"]:
        return ""
    return (
        f"Attention that is not on token 0 costs up to {recipe['head_price']:g} nats from layer {FIRST_PRICED} on, "
        f"{recipe['free_share']:.0%} of all aside. "
    )


def _origin(run: Run) -> str:
    return f"`{run.command}`, {run.day}, {recorded_commit(run)}; {run.hardware}; {run.versions}."


def _measurements(run: Run) -> Iterable[str]:
    rows = {
        name: [row for row in run.rows if row["measure"] == name] for name in ("perplexity", "answers", "attention")
    }
    if not run.about["held_out"]:
        yield "The text is not the one that training held out: some of it may have been trained on."
    for row in rows["perplexity"]:
        yield (
            f"Perplexity of text at {row['context_tokens']:,} tokens: {row['perplexity']:.2f} "
            f"({row['tokens']:,} tokens)."
        )
    if rows["answers"]:
        yield "Right answers, every token the likeliest after those before it:"
        yield _answers(rows["answers"])
    if rows["attention"]:
        first = rows["attention"][0]
        sinks, newest = (
            sum(row[name] for row in rows["attention"]) / len(rows["attention"])
            for name in ("sink_groups", "newest_groups")
        )
        yield (
            f"Attention of the {first['queries']:,} newest tokens of texts of {first['context_tokens']:,} tokens. "
            f"{sinks:.1%} of the groups (a KV head's query heads at one token) are sink groups, with at least "
            f"{SINK_MASS} of their mass on token 0; {newest:.1%} have at least half on the newest "
            f"{run.about['newest']} tokens. By layer, for each KV head:"
        )
        yield _attention(rows["attention"])
    yield _origin(run)


def _answers(rows: list[dict[str, Any]]) -> str:
    lines = []
    for context in dict.fromkeys(row["context_tokens"] for row in rows):
        cells = []
        for task in ASKED_TASKS:
            own = [row for row in rows if (row["context_tokens"], row["task"]) == (context, task)]
            right, asked = (sum(row[name] for row in own) for name in ("right", "questions"))
            cells.append(f"{right}/{asked}" if asked else "-")
        lines.append([f"{context:,}", *cells])
    return table(["context", *ASKED_TASKS], lines)


def _attention(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        first, newest = (" ".join(f"{value:.2f}" for value in row[name]) for name in ("first", "newest"))
        lines.append([str(row["layer"]), first, f"{row['sink_groups']:.1%}", newest])
    return table(["layer", "mass on token 0", "sink groups", "mass on the newest tokens"], lines)
