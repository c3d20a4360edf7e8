"""Slot ``trainer.plugins``, the part of it that is a number format: one file a precision."""
