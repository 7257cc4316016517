"""Measures the quality of page selections, on prompts and on sampled decode steps of a server."""
