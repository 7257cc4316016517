"""The study of sparse prefill: which rule should choose the blocks that a tile of a prompt reads."""
