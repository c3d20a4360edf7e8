"""Exports of checkpoints for other programs."""
