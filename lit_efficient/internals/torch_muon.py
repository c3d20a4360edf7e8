"""What Muon's step is made of: torch exports its class only. Checked with torch 2.13."""

from torch.optim._muon import _adjust_lr as adjusted_rate
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalised

__all__ = ["adjusted_rate", "orthogonalised"]
