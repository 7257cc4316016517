"""Selections and attention sinks of a model, measured in a forward pass."""
