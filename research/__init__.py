"""Experiments behind the design. Not installed: run from the checkout."""
