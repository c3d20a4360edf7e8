"""Slot ``trainer.plugins``, the part of it that is no number format: how checkpoints reach the disk."""
