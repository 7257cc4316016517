"""Compares page statistics on the queries and keys of a model."""
