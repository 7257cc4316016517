"""Compares attention that reads everything with vLLM's own attention, token by token.

python -m bench.quality identical --output identical.jsonl
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, TypeAdapter

from bench.common.children import run_python
from bench.common.console import end_with, open_console
from bench.common.continuations import Continuation, continuation, gap_at_first_difference
from bench.common.engine import DENSE, Variant, engine, exits_for_wrong_backend, parse_variants
from bench.common.models import NEEDLE_8M, library_tokens, load_tokenizer, open_model
from bench.common.options import Commit, Output, Seed, TimeLimit
from bench.common.results import ResultFile, Row
from bench.quality.lossless import TIE
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.tools.provenance import describe_run

VARIANTS = ("snapkv", "pyramidkv", "h2o", "streaming_llm")
_ALTERNATIVES = 20
_SHORTEST, _LONGEST = 64, 2048
"""Tokens of the prompts."""
_SETTINGS = {"compaction": {"budget_tokens": 1 << 14, "min_context_tokens": 0}, "selection": {"policy": DENSE}}
"""A budget that exceeds every prompt with its answer."""
_CONTINUATIONS = TypeAdapter(list[Continuation])


class Job(BaseModel):
    """The input of a process with an engine."""

    model_config = ConfigDict(frozen=True)

    model: str
    """Name or folder."""
    variant: str
    prompts: str
    """JSON file of token ids."""
    answer_tokens: int
    output: str
    """JSON file to write."""


def build_prompts(tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """Sections of Python's library source, from the shortest to the longest in even steps."""
    prompts = []
    for index in range(count):
        length = _SHORTEST + (_LONGEST - _SHORTEST) * index // max(count - 1, 1)
        prompts.append(library_tokens(tokenizer, (seed * count + index) * 40_009, length))
    return prompts


def compare(name: str, dense: Sequence[Continuation], found: Sequence[Continuation]) -> Row:
    """The row of a variant: the number of answers equal to dense attention's, and the nats at first differences."""
    gaps = map(gap_at_first_difference, dense, found)
    parted = [{"prompt": index, "gap": round(gap, 4)} for index, gap in enumerate(gaps) if gap is not None]
    ties = sum(each["gap"] < TIE for each in parted)
    return {
        "variant": name, "prompts": len(dense), "identical": len(dense) - len(parted), "parted_at_ties": ties,
        "parted": parted,
    }  # fmt: skip


def identical(
    output: Output,
    model: Annotated[str, typer.Option(help="needle-8m or a folder.")] = NEEDLE_8M.name,
    variant: Annotated[list[str] | None, typer.Option(help=f"Repeatable. Default: {', '.join(VARIANTS)}.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, of 64 to 2,048 tokens.")] = 50,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32,
    seed: Seed = 0,
    time_limit: TimeLimit = 3600,
    commit: Commit = None,
) -> None:
    """Compare answers under a compaction that keeps everything with those of vLLM's own attention. Exit code 3 if
    they differ at a token that is not a tie, or if an engine fails."""
    end, console, failed = time.monotonic() + time_limit, open_console(), []
    with open_model(model) as opened, tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        asked = Path(folder) / "prompts.json"
        asked.write_text(json.dumps(build_prompts(load_tokenizer(opened.folder), prompts, seed)), encoding="utf-8")
        answered: list[list[Continuation]] = []
        with ResultFile(output, describe_run(opened.folder, commit)) as file:
            for each in [Variant.parse(DENSE), *parse_variants(variant or VARIANTS)]:
                written = Path(folder) / "answers.json"
                job = Job(
                    model=str(opened.folder), variant=each.name, prompts=str(asked), answer_tokens=answer_tokens,
                    output=str(written),
                )  # fmt: skip
                arguments = ["identical-engine", job.model_dump_json()]
                if run_python("bench.quality", arguments, end - time.monotonic()) != 0:
                    failed.append(f"{each.name}: its engine failed, or was not done by the deadline")
                    break
                answered.append(_CONTINUATIONS.validate_json(written.read_bytes()))
                if len(answered) == 1:
                    continue
                row = compare(each.name, answered[0], answered[-1]) | {"answer_tokens": answer_tokens}
                file.write(row)
                console.print(f"{each.name}: {row['identical']} of {row['prompts']}, others part at {row['parted']}")
                if len(row["parted"]) > row["parted_at_ties"]:
                    failed.append(f"{each.name}: differs at a token that is not a tie")
    end_with(failed)


def identical_engine(text: Annotated[str, typer.Argument(metavar="JSON")]) -> None:
    """Answer the prompts in this process for `identical`."""
    job = Job.model_validate_json(text)
    prompts = json.loads(Path(job.prompts).read_text(encoding="utf-8"))
    options = {
        "max_num_seqs": 8, "max_model_len": _LONGEST + job.answer_tokens, "enforce_eager": True,
        "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30,
    }  # fmt: skip
    config, inputs = json.dumps({KEY: _SETTINGS}), [{"prompt_token_ids": prompt} for prompt in prompts]
    with (
        exits_for_wrong_backend(),
        open_model(job.model) as model,
        engine(model, Variant.parse(job.variant), config, **options) as (llm, _),
    ):
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=job.answer_tokens, ignore_eos=True, logprobs=_ALTERNATIVES)
        answers = [continuation(done) for done in llm.generate(inputs, sampling, use_tqdm=False)]
    Path(job.output).write_bytes(_CONTINUATIONS.dump_json(answers))
