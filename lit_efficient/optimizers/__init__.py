"""Optimizers for the slot ``optimizer``, the low-bit twins behind ``LowBitOptimizer``, and parameter groups."""
