"""Correctness tests of whole engines: model families, deployments, random schedules, and long-running servers."""
