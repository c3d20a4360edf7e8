"""Muon's step as a function of lists: torch exports its class only. Checked with torch 2.13."""

from torch.optim._muon import muon

__all__ = ["muon"]
