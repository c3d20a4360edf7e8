"""Slot ``model``: the LightningModules."""
