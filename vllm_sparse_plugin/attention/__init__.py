"""The attention backends: what vLLM instantiates in its workers."""
