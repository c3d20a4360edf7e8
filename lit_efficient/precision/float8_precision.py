"""Float8: the products of linear layers in eight bits, forward and backward; weights and optimizer stay as they are.

    y = (q(x / s_x) q(W / s_w)^T) s_x s_w,    s = max |.| / max of the format: of a tensor, or of each of its rows

Saves: time on GPUs from Ada and Hopper on, whose products in float8 run at twice bf16's rate; use it with Compile
Costs: 3 bits of mantissa in each operand (2 in tensorwise gradients); casts, which layers below some 1000 do not repay
Source: Micikevicius et al. (2022), https://arxiv.org/abs/2209.05433; kernels and recipes: torchao

Weights keep their names, types and values, so checkpoints are those of a run without it. It saves no memory. Shards are
gathered in their own type, not in float8.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_choice, check_installed, check_number, listed, refusal
from lit_efficient.internals.import_noise import silence_imports
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.surgery import call_layers, expert_stacks, match_modules, mix_under, name_pattern, unmixed
from lit_efficient.technique import PrecisionTechnique
from lit_efficient.traits import Trait

_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_PRECISIONS = ("bf16-mixed", "bf16-true", "32-true")
_UNITS = (8, 9)  # compute capability from which a GPU multiplies float8
_MULTIPLE = 16  # of which its kernels want both sizes of a layer


def to_float8(linear: nn.Linear, recipe: str = "tensorwise", emulate: bool = False) -> None:
    """Let a linear layer multiply in float8 from now on, in place; parameters, names and adapters on it stay.

    Args:
        linear: An ``nn.Linear`` of floats; both sizes multiples of 16, unless emulated.
        recipe: ``tensorwise``, ``rowwise`` or ``rowwise_with_gw_hp``, as of torchao.
        emulate: Round to float8 and multiply in float32, on any device.
    """
    silence_imports()
    from lit_efficient.internals.torchao_float8 import settings_of

    mix_under(linear, _Float8Linear, float8_settings=settings_of(recipe, emulate))


class _Float8Linear(nn.Module):
    """Mix-in of a linear layer; adapters in front of it add to its product."""

    weight: Tensor
    bias: Tensor | None
    float8_settings: tuple[Any, Any, Any]

    def forward(self, x: Tensor) -> Tensor:
        from lit_efficient.internals.torchao_float8 import float8_product

        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = float8_product(x, self.weight, self.float8_settings)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Float8Precision(PrecisionTechnique):
    """Train with the linear layers' products in float8, and all else in bf16 or float32.

    Output heads, embeddings, norms, attention's own products and the routers of experts stay as they are; the report
    names the linear layers that do. What exports and other programs read are the weights, which are not rounded.

    Args:
        recipe: ``tensorwise``: one scale a tensor, fastest; ``rowwise``: one a row, more exact;
            ``rowwise_with_gw_hp``: the weights' gradients in high precision, too.
        precision: Of all else, as ``Trainer(precision=...)``, which this takes the place of: ``bf16-mixed``,
            ``bf16-true`` or ``32-true``; not fp16: its losses need scaling, and all GPUs with float8 have bf16.
        modules: ``blocks``: linear layers inside the repeated blocks; ``all``; or regular expressions for the ends of
            dotted names of what is converted, with all inside it.
        skip: Regular expressions for those that stay; none need match.
        min_size: Layers with fewer inputs or outputs stay, at least 16. Both must be multiples of 16.
        emulate: Compute the same roundings without float8 units, on any device: slower, for trying it out.

    Raises:
        ConfigurationError: For an argument out of range, for a device without float8 units, without layers to convert,
            and for a model whose weights are quantised.
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
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        precision: Literal["bf16-mixed", "bf16-true", "32-true"] = "bf16-mixed",
        modules: str | list[str] = "blocks",
        skip: tuple[str, ...] = (),
        min_size: int = 128,
        emulate: bool = False,
    ) -> None:
        check_choice("Float8Precision", "recipe", recipe, _RECIPES)
        check_choice("Float8Precision", "precision", precision, _PRECISIONS)
        check_number("Float8Precision", "min_size", min_size, least=_MULTIPLE, whole=True)
        if not isinstance(emulate, bool):
            raise refusal("Float8Precision", "emulate", "true or false", emulate)
        if not modules:
            raise refusal("Float8Precision", "modules", "blocks, all or patterns", modules)
        if isinstance(skip, str):
            raise refusal("Float8Precision", "skip", "a list of patterns", skip)
        for pattern in skip:
            name_pattern(pattern, "Float8Precision: skip")
        check_installed("Float8Precision", "torchao")
        self.recipe = recipe
        self.precision = precision  # which Lightning reads, too
        self.modules = modules
        self.skip = tuple(skip)
        self.min_size = min_size
        self.emulate = emulate
        self._rest = _plain(precision, "cuda")

    def check(self, trainer: Any, module: Any) -> None:
        """Refuse a device that has no float8 units, unless they are emulated."""
        device = trainer.strategy.root_device
        fits = device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) >= _UNITS)
        if not fits and not self.emulate:
            found = (
                f"compute capability {torch.cuda.get_device_capability(device)}" if device.type == "cuda" else device
            )
            raise ConfigurationError(
                f"Float8Precision: float8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, and this is "
                f"{found}: use Trainer(precision={self.precision!r}), or emulate=True to try it out (slower)"
            )

    def transform(self, module: nn.Module) -> Report:
        codes = [name for name, part in module.named_modules() if is_quantized(part)]
        if codes:
            raise ConfigurationError(
                f"Float8Precision: {len(codes)} layers of {type(module).__name__} are quantised, first {codes[0]!r}: "
                "they hold codes, not weights that could be rounded to float8; load the float weights"
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
                f"({self.min_size}) or no multiples of {_MULTIPLE}; inputs and outputs are {str(shapes)[1:-1]}"
            )
        for name in found:
            to_float8(linears[name], self.recipe, self.emulate)
        call_layers(module)
        weights = sum(linears[name].weight.numel() for name in found)
        every = sum(p.numel() for p in module.parameters())
        left = [name for name in linears if name not in found]
        left += [f"{name} (stacked experts)" for name, _, _ in expert_stacks(module)]
        stays = f"; in {self.precision} stay {listed(left, 6)}" if left else ""
        return Report(
            f"{len(found)} of {len(linears)} linear layers multiply in float8 ({self.recipe}"
            f"{', emulated' if self.emulate else ''}), {weights / every:.0%} of all weights{stays}",
            modules=tuple(found),
            parameters=weights,
            details={"recipe": self.recipe, "left": len(left), "left_names": ", ".join(left)},
        )

    def _wanted(self, module: nn.Module, linears: Mapping[str, nn.Module]) -> set[str]:
        if self.modules == "all":
            chosen = set(linears)
        else:
            inside = (
                find_blocks(module, who="Float8Precision", every=True, example=r"modules=['layers\.\d+'], or 'all'")
                if self.modules == "blocks"
                else match_modules(module, _listed(self.modules), who="Float8Precision: modules")
            )
            chosen = {name for name in linears if any(name == n or name.startswith(f"{n}.") for n, _ in inside)}
        if self.modules in ("blocks", "all"):
            chosen -= {*_heads(module, linears), *_routers(module, linears)}
        skips = [name_pattern(pattern, "Float8Precision: skip") for pattern in self.skip]
        return {name for name in chosen if not any(pattern.fullmatch(name) for pattern in skips)}

    def _fits(self, *sizes: int) -> bool:
        return all(size >= self.min_size and size % _MULTIPLE == 0 for size in sizes)

    # What Lightning asks of a precision: the rest's answers.

    def convert_module(self, module: Any) -> Any:
        module = super().convert_module(module)
        trainer = trainer_of(module)
        if trainer is not None:
            self._rest = _plain(self.precision, trainer.strategy.root_device.type)
        return self._rest.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        return self._rest.convert_input(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._rest.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._rest.module_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._rest.forward_context()


def _plain(precision: str, device: str) -> Precision:
    """Lightning's own plugin of a precision."""
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device)
    return HalfPrecision("bf16-true") if precision == "bf16-true" else Precision()


def _listed(patterns: str | list[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _sizes(linear: Any) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _heads(module: nn.Module, linears: Mapping[str, nn.Module]) -> Iterator[str]:
    """Layers that make the outputs: named by transformers, tied to an embedding, or the last one of the network."""
    networks: list[Any] = [part for part in module.modules() if hasattr(part, "get_output_embeddings")]
    given = [network.get_output_embeddings() for network in networks]
    named = [head for head in given if head is not None]  # classifiers have none
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    last = list(linears)[-1:]
    for name, part in linears.items():
        if any(part is one for one in named) or id(part.weight) in tables or (name in last and not named):
            yield name


def _routers(module: nn.Module, linears: Mapping[str, nn.Module]) -> Iterator[str]:
    """Layers with one output for each of the experts that stand beside them."""
    stacks = {
        name: next(part.get_parameter(key).shape[0] for key in keys) for name, part, keys in expert_stacks(module)
    }
    lists = {name: len(part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    for name, part in linears.items():
        owner = name.rpartition(".")[0]
        beside = {number for other, number in {**stacks, **lists}.items() if other.rpartition(".")[0] == owner}
        if part.out_features in beside:
            yield name
