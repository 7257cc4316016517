"""Attention backends, which run in vLLM's workers."""
