"""LoRA: train a low-rank change of frozen weights, with rsLoRA, DoRA, PiSSA and LoRA+.

    y = W x + s B A x,    A [r, in], B [out, r],    s = alpha / r

Saves: gradients and optimizer states of all but r (in + out) values a layer; checkpoints hold these alone
Costs: two thin products a layer until merged; DoRA one more of A with W; a capacity of rank r
Source: Hu et al. (2021), https://arxiv.org/abs/2106.09685; LoRA+: Hayou et al. (2024), https://arxiv.org/abs/2402.12354

The variants and their formulas are in :mod:`lit_efficient.mechanisms.adapters.low_rank`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from math import inf
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.ranks import readers
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_foreach import foreach_add_, foreach_copy_, foreach_mul_
from lit_efficient.internals.torch_optimizers import HOOKS
from lit_efficient.mechanisms.adapters.base import freeze_base, is_added
from lit_efficient.mechanisms.adapters.capacity import capacity_line, learned_tokens
from lit_efficient.mechanisms.adapters.experts import LowRankExperts, add_experts
from lit_efficient.mechanisms.adapters.int4 import Int4Linear
from lit_efficient.mechanisms.adapters.low_rank import ON_INT4, VARIANTS, LowRank, add_low_rank, kind_of, scale_of
from lit_efficient.mechanisms.adapters.peft_folder import read_adapter, start_adapters
from lit_efficient.mechanisms.adapters.peft_format import placement
from lit_efficient.mechanisms.adapters.quantized import elements, is_bitsandbytes, quantization_of
from lit_efficient.mechanisms.adapters.several import active_mix, check_fields, mix_adapters, rest_beside
from lit_efficient.mechanisms.adapters.targets import (
    ALL_LINEAR,
    WITH_EXPERTS,
    find_experts,
    find_targets,
    other_targets,
)
from lit_efficient.mechanisms.adapters.technique import AdapterTechnique
from lit_efficient.surgery import call_layers, count, expert_stacks, local, match_modules, weights_wait
from lit_efficient.traits import Trait


class LoRA(AdapterTechnique):
    """Freeze the network and train low-rank adapters beside its layers, under names that leave the base's as they are.

    Works on ``nn.Linear``, transformers' ``Conv1D``, ``nn.Conv2d`` without groups, ``nn.Embedding`` and bitsandbytes'
    quantised layers. Checkpoints hold adapters, ``modules_to_save`` and buffers; they resume beside the same base only.

    Args:
        rank: r, at least 1.
        alpha: Numerator of the scale s, above 0.
        targets: ``all-linear`` (without the output head), ``all-linear+experts`` (with the stacked weights of experts,
            too), or regular expressions for the ends of dotted names, such as ``experts.down_proj``.
        dropout: On the adapters' input, at least 0 and below 1.
        variant: ``lora``; ``rslora`` scales by alpha / sqrt(r); ``dora`` learns directions and magnitudes apart;
            ``pissa`` starts from the r largest singular parts of the weight; ``qalora`` sees sums over the groups of
            ``QuantizeBase(format="int4")``, which it needs, and merges into its zero points exactly; ``rounded`` needs
            that, too, and computes with the int4 weight that it merges into: what small updates lose in rounding is
            trained against, at the cost of a float weight a layer.
        lr_ratio: LoRA+: B learns at so many times the rate, above 0 (16 in the paper); ``None``: at the same rate.
        bias: Which biases train as well: ``none``, ``lora_only`` (those of adapted layers) or ``all``.
        modules_to_save: Patterns of modules that train in full (a new head) and go into checkpoints.
        save_base: Whether checkpoints hold the frozen weights, too.
        seed: Of the adapters' start, which is the same on all ranks.
        beside: Folders as for ``start_from``, by names: adapters that rest on the same base until ``mix_adapters``
            (lit_efficient.mechanisms.adapters.several) switches or mixes them with the trained one, ``default``, or
            ``adapters_by_row`` chooses for each row. Variants lora and rslora.
        start_from: A folder that peft has saved (or ``export --format peft``) to start from. Its rank, alpha, targets,
            dropout, variant, bias and modules_to_save are taken; those that are given, too, must be the same.

    Raises:
        ConfigurationError: For an argument out of range, and for a pattern without a layer; it lists those that match.
        CheckpointError: When resuming beside another base than the adapters were trained with.
    """

    phase = Phase.ADAPT
    traits = frozenset({Trait.ADAPTER, Trait.FREEZES_MATRICES, Trait.READS_NO_WEIGHTS, Trait.REFUSES_EARLY})
    keeps = "adapters"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (11, "gradients and states of all but adapters: another training")
    }

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        targets: str | list[str] = ALL_LINEAR,
        dropout: float = 0.0,
        variant: str = "lora",
        lr_ratio: float | None = None,
        bias: str = "none",
        modules_to_save: list[str] | None = None,
        save_base: bool = False,
        seed: int = 0,
        start_from: str | None = None,
        beside: dict[str, str | dict[str, str | int | float | list[str]]] | None = None,
    ) -> None:
        super().__init__()
        check_number("LoRA", "rank", rank, least=1, whole=True)
        check_number("LoRA", "alpha", alpha, above=0)
        check_number("LoRA", "dropout", dropout, least=0, below=1)
        check_choice("LoRA", "variant", variant, VARIANTS)
        check_number("LoRA", "lr_ratio", lr_ratio, above=0, null=True)
        if dropout and variant == "rounded":
            raise refusal("LoRA", "dropout", "0 for variant rounded, which sums weight and adapter", dropout)
        check_choice("LoRA", "bias", bias, ("none", "lora_only", "all"))
        self.rank = rank
        self.alpha = alpha
        self.targets = targets
        self.dropout = dropout
        self.variant = variant
        self.lr_ratio = lr_ratio
        self.bias = bias
        self.modules_to_save = modules_to_save
        self.save_base = save_base
        self.seed = seed
        self.start_from = start_from
        self.beside = beside
        folders = {name: read_adapter(one)[0] if isinstance(one, str) else one for name, one in (beside or {}).items()}
        self._weighed = False
        self._beside = {name: check_fields(name, fields) for name, fields in folders.items()}
        if beside and variant not in ("lora", "rslora"):
            raise refusal("LoRA", "beside", f"left out for variant {variant}, whose update is no sum", [*beside])
        if start_from is not None:
            self._take(start_from)

    def _take(self, folder: str) -> None:
        """Take the arguments of the adapter in a folder."""
        defaults = {parameter.name: parameter.default for parameter in signature(LoRA).parameters.values()}
        fields, tensors = read_adapter(folder)
        for name, value in fields.items():
            given = getattr(self, name)
            if given == defaults[name]:
                setattr(self, name, value)
            elif name not in ("targets", "modules_to_save") and given != value:  # those are compared by what they match
                raise refusal("LoRA", name, f"{value!r}, as in start_from, or left out", given)
        # What the base would be compared with, or would start again as it is read.
        if self.variant in ("dora", "pissa") or not all(map(is_added, tensors)):
            self.traits = self.traits - {Trait.READS_NO_WEIGHTS}

    def arguments(self) -> dict[str, Any]:
        """Without ``start_from``, and ``beside`` without folders: a checkpoint holds what they gave."""
        own = {name: value for name, value in super().arguments().items() if name != "start_from"}
        return own | ({"beside": self._beside} if self.beside else {})

    def transform(self, module: nn.Module) -> Report:
        if any(kind.__name__ == "LoraLayer" for part in module.modules() for kind in type(part).__mro__):
            raise ConfigurationError("LoRA: the model has layers of peft's LoRA already: merge them, or leave LoRA out")
        saved = match_modules(module, self.modules_to_save, who="LoRA: modules_to_save") if self.modules_to_save else []
        whole = {id(part) for _, root in saved for part in root.modules()}
        targets = [item for item in find_targets(module, self.targets, who="LoRA: targets") if id(item[1]) not in whole]
        experts = find_experts(module, self.targets, who="LoRA: targets")
        others = other_targets(module) if self.targets in (ALL_LINEAR, WITH_EXPERTS) else []
        self._check_targets(targets, experts, others, weights_wait(module))
        for part in module.modules():
            if is_bitsandbytes(part):  # of transformers' making, perhaps
                from lit_efficient.mechanisms.adapters.bitsandbytes_layers import adopt

                adopt(part)
        for name, layer in targets:
            add_low_rank(
                layer, name,
                rank=self.rank, alpha=self.alpha, variant=self.variant, dropout=self.dropout, seed=self.seed,
            )  # fmt: skip
        for name, part, keys in experts:
            scale = scale_of(self.variant, self.alpha, self.rank)
            add_experts(part, name, keys, rank=self.rank, scale=scale, seed=self.seed)
        adapted = [*(layer for _, layer in targets), *(part for _, part, _ in experts)]
        trained = [p for part in adapted for key, p in part.named_parameters() if key.startswith("lora_")]
        trained += [p for _, root in saved for p in root.parameters()]
        if self.bias == "all":
            trained += [p for key, p in module.named_parameters() if key.rpartition(".")[2] == "bias"]
        elif self.bias == "lora_only":
            trained += [layer.bias for _, layer in targets if isinstance(getattr(layer, "bias", None), nn.Parameter)]  # type: ignore[misc]
        if self.start_from is not None:
            start_adapters(module, read_adapter(self.start_from)[1], trained, self.start_from)
        for name, fields in self._beside.items():
            folder = (self.beside or {})[name]
            rest_beside(module, name, fields, read_adapter(folder)[1] if isinstance(folder, str) else None)
        freeze_base(module, trained, save_base=self.save_base)
        call_layers(module)
        return self._report(module, (*(name for name, _ in targets), *(name for name, _, _ in experts)))

    def check(self, trainer: Any, module: Any) -> None:
        traits = traits_of(trainer.strategy)
        if self.lr_ratio is not None and traits.flattens:
            raise ConflictError(
                f"LoRA: lr_ratio={self.lr_ratio} changes the module's parameters after each step, and {traits.name} "
                "steps other tensors: leave lr_ratio out, or use strategy='ddp'"
            )

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        """For LoRA+, multiply what each step does to the B matrices; groups, schedulers and states stay as they are."""
        adapted = {name: part for name, part in module.named_modules() if isinstance(part, LowRank | LowRankExperts)}
        report = self._report(module, tuple(adapted))
        if self.lr_ratio is None:
            return report
        if "ScheduleFree" in type(optimizer).__name__:
            raise ConfigurationError(
                f"LoRA: lr_ratio={self.lr_ratio} cannot be used with {type(optimizer).__name__}, whose weights are an "
                "average of those it steps; leave lr_ratio out"
            )
        named = (item for part in adapted.values() for item in part.named_parameters(recurse=False))
        wanted = {id(p) for key, p in named if key.startswith("lora_B")}
        stretch_steps(
            optimizer, self.lr_ratio, [p for g in optimizer.param_groups for p in g["params"] if id(p) in wanted]
        )
        return dataclasses.replace(report, summary=f"{report.summary}; B learns at {self.lr_ratio:g} times the rate")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Say once, of the first batch, whether the adapters hold what there is to learn."""
        batches = min(trainer.num_training_batches, max(trainer.max_steps, 0) * trainer.accumulate_grad_batches or inf)
        if self._weighed or batches == inf:
            return
        self._weighed = True
        tokens = learned_tokens(batch)
        named = pl_module.named_parameters()
        held = count(p for name, p in named if name.rpartition(".")[2].startswith("lora_") and p.requires_grad)
        if tokens and held:
            rank_zero_info(f"LoRA: {capacity_line(tokens * batches * readers(trainer), held, self.rank)}")

    @classmethod
    def placement(cls, module: nn.Module) -> dict[str, Any]:
        mix = active_mix(module)
        return placement(module) | ({} if mix is None else {"mix": mix})

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        super().trim_checkpoint(module, checkpoint)
        checkpoint["lit_efficient"]["quantized"] = quantization_of(module)

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return any(isinstance(part, LowRank | LowRankExperts) for part in module.modules())

    @classmethod
    def check_checkpoint(cls, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Compare the base with the one that the adapters were trained beside, and mix as when it was saved."""
        super().check_checkpoint(module, checkpoint)
        mix = (checkpoint.get("lit_efficient", {}).get(cls.keeps) or {}).get("mix")
        if mix is not None and cls.is_in(module):
            mix_adapters(module, mix)

    def _check_targets(
        self,
        targets: Sequence[tuple[str, nn.Module]],
        experts: Sequence[tuple[str, nn.Module, list[str]]],
        others: Sequence[str],
        waits: bool,
    ) -> None:
        for name, part, _ in experts:
            if isinstance(part, LowRankExperts):
                raise ConfigurationError(f"LoRA: {name!r} has an adapter already; merge_adapters(module) folds it in")
            if self.dropout or self.variant not in ("lora", "rslora"):
                raise ConfigurationError(
                    f"LoRA: the experts of {name!r} take variant lora or rslora without dropout, got "
                    f"variant={self.variant!r}, dropout={self.dropout}: set these, or leave them out of targets"
                )
        if not targets and not experts:
            raise ConfigurationError(
                f"LoRA: modules_to_save={self.modules_to_save} covers every layer that targets={self.targets!r} names"
                + (f"; others can be named: targets={others}" if others else "")
            )
        for name, layer in targets:
            weight: Any = layer.weight
            if isinstance(layer, LowRank):
                raise ConfigurationError(f"LoRA: {name!r} has an adapter already; merge_adapters(module) folds it in")
            if weight.device.type == "meta" and not waits:
                raise ConfigurationError(f"LoRA: {name!r} is on the meta device: give the base its weights first")
            if kind_of(layer) == "embedding" and self.variant in ("dora", "pissa"):
                raise ConfigurationError(
                    f"LoRA: variant={self.variant!r} is for matrix products, and {name!r} is an embedding: "
                    "use lora or rslora, or leave it out of targets"
                )
            if self.variant in ON_INT4 and not isinstance(layer, Int4Linear):
                raise ConfigurationError(
                    f"LoRA: variant={self.variant!r} merges into the codes or zero points of an int4 weight, and "
                    f"{name!r} is a {type(layer).__name__} without them: put "
                    "QuantizeBase(format='int4', group_size=32) beside it, or leave the layer out of targets"
                )
            linear = isinstance(layer, nn.Linear)  # whose weight may be codes of another shape
            shape = (layer.in_features, layer.out_features) if linear else (len(weight), weight[0].numel())
            if self.variant == "pissa" and self.rank > (limit := min(shape)):
                raise refusal("LoRA", "rank", f"at most {limit} for pissa on {name!r}", self.rank)

    def _report(self, module: nn.Module, names: tuple[str, ...]) -> Report:
        trained = {id(p): p for p in module.parameters() if p.requires_grad}.values()
        every = list({id(p): p for p in module.parameters()}.values())
        total = sum(map(elements, every))
        share = count(trained) / max(1, total)
        size = sum(p.numel() * p.element_size() for p in trained)
        frozen = sum(p.numel() * p.element_size() for p in every) - size
        left = [getattr(part, key) for name, part, keys in expert_stacks(module) if name not in names for key in keys]
        aside = f"; {count(left):,} in experts have no adapter: targets='{WITH_EXPERTS}' gives them one" if left else ""
        convolutions = other_targets(module, ["conv2d"]) if self.targets in (ALL_LINEAR, WITH_EXPERTS) else []
        if convolutions:
            aside += f"; convolutions have no adapter unless they are named: targets={convolutions}"
        return Report(
            f"{len(names)} layers, {self.variant} of rank {self.rank}: {count(trained):,} of {total:,} parameters "
            f"train ({share:.2%}), {size / 2**20:.2f} MiB in a checkpoint"
            f"{aside}",
            modules=names,
            parameters=count(trained),
            bytes_saved=frozen,  # gradients that are never made
            details={"trainable_share": share, "adapter_bytes": size},
        )


def stretch_steps(optimizer: Optimizer, factor: float, parameters: Iterable[Tensor]) -> None:
    """Let each step move ``parameters`` by ``factor`` times as much as the optimizer would.

        p <- p_old + factor (p_new - p_old)

    The same as a group of its own with ``factor`` times the rate, for any optimizer whose step is linear in the rate,
    weight decay included; but no group, schedule or state changes. A second call replaces the first.

    Args:
        optimizer: Any optimizer.
        factor: The multiple.
        parameters: Some of the optimizer's.
    """
    hooks = [hook for name in HOOKS for hook in optimizer.__dict__.get(name, {}).values()]
    earlier = {id(s): s for hook in hooks if isinstance(s := getattr(hook, "__self__", None), _Stretch)}
    for stretch in earlier.values():  # of an optimizer that a module returns in a second fit, too
        stretch.factor, stretch.parameters = factor, list(parameters)
        return
    stretch = _Stretch(factor, list(parameters))
    optimizer.register_step_pre_hook(stretch.remember)
    optimizer.register_step_post_hook(stretch.stretch)


class _Stretch:
    def __init__(self, factor: float, parameters: list[Tensor]) -> None:
        self.factor, self.parameters = factor, parameters
        self.before: list[Tensor] = []

    def remember(self, *_: Any) -> None:
        parameters = [local(p.detach()) for p in self.parameters]
        self.before = [torch.empty_like(p) for p in parameters]
        foreach_copy_(self.before, parameters)

    @torch.no_grad()
    def stretch(self, *_: Any) -> None:
        parameters = [local(p.detach()) for p in self.parameters]
        foreach_add_(parameters, self.before, alpha=-1)
        foreach_mul_(parameters, self.factor)
        foreach_add_(parameters, self.before)
        self.before = []
