"""Looks for the rules of eviction, sparse prefill, routing and page scores that hold on a pretrained model."""
