"""Measured differences between a fit and variants of it that add techniques."""
