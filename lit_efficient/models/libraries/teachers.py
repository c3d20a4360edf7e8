"""Frozen networks whose features another network learns from. They are found by name and get images in their own
format.

A teacher is deliberately not an ``nn.Module``: a LightningModule that holds one does not train, count, average, save or
shard it.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files.sums import check_sums
from lit_efficient.internals.hugging_face import bars_on_terminals
from lit_efficient.internals.torch_trees import tree_map
from lit_efficient.models.libraries.config_fields import check_bounds, library_errors
from lit_efficient.surgery import match_modules, moved, own_draws

_IN_CODE = "given in code: "  # prefix of the record of a module in a checkpoint
_DATA = "data."
_WIDTHS = ("hidden_size", "width", "dim", "d_model", "n_embd", "embed_dim")
_WITHOUT = {"labels", "use_cache", "past_key_values"}  # arguments that a teacher does not need for its features

CLASS = "class token"  # key of the class token in a result, beside the layers' patterns


class Teacher:
    """Frozen network, and the layers whose features are used.

    Args:
        network: Put into evaluation mode and frozen, in place.
        layers: Patterns of dotted names, each of one layer; an empty pattern is the network's output.
        who: Name of the technique that asks, for errors.
        image_size: Side to which :meth:`of_images` resizes; ``None``: the size in the network's configuration, or no
            resizing without one.
        statistics: Mean and standard deviation of each channel of images in [0, 1] that the network expects; ``None``:
            the network's own, as of timm's models; without any it receives images in [-1, 1].
        skip_tokens: Number of tokens before those of the patches that :meth:`of_images` leaves out; ``None``: the
            number that the network declares.
        tokens: Whether an empty pattern means, for :meth:`of_images`, the tokens of a timm model before pooling.
        class_layer: Layer of which :meth:`of_images` returns the class token, or one vector per image, as ``CLASS``.
        argument: Name of the argument that holds the layers, for errors.
    """

    def __init__(
        self,
        network: nn.Module,
        layers: Sequence[str],
        *,
        who: str,
        image_size: int | None = None,
        statistics: tuple[list[float], list[float]] | None = None,
        skip_tokens: int | None = None,
        tokens: bool = False,
        class_layer: str | None = None,
        argument: str = "teacher_layer",
    ) -> None:
        if class_layer is not None:
            layers = [*layers, class_layer]
        self.class_layer = class_layer
        self.network = network.eval().requires_grad_(False)
        self.layers = {layer: only_module(network, layer, f"{who}: {argument}") for layer in layers}
        self.who = who
        self.image_size = image_size
        self.statistics = _own_statistics(network) if statistics is None else statistics
        self.skip_tokens = skip_tokens
        self._has_gradient = False  # whether a gradient is known to work on this device
        self.unpooled = tokens and "" in self.layers and callable(getattr(network, "forward_features", None))

    def features(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return features by layer pattern, without gradients. Arguments that the network's forward does not take are
        ignored.
        """
        return self._features(self.network, args, kwargs, gradients=False)

    def _features(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool
    ) -> dict[str, Tensor]:
        device, dtype = _placed(self.network)
        args, kwargs = _on((args, kwargs), device, dtype, detach=not gradients)
        found: dict[str, Tensor] = {}
        with ExitStack() as hooks, torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
            for layer, name in self.layers.items():
                hooks.enter_context(self.network.get_submodule(name).register_forward_hook(_keep(found, layer)))
            output = forward(*args, **_known(self.network, kwargs))
        if forward is self.network:
            return found
        return found | {"": feature_of(output)}

    def of_images(self, images: Tensor, gradients: bool = False) -> dict[str, Tensor]:
        """Return features of images [B, C, H, W] in [-1, 1], without class and register tokens where their number is
        known.

        Models of transformers and timm receive their own number of channels, size and normalisation.

        Args:
            images: The images.
            gradients: Whether gradients flow to the images. The network stays frozen.

        Returns:
            Features by layer pattern.

        Raises:
            ConfigurationError: If ``class_layer`` has no class token.
        """
        config = getattr(self.network, "config", None)
        embedding = getattr(self.network, "patch_embed", None)
        own = _side(getattr(config, "image_size", None) or getattr(embedding, "img_size", None))
        size = self.image_size or own
        channels = getattr(config, "num_channels", None)
        if self.statistics is not None and channels is None:
            channels = input_width_of(self.network, "")
        kwargs: dict[str, Any] = {}
        if images.ndim == 4:
            images = _prepared(images.float(), size, channels, self.statistics)
            if size != own and "interpolate_pos_encoding" in _named(self.network):
                kwargs["interpolate_pos_encoding"] = True
        forward: Any = self.network.forward_features if self.unpooled else self.network
        found = self._features(forward, (images,), kwargs, gradients)
        if gradients and images.requires_grad and torch.is_grad_enabled() and not self._has_gradient:
            self._check_gradient(images, list(found.values()))
        if getattr(self.network, "output_fmt", None) == "NHWC":  # timm's Swin, for example
            for key, features in found.items():
                if features.ndim == 4:
                    found[key] = features.permute(0, 3, 1, 2)
        patch = _side(getattr(config, "patch_size", None) or getattr(embedding, "patch_size", None))
        patches = 0
        if patch and images.ndim == 4:
            patches = (images.shape[-2] // patch) * (images.shape[-1] // patch)
        result = dict(found)
        for key, tokens in found.items():
            if tokens.ndim == 3:
                result[key] = tokens[:, self._skipped(tokens.shape[1], patches) :]
        if self.class_layer is not None:
            one = found[self.class_layer]
            if one.ndim != 2 and result[self.class_layer].shape == one.shape:  # no token precedes the patches
                raise ConfigurationError(
                    f"{self.who}: head.class_layer {self.class_layer!r} of {type(self.network).__name__} gives "
                    f"{list(one.shape)}, which is neither tokens with a class token nor one vector per image: name "
                    "another layer"
                )
            result[CLASS] = one if one.ndim == 2 else one[:, 0]
        return result

    def _check_gradient(self, images: Tensor, found: list[Tensor]) -> None:
        """Raise an error with advice if the gradient has no deterministic kernel, before the run's own backward pass
        fails.
        """
        if torch.are_deterministic_algorithms_enabled() and images.device.type != "cpu":
            try:
                torch.autograd.grad([feature.sum() for feature in found], images, retain_graph=True)
            except RuntimeError as error:
                if "deterministic" not in str(error):
                    raise
                raise ConfigurationError(
                    f"{self.who}: on {images.device.type} the gradient of {type(self.network).__name__} has no "
                    f"deterministic kernel ({str(error).split()[0]}); name layers before the one that needs it, take "
                    "another network, or set trainer.deterministic to warn"
                ) from error
        self._has_gradient = True

    def _skipped(self, count: int, patches: int) -> int:
        """Return how many of a layer's tokens precede those of the patches. ``patches`` is 0 if their number is
        unknown.
        """
        if self.skip_tokens is not None:
            return self.skip_tokens
        if count == patches:
            return 0
        surplus = max(0, count - patches) if patches else 0
        return int(getattr(self.network, "num_prefix_tokens", surplus))

    def to(self, device: torch.device) -> None:
        """Move the network to a device."""
        if _placed(self.network)[0] != device:
            with torch.inference_mode(False):  # in a validation the moved weights would be unusable for training
                self.network.to(device)

    def width(self, layer: str) -> int | None:
        """Return the width of a layer's features, or ``None`` if the network does not declare it."""
        return width_of(self.network, self.layers[layer])


def find_teacher(
    spec: str | nn.Module, layers: Sequence[str], *, who: str, data: Any = None, name: str = "teacher", **images: Any
) -> Teacher:
    """Return the teacher that an argument names.

    Args:
        spec: A module; ``data.NAME``, an attribute of the data module; the folder or name of a transformers model; or a
            transformers ``config.json``, for random weights (seed 0).
        layers: As in :class:`Teacher`.
        who: Name of the technique that asks, for errors.
        data: The data module, if there is one.
        name: Name of the argument that is ``spec``, for errors.
        **images: ``image_size``, ``skip_tokens``, ``tokens``, ``class_layer`` and ``argument`` of :class:`Teacher`.

    Raises:
        ConfigurationError: If it does not exist.
    """
    if isinstance(spec, nn.Module):
        return Teacher(spec, layers, who=who, **images)
    if spec.startswith(_IN_CODE):
        raise ConfigurationError(
            f"{who}: {name} was {spec!r}, which a config cannot name: pass the module in code again"
        )
    if spec.startswith(_DATA):
        network = getattr(data, spec.removeprefix(_DATA), None)
        if not isinstance(network, nn.Module):
            owner = "no data module"
            names: list[str] = []
            if data is not None:
                owner = type(data).__name__
                names = [name for name, value in vars(data).items() if isinstance(value, nn.Module)]
            has = f"; it has {', '.join(names)}" if names else ""
            raise ConfigurationError(f"{who}: {name} is {spec!r}, but {owner} has no such network{has}")
        return Teacher(network, layers, who=who, **images)
    return Teacher(_of_transformers(spec, who, name), layers, who=who, statistics=_statistics(spec), **images)


def name_of(spec: str | nn.Module) -> str:
    """Return the record of a teacher for checkpoints: its name, or for a module its class and a digest of its
    weights.
    """
    if isinstance(spec, str):
        return spec
    digest = hashlib.sha256()
    for key, tensor in spec.state_dict().items():
        digest.update(key.encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return f"{_IN_CODE}{type(spec).__name__} {digest.hexdigest()[:16]}"


def _of_transformers(spec: str, who: str, name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    check_sums(spec)  # before the configuration, whose values may raise anything
    allowed = "a module, data.NAME, or the folder, name or config.json of a transformers model"
    with library_errors(str(refusal(who, name, allowed, spec))):
        config = AutoConfig.from_pretrained(spec, trust_remote_code=False)
        if not spec.endswith(".json"):
            check_bounds(who, spec, config, AutoModel)
            with bars_on_terminals():
                return AutoModel.from_pretrained(spec, trust_remote_code=False)
        with own_draws(0):
            return AutoModel.from_config(config)


def _statistics(spec: str) -> tuple[list[float], list[float]] | None:
    """Return mean and standard deviation of the image processor beside a transformers model, in a folder or on a
    hub.
    """
    from transformers.image_processing_base import ImageProcessingMixin

    if spec.endswith(".json"):
        return None
    try:
        kept, _ = ImageProcessingMixin.get_image_processor_dict(spec)
    except (OSError, ValueError):  # a model without an image processor, such as one of text
        return None
    if not kept.get("do_normalize", True):
        return [0.0], [1.0]
    if "image_mean" not in kept:
        return None
    return list(kept["image_mean"]), list(kept["image_std"])


def _own_statistics(network: nn.Module) -> tuple[list[float], list[float]] | None:
    """Return the statistics that a network declares.

    Sources are timm's ``pretrained_cfg``, open_clip's attributes, and the folder from which a transformers model was
    loaded.
    """
    kept: Any = getattr(network, "pretrained_cfg", None)
    if isinstance(kept, Mapping) and "mean" in kept and "std" in kept:
        return list(kept["mean"]), list(kept["std"])
    mean = getattr(network, "image_mean", None)
    std = getattr(network, "image_std", None)
    if mean is not None and std is not None:
        return list(mean), list(std)
    name = getattr(getattr(network, "config", None), "name_or_path", None)
    if name and hasattr(network, "save_pretrained") and Path(name).is_dir():
        return _statistics(name)
    return None


def only_module(root: nn.Module, pattern: str, who: str) -> str:
    """Return the dotted name of the one module that a pattern matches; an empty pattern is the root.

    Raises:
        ConfigurationError: If it matches none, or several.
    """
    if not pattern:
        return ""
    names = [name for name, _ in match_modules(root, [pattern], who=who)]
    if len(names) > 1:
        raise ConfigurationError(
            f"{who}: {pattern!r} matches {len(names)} modules, {', '.join(names[:4])}: name one of them in full"
        )
    return names[0]


def width_of(root: nn.Module, name: str) -> int | None:
    """Return the number of features of a layer's output, from its class or a config around it; ``None`` if unknown."""
    layer: Any = root.get_submodule(name)
    parent, _, last = name.rpartition(".")
    owner = root.get_submodule(parent)
    own = _own_width(layer)
    if own is None and isinstance(owner, nn.Sequential) and name and not any(True for _ in layer.parameters()):
        own = _last_width(list(owner)[: int(last) + 1])  # an activation is as wide as the layer before it
    if own is not None:
        return own
    norms = [(part_name.count("."), part) for part_name, part in layer.named_modules() if "Norm" in type(part).__name__]
    if name and norms and not isinstance(layer, nn.Sequential):  # a residual block is as wide as its norms
        norms.sort(key=lambda norm: norm[0])  # outer norms first: inner ones may normalise heads of queries and keys
        return next(filter(None, (_own_width(part) for _, part in norms)), None)
    parts = name.split(".") if name else []
    for i in range(len(parts), -1, -1):
        config = getattr(root.get_submodule(".".join(parts[:i])), "config", None)
        for attribute in _WIDTHS:
            if isinstance(getattr(config, attribute, None), int):
                return int(getattr(config, attribute))
    sizes = getattr(getattr(root, "config", None), "hidden_sizes", None)
    return int(sizes[-1]) if sizes else None


def input_width_of(root: nn.Module, name: str) -> int | None:
    """Return the number of features of a layer's input, from the first layer in it; ``None`` if unknown."""
    for part in root.get_submodule(name).modules():
        for attribute in ("in_features", "in_channels"):
            if isinstance(getattr(part, attribute, None), int):
                return int(getattr(part, attribute))
        if "Norm" in type(part).__name__:
            return _own_width(part)
    return None


def _own_width(layer: Any) -> int | None:
    if isinstance(layer, nn.Sequential):
        return _last_width(layer)
    for attribute in ("out_features", "out_channels", "embedding_dim", "num_channels", "num_features"):
        if isinstance(getattr(layer, attribute, None), int):
            return int(getattr(layer, attribute))
    shape = getattr(layer, "normalized_shape", None)
    if shape:
        return int(shape[-1])
    weight = getattr(layer, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 1:  # an RMS norm of any package
        return int(weight.shape[0])
    return None


def _last_width(layers: Iterable[nn.Module]) -> int | None:
    """Return the width after layers in a row, or ``None`` if a layer that changes shapes follows the last known
    width.
    """
    for layer in reversed(list(layers)):
        if isinstance(layer, nn.Flatten | nn.Unflatten | nn.PixelShuffle | nn.PixelUnshuffle):
            return None
        width = _own_width(layer)
        if width is not None:
            return width
    return None


def feature_of(output: object) -> Tensor:
    """Return the features in a layer's output: a tensor, the first tensor of a tuple, or ``last_hidden_state``.

    Raises:
        ConfigurationError: If there is none.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("last_hidden_state"), Tensor):
        return output["last_hidden_state"]
    values: Iterable[object] = ()
    if isinstance(output, Mapping):
        values = output.values()
    elif isinstance(output, list | tuple):
        values = output
    for value in values:
        if isinstance(value, Tensor):
            return value
    raise ConfigurationError(
        f"a layer returned a {type(output).__name__}, which contains no features: name another layer"
    )


def _keep(found: dict[str, Tensor], layer: str) -> Any:
    def hook(module: nn.Module, args: object, output: object) -> None:
        found[layer] = feature_of(output)

    return hook


def _named(network: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(network.forward).parameters


def _known(network: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _named(network)
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {k: v for k, v in kwargs.items() if k not in _WITHOUT and (anything or k in parameters)}


def _placed(network: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
    first = next((t for t in (*network.parameters(), *network.buffers()) if t.is_floating_point()), None)
    if first is None:
        return None, None
    return first.device, first.dtype


def _on(tree: object, device: torch.device | None, dtype: torch.dtype | None, detach: bool = True) -> Any:
    """Move tensors to the network's device, and floats to its format."""

    def move(value: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        if detach:
            value = value.detach()
        return moved(value, device, dtype if value.is_floating_point() else None)

    return tree_map(move, tree)


def _side(value: int | Sequence[int] | None) -> int | None:
    if value is None or isinstance(value, int):
        return value
    return int(value[0])


def _resized(images: Tensor, size: int) -> Tensor:
    if not (images.requires_grad and torch.are_deterministic_algorithms_enabled()):
        return F.interpolate(images, (size, size), mode="bicubic", align_corners=False, antialias=True)
    # On CUDA the gradient of F.interpolate is not deterministic. Products with two matrices compute the same.
    for _ in range(2):
        side = torch.eye(images.shape[-1], dtype=images.dtype, device=images.device)[None, None]
        rows = F.interpolate(side, (side.shape[-1], size), mode="bicubic", align_corners=False, antialias=True)[0, 0]
        images = (images @ rows).mT
    return images


def _prepared(
    images: Tensor, size: int | None, channels: int | None, statistics: tuple[list[float], list[float]] | None
) -> Tensor:
    if channels and images.shape[1] != channels:
        images = images.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if size and tuple(images.shape[-2:]) != (size, size):
        images = _resized(images, size)
    if statistics is None:
        return images
    mean, std = (moved(torch.tensor(s).view(1, -1, 1, 1), images.device) for s in statistics)
    if images.shape[1] == 1:  # a network of one channel may declare the statistics of three
        mean = mean.mean(1, keepdim=True)
        std = std.mean(1, keepdim=True)
    return ((images + 1.0) / 2.0 - mean) / std
