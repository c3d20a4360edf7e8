"""Any method of peft on any network: its configuration checked, its layers put in, started, mixed, merged and saved.

Which methods there are is asked of peft: those whose model puts layers into a network and needs nothing else of its own
while it trains. What lies in a folder of peft is read and written by peft's own functions.
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
    """The name of the network that an adapter is for.

    It is the one model of transformers or diffusers inside, else the only child with weights, else the module itself.
    """
    models = [name for name, part in module.named_modules() if hasattr(part, "save_pretrained") and name]
    models = [name for name in models if not any(name.startswith(f"{other}.") for other in models)]
    if hasattr(module, "save_pretrained"):
        return ""
    if len(models) == 1 and hasattr(module.get_submodule(models[0]), "config"):
        return models[0]
    weighty = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    alone = len(weighty) == 1 and not any(True for _ in module.parameters(recurse=False))
    child = module.get_submodule(weighty[0]) if alone else module
    return weighty[0] if child is not module and any(True for _ in child.children()) else ""


def inject(
    root: nn.Module,
    configs: Mapping[str, Mapping[str, Any]],
    active: Mapping[str, float],
    *,
    train: Sequence[str] | None = None,
    seed: int = 0,
) -> None:
    """Put peft's layers into a network, in place.

    Args:
        root: The network.
        configs: Options by the adapters' names.
        active: Which of them take part, and by how much: see :func:`switch_adapters`.
        train: Those of them that require gradients; ``None``: all.
        seed: Of all draws, so that they are the same on all ranks and each time.

    Raises:
        ConfigurationError: For what peft refuses, and a start that would change the base's own weights.
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
            config.target_modules = {
                one for one, _ in find_targets(root, ALL_LINEAR, who="PeftAdapter: target_modules")
            }
        with refusing(f"put {options['peft_type']} on {type(root).__name__}"), own_draws(seed):
            tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](root, config, adapter_name=name)
        cast_adapter_dtype(root, name)
        shared[name] = _shared(tuner, root)
    for name, parameter, digest in before:
        if _digest(parameter) != digest:
            raise ConfigurationError(
                f"PeftAdapter: these options change the frozen weight {name!r} itself, which no other checkpoint "
                "of the base would fit any more: choose another start of the adapter"
            )
    for part in root.modules():
        if isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper) and not isinstance(part, PeftLayer):
            mix_in(part, PeftLayer)
    root.__dict__[NOTE] = {"seed": seed, "active": dict(active), "shared": shared}
    root.__dict__[FOLLOWS] = _start_again
    with refusing(f"train {', '.join(train or active)} together"):
        set_adapter(root, list(train or active))
    switch_adapters(root, active)
    _check_called(root)
    _check_rounded(root)


def _shared(tuner: nn.Module, root: nn.Module) -> dict[str, str]:
    """What peft's own model around a network holds and its layers share: by name there, one of its names in here."""
    places = {memory_of(tensor): name for name, tensor in root.state_dict().items()}
    own = {name: tensor for name, tensor in tuner.state_dict().items() if not name.startswith("model.")}
    if lost := [name for name, tensor in own.items() if memory_of(tensor) not in places]:
        raise ConfigurationError(
            f"PeftAdapter: {type(tuner).__name__} of peft keeps {lost[0]!r} outside of the network"
        )
    return {f"base_model.{name}": places[memory_of(tensor)] for name, tensor in own.items()}


def switch_adapters(module: nn.Module, active: Sequence[str] | Mapping[str, float]) -> None:
    """Let these adapters of peft's take part from now on, and no others; what trains stays as it is.

    Args:
        module: A module with a network that ``PeftAdapter`` has changed.
        active: Their names, or by name a factor on what each adds, for methods whose update is one product (LoRA, LoHa,
            LoKr, SHiRA). None at all leaves the base.

    Raises:
        ConfigurationError: For an unknown name, a factor that the method does not know, and what peft cannot mix.
    """
    from peft.functional import set_adapter

    weights = dict(active) if isinstance(active, Mapping) else dict.fromkeys(active, 1.0)
    roots: list[Any] = networks(module)
    for root in roots:
        if odd := [name for name in weights if name not in root.peft_config]:
            raise refusal("PeftAdapter", "the active adapters", f"among {', '.join(root.peft_config)}", odd[0])
        trained = [(parameter, parameter.requires_grad) for parameter in root.parameters()]
        layers = [part for part in root.modules() if isinstance(part, PeftLayer)]
        for name, weight in weights.items():
            scaled = [part for part in layers if name in getattr(part, "scaling", {})]
            if weight != 1 and not (scaled and _scales(scaled[0], name)):
                kind = root.peft_config[name].peft_type.value
                raise refusal(
                    "PeftAdapter", f"the weight of {name}", f"1 for {kind}, whose update is no product", weight
                )
            part: Any
            for part in scaled if weight != 1 or root.__dict__[NOTE]["active"].get(name, 1) != 1 else ():
                part.set_scale(name, weight)
        with refusing(f"mix {', '.join(weights)}"):
            set_adapter(root, list(weights))
        root.__dict__[NOTE]["active"] = weights
        for parameter, required in trained:
            parameter.requires_grad_(required)


@torch.no_grad()
def _scales(layer: Any, name: str) -> bool:
    """Whether twice the scale is twice the update: asked of a copy of the layer, with an update that is not zero."""
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
def merge_peft(root: Any) -> None:
    """Fold the active adapters of a network into its weights, in place; quantised layers become float ones."""
    layers = outermost(root)
    if any(_is_rounded(root.get_submodule(name)) for name in layers):  # what peft would add to codes is added to floats
        _to_floats(root)
    base: Any
    for name in layers:
        base = getattr(root.get_submodule(name), "base_layer", None)
        if hasattr(base, "weight") and is_tied(root, base):  # the adapter belongs to one use of it
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=base.weight.requires_grad)
    with refusing("merge the adapter"):
        unload(root, merge=True)
    for key in (NOTE, FOLLOWS):
        root.__dict__.pop(key, None)


def _is_rounded(layer: Any) -> bool:
    return is_quantized(getattr(layer, "base_layer", None))


def _to_floats(root: Any) -> None:
    """Put peft's layers for floats, with the same adapters, in the place of those on quantised weights."""
    values, note = _values(root), root.__dict__[NOTE]
    configs = {name: config_options(config) for name, config in root.peft_config.items()}
    rounded = [name for name in outermost(root) if _is_rounded(root.get_submodule(name))]
    unload(root, merge=False)
    for name in rounded:
        base: Any = root.get_submodule(name)
        owner, _, last = name.rpartition(".")
        setattr(root.get_submodule(owner), last, plain_layer(base, dequantize(base)))
    inject(root, configs, note["active"], seed=note["seed"])
    _put(root, values)


def _check_called(root: nn.Module) -> None:
    """Refuse a layer whose weight is read and whose forward nobody calls: its adapter would do nothing."""
    for name in outermost(root):
        base = getattr(root.get_submodule(name), "base_layer", None)
        if isinstance(base, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise ConfigurationError(
                f"PeftAdapter: {name!r} is read by torch's attention and never called, so that an adapter on it does "
                f"nothing: name the attention itself in target_modules, {name.rpartition('.')[0]!r}, or leave it out"
            )


@torch.no_grad()
def _check_rounded(root: Any) -> None:
    """Refuse a method that misreads quantised weights: it must compute what it does on the same weights as floats."""
    seen: set[Any] = set()
    for name in outermost(root):
        layer: Any = root.get_submodule(name)
        base: Any = getattr(layer, "base_layer", None)
        if not _is_rounded(layer) or (key := (type(layer), type(base))) in seen:
            continue
        seen.add(key)
        twin = _alone(root, name)
        with own_draws(0):
            for place in _values(twin).values():
                place.copy_(torch.randn(place.shape) / 10 if place.is_floating_point() else place)
            x = torch.randn(4, base.in_features).to(base.weight.device)
        same = False
        for floats in (_float_base, _to_floats):  # the first keeps what layers share, the second peft's own classes
            try:
                other = copy.deepcopy(twin)
                floats(other)
                found, expected = (one.get_submodule(name).eval()(x) for one in (twin, other))
                same = same or torch.allclose(found, expected, rtol=0.02, atol=0.02)
            except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
                continue
        if not same:
            kinds = ", ".join(config.peft_type.value for config in root.peft_config.values())
            raise ConfigurationError(
                f"PeftAdapter: peft's {kinds} misreads the quantised weight of {name!r} ({type(base).__name__}): use "
                "peft_type LORA, or no quantised base"
            )


@torch.no_grad()
def check_forward(root: nn.Module, context: Any, precision: str) -> None:
    """Refuse a method whose layers cannot compute in a precision: each kind is run once, as a copy.

    The network is in its final type; the context is what Lightning puts around a step.
    """
    seen: set[Any] = set()
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
                f"PeftAdapter: {type(layer).__name__} of peft, at {name!r}, cannot compute in {precision} ({error}): "
                "use bf16-mixed or 32-true"
            ) from error


def _float_base(root: nn.Module) -> None:
    """Put floats under peft's layers in the place of quantised weights, and change nothing else."""
    for name in outermost(root):
        layer: Any = root.get_submodule(name)
        layer.base_layer = plain_layer(layer.base_layer, dequantize(layer.base_layer))


def _alone(root: Any, name: str) -> Any:
    """A network with nothing in it but a copy of one layer, of the same name, by which the options know it."""
    twin: Any = nn.Module()
    *path, last = name.split(".")
    owner = twin
    for piece in path:
        owner.add_module(piece, nn.Module())
        owner = owner.get_submodule(piece)
    owner.add_module(last, copy.deepcopy(root.get_submodule(name)).eval())
    adapters = {piece for key in _values(twin) for piece in key.split(".")}
    twin.peft_config = {one: copy.deepcopy(config) for one, config in root.peft_config.items() if one in adapters}
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
    """Start the adapters again from the weights that the network has now."""
    twin = copy.deepcopy(root)
    unload(twin, merge=False)
    note, configs = root.__dict__[NOTE], {name: config_options(c) for name, c in root.peft_config.items()}
    inject(twin, configs, note["active"], seed=note["seed"])
    _put(root, _values(twin))
