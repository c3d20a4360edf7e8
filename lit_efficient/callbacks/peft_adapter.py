"""Peft adapter: train an adapter of any method of peft (LoKr, LoHa, OFT, BOFT, HiRA, FourierFT, ...) on frozen weights.

    y = f(W, a) x,    W frozen, a the adapter's weights;    for LoKr f(W, a) = W + s (C kron B A)

Saves: gradients and optimizer states of the frozen weights; checkpoints hold only the adapter
Costs: what the method costs in peft, until the adapter is merged; parameter names change to peft's
    (``up.base_layer.weight``)
Source: https://huggingface.co/docs/peft; LoKr: Yeh et al. (2023), https://arxiv.org/abs/2309.14859

This is the only technique that changes parameter names. Checkpoints of the base can still be loaded under their own
names. This package's ``LoRA`` and ``IA3`` keep names. Functions for any network, outside of Lightning, are in
:mod:`lit_efficient.mechanisms.adapters.peft_methods`.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import ConfigurationError, check_installed, check_list, check_number, refusal
from lit_efficient.mechanisms.adapters.base import freeze_base
from lit_efficient.mechanisms.adapters.lycoris import is_lycoris, read_lycoris
from lit_efficient.mechanisms.adapters.peft_configs import config_options, peft_config
from lit_efficient.mechanisms.adapters.peft_layers import PeftLayer, networks, outermost
from lit_efficient.mechanisms.adapters.peft_methods import check_forward, inject, network_of, switch_adapters
from lit_efficient.mechanisms.adapters.peft_saved import peft_placement, read_peft_folder, start_from
from lit_efficient.mechanisms.adapters.quantized import float_count, is_bitsandbytes
from lit_efficient.mechanisms.adapters.technique import AdapterTechnique
from lit_efficient.mechanisms.blocks.block_map import note_trained
from lit_efficient.models.libraries.causal_lm import Primitive
from lit_efficient.models.libraries.config_fields import misspelling_hint
from lit_efficient.surgery import call_layers, count
from lit_efficient.traits import Trait

_FIELDS = "fields of a peft configuration with peft_type, or its object"

Field = Primitive | list[Primitive] | dict[str, Primitive | list[Primitive]]


class PeftAdapter(AdapterTechnique):
    """Freeze the network and train adapters of any peft method that can be injected into it.

    Methods that need peft's own model around the network (prompts, or state that layers share) are refused.

    Args:
        config: Fields of peft's configuration class with ``peft_type``, such as ``{peft_type: LOKR, r: 8,
            target_modules: all-linear}``, or a configuration object. With ``start_from``, training starts from the
            adapter in that folder, which peft has saved, or from LyCORIS's file of LoKr or LoHa for a network of
            diffusers, and fields that are not given are read from it. For several
            adapters, a mapping from their names to such configurations.
        active: Names of the adapters that are applied, or a mapping from names to weights (for methods whose update is
            one product). ``None`` applies all. Change it later with
            :func:`~lit_efficient.mechanisms.adapters.peft_methods.switch_adapters`.
        train: Names of the active adapters that train; ``None`` trains all of them.
        network: Dotted name of the network that is adapted. ``None`` for the only model of transformers or diffusers in
            the module, else its only child, else the module itself.
        save_base: If true, checkpoints also hold the frozen weights.
        seed: Seed of the adapters' initial values, which are the same on all ranks.

    Raises:
        ConfigurationError: For a configuration that peft refuses, fields that the method does not have, and weights
            that do not fit.
        CheckpointError: When resuming with a base other than the one that the adapters were trained with.
    """

    phase = Phase.ADAPT
    traits = frozenset({Trait.ADAPTER, Trait.FREEZES_MATRICES, Trait.REFUSES_EARLY})
    keeps = "peft"
    conflicts: ClassVar[dict[str, str]] = {
        "LoRA": "each freezes all parameters but its own; keep one of them (one config can hold several peft adapters)",
        "IA3": "each freezes all parameters but its own; keep one of them (one config can hold several peft adapters)",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "frozen weights need no gradients or optimizer states; changes the result")
    }

    def __init__(
        self,
        config: dict[str, Field | dict[str, Field]],
        active: list[str] | dict[str, float] | None = None,
        train: list[str] | None = None,
        network: str | None = None,
        save_base: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_installed("PeftAdapter", "peft")
        check_number("PeftAdapter", "seed", seed, least=0, whole=True)
        several = _holds_several(config)
        named: dict[str, object] = dict(config) if several else {"default": config}
        self._folders: dict[str, str] = {}
        self._files: dict[str, dict[str, Any]] = {}  # given options of adapters that come from LyCORIS's files
        self._configs = {name: self._options(name, one) for name, one in named.items()}
        self.config = self._configs if several else self._configs["default"]
        _check_names("active", active, named)
        if isinstance(active, Mapping):
            self._weights = dict(active)
        else:
            self._weights = dict.fromkeys(named if active is None else active, 1.0)
        for name, weight in self._weights.items():
            check_number("PeftAdapter", f"active: {name}", weight)
        _check_names("train", train, self._weights)
        self.active = active
        self.train = train
        self.network = network
        self.save_base = save_base
        self.seed = seed

    def _options(self, name: str, config: object) -> dict[str, Any]:
        """Return the fields of one adapter. Fields that are given take precedence over those of its folder."""
        if not isinstance(config, Mapping) and not hasattr(config, "peft_type"):
            raise refusal("PeftAdapter", "config", _FIELDS, config)
        if not name or "." in name:
            raise refusal("PeftAdapter", "the name of an adapter", "without dots", name)
        options = config_options(config)
        folder = options.pop("start_from", None)
        if folder is not None:
            self._folders[name] = str(folder)
            if is_lycoris(str(folder)):  # its layers are known only with the network
                self._files[name] = options
                return {"peft_type": "LOKR", **options}
            options = read_peft_folder(str(folder))[0] | options
        if "peft_type" not in options:
            raise refusal("PeftAdapter", "config", _FIELDS + misspelling_hint("peft_type", options), config)
        peft_config(options)
        return options | {"peft_type": str(options["peft_type"]).upper()}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if trainer.precision in ("bf16-true", "16-true"):
            for network in networks(pl_module):
                check_forward(network, trainer.precision_plugin.forward_context, trainer.precision)

    def transform(self, module: nn.Module) -> Report:
        place = network_of(module) if self.network is None else self.network
        try:
            root = module.get_submodule(place)
        except AttributeError as error:
            names = [name for name, _ in module.named_children()]
            raise refusal("PeftAdapter", "network", f"a dotted name in the module, such as {names}", place) from error
        self._check(root)
        note_trained(module)
        for part in module.modules():
            if is_bitsandbytes(part):
                # Imported here because bitsandbytes is optional. The layer may be one that transformers has built.
                from lit_efficient.mechanisms.adapters.bitsandbytes_layers import adopt

                adopt(part)
        starts: dict[str, dict[str, Tensor]] = {}
        for name, folder in self._folders.items():
            if name in self._files:
                read, starts[name] = read_lycoris(folder, root)
                self._configs[name].clear()
                self._configs[name].update(read | self._files[name])
            else:
                starts[name] = read_peft_folder(folder)[1]
        inject(root, self._configs, self._weights, train=self.train, seed=self.seed)
        for name, tensors in starts.items():
            start_from(root, name, tensors, self._folders[name])
        trained = [parameter for parameter in root.parameters() if parameter.requires_grad]  # peft has frozen the rest
        freeze_base(module, trained, save_base=self.save_base)
        call_layers(module)
        return self._report(module, root, trained)

    def _check(self, root: nn.Module) -> None:
        if isinstance(getattr(root, "peft_config", None), Mapping) or self.is_in(root):
            raise ConfigurationError(
                f"PeftAdapter: {type(root).__name__} already has adapters of peft. Merge them, or set start_from to "
                "the folder in which they were saved"
            )
        if any(parameter.device.type == "meta" for parameter in root.parameters()):
            raise ConfigurationError("PeftAdapter: weights are on the meta device. Load the base's weights first")

    def _report(self, module: nn.Module, root: Any, trained: list[nn.Parameter]) -> Report:
        place = next(name for name, part in module.named_modules() if part is root)
        layers = [f"{place}.{name}".lstrip(".") for name in outermost(root)]
        total = float_count(module)
        size = sum(parameter.nbytes for parameter in trained)
        kinds = [one["peft_type"] for one in self._configs.values()]
        if len(self._configs) > 1:
            kinds = [f"{one['peft_type']} {name!r}" for name, one in self._configs.items()]
        return Report(
            f"{', '.join(kinds)} on {len(layers)} layers: {count(trained):,} of {total:,} parameters train "
            f"({count(trained) / max(1, total):.2%}), {format_bytes(size)} in a checkpoint",
            modules=tuple(layers),
            parameters=count(trained),
            bytes_saved=sum(p.nbytes for p in module.parameters() if not p.requires_grad),  # gradients
            details={"trainable_share": count(trained) / max(1, total), "adapter_bytes": size},
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments with the fields from folders, which may not exist on resume, in place of the folders."""
        return super().arguments() | {"config": self.config}

    @classmethod
    def placement(cls, module: nn.Module) -> dict[str, Any]:
        return peft_placement(module)

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return any(isinstance(part, PeftLayer) for part in module.modules())

    @classmethod
    def check_checkpoint(cls, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Check that the base is the one of the checkpoint, and restore which adapters are active."""
        super().check_checkpoint(module, checkpoint)
        switched = checkpoint.get("lit_efficient", {}).get(cls.keeps, {}).get("active")
        if switched is not None and cls.is_in(module):
            switch_adapters(module, switched)


def _check_names(argument: str, value: Any, known: Collection[str]) -> None:
    """Check that an argument is left out, or has names of known adapters."""
    if not value or not isinstance(value, Mapping):
        check_list("PeftAdapter", argument, value, "a list of at least one adapter, or left out", null=True)
    for name in value or ():
        if name not in known:
            raise refusal("PeftAdapter", argument, f"among {', '.join(known)}", name)


def _holds_several(config: Any) -> bool:
    """Return whether ``config`` maps names to configurations, and is not the configuration of one adapter."""
    if not isinstance(config, Mapping) or not config or {"peft_type", "start_from"} & config.keys():
        return False
    return all(isinstance(one, Mapping) or hasattr(one, "peft_type") for one in config.values())
