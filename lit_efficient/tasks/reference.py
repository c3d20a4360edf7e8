"""Reference policy: the network as it was before training, without a second network.

    with adapters       the frozen base, and copies of other weights that train (a new head); often there are none
    without adapters    copies of all weights, which replace the trained ones during one forward pass
    sharded             copies of the shards of each process, which are swapped with the trained ones

The copies do not belong to a module, so checkpoints, optimizers and techniques do not see them. A resumed run builds
its start as the first run did and copies the weights again. A fingerprint in the checkpoint verifies that they are the
same.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lit_efficient.distributed.ranks import gather_objects
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_fsdp import drop_gathered
from lit_efficient.internals.torch_shards import own_slices
from lit_efficient.mechanisms.adapters.base import added_names
from lit_efficient.mechanisms.adapters.disabled import disabled, has_adapters
from lit_efficient.models.probes.modes import call_with, evaluating
from lit_efficient.surgery import is_sharded, local

_SAMPLES = 1024  # values of each tensor in the fingerprint


class Reference:
    """Snapshot of a network that can be evaluated after the weights have changed.

    Args:
        network: The network, with its adapters if it has any. Weights are copied unless adapters keep them frozen.
        root: Root of the sharded modules that contains the network. ``None`` for the network itself.
    """

    def __init__(self, network: nn.Module, root: nn.Module | None = None) -> None:
        self.root = network if root is None else root
        drop_gathered(self.root)
        self.adapted = has_adapters(network)
        in_full = _train_in_full(network)
        self.tensors = {
            name: parameter.detach().clone()
            for name, parameter in network.named_parameters()
            if parameter.is_floating_point() and (not self.adapted or name in in_full)
        }
        self.sharded = any(map(is_sharded, self.tensors.values()))
        self._fingerprint = ""
        if self.sharded:  # computed here, because all processes must take part
            self._fingerprint = self.fingerprint()

    def describe(self) -> str:
        """Return one line about the source of the reference and its memory."""
        copies = "no copy"
        if self.tensors:
            size = sum(tensor.nbytes for tensor in self.tensors.values()) / 2**20
            copies = f"a copy of {len(self.tensors)} tensors, {size:.1f} MiB"
        if self.adapted:
            copies = f"the base with disabled adapters, {copies}"
        return copies

    def fingerprint(self) -> str:
        """Return a digest of the copies. Adapters verify the frozen weights themselves."""
        if self._fingerprint:
            return self._fingerprint
        own = {name: _samples(tensor) for name, tensor in self.tensors.items()}
        every = gather_objects(own) if self.sharded else [own]
        found = []
        for name, tensor in self.tensors.items():
            values = b"".join(piece for _, piece in sorted({one[name] for one in every}))
            content = repr((tuple(tensor.shape), str(tensor.dtype))).encode() + values
            found.append((name, hashlib.sha256(content).hexdigest()))
        return hashlib.sha256(repr(found).encode()).hexdigest()[:32]

    def __call__(self, network: nn.Module, function: Callable[[], Any]) -> Any:
        """Call ``function`` while ``network`` has its original weights, in eval mode and without gradients.

        No tensor that requires a gradient takes part, so autocast does not cache casts for the policy's forward pass.

        Raises:
            ConfigurationError: If a weight trains that was frozen when the copies were made.
        """
        late: list[str] = []
        if self.adapted:
            late = [name for name in _train_in_full(network) if name not in self.tensors]
        if late:
            raise ConfigurationError(
                f"Preference: {late[0]!r} was unfrozen after training began, and the reference has no copy of it: "
                "unfreeze it from the start, or do not use adapters"
            )
        if self.sharded:
            with torch.no_grad(), evaluating(network), disabled(network):
                self._exchange(network)
                try:
                    return function()
                finally:
                    self._exchange(network)
        self.to(next(network.parameters()).device)
        with torch.no_grad(), evaluating(network), disabled(network):
            return call_with(network, self.tensors, function)

    def to(self, device: torch.device) -> None:
        """Move the copies to a device."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}

    def _exchange(self, network: nn.Module) -> None:
        """Swap the shards of the network with those of the copies."""
        drop_gathered(self.root)
        parameters = dict(network.named_parameters())
        for name, tensor in self.tensors.items():
            current = local(parameters[name].detach())
            copy = local(tensor)
            kept = current.clone()
            current.copy_(copy)
            copy.copy_(kept)


def _train_in_full(network: nn.Module) -> list[str]:
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    added = added_names(network, trained)
    return [name for name in trained if name not in added]


def _samples(tensor: Any) -> tuple[int, bytes]:
    """Return the bits of up to 1024 evenly spaced values of a tensor, as far as this process holds them.

    The values are exact, so that even one step at a learning rate of 1e-6 changes them.

    Returns:
        The number of the first value among all of the tensor's, and the bytes.
    """
    step = max(1, tensor.numel() // _SAMPLES)
    rows = own_slices(tensor) if is_sharded(tensor) else None
    if rows is None or local(tensor).shape[1:] != tensor.shape[1:]:  # whole, or sharded along another dimension
        rows = (slice(0, None),)
        if is_sharded(tensor):
            tensor = tensor.full_tensor()
    row = tensor.numel() // max(1, len(tensor)) if tensor.ndim else 1
    before = rows[0].start * row  # values in earlier processes
    first = -(-before // step)
    values = local(tensor).reshape(-1)[first * step - before :: step].contiguous().cpu()
    return first, values.view(torch.uint8).numpy().tobytes()
