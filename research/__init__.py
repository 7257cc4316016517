"""Experiments behind the design: what was tried, measured and learned. Not installed: run from the checkout."""
