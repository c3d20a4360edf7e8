"""Float8: matrix products of linear layers in 8 bits, forward and backward, with unchanged weights and optimizer.

    y = (q(x / s_x) q(W / s_w)^T) s_x s_w,    s = max |.| / largest float8, for a tensor or for each of its rows;
                                              mxfp8: a power of two for each 32 values of a row

Saves: time on Ada, Hopper and later GPUs, whose float8 products are twice as fast as bf16; use it with Compile
Costs: only 3 bits of mantissa in each operand (2 in tensorwise gradients); casts, which only pay off from sizes of
    about 1000
Source: Micikevicius et al. (2022), https://arxiv.org/abs/2209.05433; MXFP8: Mishra et al. (2025),
    https://arxiv.org/abs/2506.08027; kernels and recipes: torchao

Weights keep their names, dtypes and values, so checkpoints equal those of a run without it. It saves no memory. Shards
are gathered in their own dtype, not in float8.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_installed, check_list, check_number, listed
from lit_efficient.internals.import_noise import silence_imports
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.surgery import (
    call_layers,
    expert_stacks,
    in_autocast_dtype,
    match_modules,
    mix_under,
    name_pattern,
    unmixed,
)
from lit_efficient.technique import PrecisionTechnique
from lit_efficient.traits import Trait

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp"]
_UNITS = (8, 9)  # smallest compute capability of GPUs with float8 products
_MX_UNITS = (10, 0)  # of GPUs with MXFP8 products
_MULTIPLE = 16  # the kernels need sizes of a layer that are multiples of this
_MX_MULTIPLE = 32


def to_float8(linear: nn.Linear, recipe: str = "tensorwise", emulate: bool = False) -> None:
    """Change a linear layer, in place, to multiply in float8. Parameters, names and adapters stay.

    Args:
        linear: An ``nn.Linear`` with float weights. Both sizes must be multiples of 16, unless emulated, and of 32 for
            MXFP8.
        recipe: Recipe of torchao: ``tensorwise``, ``rowwise``, ``rowwise_with_gw_hp``, ``mxfp8`` or
            ``mxfp8_with_gw_hp``.
        emulate: Round to float8 and multiply in float32, on any device.
    """
    silence_imports()
    from lit_efficient.internals.torchao_float8 import settings_of

    mix_under(linear, _Float8Linear, float8_settings=settings_of(recipe, emulate))


class _Float8Linear(nn.Module):
    """Mix-in of a linear layer. Adapters in front of it add to its product."""

    weight: Tensor
    bias: Tensor | None
    float8_settings: tuple[Any, ...]

    def forward(self, x: Tensor) -> Tensor:
        from lit_efficient.internals.torchao_float8 import float8_product

        x = in_autocast_dtype(x)
        y = float8_product(x, self.weight, self.float8_settings)
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype)


class Float8Precision(PrecisionTechnique):
    """Train with the matrix products of linear layers in float8, and everything else in bf16 or float32.

    Output heads, embeddings, norms, the products inside attention and the routers of experts do not change. The report
    names the linear layers that are not converted. Weights are not rounded, so exports are those of a normal run.

    Args:
        recipe: ``tensorwise``, one scale for each tensor, fastest; ``rowwise``, one scale for each row, more accurate;
            ``rowwise_with_gw_hp``, which also computes the gradients of weights in high precision; ``mxfp8``, one scale
            for each 32 values of a row, for Blackwell; ``mxfp8_with_gw_hp``.
        precision: Precision of everything else, instead of ``Trainer(precision=...)``: ``bf16-mixed``, ``bf16-true`` or
            ``32-true``. fp16 is not supported: it needs loss scaling, and all GPUs with float8 support bf16.
        modules: ``blocks``, the linear layers inside the repeated blocks; ``all``; or regular expressions that match
            the ends of dotted names. Linear layers inside the matching modules are converted.
        skip: Regular expressions for layers that are not converted. They need not match anything.
        min_size: Layers with fewer inputs or outputs are not converted. At least 16. Both sizes must be multiples of
            16, for MXFP8 of 32.
        emulate: Compute the same rounding without float8 hardware, on any device. Slower, for trials.

    Raises:
        ConfigurationError: For an argument out of range, a device without float8, if no layer can be converted, and
            for a model whose weights are quantised.
    """

    phase = Phase.LAYOUT
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY})
    conflicts: ClassVar[dict[str, str]] = {
        "QuantizeBase": "its layers hold codes, not weights that could be rounded to float8: use one of the two",
    }
    computes: ClassVar[str] = "rounded"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (8, "products in 8 bits; Ada, Hopper and later")}

    def __init__(
        self,
        recipe: Recipe = "tensorwise",
        precision: Literal["bf16-mixed", "bf16-true", "32-true"] = "bf16-mixed",
        modules: str | list[str] = "blocks",
        skip: tuple[str, ...] = (),
        min_size: int = 128,
        emulate: bool = False,
    ) -> None:
        check_number("Float8Precision", "min_size", min_size, least=_MULTIPLE, whole=True)
        check_list("Float8Precision", "modules", modules, "blocks, all or patterns", text=True)
        for pattern in skip:
            name_pattern(pattern, "Float8Precision: skip")
        check_installed("Float8Precision", "torchao")
        self.recipe = recipe
        self.precision = precision  # Lightning reads this attribute too
        self.modules = modules
        self.skip = tuple(skip)
        self.min_size = min_size
        self.emulate = emulate
        self._rest = _plain(precision, "cuda")
        self._blocks = recipe.startswith("mxfp8")  # a scale for each block of a row
        self._multiple = _MX_MULTIPLE if self._blocks else _MULTIPLE

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        device = trainer.strategy.root_device
        if self.emulate:
            return
        found = str(device)
        needed, generation = (_MX_UNITS, "10.0 (Blackwell)") if self._blocks else (_UNITS, "8.9 (Ada, Hopper)")
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if (torch.version.hip and not self._blocks) or capability >= needed:
                return
            found = f"compute capability {capability}"
        raise ConfigurationError(
            f"Float8Precision: recipe={self.recipe!r} needs a GPU of compute capability {generation} or later, and "
            f"this is {found}: use Trainer(precision={self.precision!r}), or emulate=True to try it out (slower)"
        )

    def transform(self, module: nn.Module) -> Report:
        codes = [name for name, part in module.named_modules() if is_quantized(part)]
        if codes:
            raise ConfigurationError(
                f"Float8Precision: {len(codes)} layers of {type(module).__name__} are quantised, first {codes[0]!r}: "
                "they contain codes instead of weights that could be rounded to float8; load the float weights"
            )
        linears = {name: part for name, part in module.named_modules() if unmixed(part) is nn.Linear}
        wanted = self._wanted(module, linears)
        small = {name for name in wanted if not self._fits(*_sizes(linears[name]))}
        found = [name for name in linears if name in wanted - small]
        if not found:
            shapes = sorted({_sizes(part) for part in linears.values()})
            raise ConfigurationError(
                f"Float8Precision: none of the {len(linears)} linear layers of {type(module).__name__} is converted: "
                f"{len(small)} of the {len(wanted)} in modules={self.modules!r} have sizes below min_size "
                f"({self.min_size}) or not divisible by {self._multiple}; inputs and outputs are {str(shapes)[1:-1]}"
            )
        for name in found:
            to_float8(linears[name], self.recipe, self.emulate)
        call_layers(module)
        weights = sum(linears[name].weight.numel() for name in found)
        every = sum(p.numel() for p in module.parameters())
        left = [name for name in linears if name not in found]
        left += [f"{name} (stacked experts)" for name, _, _ in expert_stacks(module)]
        recipe = f"{self.recipe}, emulated" if self.emulate else self.recipe
        summary = f"{len(found)} of {len(linears)} linear layers multiply in float8 ({recipe}), "
        summary += f"{weights / every:.0%} of all weights"
        if left:
            summary += f"; in {self.precision} stay {listed(left, 6)}"
        return Report(
            summary,
            modules=tuple(found),
            parameters=weights,
            details={"recipe": self.recipe, "left": len(left), "left_names": ", ".join(left)},
        )

    def _wanted(self, module: nn.Module, linears: Mapping[str, nn.Module]) -> set[str]:
        """Return the names of the linear layers that ``modules`` and ``skip`` select."""
        if self.modules == "all":
            chosen = set(linears)
        else:
            if self.modules == "blocks":
                example = r"modules=['layers\.\d+'], or 'all'"
                inside = find_blocks(module, who="Float8Precision", every=True, example=example)
            else:
                inside = match_modules(module, self.modules, who="Float8Precision: modules")
            chosen = {name for name in linears if any(name == n or name.startswith(f"{n}.") for n, _ in inside)}
        if self.modules in ("blocks", "all"):
            chosen -= {*_heads(module, linears), *_routers(module, linears)}
        skips = [name_pattern(pattern, "Float8Precision: skip") for pattern in self.skip]
        return {name for name in chosen if not any(pattern.fullmatch(name) for pattern in skips)}

    def _fits(self, *sizes: int) -> bool:
        return all(size >= self.min_size and size % self._multiple == 0 for size in sizes)

    # The methods of a precision plugin, which call those of `precision`.

    def convert_module(self, module: Any) -> Any:
        module = super().convert_module(module)
        trainer = trainer_of(module)
        if trainer is not None:
            self._rest = _plain(self.precision, trainer.strategy.root_device.type)
        return self._rest.convert_module(module)

    def convert_input(self, data: object) -> Any:
        return self._rest.convert_input(data)

    def tensor_init_context(self) -> AbstractContextManager[object]:
        return self._rest.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[object]:
        return self._rest.module_init_context()

    def forward_context(self) -> AbstractContextManager[object]:
        return self._rest.forward_context()


def _plain(precision: str, device: str) -> Precision:
    """Return Lightning's plugin for a precision."""
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device)
    if precision == "bf16-true":
        return HalfPrecision("bf16-true")
    return Precision()


def _sizes(linear: Any) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _heads(module: nn.Module, linears: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the output layers: named by transformers, tied to an embedding, or the last one of the network."""
    networks: list[Any] = [part for part in module.modules() if hasattr(part, "get_output_embeddings")]
    given = [network.get_output_embeddings() for network in networks]
    named = [head for head in given if head is not None]  # classifiers have none
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    last = list(linears)[-1:]
    for name, part in linears.items():
        if any(part is one for one in named) or id(part.weight) in tables or (name in last and not named):
            yield name


def _routers(module: nn.Module, linears: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the layers with one output for each expert in the same module."""
    experts: dict[str, set[int]] = defaultdict(set)  # numbers of experts, by the name of the module that owns them
    for name, part, keys in expert_stacks(module):
        experts[name.rpartition(".")[0]].add(getattr(part, keys[0]).shape[0])
    for name, children in module.named_modules():
        if isinstance(children, nn.ModuleList):
            experts[name.rpartition(".")[0]].add(len(children))
    for name, linear in linears.items():
        if linear.out_features in experts[name.rpartition(".")[0]]:
            yield name
