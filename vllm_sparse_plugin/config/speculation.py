"""Settings of speculation: the attention of a draft. Verification attends like every decode step."""

from __future__ import annotations

from typing import Literal

from vllm_sparse_plugin.policies.base import Section


class Speculation(Section):
    """How the attention layers of a draft attend, where vLLM speculates with EAGLE, EAGLE-3, MTP or a draft model."""

    draft: Literal["dense", "sparse"] = "dense"
    """`sparse`: the draft's layers read selected pages, without routing, stopping or sparse prefill."""
