"""Predictions of the memory and the compute of a training step, without weights."""
