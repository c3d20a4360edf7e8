"""The norm of gradients that may be sharded."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lit_efficient.internals.torch_foreach import foreach_norm
from lit_efficient.surgery import is_sharded


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor | None:
    """The 2-norm of all gradients together, as a scalar that is not waited for; ``None`` where there are none.

    Shards count as a whole, which all processes ask for together. Formats of 16 bits are summed in float32.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        mesh = getattr(values, "device_mesh", None)  # shards of several meshes are not summed together
        kinds.setdefault((is_sharded(values), values.device, values.dtype, mesh), []).append(values)
    norms: list[Tensor] = []
    for (sharded, _, dtype, _), tensors in kinds.items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        norm: Any = torch.linalg.vector_norm(torch.stack(list(foreach_norm(tensors, 2.0, dtype=wide))))
        norms.append(norm.full_tensor() if sharded else norm)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms])) if norms else None
