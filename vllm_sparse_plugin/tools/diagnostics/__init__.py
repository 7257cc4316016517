"""Measures selections and attention sinks of a model in a forward pass."""
