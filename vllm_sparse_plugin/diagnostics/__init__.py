"""How good a selection of pages is: measured on prompts, and on a sampled share of what a server decodes."""
