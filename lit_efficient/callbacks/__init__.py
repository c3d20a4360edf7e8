"""Slot ``trainer.callbacks``: one file a technique."""
