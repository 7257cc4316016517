"""Lossless mode: the model drafts with sparse attention and verifies its drafts with dense attention."""
