"""Attention to the first tokens and a window, with positions counted within the cache (StreamingLLM)."""

from sparse_kernels.rolling_attention.api import attend_rolling
from sparse_kernels.rolling_attention.rule import RollingWindow, Rotation

__all__ = ["RollingWindow", "Rotation", "attend_rolling"]
