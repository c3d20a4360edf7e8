"""Adaptive gradient clipping: each unit's gradient is at most a share of the unit's own weights.

    g_i  <-  g_i * min(1, clip_factor * max(||w_i||, eps) / ||g_i||)        of each unit i, a row of a weight

Saves: runs at rates and batches where one bad batch would ruin single layers; networks without batch norm train at all
Costs: two norms and a product over the gradients an optimizer step; nothing is waited for
Source: Brock et al. (2021), https://arxiv.org/abs/2102.06171, section 4.1

A unit is what one output sees: ``w[i]`` of a weight of two dimensions or more, and all of a vector (a bias, a norm).
Of weights that have their inputs first (GPT-2's) it is ``w[:, i]``, and of those of several experts ``w[e, i]``.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import check_number, refusal
from lit_efficient.mechanisms.clipping import ClipsGradients
from lit_efficient.surgery import expert_stacks, inputs_first, match_parameters, name_pattern, parents
from lit_efficient.traits import Trait


def adaptive_clip(
    pairs: Iterable[tuple[Tensor, Tensor] | tuple[Tensor, Tensor, tuple[int, ...]]],
    clip_factor: float = 0.01,
    eps: float = 1e-3,
) -> None:
    """Clip gradients, in place, unit by unit.

    Args:
        pairs: Weights and their gradients, of the same shapes; DTensors count as a whole. Of a sparse gradient (which
            must be coalesced) each row that it has is a unit. Where a unit is not ``w[i]``, the third value has the
            dimensions that it is summed over.
        clip_factor: The largest norm of a unit's gradient, as a share of that of its weights, above 0.
        eps: Weights count as if their norm were at least this, above 0: those that start at zero must move.

    Raises:
        ConfigurationError: For an argument out of range.

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
                weight, gradient = weight[gradient.indices()[0]], gradient.values()  # noqa: PLW2901
            dims = given[0] if given else tuple(range(1, weight.ndim))
            limit = _unit_norms(weight, dims).to(gradient.device).clamp(min=eps) * clip_factor
            gradient.mul_((limit / _unit_norms(gradient, dims)).clamp(max=1.0))


def _unit_norms(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Norms over ``dims``, which stay as 1; of a vector or a number its own, []. 16 bits are summed in float32."""
    wide = torch.float32 if tensor.itemsize < 4 else None
    if tensor.ndim < 2:
        return torch.linalg.vector_norm(tensor, dtype=wide)
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=True, dtype=wide)


def input_dims(root: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """The dimensions that stand for inputs, of those parameters where they are not all but the first."""
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

    What trains is clipped, adapters alone beside a frozen base. A matrix that starts at zero (LoRA's B) is clipped by
    ``eps`` until it has grown, which works like a warm-up of its rate under SGD, and hardly at all under Adam. It acts
    on complete gradients: after accumulation, the mean over processes and the checks of `NonFiniteGuard`.

    Args:
        clip_factor: The largest norm of a unit's gradient, as a share of that of its weights, above 0. Larger batches
            take smaller ones: the paper has 0.01 at 4096 images and 0.16 at 256.
        eps: Weights count as if their norm were at least this, above 0.
        skip: Regular expressions for the ends of names of parameters, or of modules, that are left alone; the paper
            leaves out the classifier's last layer.

    Raises:
        ConfigurationError: For an argument out of range, a pattern that matches nothing that trains, and if nothing is
            left to clip.
        ConflictError: Beside ``gradient_clip_val`` or the module's own clipping; with FSDP1 and DeepSpeed.
    """

    phase = Phase.CLIP
    traits = frozenset({Trait.CLIPS})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "safety": (8, "no unit's gradient is large beside its weights; high rates without batch norm")
    }

    def __init__(self, clip_factor: float = 0.01, eps: float = 1e-3, skip: Sequence[str] = ()) -> None:
        super().__init__()
        check_number("AdaptiveGradientClipping", "clip_factor", clip_factor, above=0)
        check_number("AdaptiveGradientClipping", "eps", eps, above=0)
        if isinstance(skip, str):
            raise refusal("AdaptiveGradientClipping", "skip", "a list of regular expressions", skip)
        for pattern in skip:
            name_pattern(pattern, "AdaptiveGradientClipping: skip")
        self.clip_factor, self.eps, self.skip = clip_factor, eps, tuple(skip)
        self._skipped: set[Tensor] = set()
        self._dims: dict[Tensor, tuple[int, ...]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        who = "AdaptiveGradientClipping: skip"
        self._skipped = {p for _, p in match_parameters(pl_module, self.skip, who=who)} if self.skip else set()
        self._dims = input_dims(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._skipped, self._dims = set(), {}  # no copy of the callback should hold weights
        super().teardown(trainer, pl_module, stage)

    def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: nn.Module) -> None:
        kept = {p: gradient for p, gradient in gradients.items() if p not in self._skipped}
        pairs = [(p.detach(), g, *([self._dims[p]] if p in self._dims else [])) for p, g in kept.items()]
        adaptive_clip(pairs, self.clip_factor, self.eps)  # type: ignore[arg-type]

    def describe(self, module: nn.Module) -> Report:
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        patterns = [name_pattern(pattern, "AdaptiveGradientClipping: skip") for pattern in self.skip]
        names = [n for n, _ in trained if not any(e.fullmatch(part) for part in (n, *parents(n)) for e in patterns)]
        return Report(f"gradients of {len(names)} of {len(trained)} tensors, at most {self.clip_factor:g} of a unit")
