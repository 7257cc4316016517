"""Tiny models of many families in whole engines, compared with dense attention and with the reference pipeline."""
