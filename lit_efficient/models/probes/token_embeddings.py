"""Which layer of a network turns tokens into vectors."""

from typing import Any

from torch import nn

from lit_efficient.errors import ConfigurationError


def token_embeddings(root: nn.Module, *, who: str, argument: str) -> list[tuple[str, nn.Module]]:
    """Names and layers: what transformers' models call their input embeddings, or the only ``nn.Embedding``.

    Raises:
        ConfigurationError: Without such a layer, and where it is not known which of several it is, for ``who`` asks and
            the argument in which its user names it.
    """
    names = {id(module): name for name, module in root.named_modules()}
    found: dict[int, Any] = {}
    for network in root.modules():
        if not hasattr(type(network), "get_input_embeddings"):
            continue
        try:
            layer: Any = network.get_input_embeddings()  # type: ignore[operator]
        except NotImplementedError:  # what sees images alone
            continue
        if id(layer) in names and getattr(layer, "weight", None) is not None and layer.weight.ndim == 2:
            found[id(layer)] = layer
    if not found:
        found = {id(module): module for module in root.modules() if isinstance(module, nn.Embedding)}
        if len(found) != 1:
            listed = ", ".join(names[key] for key in found) or "there are none"
            raise ConfigurationError(
                f"{who}: {type(root).__name__} has {len(found)} embeddings, and it is not known which is that of the "
                f"tokens: name it with {argument}= ({listed})"
            )
    return [(names[key], layer) for key, layer in found.items()]
