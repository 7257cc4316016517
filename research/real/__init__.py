"""Finds rules of eviction, sparse prefill, routing and page scores that keep the answers of a pretrained model."""
