"""Block-sparse prefill: each tile of a prompt attends to chosen key blocks of its past."""

from sparse_kernels.block_prefill.api import prefill_blocks
from sparse_kernels.block_prefill.rule import COUNTERS, SHARE_UNITS, BlockRule
from sparse_kernels.block_prefill.scratch import scratch_bytes
from sparse_kernels.block_prefill.sequences import VarlenAttention, VirtualSequences
from sparse_kernels.block_prefill.tiles import ScoringRows, Tiles, plan_tiles

__all__ = [
    "COUNTERS",
    "SHARE_UNITS",
    "BlockRule",
    "ScoringRows",
    "Tiles",
    "VarlenAttention",
    "VirtualSequences",
    "plan_tiles",
    "prefill_blocks",
    "scratch_bytes",
]
