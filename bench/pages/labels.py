"""What was run, in words, from the settings that result rows and their files record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence

from bench.common.options import size_text
from bench.common.results import Row

Rows = Sequence[Row]
ABOUT, MACHINE, FILE = "_about", "_machine", "_file"
"""Columns that `rows_of` adds: the first line of the file, `H100`, `H200` or `CPU`, and the stem of the file."""
AGAIN = "dense-again"
"""The setting of dense attention in other batches."""

MODELS = {
    "smollm2-135m": "S", "SmolLM2-135M-Instruct": "S", "model": "S", "gemma-3-270m": "G", "needle-8m": "N",
    "witness-6m": "W", "llama-3.1-8b": "L", "llama-3.1-8b-512k": "L", "llama-3.1-8b-1m": "L",
    "llama-3.2-1b": "Llama-3.2-1B's shape", "qwen3-1.7b": "Qwen3-1.7B's shape", None: "one layer",
}  # fmt: skip
"""Short names of models, which docs/reproduction.md explains. Early runs had SmolLM2-135M in a folder named `model`."""
_DEFAULTS = {
    "unique": 1024, "unique_prefill": 1024, "unique_offload": 1024, "unique_paper": 512, "quest": 512, "infllm": 512,
    "mean": 512, "streaming_llm": 512, "snapkv": 1024, "snapkv_paper": 1024, "pyramidkv": 1024, "h2o": 1024,
}  # fmt: skip
"""Tokens of a preset's budget."""
_EARLIER = {"unique": 512, "unique_prefill": 512}
_CHANGED = "2026-11-25T15:33"
"""When `unique` got its present budget."""
_TEXTS = (
    (r"essay|prose", "essays"), (r"code", "code"), (r"niah|vt$|cwe|fwe|ruler", "RULER*"),
    (r"denseneedle", "look-alikes"), (r"single|multikey|manykeys|multiquery|kv|questions", "needle questions"),
    (r"completion", "essays"),
)  # fmt: skip
_FORCED = {
    r"--skip-ratio": "groups forced",
    r'"termination"': "stop forced",
    r"accept=": "routing forced",
    r"--acceptance": "acceptance set",
}


def model_of(row: Row) -> str:
    """The model of a row."""
    name = row[ABOUT].get("model")
    return MODELS.get(name, str(name))


def budget_of(row: Row) -> str:
    """What a row reads or keeps; empty for dense attention."""
    variant = str(row.get("variant") or row.get("provider") or "").partition(":")[0]
    setting = str(row.get("setting") or "")
    if AGAIN in (setting, row.get("arm")) or "dense" in (setting, variant) or variant in ("flash_attn", "sinkrouter"):
        return ""
    if (given := _given_budget(row, setting)) is not None:
        return given
    backend = variant or re.split(r"[-+:/]", setting)[0] or _evaluated(row)
    earlier = _EARLIER if str(row[ABOUT].get("date", "")) < _CHANGED else {}
    tokens = (_DEFAULTS | earlier).get(backend)
    return f"{tokens:,} tokens" if tokens else ""


def _given_budget(row: Row, setting: str) -> str | None:
    """The budget that a row states itself; None if it follows from the preset."""
    selection = ((row.get("additional_config") or {}).get("sparse_attention") or {}).get("selection") or {}
    if share := re.search(r"budget_ratio=([\d.]+)", setting):
        return f"{float(share[1]):.0%} kept"
    if "ratio" in row and row.get("study") == "answers":
        return f"{row['ratio']:.0%} kept" if row["ratio"] < 1 else ""
    if found := re.search(r"-(\d{3,})(?:-|$)|/b(\d+)$", setting):
        return f"{int(found[1] or found[2]):,} tokens"
    if tokens := row.get("budget_tokens") or selection.get("budget_tokens"):
        return f"{tokens:,} tokens"
    if "budget_tokens" in row:
        return ""
    if row.get("study") in ("decode", "reuse") and "pages" in row:
        return f"{row['pages'] * 8:,} tokens"
    if row.get("op") in ("decode", "score", "topk") and "geometry" in row[ABOUT]:
        return f"{row[ABOUT]['geometry']['k'] * row[ABOUT]['geometry']['page_size']:,} tokens"
    if row.get("study") in ("adaptive", "prefill") and row["arm"] not in ("noise", "dense"):
        tau = re.search(r"(?:_|^)(?:0\.)?(9\d*)$", str(row["arm"]))
        return f"tau 0.{tau[1]}" if tau else "tau 0.975"
    return None


def _evaluated(row: Row) -> str:
    """The backend of a file of `vllm-sparse eval`."""
    return str(((row[ABOUT].get("settings") or {}).get("engine") or {}).get("attention_backend") or "")


def lengths_of(row: Row) -> list[int]:
    """Tokens of the contexts of a row."""
    if "rows" in row:
        return [each["context_tokens"] for each in row["rows"]]
    if "part_tokens" in row and "perplexity" in row:
        return [row["part_tokens"] * len(row["perplexity"])]
    length = _length_of(row)
    return [length] if length else []


def _length_of(row: Row) -> int | None:
    for place in (row, row.get("case") or {}):
        for name in ("context_tokens", "input_tokens", "context"):
            if isinstance(place.get(name), int):
                return int(place[name])
    found = re.search(r"[-/_](\d{3,})(?:[-/]|$)", str(row.get("text") or row.get("name") or row.get("document") or ""))
    return int(found[1]) if found else None


def text_of(row: Row) -> str:
    """The kind of text of a row."""
    if "cache" in row:
        return str(row["cache"])
    if row.get("op"):
        return "drawn data"
    if "noise_cache" in row or "load" in row:
        return "random keys" if row.get("noise_cache", True) else "drawn prompts"
    if row.get("weights") == "drawn":
        return "drawn prompts"
    if "rows" in row:
        row = row["rows"][0]
    for name in ("kind", "task", "text", "name", "document", "part", "id"):
        if value := row.get(name):
            for pattern, words in _TEXTS:
                if re.search(pattern, str(value)):
                    return words
    return ""


def forced_of(row: Row) -> str:
    """What the run forced; empty if nothing."""
    places = str(row[ABOUT].get("command", "")), json.dumps(row.get("additional_config")), str(row.get("setting"))
    found = [words for pattern, words in _FORCED.items() if any(re.search(pattern, place) for place in places)]
    return found[0] if found and budget_is_read(row) else ""


def budget_is_read(row: Row) -> bool:
    """Whether a row is not of dense attention."""
    return row.get("variant") != "flash_attn" and row.get("setting") not in (AGAIN, "dense")


def describe(rows: Rows) -> str:
    """Model, length, budget, text, what is forced, and machine of some rows, in one cell."""
    lengths = sorted({length for row in rows for length in lengths_of(row)})
    sizes = [size_text(length) if length % 1024 == 0 else f"{length:,}" for length in lengths]
    length = f"{sizes[0]} to {sizes[-1]} tokens" if len(sizes) > 2 else f"{', '.join(sizes)} tokens" if sizes else ""
    parts = [
        " and ".join(_distinct(rows, model_of)), length, _budgets(rows), " and ".join(_distinct(rows, text_of)),
        " and ".join(_distinct(rows, forced_of)), " and ".join(_distinct(rows, lambda row: str(row[MACHINE]))),
    ]  # fmt: skip
    return ", ".join(filter(None, parts))


def _budgets(rows: Rows) -> str:
    found = _distinct(rows, budget_of)
    if found and all(each.endswith(" tokens") for each in found):
        tokens = sorted((int(each.removesuffix(" tokens").replace(",", "")) for each in found), reverse=True)
        return f"budget {' / '.join(f'{each:,}' for each in tokens)}"
    return " / ".join(found)


def _distinct(rows: Iterable[Row], name: Callable[[Row], str]) -> list[str]:
    return list(filter(None, dict.fromkeys(map(name, rows))))
