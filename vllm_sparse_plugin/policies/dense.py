"""Dense attention: everything, by vLLM's own kernels in our backend."""

from __future__ import annotations

from typing import Literal

from vllm_sparse_plugin.policies.base import Policy


class DensePolicy(Policy):
    """Reads everything: what a sparse policy is compared with, all else being equal."""

    policy: Literal["dense"] = "dense"
    """Name of the selection policy."""
