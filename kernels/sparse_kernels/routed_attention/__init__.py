"""Dense attention of decoding tokens, but for KV groups left out (SinkRouter), and until it stops (ART)."""

from sparse_kernels.routed_attention.api import PIECES_BYTES, SPLITS, routed_attention, rows_at_once, stop_scratch

__all__ = ["PIECES_BYTES", "SPLITS", "routed_attention", "rows_at_once", "stop_scratch"]
