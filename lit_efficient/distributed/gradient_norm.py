"""Norm of gradients, sharded or not."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lit_efficient.internals.torch_optimizers import foreach_norm
from lit_efficient.surgery import is_sharded


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor | None:
    """Return the 2-norm of all gradients together as a scalar, without waiting for the device; ``None`` without
    gradients.

    Shards count as a whole tensor, which all processes compute together. 16-bit formats are summed in float32.
    """
    kinds: dict[tuple[bool, torch.device, torch.dtype, object], list[Tensor]] = {}
    for gradient in gradients:
        values = gradient
        if gradient.is_sparse:
            values = gradient.coalesce().values()
        mesh = getattr(values, "device_mesh", None)  # torch does not add shards of several meshes
        kinds.setdefault((is_sharded(values), values.device, values.dtype, mesh), []).append(values)
    norms: list[Tensor] = []
    for (sharded, _, dtype, _), tensors in kinds.items():
        wide = torch.float32 if dtype.itemsize < 4 else None  # float16 sums would overflow, bfloat16 ones lose digits
        norm = torch.linalg.vector_norm(torch.stack(list(foreach_norm(tensors, 2.0, dtype=wide))))
        norms.append(norm.full_tensor() if sharded else norm)
    if not norms:
        return None
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))
