"""Search for the layer that maps token ids to vectors."""

from typing import Any

from torch import nn

from lit_efficient.errors import ConfigurationError


def token_embeddings(root: nn.Module, *, who: str, argument: str) -> list[tuple[str, nn.Module]]:
    """Return names and layers of the token embeddings: the input embeddings of transformers' models, or the only
    ``nn.Embedding``.

    Args:
        root: Any module.
        who: Name of the technique that asks, for the error.
        argument: Argument in which its user names the layer, for the error.

    Raises:
        ConfigurationError: Without such a layer, or with several ``nn.Embedding`` to choose from.
    """
    names = {id(module): name for name, module in root.named_modules()}
    found: dict[int, Any] = {}
    for network in root.modules():
        if not hasattr(type(network), "get_input_embeddings"):
            continue
        try:
            layer: Any = network.get_input_embeddings()  # type: ignore[operator]
        except NotImplementedError:  # models of images
            continue
        if id(layer) in names and getattr(layer, "weight", None) is not None and layer.weight.ndim == 2:
            found[id(layer)] = layer
    if not found:
        found = {id(module): module for module in root.modules() if isinstance(module, nn.Embedding)}
        if len(found) != 1:
            listed = ", ".join(names[key] for key in found) or "there are none"
            raise ConfigurationError(
                f"{who}: {type(root).__name__} has {len(found)} embeddings, and it is unknown which of them embeds "
                f"tokens: name it with {argument}= ({listed})"
            )
    return [(names[key], layer) for key, layer in found.items()]
