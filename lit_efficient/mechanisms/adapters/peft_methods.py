"""Methods of peft on any network: injection of their layers, active adapters, merging, and checks of the layers.

The supported methods are those whose model puts layers into a network and needs no other code of peft during training.
Source: https://huggingface.co/docs/peft/developer_guides/low_level_api
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.mechanisms.adapters.base import FOLLOWS, _digest
from lit_efficient.mechanisms.adapters.peft_configs import config_options, peft_config, refusing
from lit_efficient.mechanisms.adapters.peft_layers import NOTE, PeftLayer, networks, outermost, peft_names, unload
from lit_efficient.mechanisms.adapters.quantized import dequantize, is_quantized, plain_layer
from lit_efficient.mechanisms.adapters.targets import ALL_LINEAR, find_targets, is_tied
from lit_efficient.surgery import is_sharded, memory_of, mix_in, own_draws


def network_of(module: nn.Module) -> str:
    """Return the dotted name of the network that gets the adapters.

    This is the only model of transformers or diffusers in the module, else its only child with weights, else the module
    itself (an empty name).
    """
    models = [name for name, part in module.named_modules() if hasattr(part, "save_pretrained") and name]
    models = [name for name in models if not any(name.startswith(f"{other}.") for other in models)]
    if hasattr(module, "save_pretrained"):
        return ""
    if len(models) == 1 and hasattr(module.get_submodule(models[0]), "config"):
        return models[0]
    weighty = [name for name, child in module.named_children() if list(child.parameters())]
    if len(weighty) != 1 or list(module.parameters(recurse=False)):
        return ""
    if not list(module.get_submodule(weighty[0]).children()):  # a single layer is no network
        return ""
    return weighty[0]


def inject(
    root: nn.Module,
    configs: Mapping[str, Mapping[str, object]],
    active: Mapping[str, float],
    *,
    train: Sequence[str] | None = None,
    seed: int = 0,
) -> None:
    """Put peft's layers into a network, in place.

    Args:
        root: The network.
        configs: Options of each adapter by name.
        active: Weights of the active adapters by name, as for :func:`switch_adapters`.
        train: Names of the active adapters that train; None for all.
        seed: Seed of all random values, which are therefore equal on all ranks and after a resume.

    Raises:
        ConfigurationError: If peft rejects the options, or if the initialisation changes weights of the base.
    """
    from peft.functional import cast_adapter_dtype, set_adapter
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    shared: dict[str, dict[str, str]] = {}
    before = [(name, parameter, _digest(parameter)) for name, parameter in root.named_parameters()]
    for name, options in configs.items():
        config = peft_config(options)
        if str(getattr(config, "target_modules", "")).lower() == ALL_LINEAR:
            targets = find_targets(root, ALL_LINEAR, who="PeftAdapter: target_modules")
            config.target_modules = {target for target, _ in targets}
        with refusing(f"put {options['peft_type']} on {type(root).__name__}"), own_draws(seed):
            tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](root, config, adapter_name=name)
        cast_adapter_dtype(root, name)
        shared[name] = _shared(tuner, root)
    for name, parameter, digest in before:
        if _digest(parameter) != digest:
            raise ConfigurationError(
                f"PeftAdapter: these options change the frozen weight {name!r}, so that other checkpoints of the base "
                "would no longer fit. Choose another initialisation of the adapter"
            )
    for part in root.modules():
        if isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper) and not isinstance(part, PeftLayer):
            mix_in(part, PeftLayer)
    root.__dict__[NOTE] = {"seed": seed, "active": dict(active), "shared": shared}
    root.__dict__[FOLLOWS] = _start_again
    trained = list(train or active)
    with refusing(f"train {', '.join(trained)} together"):
        set_adapter(root, trained)
    switch_adapters(root, active)
    _check_called(root)
    _check_rounded(root)


def _shared(tuner: nn.Module, root: nn.Module) -> dict[str, str]:
    """Return the tensors that peft's model around a network shares with its layers.

    Returns:
        For each name in peft's model, a name of the same tensor in the network.
    """
    places = {memory_of(tensor): name for name, tensor in root.state_dict().items()}
    own = {name: tensor for name, tensor in tuner.state_dict().items() if not name.startswith("model.")}
    found = {}
    for name, tensor in own.items():
        if memory_of(tensor) not in places:
            raise ConfigurationError(
                f"PeftAdapter: {type(tuner).__name__} of peft keeps {name!r} outside of the network, where it would "
                "not be trained or saved. Choose another method"
            )
        found[f"base_model.{name}"] = places[memory_of(tensor)]
    return found


def switch_adapters(module: nn.Module, active: Sequence[str] | Mapping[str, float]) -> None:
    """Activate adapters of peft, and deactivate all others. The parameters that train do not change.

    Args:
        module: A module with a network to which ``PeftAdapter`` was applied.
        active: Names of adapters, or a factor of each adapter's update by name. Factors other than 1 require a method
            whose update is proportional to its scale (LoRA, LoHa, LoKr, SHiRA). If it is empty, the network computes
            the output of the base.

    Raises:
        ConfigurationError: If a name is unknown, if the method does not support the factor, or if peft cannot combine
            the adapters.
    """
    from peft.functional import set_adapter

    if isinstance(active, Mapping):
        weights = dict(active)
    else:
        weights = dict.fromkeys(active, 1.0)
    roots: list[Any] = networks(module)
    for root in roots:
        for name in weights:
            if name not in root.peft_config:
                raise refusal("PeftAdapter", "the active adapters", f"among {', '.join(root.peft_config)}", name)
        trained = [(parameter, parameter.requires_grad) for parameter in root.parameters()]
        layers = [part for part in root.modules() if isinstance(part, PeftLayer)]
        for name, weight in weights.items():
            scaled = [part for part in layers if name in getattr(part, "scaling", {})]
            if weight != 1 and not (scaled and _scales(scaled[0], name)):
                kind = root.peft_config[name].peft_type.value
                raise refusal(
                    "PeftAdapter", f"the weight of {name}", f"1 for {kind}, whose update is not a product", weight
                )
            # Layers of methods without a scale have no set_scale, and need none while the weight is 1.
            part: Any
            if weight != 1 or root.__dict__[NOTE]["active"].get(name, 1) != 1:
                for part in scaled:
                    part.set_scale(name, weight)
        with refusing(f"mix {', '.join(weights)}"):
            set_adapter(root, list(weights))
        root.__dict__[NOTE]["active"] = weights
        for parameter, required in trained:
            parameter.requires_grad_(required)


@torch.no_grad()
def _scales(layer: Any, name: str) -> bool:
    """Return whether a double scale gives a double update, measured on a copy of the layer with a random update."""
    twin = copy.deepcopy(layer)
    if not hasattr(twin, "set_scale") or not hasattr(twin, "get_delta_weight"):
        return False
    added, _ = peft_names(twin, [key for key, _ in twin.named_parameters()])
    with own_draws(0):
        for key in added:
            place = twin.get_parameter(key)
            place.copy_(torch.randn(place.shape))
    twin.set_scale(name, 1.0)
    once = twin.get_delta_weight(name)
    twin.set_scale(name, 2.0)
    return torch.allclose(twin.get_delta_weight(name), 2 * once, rtol=1e-3)


@torch.no_grad()
def merge_peft(root: nn.Module) -> None:
    """Merge the active adapters of a network into its weights, in place. Quantised layers become float layers."""
    layers = outermost(root)
    if any(_is_rounded(root.get_submodule(name)) for name in layers):  # peft would quantise the sum again
        _to_floats(root)
    base: Any
    for name in layers:
        base = getattr(root.get_submodule(name), "base_layer", None)
        if hasattr(base, "weight") and is_tied(root, base):  # the adapter belongs to this layer only
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=base.weight.requires_grad)
    with refusing("merge the adapter"):
        unload(root, merge=True)
    for key in (NOTE, FOLLOWS):
        root.__dict__.pop(key, None)


def _is_rounded(layer: nn.Module) -> bool:
    return is_quantized(getattr(layer, "base_layer", None))


def _to_floats(root: Any) -> None:
    """Replace peft's layers of quantised weights by those of float weights, with the same adapters, in place."""
    values = _values(root)
    note = root.__dict__[NOTE]
    configs = {name: config_options(config) for name, config in root.peft_config.items()}
    rounded = [name for name in outermost(root) if _is_rounded(root.get_submodule(name))]
    unload(root, merge=False)
    for name in rounded:
        base = root.get_submodule(name)
        owner, _, last = name.rpartition(".")
        setattr(root.get_submodule(owner), last, plain_layer(base, dequantize(base)))
    inject(root, configs, note["active"], seed=note["seed"])
    _put(root, values)


def _check_called(root: nn.Module) -> None:
    """Raise an error for an adapted layer whose ``forward`` is never called, because only its weight is read."""
    for name in outermost(root):
        base = getattr(root.get_submodule(name), "base_layer", None)
        if isinstance(base, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise ConfigurationError(
                f"PeftAdapter: torch's attention reads the weight of {name!r} and never calls the layer, so an adapter "
                f"would have no effect. Name the attention {name.rpartition('.')[0]!r} in target_modules, or leave "
                "the layer out"
            )


@torch.no_grad()
def _check_rounded(root: Any) -> None:
    """Check that each kind of layer computes the same with a quantised weight and with the dequantised weight.

    Raises:
        ConfigurationError: If the outputs differ, because the method misreads quantised weights.
    """
    seen: set[Any] = set()
    for name in outermost(root):
        layer: Any = root.get_submodule(name)
        base: Any = getattr(layer, "base_layer", None)
        key = (type(layer), type(base))
        if not _is_rounded(layer) or key in seen:
            continue
        seen.add(key)
        twin = _alone(root, name)
        with own_draws(0):
            for place in _values(twin).values():
                if place.is_floating_point():
                    place.copy_(torch.randn(place.shape) / 10)
            x = torch.randn(4, base.in_features).to(base.weight.device)
        same = False
        # The first function keeps tensors that layers share, the second one lets peft choose the class of the layer.
        for floats in (_float_base, _to_floats):
            try:
                other = copy.deepcopy(twin)
                floats(other)
                found = twin.get_submodule(name).eval()(x)
                expected = other.get_submodule(name).eval()(x)
                same = same or torch.allclose(found, expected, rtol=0.02, atol=0.02)
            except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
                continue
        if not same:
            kinds = ", ".join(config.peft_type.value for config in root.peft_config.values())
            raise ConfigurationError(
                f"PeftAdapter: peft's {kinds} misreads the quantised weight of {name!r} ({type(base).__name__}). Use "
                "peft_type LORA, or a base that is not quantised"
            )


@torch.no_grad()
def check_forward(root: nn.Module, context: Any, precision: str) -> None:
    """Check that peft's adapter layers can compute in a precision, by running a copy of one layer of each kind.

    Layers without ``in_features`` and sharded layers are not checked.

    Args:
        root: The network, with its final dtype.
        context: Function that returns the context in which Lightning runs a step.
        precision: Name of the precision, for messages.

    Raises:
        ConfigurationError: If a layer cannot compute in the precision.
    """
    seen: set[object] = set()
    for name in outermost(root):
        layer: Any = root.get_submodule(name)
        base: Any = getattr(layer, "base_layer", None)
        key = (type(layer), type(base))
        if not hasattr(base, "in_features") or key in seen or any(map(is_sharded, layer.parameters())):
            continue
        seen.add(key)
        device = next(layer.parameters()).device
        try:
            with own_draws(0), context():
                copy.deepcopy(layer).eval()(torch.zeros(2, base.in_features, device=device))
        except RuntimeError as error:
            raise ConfigurationError(
                f"PeftAdapter: {type(layer).__name__} of peft at {name!r} cannot compute in {precision} ({error}). Use "
                "bf16-mixed or 32-true"
            ) from error


def _float_base(root: nn.Module) -> None:
    """Replace the quantised layers that peft's layers wrap by float layers, in place."""
    for name in outermost(root):
        layer: Any = root.get_submodule(name)
        layer.base_layer = plain_layer(layer.base_layer, dequantize(layer.base_layer))


def _alone(root: Any, name: str) -> Any:
    """Return a network that contains only a copy of one layer, with the same dotted name, to which options refer."""
    twin: Any = nn.Module()
    *path, last = name.split(".")
    owner = twin
    for piece in path:
        owner.add_module(piece, nn.Module())
        owner = owner.get_submodule(piece)
    owner.add_module(last, copy.deepcopy(root.get_submodule(name)).eval())
    adapters = {piece for key in _values(twin) for piece in key.split(".")}
    twin.peft_config = {}
    for adapter, config in root.peft_config.items():
        if adapter in adapters:
            twin.peft_config[adapter] = copy.deepcopy(config)
    for config in twin.peft_config.values():
        for other in ("modules_to_save", "trainable_token_indices", "target_parameters"):
            if hasattr(config, other):
                setattr(config, other, None)
    note = root.__dict__[NOTE]
    active = {one: weight for one, weight in note["active"].items() if one in adapters}
    twin.__dict__[NOTE] = note | {"active": active}
    return twin


def _values(root: nn.Module) -> dict[str, Tensor]:
    tensors = dict([*root.named_parameters(), *root.named_buffers()])
    return {name: tensors[name].detach() for name in peft_names(root, tensors)[0]}


def _put(root: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, place in _values(root).items():
        place.copy_(values[name])


@torch.no_grad()
def _start_again(root: Any) -> None:
    """Initialise the adapters again from the network's present weights."""
    twin = copy.deepcopy(root)
    unload(twin, merge=False)
    note = root.__dict__[NOTE]
    configs = {name: config_options(config) for name, config in root.peft_config.items()}
    inject(twin, configs, note["active"], seed=note["seed"])
    _put(root, _values(twin))
