"""Measures how good a selection of pages is, on prompts and on a sampled share of what a server decodes."""
