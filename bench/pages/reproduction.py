"""Blocks that put the numbers of the papers beside those measured here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.common.pages import Block, table
from bench.common.results import RESULTS
from bench.pages import measured
from bench.pages.measured import Found

_MACHINES = {RESULTS / "h200": "H200", RESULTS / "h100": "H100", RESULTS / "cpu-2core": "CPU"}


class Claim(NamedTuple):
    """A number of a paper. `published` is copied from the paper by hand."""

    result: str
    """Where the paper states it, and what it is."""
    published: str
    difference: str
    """The main reason why the value here is not like the paper's, or why there is none."""
    here: Callable[[], Found] | None = None
    """The value of this project; None if it is not measured."""


_UNIQUE = (
    Claim("Table 1: LongBench Pro, 1,024 / 512 tokens", "36.72 / 36.58 of 37.70", "text",
          measured.changed_tokens),
    Claim("Table 2: RULER 32K, 512 tokens", "90.78 of 93.15", "4K", measured.ruler),
    Claim("Table 2: Quest, InfLLM, UNIQUE, 512 tokens", "84.14, 73.30, 90.78", "4K",
          measured.policies),
    Claim("Table 2: H2O, 512 tokens", "56.00 of 93.15", "1,024 of 4K", measured.evicted_answers),
    Claim("Table 3: trained, 512 tokens", "37.25 of 36.55", "hard mask; RULER words", measured.trained),
    Claim("Tables 4, 5: speech, error", "18.60, trained 17.89; dense 18.25", "no speech model"),
    Claim("Table 6: without, with deviation", "19.11, 18.60 (errors)", "needles", measured.deviation),
    Claim("Table 7: soft, hard mask", "17.89, 18.32 (errors)", "RULER", measured.masks),
    Claim("Table 8: fused score, 8K, 128K", "39, 342 µs (1.73x, 1.46x)", "H200, warm cache",
          measured.fused_score),
    Claim("Table 9: top-k, 1K, 16K pages (FlashInfer; PyTorch)", "13, 22 µs (2.0x, 1.4x; 2.4x, 4.6x)",
          "H200, warm cache", measured.top_k),
    Claim("Fig. 2: attention over FlashInfer, 128K", "11.4x", "other statistics",
          measured.attention_kernel),
    Claim("Fig. 3: step, 128K", "at least 5.3x", "other batch, drawn weights", measured.end_to_end),
)  # fmt: skip
_SINKROUTER = (
    Claim("Table 1: largest weight beside 0.8", "0.0195 (ratio 51) at 16K", "no BOS",
          measured.other_weights),
    Claim("Fig. 1: first value's norm", "near 0", "no BOS", measured.value_norm),
    Claim("Fig. 2: first key's norm", "below others", "no BOS", measured.key_norm),
    Claim("Fig. 3: keys of BOS", "compact cluster", "no projection drawn", measured.query_cosine),
    Claim("Fig. 9: writes, sink heads, others", "smaller, less aligned", "other model", measured.writes),
    Claim("Table 2: LongBench, 60% skipped", "49.89 of 50.58", "needles; trained for sinks",
          measured.routed_answers),
    Claim("Fig. 5: accuracy by skipped share", "flat, then falls", "next tokens", measured.routed_texts),
    Claim("Table 2: H2O, StreamingLLM, SinkRouter, 40%", "50.61, 32.82, 49.89 of 50.58", "RULER, 4K",
          measured.forty),
    Claim("Tables 3, 4, 5: InfiniteBench; images", "53.47 of 53.43; 53.82 of 54.05; 32.89 of 33.14", "no data"),
    Claim("Figs. 6, 7: step, 512K", "2.03x", "forced; rival FlashAttention 3",
          measured.routed_steps),
    Claim("Fig. 8: skipped share by task, length", "60% held by a cubic", "4K to 8K",
          measured.skipped_by_task),
    Claim("Fig. 10: AUPRC of the cosine", "0.773", "other models", measured.cosine_finds),
    Claim("Fig. 11: sinks among skipped", "most", "other model", measured.skipped_sinks),
)  # fmt: skip
_ART = (
    Claim("Tables 1, 7: LongBench; time per token", "45.74 of 46.29; 1.16x", "text, no time",
          measured.stopped_texts),
    Claim("Table 2: NIAH 32K; SnapKV", "78.65 of 99.34; 95.68 of 99.37", "up to 8K", measured.stopped_answers),
    Claim("Table 3, Fig. 7: without scale, direction, patience", "19.34, 43.87, 41.54 (45.74)",
          "larger tau", measured.ablation),
    Claim("Table 4: probe agrees, 8K", "99.88%", "all layers", measured.probe),
    Claim("Table 6: cost of tests", "1.3%", "one layer", measured.stop_tests),
    Claim("Fig. 4: error by loaded share", "falls fast", "one point", measured.loaded_share),
    Claim("Fig. 5: throughput", "up to 1.20x", "stop forced", measured.stopped_steps),
    Claim("Fig. 6: tau 1e-4", "44.71 (46.0)", "needles", measured.tolerances),
    Claim("Fig. 8: gain by length", "grows", "artificial data", measured.stopped_lengths),
    Claim("Fig. 1", "key scores miss outputs", "norms of A V", measured.missed_contributions),
)  # fmt: skip
_ZIPVL = (
    Claim("Table 1: VQAv2, tau 0.975", "80.4 of 80.9", "text", measured.prefill_forms),
    Claim("Table 2: Video-MME; operations; cache", "52.6 of 52.6; -82.3%; -57.9%", "text",
          measured.prefill_operations),
    Claim("Table 3: adaptive, fixed ratio; in a quantized cache", "52.4, 51.1; 54.06, 53.75", "text; cache kept",
          measured.fixed_ratio),
    Claim("Table 4: first token, 128K", "20.57 of 48.01 s (2.3x)", "chunks of 8K, drawn weights",
          measured.first_token),
    Claim("Table 4: throughput, 16K", "2.8x", "42% kept; few prompts",
          measured.evicting_throughput),
    Claim("Figs. 5, A: smaller tau", "falls below 0.97", "text", measured.prefill_taus),
    Claim("Table A: hybrid, newest, random probes", "52.6, 52.4, 6.3 of 54.8", "fixed share", measured.probe_rows),
    Claim("Table B: normalised, accumulated score", "52.64, 52.40", "fixed share", measured.ranked_tokens),
    Claim("Figs. 3, 4: ratio by layer", "varies", "text", measured.ratio_by_layer),
    Claim("Table C: probe, 16K", "0.95 s of 3.48", "one layer", measured.probe_time),
)  # fmt: skip
_STREAMING_LLM = (
    Claim("perplexity: dense, window, 4 sinks", "6, above 1,000, below 7",
          "window 1,024", measured.window_loss),
    Claim("“the” four times as sinks", "most of the gain", "other model", measured.window_word),
    Claim("at 64K: without, with sinks", "-", "tiny models", measured.streams),
    Claim("heat map: first tokens", "bright stripe", "a mean", measured.first_weight),
    Claim("H2O throughput; step at 64K, dense, Quest", "29x; 6.2, 3.2 ms (computed)", "no OPT; other GPU"),
)  # fmt: skip
_RIVALS = (
    Claim("Vortex (2606.06453): throughput, Qwen3-1.7B, H200", "3.46x", "decode steps, drawn weights",
          measured.small_model_steps),
    Claim("Kascade (2512.16391): decode attention, H100", "4.1x", "every layer selects",
          measured.attention_over_dense),
    Claim("Kascade: prefill", "2.2x", "first token, 128K", measured.sparse_first_token),
    Claim("SPIN (2604.26837): throughput, host memory", "1.66x to 5.66x", "returning clients",
          measured.returning_clients),
    Claim("R-KV: requests, throughput", "2.56x, 1.32x", "drawn weights", measured.evicting_users),
)  # fmt: skip
CLAIMS: dict[str, Sequence[Claim]] = {
    "unique": _UNIQUE, "sinkrouter": _SINKROUTER, "art": _ART, "zipvl": _ZIPVL, "streaming_llm": _STREAMING_LLM,
    "rivals": _RIVALS,
}  # fmt: skip
"""By the block that shows them."""


def unique() -> Block:
    """UNIQUE."""
    return _block("unique")


def sinkrouter() -> Block:
    """SinkRouter."""
    return _block("sinkrouter")


def art() -> Block:
    """ART."""
    return _block("art")


def zipvl() -> Block:
    """ZipVL."""
    return _block("zipvl")


def streaming_llm() -> Block:
    """StreamingLLM and the text about sinks."""
    return _block("streaming_llm")


def rivals() -> Block:
    """Other systems."""
    return _block("rivals")


def _block(name: str) -> Block:
    lines: list[list[str]] = []
    sources: list[Path] = []
    for claim in CLAIMS[name]:
        if claim.here is None:
            lines.append([claim.result, claim.published, "not measured", "", claim.difference])
            continue
        found = claim.here()
        machines = dict.fromkeys(_MACHINES[path.parents[1]] for path in found.paths)
        lines.append([claim.result, claim.published, found.text, ", ".join(machines), claim.difference])
        sources += found.paths
    return Block(table(["result", "paper", "here", "machine", "main difference"], lines), sources)
