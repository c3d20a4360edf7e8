"""Muon's step as a function of lists, and what it is made of: torch exports its class only. Checked with torch 2.13."""

from torch.optim._muon import _adjust_lr as adjusted_rate
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalised
from torch.optim._muon import muon

__all__ = ["adjusted_rate", "muon", "orthogonalised"]
