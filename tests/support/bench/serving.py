"""Settings and result files of measured decode steps."""

import json
from pathlib import Path

from bench.serving.batches import parse_batches
from bench.serving.decode import DecodeSettings

RUN = {"date": "2026-11-21", "model": "llama-3.1-8b", "versions": {}, "hardware": {"gpu": "NVIDIA H200"}}


def settings(**changes) -> DecodeSettings:
    values = {
        "model": "llama-3.1-8b",
        "variant": "flash_attn",
        "additional_config": None,
        "loads": parse_batches(["1x32K", "8x32K"]),
        "new_tokens": 4,
        "repeats": 3,
        "max_model_len": 131072,
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "gpu_memory_utilization": None,
        "block_size": None,
        "compile": True,
        "output": "unused",
    }
    return DecodeSettings(**values | changes)


def decode_rows() -> list[dict]:
    return [
        {"variant": variant, "context_tokens": context, "batch": batch, "ms_per_token": context / 16384 * factor + 5}
        for variant, factor in (("flash_attn", 1.0), ("unique", 0.1))
        for context in (2048, 32768, 131072)
        for batch in (1, 6)
    ] + [{"variant": "unique", "context_tokens": 131072, "batch": 24, "skipped": "the KV cache holds 6 requests"}]


def write_results(path: Path, *runs: list[dict]) -> Path:
    lines = [line for rows in runs for line in (RUN, *rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
