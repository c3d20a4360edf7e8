"""Slot ``data``: the LightningDataModules, and the samplers and loaders under them."""
