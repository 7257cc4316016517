"""Random schedules of vLLM's scheduler over one attention layer, against a model of what its state must be."""
