"""Adaptive gradient clipping: the norm of each unit's gradient is at most a fraction of the norm of its weights.

    g_i  <-  g_i * min(1, clip_factor * max(||w_i||, eps) / ||g_i||)        for each unit i, a row of a weight

Saves: runs with rates and batches for which one bad batch would ruin single layers; trains networks without batch norm
Costs: two norms and a product over the gradients per optimizer step; the host waits for nothing
Source: Brock et al. (2021), https://arxiv.org/abs/2102.06171, section 4.1

A unit is the set of weights of one output: ``w[i]`` of a weight with two dimensions or more, and all of a vector (a
bias, a norm's weight). For weights with their inputs first (GPT-2's) it is ``w[:, i]``, and for those of several
experts ``w[e, i]``.
"""

from collections.abc import Iterable, Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import check_number
from lit_efficient.mechanisms.clipping import ClipsGradients
from lit_efficient.surgery import expert_stacks, inputs_first, match_parameters, name_pattern
from lit_efficient.traits import Trait


def adaptive_clip(
    pairs: Iterable[tuple[Tensor, Tensor] | tuple[Tensor, Tensor, tuple[int, ...]]],
    clip_factor: float = 0.01,
    eps: float = 1e-3,
) -> None:
    """Clip gradients in place, unit by unit.

    Args:
        pairs: Weights and their gradients, of the same shapes. Norms of DTensors are those of the whole tensor. A
            sparse gradient must be coalesced; each row that it holds is a unit. A third value, if given, has the
            dimensions to reduce over; the default is all but the first.
        clip_factor: Largest norm of a unit's gradient, as a fraction of the norm of its weights, above 0.
        eps: Smallest norm of weights that is assumed, above 0, so that weights that start at zero can grow.

    Raises:
        ConfigurationError: For an argument out of range.

    Example:
    Example:
        >>> weight, gradient = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.6, 0.8], [0.0, 1.0]])
        >>> adaptive_clip([(weight, gradient)], clip_factor=0.1, eps=0.1)
        >>> gradient
        tensor([[0.3000, 0.4000],
                [0.0000, 0.0100]])
    """
    check_number("adaptive_clip", "clip_factor", clip_factor, above=0)
    check_number("adaptive_clip", "eps", eps, above=0)
    with torch.no_grad():
        for weight, gradient, *given in pairs:
            if gradient.is_sparse:
                weight = weight[gradient.indices()[0]]  # noqa: PLW2901
                gradient = gradient.values()  # noqa: PLW2901
            dims = given[0] if given else tuple(range(1, weight.ndim))
            limit = _unit_norms(weight, dims).to(gradient.device).clamp(min=eps) * clip_factor
            gradient.mul_((limit / _unit_norms(gradient, dims)).clamp(max=1.0))


def _unit_norms(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return norms over ``dims``, kept as 1. A vector or number has one norm, []. 16 bits are summed in float32."""
    wide = torch.float32 if tensor.itemsize < 4 else None
    if tensor.ndim < 2:
        return torch.linalg.vector_norm(tensor, dtype=wide)
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=True, dtype=wide)


def input_dims(root: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """Return the input dimensions of those parameters where they are not all but the first."""
    found: dict[Tensor, tuple[int, ...]] = {}
    for part in root.modules():
        for p in part.parameters(recurse=False):
            if p.ndim > 1 and inputs_first(part):
                found[p] = (0, *range(2, p.ndim))
    for _, part, _ in expert_stacks(root):
        dims = (1,) if getattr(part, "is_transposed", False) else (2,)
        found |= {p: dims for p in part.parameters(recurse=False) if p.ndim == 3}
    return found


class AdaptiveGradientClipping(ClipsGradients):
    """Clip the gradient of each unit in proportion to the unit's weights, right before each optimizer step.

    All trained parameters are clipped; with adapters these are the adapters' alone. A matrix that starts at zero
    (LoRA's B) is clipped to ``eps`` until it has grown. Under SGD this acts like a warm-up of its rate, under Adam it
    has hardly any effect. Gradients are complete when they are clipped: after accumulation, averaging over processes
    and the checks of `NonFiniteGuard`.

    Args:
        clip_factor: Largest norm of a unit's gradient, as a fraction of the norm of its weights, above 0. Larger
            batches need smaller factors: the paper uses 0.01 for 4096 images and 0.16 for 256.
        eps: Smallest norm of weights that is assumed, above 0.
        skip: Regular expressions for the ends of names of parameters or modules that are not clipped. The paper
            excludes the classifier's last layer.

    Raises:
        ConfigurationError: For an argument out of range, and a pattern that matches no parameter.
        ConflictError: With ``gradient_clip_val`` or the module's own clipping; with FSDP1 and DeepSpeed.
    """

    phase = Phase.CLIP
    traits = frozenset({Trait.CLIPS})
    helps = {"safety": (8, "no unit's gradient is large compared with its weights; high rates without batch norm")}

    def __init__(self, clip_factor: float = 0.01, eps: float = 1e-3, skip: Sequence[str] = ()) -> None:
        super().__init__()
        check_number("AdaptiveGradientClipping", "clip_factor", clip_factor, above=0)
        check_number("AdaptiveGradientClipping", "eps", eps, above=0)
        for pattern in skip:
            name_pattern(pattern, "AdaptiveGradientClipping: skip")
        self.clip_factor = clip_factor
        self.eps = eps
        self.skip = tuple(skip)
        self._skipped: set[Tensor] = set()
        self._dims: dict[Tensor, tuple[int, ...]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._skipped = self._matches(pl_module)
        self._dims = input_dims(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # A copy of the callback should not hold weights.
        self._skipped = set()
        self._dims = {}
        super().teardown(trainer, pl_module, stage)

    def clip(self, gradients: dict[Tensor, Tensor]) -> None:
        pairs = []
        for p, gradient in gradients.items():
            if p not in self._skipped:
                pairs.append((p.detach(), gradient, self._dims.get(p, tuple(range(1, p.ndim)))))
        adaptive_clip(pairs, self.clip_factor, self.eps)

    def describe(self, module: nn.Module) -> Report:
        trained = {p for p in module.parameters() if p.requires_grad}
        count = len(trained - self._matches(module))
        return Report(f"gradients of {count} of {len(trained)} tensors, at most {self.clip_factor:g} of a unit")

    def _matches(self, module: nn.Module) -> set[Tensor]:
        """Return the parameters that ``skip`` matches."""
        if not self.skip:
            return set()
        return {p for _, p in match_parameters(module, self.skip, who="AdaptiveGradientClipping: skip")}
