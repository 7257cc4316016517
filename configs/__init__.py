"""Presets, one YAML file each, and per-GPU tuning tables."""
