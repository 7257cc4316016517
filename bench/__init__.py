"""Measurements of the plugin. Not installed: run from the checkout."""
