"""The trained network of a checkpoint, rebuilt without a trainer. Exports are made from it and compared with it.

Tasks on language models rebuild themselves. The class of a user's module is not known, so the transformers model inside
is rebuilt under its name in that module, from the configuration in the checkpoint or from a named base.
"""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.application.recorded import replay
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.export.check import refuse_own_layers
from lit_efficient.files.checkpoints import Checkpoint, Fields
from lit_efficient.files.sums import check_sums
from lit_efficient.internals.hugging_face import from_config, take_generation
from lit_efficient.internals.hugging_face_loading import empty_from_config
from lit_efficient.mechanisms.adapters.merge import dequantize_layers, merge_adapters, whole_state, without_adapters
from lit_efficient.mechanisms.adapters.peft_layers import plain_name
from lit_efficient.mechanisms.adapters.quantized import float_name, is_quantized
from lit_efficient.mechanisms.adapters.survival import describe_survival, surviving
from lit_efficient.mechanisms.restore import Weights, weights_of
from lit_efficient.models.libraries.gguf_file import is_gguf, read_model
from lit_efficient.surgery import own_draws, unmixed


@dataclass(frozen=True)
class Trained:
    """A rebuilt module with its techniques and weights, in evaluation mode."""

    module: nn.Module
    root: str  # name of the network in the module
    held: str  # kind of its weights: "raw" or the name of an average
    base: str | None = None  # folder of the frozen weights, unless training changed them

    @property
    def network(self) -> Any:
        """The network inside the module: a model of transformers or our GPT."""
        return self.module.get_submodule(self.root)

    def trained_outside(self) -> list[str]:
        """Return the names of trained parameters outside of the network."""
        inside = {id(parameter) for parameter in self.network.parameters()}
        named = self.module.named_parameters()
        return [name for name, p in named if p.requires_grad and id(p) not in inside]


def trained(
    checkpoint: Checkpoint, path: str | os.PathLike[str], weights: Weights, base: str | None, random: bool = False
) -> Trained:
    """Rebuild the module that wrote a checkpoint.

    Args:
        checkpoint: The checkpoint.
        path: Its file, for messages.
        weights: Kind of weights to load.
        base: Folder of the base model below adapters.
        random: Draw frozen weights at random if they are in neither the checkpoint nor a base.

    Raises:
        ConfigurationError: If the base is needed and unknown, or cannot be read.
        CheckpointError: If the weights do not fit.
    """
    if "language_modeling" in checkpoint:
        from lit_efficient.tasks.loading import language_model_of

        try:
            module, held = language_model_of(checkpoint, str(path), weights, base)
        except CheckpointError as error:
            raise CheckpointError(f"export: {error}; name the base by --base") from error
        state = checkpoint["state_dict"]
        named = getattr(getattr(module.network, "config", None), "name_or_path", None)
        whole = all(f"network.{name}" in state for name, _ in module.network.named_parameters())
        return Trained(module, "network", held, None if whole else named or None)
    model, root, base = _own(checkpoint, base, random)
    holder = _hold(model, root)
    state, held = weights_of(checkpoint, weights)
    prefix = f"{root}." if root else ""
    try:
        replay(holder, checkpoint)
    except ConfigurationError as error:
        if all(name.startswith(prefix) for name in state):
            raise
        raise ConfigurationError(
            f"export: this format holds only {root!r}, and the run's techniques also acted outside of it: {error}. Use "
            "format safetensors"
        ) from error
    try:
        holder.load_state_dict({name: tensor for name, tensor in state.items() if name.startswith(prefix)})
    except RuntimeError as error:
        what = " ".join(str(error).split())[:300]
        raise CheckpointError(f"export: the trained weights do not fit {type(model).__name__} ({what})") from error
    return Trained(holder.eval(), root, held, base)


def _own(checkpoint: Checkpoint, base: str | None, random: bool) -> tuple[Any, str, str | None]:
    """Return the transformers model in a user's module, its name in the module, and the folder of its base."""
    kept = checkpoint.get("lit_efficient", {})
    state = checkpoint["state_dict"]
    where = kept.get("adapters") or kept.get("ia3") or kept.get("prefix") or kept.get("peft") or {}
    config = where.get("config")
    if base is None and config is None:
        raise ConfigurationError("export: format merged needs base: the folder of the transformers model")
    if base is None:
        entries = json.loads(str(config))
        with torch.device("meta"):
            names = [name for name, _ in _built(entries, where).named_parameters()]
        prefix = f"{where['root']}." if where["root"] else ""
        present = set(state)
        if "peft" in kept:  # whose layers rename the weights that they adapt
            present = set(map(plain_name, state))
        lost = [name for name in names if f"{prefix}{name}" not in present]
        if random or not lost:
            make = from_config if lost else empty_from_config
            with own_draws():
                model = _built(entries, where, make)
            take_generation(model, where.get("generation"))
            return model, where["root"], None
        base = where.get("base")
        if base is None:
            raise ConfigurationError(
                f"export: format merged needs base: the folder of the transformers model; the checkpoint lacks "
                f"{len(lost)} of its weights, first {lost[0]!r} (LoRA(save_base=True) keeps them)"
            )
    model = _loaded(base, where)
    take_generation(model, where.get("generation"))
    root = _root_in(state, model) if config is None else where["root"]
    return model, root, base


def _kind(name: str | None) -> Any:
    import transformers

    kind = getattr(transformers, name or "", None)
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind
    return transformers.AutoModelForCausalLM  # the class is the user's own, or not recorded


def _built(entries: Fields, where: Fields, make: Any = from_config) -> Any:
    from transformers import AutoConfig

    dtype = getattr(torch, where.get("dtype") or "float32")
    return make(_kind(where.get("class")), AutoConfig.for_model(**entries), dtype=dtype)


def _loaded(base: str, where: Fields) -> Any:
    from transformers import PretrainedConfig

    check_sums(base)
    try:
        kind = where.get("class")
        if kind is None and not is_gguf(base):
            kind = (PretrainedConfig.get_config_dict(base)[0].get("architectures") or [None])[0]
        return read_model(_kind(kind), base, dtype=where.get("dtype") or "auto", trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(f"export: the base {base} cannot be read: {str(error).splitlines()[0]}") from error


def _root_in(state: Mapping[str, Tensor], model: nn.Module) -> str:
    """Return the prefix in a ``state_dict`` under which most of a model's parameters are found, without its dot."""
    names = [name for name, _ in model.named_parameters()]
    ends = tuple(names)
    prefixes = {key.removesuffix(name) for key in state if key.endswith(ends) for name in names if key.endswith(name)}
    prefixes = {prefix for prefix in prefixes if not prefix or prefix.endswith(".")}
    if not prefixes:
        raise ConfigurationError("export: the checkpoint has no weight of the base: it belongs to another model")
    return max(prefixes, key=lambda prefix: sum(f"{prefix}{name}" in state for name in names)).removesuffix(".")


def _hold(model: nn.Module, root: str) -> nn.Module:
    """Return a module in which ``model`` has the dotted name ``root``."""
    for name in filter(None, reversed(root.split("."))):
        holder = nn.Module()
        holder.add_module(name, model)
        model = holder
    return model


def fold(run: Trained, *, keep_int4: bool) -> str:
    """Merge the adapters in place. Quantised weights get the number format of the other weights.

    Args:
        run: The trained module.
        keep_int4: Keep int4 weights in int4.

    Returns:
        A clause for people: the share of the adapters' update that would survive rounding the merged weights again.
        Empty without a quantised base.
    """
    said = describe_survival(surviving(run.module))
    dtype = next(p.dtype for p in run.network.parameters() if p.is_floating_point())
    merge_adapters(run.module, dtype=dtype)
    if not keep_int4:
        dequantize_layers(run.module, dtype)
    return said


def merged_model(run: Trained) -> tuple[Any, str]:
    """Return the network as a plain model of transformers with merged float weights, and the clause of :func:`fold`.

    ``run`` is changed.
    """
    refuse_own_layers(run.network)
    said = fold(run, keep_int4=False)
    config = copy.deepcopy(run.network.config)
    embedding = run.network.get_input_embeddings()
    head = run.network.get_output_embeddings()
    if embedding is not None and hasattr(head, "weight") and embedding.weight is not head.weight:
        # The configuration may tie them, and an adapter was merged into only one of them.
        config.tie_word_embeddings = False
    model = _empty(run.network, config)
    own = whole_state(run.network)
    beside = {name for name, _ in run.network.named_parameters()} - {*model.state_dict()}
    if beside:
        raise ConfigurationError(
            f"export: {type(model).__name__} of transformers has no {sorted(beside)[0]!r}, which was trained: use "
            "format safetensors"
        )
    model.load_state_dict({name: own[name] for name in model.state_dict()}, assign=True)
    model.generation_config = getattr(run.network, "generation_config", None)
    return model, said


def base_state(run: Trained) -> tuple[dict[str, Tensor], Any]:
    """Return the network's float weights without adapters, trained ones replaced by zeros, and its configuration."""
    prefix = f"{run.root}." if run.root else ""
    moved = {name for name, p in run.module.named_parameters(remove_duplicate=False) if p.requires_grad}
    dtype = next(p.dtype for p in run.network.parameters() if p.is_floating_point())
    own = without_adapters(run.module)
    config = copy.deepcopy(run.network.config)
    names = [name for name in _empty(run.network, config).state_dict() if f"{prefix}{name}" in own]
    state = {name: own[f"{prefix}{name}"] for name in names}
    for name, part in run.network.named_modules():
        if is_quantized(part):
            state[float_name(name, part)] = state[float_name(name, part)].to(dtype)
    for name, tensor in state.items():
        if f"{prefix}{name}" in moved:  # the adapter's file contains these weights
            state[name] = torch.zeros_like(tensor)
    return state, config


def _empty(network: nn.Module, config: Any) -> Any:
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return from_config(unmixed(network), config)
