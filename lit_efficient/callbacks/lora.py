"""LoRA: train a low-rank change of frozen weights, with rsLoRA, DoRA, LoRA+ and starts from weights or data.

    y = W x + s B A x,    A [r, in], B [out, r],    s = alpha / r

Saves: gradients and optimizer states of the frozen weights: r (in + out) values of each layer train, and checkpoints
    hold only these
Costs: two thin matrix products for each layer until the adapters are merged, and with DoRA a product of A and W; the
    change of a weight has at most rank r
Source: Hu et al. (2021), https://arxiv.org/abs/2106.09685; LoRA+: Hayou et al. (2024), https://arxiv.org/abs/2402.12354

The variants and their formulas are in :mod:`lit_efficient.mechanisms.adapters.low_rank`, their initial values in
:mod:`lit_efficient.mechanisms.adapters.starts`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from math import inf
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import schedulers_of
from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import (
    ConfigurationError,
    ConflictError,
    check_choice,
    check_number,
    diagnostic,
    listed,
    refusal,
)
from lit_efficient.internals.lightning_strategies import readers, traits_of
from lit_efficient.internals.torch_optimizers import HOOKS, foreach_add_, foreach_copy_, foreach_mul_
from lit_efficient.mechanisms.adapters.activated import ACTIVATED, Invocation
from lit_efficient.mechanisms.adapters.base import freeze_base, is_added
from lit_efficient.mechanisms.adapters.experts import LowRankExperts, add_experts
from lit_efficient.mechanisms.adapters.int4 import Int4Linear
from lit_efficient.mechanisms.adapters.low_rank import (
    FIXED_A,
    ON_INT4,
    VARIANTS,
    LowRank,
    add_low_rank,
    capacity_line,
    contributes,
    kind_of,
    learned_tokens,
    scale_of,
    settings_of,
    start_from_data,
)
from lit_efficient.mechanisms.adapters.peft_folder import adapter_in, placement, read_adapter, start_adapters
from lit_efficient.mechanisms.adapters.quantized import SOURCE, float_count, is_bitsandbytes, quantization_of
from lit_efficient.mechanisms.adapters.several import active_mix, check_fields, load_beside, mix_adapters, rest_beside
from lit_efficient.mechanisms.adapters.starts import FROM_DATA, FROM_ROUNDING, FROM_WEIGHT, Statistics
from lit_efficient.mechanisms.adapters.targets import (
    ALL_LINEAR,
    WITH_EXPERTS,
    find_experts,
    find_targets,
    other_targets,
)
from lit_efficient.mechanisms.adapters.technique import AdapterTechnique
from lit_efficient.mechanisms.adapters.trained_rows import NEW, add_trained_rows, frozen_new_rows, transformers_in
from lit_efficient.surgery import (
    call_layers,
    count,
    expert_stacks,
    inner_optimizer,
    local,
    match_modules,
    name_pattern,
    weights_wait,
)
from lit_efficient.traits import Trait

_DAMPING = 1e-8  # of A A^T in LoRA-FA, as in peft


class LoRA(AdapterTechnique):
    """Freeze the network and train low-rank adapters on its layers. The names of the base's parameters stay the same.

    Supported layers are ``nn.Linear``, transformers' ``Conv1D``, ``nn.Conv2d`` without groups, ``nn.Embedding`` and
    the quantised layers of bitsandbytes. Checkpoints hold the adapters, ``modules_to_save`` and buffers, and can be
    resumed only with the same base.

    Args:
        rank: Rank r of the adapters, at least 1.
        alpha: Numerator of the scale s, above 0.
        targets: Layers that get adapters. ``all-linear`` means all linear layers except the output head and layers
            whose weight other code reads (Mamba's ``dt_proj``). ``all-linear+experts`` also means the stacked weights
            of experts. Otherwise regular expressions for the ends of dotted names, such as ``experts.down_proj``.
        dropout: Dropout rate on the input of the adapters, at least 0 and below 1.
        variant: ``lora`` is the formula above. ``rslora`` scales by alpha / sqrt(r). ``dora`` trains directions and
            magnitudes separately. ``pissa`` starts from the r largest singular values of the weight and their vectors,
            ``olora`` from its QR decomposition. ``loftq`` starts from the error of a quantised weight, and requires
            ``QuantizeBase(keep_source=True)``; with several ``start_rounds`` the quantised weight is another one, too.
            ``lora_fa`` trains B alone, with gradients that come closest to those of the weight; linear layers then
            store r values for the backward pass instead of their input. ``alora`` acts on the tokens from the last
            ``invocation_tokens`` of a row on, for models of transformers. Three variants start from ``start_rounds``
            batches of the training data, whose statistics need host memory: ``eva`` from the main directions of a
            layer's inputs, ``corda`` from the directions in which the weight changes these inputs most (4 in^2 bytes
            for each layer), and ``lora_ga`` from the gradient of the weight (4 in out bytes).
            ``qalora`` and ``rounded`` need ``QuantizeBase(format="int4")``: ``qalora`` sees sums over the
            quantisation groups and merges into the zero points without error, and ``rounded`` computes with the
            rounded int4 weight that results from merging, at the cost of one float weight per layer.
        patterns: Ranks and alphas of single layers, by regular expressions for the ends of dotted names, such as
            ``{q_proj: {rank: 16, alpha: 32}, layers.0.mlp.up_proj: {rank: 4}}``. The first pattern that matches a layer
            counts, and what it leaves out is ``rank`` or ``alpha``. They correspond to peft's ``rank_pattern`` and
            ``alpha_pattern``. Stacked experts always have ``rank`` and ``alpha``.
        invocation_tokens: Ids of the tokens that activate the variant ``alora``, such as those that begin an answer in
            the chat template; peft's ``alora_invocation_tokens``. A row without them is left to the base. The variant
            cannot be merged, and needs rows of one text (``pack: false``).
        lr_ratio: Learning rate of B divided by the rate of A (LoRA+), above 0; the paper uses 16. ``None`` trains
            both at the same rate.
        rates: Learning rates of parts of the module as multiples of the optimizer's rate, by regular expressions for
            the ends of dotted names, such as ``{text_networks: 0.5}`` for text encoders.
        bias: Biases that also train: ``none``, ``lora_only`` (biases of adapted layers) or ``all``.
        modules_to_save: Patterns of modules that train in full, such as a new head, and are saved in checkpoints.
        trainable_token_indices: Ids of tokens whose rows of the embeddings and of the output head train, as in peft.
            ``new`` means the rows that ``resize_vocabulary`` added, the tokens in ``chat.new_tokens`` of the data, and
            those that the tokenizer of the model lacks and that of the data has. Tokens that were added to the
            tokenizer in the model's own folder look like its own: name them in ``chat.new_tokens``. A model with
            new tokens needs a choice: this argument, or modules_to_save with both layers. An empty list keeps the rows
            frozen.
        save_base: If true, checkpoints also hold the frozen weights.
        seed: Seed of the adapters' initial values, which are the same on all ranks.
        beside: Further adapters on the same base, as a mapping from name to folder (as in ``start_from``). They do
            not train. ``mix_adapters`` (lit_efficient.mechanisms.adapters.several) switches to them or mixes them with
            the trained adapter, which is called ``default``; ``adapters_by_row`` chooses one for each row of a batch.
            Only for the variants lora and rslora.
        start_rounds: Number of batches from which the variants ``eva``, ``corda`` and ``lora_ga`` start (16 if it is
            None), or of alternations of ``loftq`` (1 if it is None), at least 1. The batches run before the first step
            and are trained on again later. The positions that ``attention_mask`` leaves out do not count.
        start_from: Folder of an adapter, saved by peft or by ``export --format peft``, from which training starts; or
            file or folder of a LoRA of diffusers, kohya's scripts, ComfyUI, ai-toolkit or LyCORIS for a network of
            diffusers, whose layers may have several ranks (training then has the largest). rank, alpha, targets,
            dropout, variant, patterns, bias, modules_to_save and trainable_token_indices are read from it. If one of
            them is also given, it must be the same.

    Raises:
        ConfigurationError: For an argument out of range, and for a pattern that matches no layer. The message lists
            names that match.
        CheckpointError: When resuming with a base other than the one that the adapters were trained with.
    """

    phase = Phase.ADAPT
    traits = frozenset({Trait.ADAPTER, Trait.FREEZES_MATRICES, Trait.READS_NO_WEIGHTS, Trait.REFUSES_EARLY})
    keeps = "adapters"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (11, "frozen weights need no gradients or optimizer states; changes the result")
    }

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        targets: str | list[str] = ALL_LINEAR,
        dropout: float = 0.0,
        variant: str = "lora",
        lr_ratio: float | None = None,
        rates: dict[str, float] | None = None,
        bias: str = "none",
        modules_to_save: str | list[str] | None = None,
        trainable_token_indices: str | list[int] | None = None,
        save_base: bool = False,
        seed: int = 0,
        start_from: str | None = None,
        beside: dict[str, str | dict[str, str | int | float | list[str]]] | None = None,
        start_rounds: int | None = None,
        patterns: dict[str, dict[str, int | float]] | None = None,
        invocation_tokens: list[int] | None = None,
    ) -> None:
        super().__init__()
        check_number("LoRA", "rank", rank, least=1, whole=True)
        check_number("LoRA", "alpha", alpha, above=0)
        check_number("LoRA", "dropout", dropout, least=0, below=1)
        check_choice("LoRA", "variant", variant, VARIANTS)
        check_number("LoRA", "lr_ratio", lr_ratio, above=0, null=True)
        check_number("LoRA", "start_rounds", start_rounds, least=1, whole=True, null=True)
        if start_rounds is not None and variant not in (*FROM_DATA, FROM_ROUNDING):
            raise refusal("LoRA", "start_rounds", f"null for variant {variant}", start_rounds)
        for pattern, rate in (rates or {}).items():
            check_number("LoRA", f"rates[{pattern!r}]", rate, above=0)
        if (variant == ACTIVATED) != bool(invocation_tokens):
            allowed = f"a list of ids for variant {ACTIVATED}, and null for others"
            raise refusal("LoRA", "invocation_tokens", allowed, invocation_tokens)
        for pattern, own in (patterns or {}).items():
            name_pattern(pattern, "LoRA: patterns")
            if not isinstance(own, Mapping) or not own or not own.keys() <= {"rank", "alpha"}:
                raise refusal("LoRA", f"patterns[{pattern!r}]", "a mapping with rank, alpha or both", own)
            check_number("LoRA", f"patterns[{pattern!r}].rank", own.get("rank"), least=1, whole=True, null=True)
            check_number("LoRA", f"patterns[{pattern!r}].alpha", own.get("alpha"), above=0, null=True)
        if dropout and variant == "rounded":
            raise refusal("LoRA", "dropout", "0 for variant rounded, which sums weight and adapter", dropout)
        check_choice("LoRA", "bias", bias, ("none", "lora_only", "all"))
        if isinstance(modules_to_save, str):
            modules_to_save = [modules_to_save]
        if isinstance(trainable_token_indices, str):
            check_choice("LoRA", "trainable_token_indices", trainable_token_indices, (NEW,))
        if beside is not None and not isinstance(beside, Mapping):
            raise refusal("LoRA", "beside", "a mapping from a name to a folder", beside)
        self.rank = rank
        self.alpha = alpha
        self.targets = targets
        self.dropout = dropout
        self.variant = variant
        self.lr_ratio = lr_ratio
        self.rates = rates
        self.bias = bias
        self.modules_to_save = modules_to_save
        self.trainable_token_indices = trainable_token_indices
        self.save_base = save_base
        self.seed = seed
        self.start_from = start_from
        self.beside = beside
        self.start_rounds = start_rounds
        self.patterns = patterns
        self.invocation_tokens = invocation_tokens
        self._batches = start_rounds or 16  # from which the variants of FROM_DATA start
        self._started = False  # the initial values have been computed from data
        if variant in FROM_DATA:
            self.traits = self.traits | {Trait.NEEDS_ALL_GRADIENTS}
        if variant == FROM_ROUNDING:
            self.traits = self.traits - {Trait.READS_NO_WEIGHTS}
        self._capacity_reported = False
        self._read: list[str] = []  # names of linear layers without an adapter, whose weights other code reads
        self._fields_beside: dict[str, Any] = {}  # the arguments of the adapters in ``beside``, by name
        for name, given in (beside or {}).items():
            fields = read_adapter(given)[0] if isinstance(given, str) else given
            self._fields_beside[name] = check_fields(name, fields)
        if beside and variant not in ("lora", "rslora"):
            raise refusal("LoRA", "beside", f"left out for variant {variant}, whose update is not a sum", [*beside])
        if start_from is not None:
            self._read_arguments(start_from)

    def _read_arguments(self, folder: str) -> None:
        """Set the arguments to those of the adapter in a folder."""
        defaults = {parameter.name: parameter.default for parameter in signature(LoRA).parameters.values()}
        fields, tensors = read_adapter(folder)
        for name, value in fields.items():
            given = getattr(self, name)
            if given == defaults[name]:
                setattr(self, name, value)
            # Patterns are not compared: start_adapters compares the layers that they match.
            elif name not in ("targets", "modules_to_save", "trainable_token_indices") and given != value:
                raise refusal("LoRA", name, f"{value!r}, as in start_from, or left out", given)
        # These adapters depend on the base's weights, so that the technique must run after the weights are loaded.
        if self.variant in ("dora", *FROM_WEIGHT) or not all(map(is_added, tensors)):
            self.traits = self.traits - {Trait.READS_NO_WEIGHTS}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments without folders, which may not exist on resume: a checkpoint holds what was read."""
        own = super().arguments()
        del own["start_from"]
        if self.beside:
            own["beside"] = self._fields_beside
        return own

    def transform(self, module: nn.Module) -> Report:
        if any(kind.__name__ == "LoraLayer" for part in module.modules() for kind in type(part).__mro__):
            raise ConfigurationError("LoRA: the model already has layers of peft's LoRA. Merge them, or leave out LoRA")
        start: dict[str, Tensor] = {}
        if self.start_from is not None:
            layers, start = adapter_in(
                self.start_from, module, self.rank, scale_of(self.variant, self.alpha, self.rank)
            )
            if self.targets == ALL_LINEAR:
                self.targets = layers
        saved: list[tuple[str, nn.Module]] = []
        if self.modules_to_save:
            saved = match_modules(module, self.modules_to_save, who="LoRA: modules_to_save")
        whole = {id(part) for _, root in saved for part in root.modules()}
        targets = [item for item in find_targets(module, self.targets, who="LoRA: targets") if id(item[1]) not in whole]
        experts = find_experts(module, self.targets, who="LoRA: targets")
        others: Sequence[str] = []
        if self.targets in (ALL_LINEAR, WITH_EXPERTS):
            others = other_targets(module)
            from lit_efficient.models.probes.read_weights import read_elsewhere  # only LoRA on all layers needs it

            read = read_elsewhere(module)
            self._read = [name for name, _ in targets if name in read]
            targets = [(name, part) for name, part in targets if name not in read]
        settings = {name: self._settings(name) for name, _ in targets}
        self._check_targets(targets, experts, others, weights_wait(module), settings)
        self._check_patterns(settings)
        for pattern in self.rates or ():  # here as well as for the optimizer, so that `check` finds it
            match_modules(module, [pattern], who="LoRA: rates")
        for part in module.modules():
            if is_bitsandbytes(part):
                # Imported here because bitsandbytes is optional. The layer may be one that transformers has built.
                from lit_efficient.mechanisms.adapters.bitsandbytes_layers import adopt

                adopt(part)
        for name, layer in targets:
            add_low_rank(
                layer,
                name,
                rank=settings[name][0],
                alpha=settings[name][1],
                variant=self.variant,
                dropout=self.dropout,
                seed=self.seed,
                rounds=(self.start_rounds or 1) if self.variant == FROM_ROUNDING else 1,
            )
        if self.invocation_tokens:
            self._activate(module, [layer for _, layer in targets])
        for name, part, keys in experts:
            scale = scale_of(self.variant, self.alpha, self.rank)
            add_experts(part, name, keys, rank=self.rank, scale=scale, seed=self.seed)
        adapted = [*(layer for _, layer in targets), *(part for _, part, _ in experts)]
        trained = [p for part in adapted for key, p in part.named_parameters() if key.startswith("lora_")]
        for _, root in saved:
            trained += root.parameters()
        if self.trainable_token_indices:
            trained += add_trained_rows(module, self.trainable_token_indices, "LoRA: trainable_token_indices")
        if self.bias == "all":
            trained += [p for key, p in module.named_parameters() if key.rpartition(".")[2] == "bias"]
        elif self.bias == "lora_only":
            for _, layer in targets:
                bias = getattr(layer, "bias", None)
                if isinstance(bias, nn.Parameter):
                    trained.append(bias)
        whole_parameters = {"bias": self.bias != "none", "modules_to_save": bool(saved)}
        for _, layer in targets:
            layer.lora_trains = [name for name, train in whole_parameters.items() if train]  # type: ignore[assignment]
        if self.start_from is not None:
            start_adapters(module, start, trained, self.start_from)
        for name, folder in (self.beside or {}).items():
            fields = self._fields_beside[name]
            if isinstance(folder, str):
                load_beside(module, name, folder, fields)
            else:
                rest_beside(module, name, fields, None)  # the values are those of the checkpoint that is resumed
        left = frozen_new_rows(module, trained)
        if left and self.trainable_token_indices is None:
            raise ConfigurationError(
                f"LoRA: the model has {len(left)} new tokens, ids {left[0]} to {left[-1]}, whose rows would stay "
                "frozen at their initial values. Set trainable_token_indices: new, or modules_to_save with the "
                "embeddings and the output head, or trainable_token_indices: [] to keep the rows frozen"
            )
        for part in module.modules():  # weights for LoftQ of layers without an adapter
            part.__dict__.pop(SOURCE, None)
        freeze_base(module, trained, save_base=self.save_base)
        call_layers(module)
        return self._report(module, (*(name for name, _ in targets), *(name for name, _, _ in experts)))

    def check(self, trainer: Any, module: nn.Module) -> None:
        traits = traits_of(trainer.strategy)
        if self.variant == ACTIVATED and getattr(getattr(trainer, "datamodule", None), "pack", False):
            raise ConflictError(
                f"LoRA: variant={ACTIVATED!r} acts from the last invocation of a row on, and packed rows have several "
                "texts. Set pack: false for the data"
            )
        if self.variant in (*FROM_DATA, FROM_ROUNDING) and not traits.replicates and trainer.world_size > 1:
            raise ConflictError(
                f"LoRA: variant={self.variant!r} computes initial values from whole weights and gradients, which "
                f"{traits.name} shards. Use another variant, or strategy='ddp'"
            )
        if self.rates and traits.flattens:
            raise ConflictError(
                f"LoRA: rates={self.rates} needs parameter groups, and the optimizer of {traits.name} steps other "
                "tensors. Leave out rates, or use strategy='ddp'"
            )
        if (self.lr_ratio is not None or self.variant == FIXED_A) and traits.flattens:
            name = "variant" if self.lr_ratio is None else "lr_ratio"
            raise ConflictError(
                f"LoRA: {name}={getattr(self, name)} changes the module's parameters after each step, or their "
                f"gradients before it, but the optimizer of {traits.name} steps other tensors. Leave out {name}, or "
                "use strategy='ddp'"
            )

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        """Split the groups by ``rates``. With LoRA+, multiply each step's change of the B matrices."""
        if self.rates:
            from lit_efficient.optimizers.rates import multiply_rates  # only LoRA with rates of its own needs it

            multiply_rates(optimizer, schedulers_of(module), module, self.rates, who="LoRA: rates")
        adapted = {name: part for name, part in module.named_modules() if isinstance(part, LowRank | LowRankExperts)}
        if self.variant == FIXED_A:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            layers = [part for part in adapted.values() if isinstance(part, LowRank)]
            correct_gradients(optimizer, [layer for layer in layers if id(layer.lora_B) in held])
        report = self._report(module, tuple(adapted))
        if self.rates:
            rates = ", ".join(f"{pattern} at {rate:g} times the rate" for pattern, rate in self.rates.items())
            report = dataclasses.replace(report, summary=f"{report.summary}; {rates}")
        if self.lr_ratio is None:
            return report
        if "ScheduleFree" in type(optimizer).__name__:
            raise ConfigurationError(
                f"LoRA: lr_ratio={self.lr_ratio} cannot be used with {type(optimizer).__name__}, because the module's "
                "weights are averages of the weights that it steps. Leave out lr_ratio"
            )
        name, inner = inner_optimizer(optimizer)
        if inner is not None:
            raise ConfigurationError(
                f"LoRA: lr_ratio={self.lr_ratio} cannot be used with {type(optimizer).__name__}, which changes the "
                f"weights besides the steps of {type(inner).__name__} ({name}). Leave out lr_ratio"
            )
        wanted: set[int] = set()
        for part in adapted.values():
            wanted |= {id(p) for key, p in part.named_parameters(recurse=False) if key.startswith("lora_B")}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in wanted]
        stretch_steps(optimizer, self.lr_ratio, stepped)
        return dataclasses.replace(report, summary=f"{report.summary}; B learns at {self.lr_ratio:g} times the rate")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._started = False  # the module may be another one; a checkpoint's state is read later

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        # A plan, which sets ``worst_case``, has no data to start from.
        if self.variant in FROM_DATA and not self._started and not self.worst_case and self.start_from is None:
            from lit_efficient.mechanisms.trials.steps import schedule  # only a start from data runs trial steps

            schedule(trainer, lambda _: None, partial(self._start, trainer), order=1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.variant in FROM_DATA:
            from lit_efficient.mechanisms.trials.steps import unschedule

            unschedule(trainer)
        super().teardown(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        return {"started": self._started}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._started = state_dict["started"]

    def _start(self, trainer: Trainer) -> None:
        """Compute the initial values of the adapters from batches of the training data, and undo all else."""
        from lit_efficient.mechanisms.trials.steps import Trials, repeated_batches

        layers = {name: part for name, part in trainer.lightning_module.named_modules() if isinstance(part, LowRank)}
        if any(map(contributes, layers.values())):  # an earlier fit has trained them, or their checkpoint was restored
            self._started = True
            return
        trials = Trials(trainer)
        # The accumulation is longer than the trial, so that the optimizer does not step. Compiled code would keep the
        # hooks.
        with (
            Statistics(layers, self.variant) as statistics,
            repeated_batches(trainer, "LoRA") as batches,
            trials.trial(self._batches + 1, alone=False),
            torch.compiler.set_stance("force_eager"),
        ):
            for _ in range(self._batches):
                trials.train(lambda: statistics.with_mask_of(next(batches)))
        trials.finish()
        for name, layer in layers.items():
            if name not in statistics.sums:
                raise ConfigurationError(
                    f"LoRA: variant={self.variant!r} starts from inputs and gradients, but {name!r} had none in "
                    f"{self._batches} batches. Leave the layer out of targets, or use another variant"
                )
            device = layer.lora_A.device
            total = trainer.strategy.reduce(statistics.sums.pop(name).to(device), reduce_op="sum")
            samples = trainer.strategy.reduce(statistics.samples[name].to(device), reduce_op="sum")
            if not total.isfinite().all():
                raise ConfigurationError(
                    f"LoRA: variant={self.variant!r} starts from inputs and gradients, and those of {name!r} are not "
                    f"finite in {self._batches} batches. Check the data and the base's weights; with precision "
                    "16-mixed gradients overflow in the first steps: use bf16-mixed or 32-true"
                )
            start_from_data(layer, total, samples)
        self._started = True
        rank_zero_info(
            f"LoRA: the adapters of {len(layers)} layers start from {self._batches} batches ({self.variant})"
        )

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """At the first batch, report whether the rank is large enough for the tokens of the run, an epoch's at most."""
        steps = trainer.max_steps if trainer.max_steps > 0 else inf
        batches = min(trainer.num_training_batches, steps * trainer.accumulate_grad_batches)
        if self._capacity_reported or batches == inf:
            return
        self._capacity_reported = True
        with diagnostic("LoRA", "the tokens of the first batch"):
            tokens = learned_tokens(batch)
            named = pl_module.named_parameters()
            held = count(p for name, p in named if name.rpartition(".")[2].startswith("lora_") and p.requires_grad)
            if tokens and held:
                rank_zero_info(f"LoRA: {capacity_line(tokens * batches * readers(trainer), held, self.rank)}")

    @classmethod
    def placement(cls, module: nn.Module) -> dict[str, Any]:
        found = placement(module)
        mix = active_mix(module)
        if mix is not None:
            found["mix"] = mix
        return found

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        super().trim_checkpoint(module, checkpoint)
        checkpoint["lit_efficient"]["quantized"] = quantization_of(module)

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return any(isinstance(part, LowRank | LowRankExperts) for part in module.modules())

    @classmethod
    def check_checkpoint(cls, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Check that the base is the one of the checkpoint, and restore the checkpoint's mix of adapters."""
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
        settings: Mapping[str, tuple[int, float]],
    ) -> None:
        for name, part, _ in experts:
            if isinstance(part, LowRankExperts):
                raise _adapted_twice(name)
            if self.dropout or self.variant not in ("lora", "rslora"):
                raise ConfigurationError(
                    f"LoRA: the experts of {name!r} support the variants lora and rslora without dropout, got "
                    f"variant={self.variant!r}, dropout={self.dropout}. Change these, or leave the experts out of "
                    "targets"
                )
        if not targets and not experts:
            message = (
                f"LoRA: modules_to_save={self.modules_to_save} covers every layer that targets={self.targets!r} matches"
            )
            if others:
                message += f". Other layers that can have adapters: targets={others}"
            raise ConfigurationError(message)
        for name, layer in targets:
            weight: Any = layer.weight
            if isinstance(layer, LowRank):
                raise _adapted_twice(name)
            if weight.device.type == "meta" and not waits:
                raise ConfigurationError(f"LoRA: {name!r} is on the meta device. Load the base's weights first")
            if self.variant == FROM_ROUNDING and SOURCE not in layer.__dict__:
                raise ConfigurationError(
                    f"LoRA: variant={FROM_ROUNDING!r} starts from the error of a weight that QuantizeBase rounds, but "
                    f"the weight of {name!r} before rounding is not known. Add QuantizeBase(keep_source=True) to the "
                    "callbacks, or leave the layer out of targets"
                )
            if self.variant != FROM_ROUNDING and SOURCE in layer.__dict__:
                raise ConfigurationError(
                    f"LoRA: QuantizeBase(keep_source=True) keeps weights for variant={FROM_ROUNDING!r}, got "
                    f"{self.variant!r}. Leave out keep_source"
                )
            if self.variant == ACTIVATED and kind_of(layer) not in ("linear", "conv1d"):
                raise ConfigurationError(
                    f"LoRA: variant={ACTIVATED!r} is for linear layers, and {name!r} is none. Leave it out of targets"
                )
            if kind_of(layer) == "embedding" and self.variant not in ("lora", "rslora"):
                raise ConfigurationError(
                    f"LoRA: variant={self.variant!r} is for matrix products, but {name!r} is an embedding. Use "
                    "variant lora or rslora, or leave the embedding out of targets"
                )
            if self.variant in ON_INT4 and not isinstance(layer, Int4Linear):
                raise ConfigurationError(
                    f"LoRA: variant={self.variant!r} merges into the codes or zero points of an int4 weight, but "
                    f"{name!r} is a {type(layer).__name__} without them. Add "
                    "QuantizeBase(format='int4', group_size=32) to the callbacks, or leave the layer out of targets"
                )
            if isinstance(layer, nn.Linear):  # its weight may hold packed codes, which have another shape
                limit = min(layer.in_features, layer.out_features)
            else:
                limit = min(len(weight), weight[0].numel())
            if self.variant in FROM_DATA and kind_of(layer) == "conv2d":
                raise ConfigurationError(
                    f"LoRA: variant={self.variant!r} starts from inputs of linear layers, but {name!r} is a "
                    "convolution. Use variant lora or pissa, or leave the layer out of targets"
                )
            if self.variant == "lora_ga":  # A and B take different singular vectors
                limit //= 2
            if self.variant in (*FROM_WEIGHT, *FROM_DATA, FROM_ROUNDING) and settings[name][0] > limit:
                raise refusal("LoRA", "rank", f"at most {limit} for {self.variant} on {name!r}", settings[name][0])

    def _activate(self, module: nn.Module, layers: Iterable[Any]) -> None:
        """Let the layers act from the invocation on, which the network around them finds."""
        models: list[Any] = transformers_in(module)
        inside = {id(part) for network in models[:1] for part in network.modules()}
        invocation = Invocation(self.invocation_tokens or ())
        for layer in layers:
            if id(layer) not in inside:
                raise ConfigurationError(
                    f"LoRA: variant={ACTIVATED!r} searches its invocation in the input_ids of a model of transformers, "
                    f"and {layer._layer_name()!r} is not in one"
                )
            layer.lora_invocation = invocation
        invocation.follow(models[0].base_model)  # tasks may compute the loss from its output, without the head

    def _settings(self, name: str) -> tuple[int, float]:
        """Return the rank and the alpha of a layer."""
        return settings_of(name, self.rank, self.alpha, self.patterns)

    def _check_patterns(self, layers: Iterable[str]) -> None:
        for pattern in self.patterns or {}:
            if not any(name_pattern(pattern, "LoRA: patterns").fullmatch(name) for name in layers):
                raise ConfigurationError(
                    f"LoRA: patterns: {pattern!r} matches none of the layers with adapters: {listed(list(layers))}"
                )

    def _report(self, module: nn.Module, names: tuple[str, ...]) -> Report:
        trained = {id(p): p for p in module.parameters() if p.requires_grad}.values()
        every = list({id(p): p for p in module.parameters()}.values())
        total = float_count(module)
        share = count(trained) / max(1, total)
        size = sum(p.numel() * p.element_size() for p in trained)
        frozen = sum(p.numel() * p.element_size() for p in every) - size
        summary = (
            f"{len(names)} layers, {self.variant} of rank {self.rank}: {count(trained):,} of {total:,} parameters "
            f"train ({share:.2%}), {format_bytes(size)} in a checkpoint"
        )
        left = [getattr(part, key) for name, part, keys in expert_stacks(module) if name not in names for key in keys]
        if left:
            number = sum(math.prod(weight.shape) for weight in left)
            summary += f"; {number:,} parameters of experts have no adapter (see targets='{WITH_EXPERTS}')"
        if self.targets in (ALL_LINEAR, WITH_EXPERTS):
            if self._read:
                summary += f"; {len(self._read)} layers have no adapter, because other code reads their weights: "
                summary += listed(self._read)
            convolutions = other_targets(module, ["conv2d"])
            if convolutions:
                summary += f"; convolutions have no adapter unless they are named: targets={convolutions}"
        return Report(
            summary,
            modules=names,
            parameters=count(trained),
            bytes_saved=frozen,  # the gradients of frozen weights, which are never allocated
            details={"trainable_share": share, "adapter_bytes": size},
        )


def _adapted_twice(name: str) -> ConfigurationError:
    return ConfigurationError(f"LoRA: {name!r} already has an adapter. Call merge_adapters(module) to merge it first")


def correct_gradients(optimizer: Optimizer, layers: Iterable[LowRank]) -> None:
    """Let an optimizer step B with the corrected gradient of LoRA-FA, whose change of the weight is closest to -dL/dW.

        dL/dB <- dL/dB (A A^T)^-1 / s^2

    A must not change. A second call replaces the layers of the first.

    Args:
        optimizer: Optimizer of the ``lora_B`` of the layers.
        layers: Layers with a frozen A.
    """
    for hook in optimizer.__dict__.get(HOOKS[0], {}).values():
        earlier = getattr(hook, "__self__", None)
        if isinstance(earlier, _Correction):
            earlier.layers = list(layers)
            earlier.inverses = {}
            return
    optimizer.register_step_pre_hook(_Correction(list(layers)).correct)


class _Correction:
    """Hook of an optimizer that corrects the gradients of LoRA-FA."""

    def __init__(self, layers: list[LowRank]) -> None:
        self.layers = layers
        self.inverses: dict[int, Tensor] = {}

    @torch.no_grad()
    def correct(self, *_: object) -> None:
        for layer in self.layers:
            if layer.lora_B.grad is None:
                continue
            if id(layer) not in self.inverses:
                a = layer.lora_A.flatten(1)
                unit = torch.eye(len(a), dtype=a.dtype, device=a.device)
                gram = a @ a.T + _DAMPING * unit
                self.inverses[id(layer)] = torch.linalg.pinv(gram, hermitian=True) / layer.lora_scale**2
            gradient = local(layer.lora_B.grad)
            flat = gradient.flatten(1) @ self.inverses[id(layer)].to(gradient.dtype)
            gradient.copy_(flat.view_as(gradient))


def stretch_steps(optimizer: Optimizer, factor: float, parameters: Iterable[Tensor]) -> None:
    """Make each step of the optimizer change ``parameters`` by ``factor`` times as much.

        p <- p_old + factor (p_new - p_old)

    For any optimizer whose step is linear in the learning rate, weight decay included, the effect is that of a separate
    group with ``factor`` times the rate. No group, schedule or state changes. A second call replaces the first.

    Args:
        optimizer: Any optimizer.
        factor: Multiple of the optimizer's change.
        parameters: Parameters of the optimizer to which the factor applies.
    """
    for name in HOOKS:
        for hook in optimizer.__dict__.get(name, {}).values():
            earlier = getattr(hook, "__self__", None)
            if isinstance(earlier, _Stretch):  # a module may return the same optimizer in a second fit
                earlier.factor = factor
                earlier.parameters = list(parameters)
                return
    stretch = _Stretch(factor, list(parameters))
    optimizer.register_step_pre_hook(stretch.remember)
    optimizer.register_step_post_hook(stretch.stretch)


class _Stretch:
    """Two optimizer hooks that multiply a step's change of some parameters by a factor."""

    def __init__(self, factor: float, parameters: list[Tensor]) -> None:
        self.factor = factor
        self.parameters = parameters
        self.before: list[Tensor] = []  # values of the parameters before the step

    def remember(self, *_: object) -> None:
        parameters = [local(p.detach()) for p in self.parameters]
        self.before = [torch.empty_like(p) for p in parameters]
        foreach_copy_(self.before, parameters)

    @torch.no_grad()
    def stretch(self, *_: object) -> None:
        parameters = [local(p.detach()) for p in self.parameters]
        foreach_add_(parameters, self.before, alpha=-1)
        foreach_mul_(parameters, self.factor)
        foreach_add_(parameters, self.before)
        self.before = []
