"""Evidence in a network's weights that it has been trained."""

from torch import Tensor, nn

from lit_efficient.internals.hugging_face import source_of
from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.surgery import unmixed


def sign_of_training(module: nn.Module) -> str | None:
    """Return evidence that a network has been trained or read from files, or ``None``.

    Evidence is a source in its configuration, statistics of batches, or a norm whose weights are not all equal.
    ``None`` proves nothing: a network without norms may have been trained, too.
    """
    for name, part in module.named_modules():
        source = source_of(part)
        if source:
            return f"{name or type(part).__name__} was read from {source!r}"
        seen = getattr(part, "num_batches_tracked", None)
        if isinstance(seen, Tensor) and has_values(seen) and int(seen):
            return f"{name} holds statistics of {int(seen)} batches"
        vectors = [p for p in part.parameters(recurse=False) if has_values(p)]
        is_norm = "norm" in unmixed(part).__name__.lower() and all(p.ndim == 1 for p in vectors)
        if is_norm and any(len(p.detach().unique()) > 1 for p in vectors):
            return f"the norm {name} does not have initial weights"
    return None
