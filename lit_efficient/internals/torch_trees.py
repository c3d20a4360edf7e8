"""Functions on nested structures of tensors: ``torch.utils._pytree``, which is private. Checked with torch 2.13."""

from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["tree_leaves", "tree_map", "tree_map_only"]
