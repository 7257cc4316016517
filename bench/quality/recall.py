"""Recall of the pages that matter, and the error of the output, for each format of the page statistics.

    python -m bench.quality recall --output recall.jsonl

Queries and keys are those of a forward pass of the model over needle questions with their answers, in transformers;
the operations are the torch references. A query is one that produces a token of the answer. The oracle reads the same
number of complete pages, chosen by the true attention weights (or by the largest logit) of the query heads of a KV
head.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.page_statistics import STATISTICS_FORMATS, PageStatistics, StatisticsFormat, StatisticsLayout
from sparse_kernels.page_statistics.reference import update_page_statistics
from sparse_kernels.page_topk.reference import select_pages
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_attention.reference import attend_pages

from bench.models import NEEDLE_8M, Model, open_model
from bench.quality.accuracy import DEFAULT_PAGES, PAGE_SIZE
from bench.quality.questions import check, load_tokenizer, write_questions
from bench.report import open_console, read_runs
from vllm_sparse_plugin.cli.provenance import open_report
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.needles import TASKS, Question
from vllm_sparse_plugin.policies import UniqueSelection

_BLOCK_SIZE = 64
"""The smallest that holds records of every format."""
_ATTENTION = "capture"


@dataclass(frozen=True)
class Layer:
    """What one layer's attention saw of one question."""

    query: torch.Tensor
    """`[num_queries, num_kv_heads, group_size, head_size]`, the newest tokens."""
    keys: torch.Tensor
    """`[num_kv_heads, num_tokens, head_size]`, with positions."""
    values: torch.Tensor
    """`[num_kv_heads, num_tokens, head_size]`."""

    @property
    def context_lens(self) -> torch.Tensor:
        """Tokens that each query attends to, itself included: `[num_queries]` int64."""
        tokens, queries = self.keys.shape[1], self.query.shape[0]
        return torch.arange(tokens - queries + 1, tokens + 1, device=self.keys.device)


@dataclass(frozen=True)
class Truth:
    """Dense attention of a layer's queries."""

    mass: torch.Tensor
    """`[num_queries, num_kv_heads, num_pages]` float32: weight of each page, mean over the group."""
    logit: torch.Tensor
    """`[num_queries, num_kv_heads, num_pages]` float32: largest logit, over the page and the group."""
    output: torch.Tensor
    """`[num_queries, num_query_heads, head_size]` float32."""


def attend_dense(layer: Layer, scale: float) -> Truth:
    """Attend to everything, in float32."""
    queries, heads, group, head_size = layer.query.shape
    tokens = layer.keys.shape[1]
    logits = torch.einsum("qhgd,hnd->qhgn", layer.query.float(), layer.keys.float()) * scale
    visible = torch.arange(tokens, device=logits.device) < layer.context_lens[:, None, None, None]
    logits = logits.masked_fill(~visible, -torch.inf)
    weights = logits.softmax(dim=-1)
    output = torch.einsum("qhgn,hnd->qhgd", weights, layer.values.float())
    missing = -tokens % PAGE_SIZE
    by_page = torch.nn.functional.pad(weights, (0, missing)).unflatten(-1, (-1, PAGE_SIZE))
    logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf).unflatten(-1, (-1, PAGE_SIZE))
    return Truth(
        by_page.sum(dim=-1).mean(dim=2),
        logits.amax(dim=(2, 4)),
        output.reshape(queries, heads * group, head_size),
    )


class PagedLayer:
    """A layer's keys, values and statistics in a paged cache, one block after the other."""

    def __init__(self, layer: Layer, statistics: StatisticsFormat) -> None:
        self.layer = layer
        layout = StatisticsLayout(PAGE_SIZE, layer.keys.shape[2], statistics)
        self.keys, self.values = (self._blocks(rows) for rows in (layer.keys, layer.values))
        blocks, heads = self.keys.view.shape[:2]
        device = layer.keys.device
        rows = torch.zeros(blocks, heads, layout.rows(_BLOCK_SIZE), 2 * self.keys.head_size, dtype=torch.bfloat16)
        self.statistics: PageStatistics = layout.views(rows.to(device), _BLOCK_SIZE)
        pages = torch.arange(layer.keys.shape[1] // PAGE_SIZE, device=device)
        per_block = self.keys.pages_per_block
        update_page_statistics(self.keys, self.statistics, pages // per_block, pages % per_block)
        self.block_table = torch.arange(blocks, device=device).expand(len(layer.query), -1)

    @staticmethod
    def _blocks(rows: torch.Tensor) -> PagedTensor:
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[1] % _BLOCK_SIZE))
        return PagedTensor.from_rows(padded.unflatten(1, (-1, _BLOCK_SIZE)).transpose(0, 1), PAGE_SIZE)

    def scores(self, std_weight: float) -> torch.Tensor:
        """`[num_queries, num_kv_heads, num_pages]` bfloat16."""
        num_pages = self.layer.context_lens // PAGE_SIZE
        return score_pages(self.layer.query, self.statistics, self.block_table, num_pages, std_weight)

    def attend(self, pages: torch.Tensor, scale: float) -> torch.Tensor:
        """`[num_queries, num_query_heads, head_size]` float32."""
        query = self.layer.query.float()
        lens = self.layer.context_lens
        return attend_pages(query, self.keys, self.values, self.block_table, lens, pages, scale, None, 0.0)


def compare(
    layer: Layer, paged: PagedLayer, truth: Truth, budgets: list[int], scale: float
) -> Iterator[dict[str, Any]]:
    """Columns of a row for each budget in pages, means over queries and heads."""
    selection = UniqueSelection()
    scores = paged.scores(selection.lambda_)
    complete = layer.context_lens // PAGE_SIZE
    width = int(complete.max())
    exists = torch.arange(width, device=complete.device) < complete[:, None, None]
    for budget in budgets:
        pages = select_pages(scores, complete, budget, selection.sink_pages, selection.recent_pages)
        chosen = torch.zeros(scores.shape[0], scores.shape[1], width + 1, dtype=torch.bool, device=pages.device)
        chosen.scatter_(2, torch.where(pages < 0, width, pages), True)
        chosen = chosen[..., :width]
        k = min(budget, int(complete.min()))
        recalls = {}
        for name, merit in (("mass", truth.mass), ("logit", truth.logit)):
            ranked = merit[..., :width].masked_fill(~exists, -torch.inf)
            best = ranked.topk(k, dim=-1).indices
            recalls[f"recall_of_{name}"] = chosen.gather(2, best).float().mean().item()
        mass = truth.mass[..., :width].masked_fill(~exists, 0.0)
        rest = 1 - mass.sum(dim=-1)  # of the incomplete page, which everyone reads
        output = paged.attend(pages, scale)
        cosine = torch.nn.functional.cosine_similarity(output, truth.output, dim=-1).flatten()
        yield {
            "budget_pages": budget,
            **recalls,
            "mass": ((mass * chosen).sum(dim=-1) + rest).mean().item(),
            "oracle_mass": (mass.topk(k, dim=-1).values.sum(dim=-1) + rest).mean().item(),
            "cosine": cosine.mean().item(),
            "cosine_p05": cosine.quantile(0.05).item(),
        }


def capture(model: Model, device: str) -> Callable[[list[int], int], list[Layer]]:
    """Load the model and return what runs it: token ids and a number of newest queries in, the layers out."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layers: list[Layer] = []
    newest = 0

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        heads = key.shape[1]
        # [query heads, queries, size] to [queries, KV heads, group, size]
        kept = query[0, :, -newest:].unflatten(0, (heads, -1)).permute(2, 0, 1, 3).contiguous()
        layers.append(Layer(kept, key[0], value[0]))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(_ATTENTION, attend)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model.folder, attn_implementation=_ATTENTION, dtype=torch.bfloat16
    )
    loaded.to(device).eval()

    def run(tokens: list[int], queries: int) -> list[Layer]:
        nonlocal newest
        newest = queries
        layers.clear()
        with torch.inference_mode():
            loaded(torch.tensor([tokens], device=device), use_cache=False, logits_to_keep=1)
        return list(layers)

    return run


def recall(
    output: Annotated[Path, typer.Option(help="JSON lines to write.")],
    model: Annotated[str, typer.Option(help="needle-8m or the folder of another Llama.")] = NEEDLE_8M.name,
    pages: Annotated[list[int] | None, typer.Option(min=3, help="Budget in pages; 64, 32, 16 and 8.")] = None,
    statistics: Annotated[
        list[str] | None, typer.Option(help=f"Format of mean keys, repeatable; {', '.join(STATISTICS_FORMATS)}.")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(help="Context in tokens; 4096 and 16384.")] = None,
    task: Annotated[list[str] | None, typer.Option(help=f"Task, repeatable; {', '.join(TASKS)}.")] = None,
    questions: Annotated[int, typer.Option(help="Questions for each task and context.")] = 4,
    layer: Annotated[list[int] | None, typer.Option(min=0, help="Layer, repeatable; all of them.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of documents and needles.")] = 0,
    device: Annotated[str | None, typer.Option(help="Torch device; the GPU if there is one.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record, where the checkout has no .git.")] = None,
) -> None:
    """Measure recall of the oracle's pages and the output's cosine to dense attention."""
    tasks, contexts = task or list(TASKS), context or [4096, 16384]
    formats = [_format(text) for text in statistics or STATISTICS_FORMATS]
    budgets = pages or list(DEFAULT_PAGES)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    console = open_console()
    with open_model(model) as opened:
        check(opened, contexts, tasks, questions)
        number = int(opened.config["num_hidden_layers"])
        chosen = layer or list(range(number))
        if max(chosen) >= number:
            raise ConfigurationError(f"layer: got {max(chosen)}, allowed: 0 to {number - 1}")
        if max(budgets) * PAGE_SIZE > min(contexts) // 2:
            raise ConfigurationError(
                f"pages: got {max(budgets)}, allowed: at most half of the smallest context, "
                f"{min(contexts) // 2 // PAGE_SIZE}"
            )
        with open_report(output, opened.folder, "output", commit) as report:
            with console.status("Writing the questions"):
                asked = write_questions(opened, contexts, tasks, questions, seed, os.cpu_count() or 1)
            run = capture(opened, device)
            tokenizer = load_tokenizer(opened.folder)
            with console.status("Comparing"):
                for question in asked:
                    for row in _rows(question, tokenizer, run, chosen, formats, budgets):
                        print(json.dumps({"device": device.partition(":")[0], **row}), file=report, flush=True)
    console.print(table(read_runs(output)[-1].rows))


def _format(text: str) -> StatisticsFormat:
    for known in STATISTICS_FORMATS:
        if text == known:
            return known
    raise ConfigurationError(f"statistics: got {text!r}, allowed: {', '.join(STATISTICS_FORMATS)}")


def _rows(
    question: Question,
    tokenizer: Any,
    run: Callable[[list[int], int], list[Layer]],
    chosen: list[int],
    formats: list[StatisticsFormat],
    budgets: list[int],
) -> Iterator[dict[str, Any]]:
    prompt = tokenizer.encode(question.prompt)
    answer = tokenizer.encode(f" {question.answer}", add_special_tokens=False)
    # The last token of the answer asks for what comes after it.
    layers = run([*prompt, *answer[:-1]], len(answer))
    for index in chosen:
        layer = layers[index]
        scale = layer.query.shape[-1] ** -0.5
        truth = attend_dense(layer, scale)
        for kind in formats:
            for columns in compare(layer, PagedLayer(layer, kind), truth, budgets, scale):
                yield {
                    "task": question.task,
                    "context_tokens": question.context_tokens,
                    "layer": index,
                    "queries": len(answer),
                    "statistics": kind,
                    **{key: round(value, 6) if isinstance(value, float) else value for key, value in columns.items()},
                }


def table(rows: list[dict[str, Any]]) -> Table:
    """Return one line for each context, budget and format: means over tasks, questions and layers."""
    columns = ("recall_of_mass", "recall_of_logit", "mass", "oracle_mass", "cosine", "cosine_p05")
    lines = Table("context", "pages", "statistics", title="Pages chosen beside those of the oracle, means")
    for column in columns:
        lines.add_column(column.replace("_", " "), justify="right")
    groups: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["context_tokens"], row["budget_pages"], row["statistics"]), []).append(row)
    order = {kind: i for i, kind in enumerate(("bf16", "fp8", "int8"))}
    for (context, budget, kind), group in sorted(
        groups.items(), key=lambda item: (item[0][0], -item[0][1], order[item[0][2]])
    ):
        means = (sum(row[column] for row in group) / len(group) for column in columns)
        lines.add_row(str(context), str(budget), kind, *(f"{mean:.4f}" for mean in means))
    return lines
