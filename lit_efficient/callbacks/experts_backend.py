"""Experts by one grouped product: the stacked experts of transformers' networks are computed in the named way.

    grouped_mm  tokens are sorted by expert, and one grouped product multiplies each group by the matrix of its expert
    batched_mm  each token gets a copy of its expert's matrices: for very few tokens
    eager       a loop over the experts, the reference

Saves: a loop over experts, whose small products leave a GPU idle
Costs: nothing for ``grouped_mm``; ``batched_mm`` holds the matrices once for each token and chosen expert
Source: Gale et al. (2022), https://arxiv.org/abs/2211.15841; the ``experts_implementation`` of transformers,
    https://huggingface.co/docs/transformers/experts_interface; torch.nn.functional.grouped_mm

transformers chooses ``grouped_mm`` itself where a class supports it, and never says so. This technique sets the way,
and stops a run whose network would loop, or would fail in its first step.
"""

from typing import ClassVar, Literal

import torch
from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_choice
from lit_efficient.internals.hugging_face import expert_modules, experts_way, set_experts_way
from lit_efficient.surgery import class_names, expert_stacks
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_WAYS = ("grouped_mm", "batched_mm", "eager")
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)  # of torch's grouped product
_ALIGNMENT = 16  # bytes to which it needs each row of a matrix


class ExpertsBackend(Technique):
    """Compute the stacked experts of transformers' networks by one grouped product, or in another way by name.

    The experts of ``MixtureOfExperts`` always use the grouped product where torch supports their sizes.

    Args:
        backend: ``grouped_mm``, ``batched_mm`` or ``eager``.

    Raises:
        ConfigurationError: For another name; without experts whose class lets transformers choose; and with
            ``grouped_mm`` for matrices whose format or sizes torch's product does not support.
    """

    phase = Phase.LAYOUT
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY, Trait.READS_NO_WEIGHTS})
    computes = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "experts by one grouped product, not by a loop")}

    def __init__(self, backend: Literal["grouped_mm", "batched_mm", "eager"] = "grouped_mm") -> None:
        super().__init__()
        check_choice("ExpertsBackend", "backend", backend, _WAYS)
        self.backend = backend

    def transform(self, module: nn.Module) -> Report:
        found = dict(expert_modules(module))
        if not found:
            raise ConfigurationError(
                f"ExpertsBackend: {type(module).__name__} has no experts for which transformers offers a choice: they "
                "are modules of stacked weights that its use_experts_implementation decorates. Leave it out"
            )
        if self.backend == "grouped_mm":
            _check_products(found)
        before = {experts_way(part) for part in found.values()}
        for network in module.modules():
            if hasattr(network, "set_experts_implementation"):
                set_experts_way(network, self.backend)
        left = [name for name, part in found.items() if experts_way(part) != self.backend]
        if left:
            kind = type(found[left[0]]).__name__
            raise ConfigurationError(
                f"ExpertsBackend: transformers does not set backend={self.backend!r} for {left[0]!r} ({kind}), whose "
                f"network keeps {experts_way(found[left[0]])!r}: leave it out"
            )
        was = ", ".join(sorted(map(str, before)))
        return Report(
            f"{len(found)} modules of experts ({class_names(found.values())}) use {self.backend}, was {was}",
            modules=tuple(found),
        )


def _check_products(found: dict[str, nn.Module]) -> None:
    """Raise an error if torch's grouped product does not support a matrix of experts."""
    for name, part in found.items():
        for key in [key for _, _, keys in expert_stacks(part) for key in keys]:
            weight = getattr(part, key)  # a parameter, or a layer with its codes
            sizes = weight.shape[1:]
            unaligned = any(size * weight.dtype.itemsize % _ALIGNMENT for size in sizes)
            if weight.dtype not in _FORMATS or unaligned:
                needs = "rows of a multiple of 16 bytes, in float32, bfloat16 or float16"
                raise ConfigurationError(
                    f"ExpertsBackend: backend='grouped_mm' needs {needs}, and '{name}.{key}' has matrices of "
                    f"{sizes[0]} x {sizes[1]} in {weight.dtype}: use eager"
                )
