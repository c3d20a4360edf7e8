"""Nested structures of tensors. torch has no public name for ``torch.utils._pytree``. Checked with torch 2.13."""

from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["tree_leaves", "tree_map", "tree_map_only"]
