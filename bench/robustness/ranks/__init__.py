"""Data-parallel engines of which one has no requests. Its steps without requests must not change an answer."""
