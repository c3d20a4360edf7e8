"""Adapters beside frozen weights: their layers, their targets, merging, and the formats of others."""
