"""Measures, tunes and trains models. No server imports this package."""
