"""Attention over packed trees: the function of transformers, and the ways to compute it."""
