"""Tiny models of many families in whole engines: equal to dense attention, and to the reference pipeline."""
