"""Random schedules of vLLM's scheduler on one attention layer, compared with a model of the correct state."""
