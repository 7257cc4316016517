"""Long prompts in an engine that gives nearly all GPU memory to the KV cache. Scratch must fit the memory profile."""
