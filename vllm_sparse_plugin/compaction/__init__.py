"""Gives KV cache blocks back after a prompt has been computed."""
