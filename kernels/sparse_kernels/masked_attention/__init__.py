"""Causal attention for training under a soft or hard page mask: the pages that serving would read."""

from sparse_kernels.masked_attention.api import dense_shares, masked_attention, newest_attention, selection_loss
from sparse_kernels.masked_attention.packing import Packing
from sparse_kernels.masked_attention.records import TRAINABLE, PageRecords, page_records
from sparse_kernels.masked_attention.rule import PageMask

__all__ = [
    "TRAINABLE", "Packing", "PageMask", "PageRecords", "dense_shares", "masked_attention", "newest_attention",
    "page_records", "selection_loss",
]  # fmt: skip
