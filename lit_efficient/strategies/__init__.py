"""Slot ``trainer.strategy``: one file a strategy."""
