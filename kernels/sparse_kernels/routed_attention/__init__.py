"""Dense attention of decoding tokens, but for the KV groups that routing leaves out (SinkRouter)."""

from sparse_kernels.routed_attention.api import SPLITS, routed_attention

__all__ = ["SPLITS", "routed_attention"]
