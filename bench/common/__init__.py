"""Shared parts of the measurements: models, engines, child processes, result files and their readers."""
