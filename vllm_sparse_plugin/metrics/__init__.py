"""Counts what a running server reads, and logs what its requests read."""
