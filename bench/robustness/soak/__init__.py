"""A server under clients that come and go: no answer may change, and no block of the cache may be lost."""
