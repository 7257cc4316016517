"""Lossless mode: the model drafts for itself with sparse attention and verifies its drafts with dense attention."""
