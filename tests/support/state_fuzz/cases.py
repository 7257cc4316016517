"""The settings of a seed's engine. Consecutive seeds cover all settings."""

import random
from dataclasses import dataclass
from typing import Any, Self

from support.engines import MODEL
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

MAX_MODEL_LEN = 512
_LARGE_UNITS = 64
"""Tokens of a block that holds whole statistics rows in every format."""


@dataclass(frozen=True)
class Policy:
    """A backend, and differences from its preset."""

    backend: str
    selection: tuple[tuple[str, Any], ...] = ()
    small_blocks: bool = False
    """Whether its statistics fit blocks of 32 tokens."""
    compaction: tuple[tuple[str, Any], ...] = ()
    """Differences from the shared settings of compaction; empty for no compaction."""


_EVERY = ("every", 40)
_SNAPKV = (("method", "snapkv"), ("window_tokens", 8), ("pool_tokens", 5))
_H2O = (("method", "h2o"),)

POLICIES = {
    "unique": Policy("unique", small_blocks=True),
    "unique, pages of 16": Policy("unique", (("page_size", 16),), small_blocks=True),
    "unique, sketch": Policy("unique", (("statistics", "sketch"),), small_blocks=True),
    "unique, int8": Policy("unique", (("statistics", "int8"),), small_blocks=True),
    "unique, fp8": Policy("unique", (("statistics", "fp8"),), small_blocks=True),
    "unique, bf16": Policy("unique", (("statistics", "bf16"),)),
    "quest": Policy("quest"),
    "unique, leveled quarters": Policy("unique", (("statistics", "leveled_quarters"),), small_blocks=True),
    "snapkv": Policy("dense", small_blocks=True, compaction=_SNAPKV),
    "evicting snapkv": Policy("dense", small_blocks=True, compaction=(*_SNAPKV, _EVERY)),
    "evicting snapkv and unique": Policy("unique", small_blocks=True, compaction=(*_SNAPKV, _EVERY)),
    "evicting snapkv of everything": Policy(
        "dense", small_blocks=True, compaction=(*_SNAPKV, _EVERY, ("budget_tokens", MAX_MODEL_LEN))
    ),
    "h2o": Policy("dense", small_blocks=True, compaction=_H2O),
    "evicting h2o": Policy("dense", small_blocks=True, compaction=(*_H2O, _EVERY)),
    "evicting h2o and unique": Policy("unique", small_blocks=True, compaction=(*_H2O, _EVERY)),
    "streaming_llm and unique": Policy("unique", small_blocks=True, compaction=(("method", "streaming_llm"),)),
}
"""By name. Consecutive seeds use them in turn."""


@dataclass(frozen=True)
class Case:
    """The settings of a seed."""

    policy: str
    """A name in `POLICIES`."""
    block_size: int
    num_blocks: int
    max_requests: int
    chunk_tokens: int
    """Largest number of tokens of a step."""
    drafts: int
    """Largest number of draft tokens."""
    prefix_cache: bool
    is_async: bool = False
    """Whether a step is scheduled before the tokens of the step before it are known."""

    @classmethod
    def draw(cls, seed: int) -> Self:
        """Draws the settings of a seed."""
        rng = random.Random(seed)
        policy = list(POLICIES)[seed % len(POLICIES)]
        sizes = (32, 64, 128) if POLICIES[policy].small_blocks else (_LARGE_UNITS, 2 * _LARGE_UNITS)
        if POLICIES[policy].compaction:
            # In larger blocks hardly a request is long enough for several evictions.
            sizes = 32, 64
        block_size, max_requests = rng.choice(sizes), rng.randint(3, 8)
        # One request always fits. All requests together rarely do.
        tokens = MAX_MODEL_LEN + rng.randint(128, 192 * max_requests)
        drafts = 0 if POLICIES[policy].compaction else rng.choice((0, 2, 3))
        return cls(
            policy=policy,
            block_size=block_size,
            num_blocks=1 + -(-tokens // block_size),
            max_requests=max_requests,
            chunk_tokens=rng.choice((48, 96, 200)),
            drafts=drafts,
            prefix_cache=rng.random() < 0.8,
            is_async=not drafts and rng.random() < 0.5,
        )

    def vllm_config(self) -> VllmConfig:
        """Makes vLLM's configuration of an engine with these settings."""
        policy = POLICIES[self.policy]
        settings: dict[str, Any] = {}
        if policy.backend != "dense":
            settings = {"selection": {"budget_tokens": 64, **dict(policy.selection)}, "min_context_tokens": 0}
        if policy.compaction:
            settings["compaction"] = {"budget_tokens": 96, "min_context_tokens": 0, **dict(policy.compaction)}
        ngram = {"method": "ngram", "num_speculative_tokens": self.drafts, "prompt_lookup_max": 3}
        config = EngineArgs(
            model=str(MODEL),
            attention_backend=policy.backend,
            additional_config={"sparse_attention": settings},
            block_size=self.block_size,
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.max_requests,
            max_num_batched_tokens=self.chunk_tokens,
            enable_prefix_caching=self.prefix_cache,
            async_scheduling=self.is_async,
            speculative_config=ngram if self.drafts else None,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = self.num_blocks
        return config
