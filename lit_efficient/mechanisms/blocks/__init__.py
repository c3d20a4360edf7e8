"""Repeated blocks: which residual streams they belong to, which of them train, which are computed again."""
