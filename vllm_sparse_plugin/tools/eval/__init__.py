"""Evaluates a model behind an engine: tasks, metrics, intervals and comparisons."""

FORCED_TOKENS_PROCESSOR = "vllm_sparse_plugin.tools.forced_tokens:ForcedTokens"
"""For vLLM's `--logits-processors`: an engine needs this class to decode given tokens."""
FORCED_TOKENS_ARGUMENT = "forced_token_ids"
"""Key of a request's `vllm_xargs`: the ids to decode first, in order."""
