"""The network as it was before training, without a second network: adapters off, and the first values of what trains.

    under adapters    the frozen base, with copies of what trains in full beside them (a new head): often nothing
    without           copies of all weights, which take the place of the trained ones for one forward pass
    in shards         copies of each process's, which change places with the trained ones for it

The copies belong to no module: no checkpoint, optimizer or technique ever meets them. A run that is resumed builds its
start as the first one did and takes the copies from there; a fingerprint in the checkpoint proves them to be the same.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from lit_efficient.distributed.ranks import gather_objects
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_fsdp import drop_gathered
from lit_efficient.internals.torch_shards import own_slices
from lit_efficient.mechanisms.adapters.base import added_names
from lit_efficient.mechanisms.adapters.disabled import disabled, has_adapters
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.surgery import is_sharded, local

_SAMPLES = 1024


class Reference:
    """What a network computes now, to be asked again after its weights have changed.

    Args:
        network: The network, with its adapters if it is to have any. Its weights are copied, except for those that
            adapters keep frozen.
        root: What is sharded, with the network in it; by default the network.
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
        if self.sharded:  # now, as all processes make it together
            self._fingerprint = self.fingerprint()

    def describe(self) -> str:
        """One line about where it comes from, and what it costs."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values()) / 2**20
        copies = f"a copy of {len(self.tensors)} tensors, {size:.1f} MiB" if self.tensors else "no copy"
        return f"the base under disabled adapters, {copies}" if self.adapted else copies

    def fingerprint(self) -> str:
        """A digest of the copies; that of frozen weights is the adapters' own business."""
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
        """What ``function`` returns while ``network`` is as it was, in eval mode and without gradients.

        Nothing that requires a gradient takes part, so autocast caches no weight of it for the policy's own pass.

        Raises:
            ConfigurationError: If a weight trains now that was frozen when the copies were made.
        """
        late = [name for name in _train_in_full(network) if name not in self.tensors] if self.adapted else []
        if late:
            raise ConfigurationError(
                f"Preference: {late[0]!r} has begun to train beside adapters, and the reference has no copy of it: "
                "let all that trains do so from the start, or use no adapters"
            )
        if self.sharded:
            with torch.no_grad(), evaluating(network), disabled(network):
                self._exchange(network)
                try:
                    return function()
                finally:
                    self._exchange(network)
        device = next(network.parameters()).device
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        with torch.no_grad(), evaluating(network), disabled(network):
            return functional_call(_Call(network, function), {f"network.{k}": t for k, t in self.tensors.items()}, ())

    def _exchange(self, network: nn.Module) -> None:
        """Let the shards of the network and those of the copies change places."""
        drop_gathered(self.root)
        parameters = dict(network.named_parameters())
        for name, tensor in self.tensors.items():
            ours, theirs = local(parameters[name].detach()), local(tensor)
            now = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(now)


class _Call(nn.Module):
    """A function of a network, as the module that ``functional_call`` wants."""

    def __init__(self, network: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.network = network
        self.function = function

    def forward(self) -> Any:
        return self.function()


def _train_in_full(network: nn.Module) -> list[str]:
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    added = added_names(network, trained)
    return [name for name in trained if name not in added]


def _samples(tensor: Any) -> tuple[int, bytes]:
    """Of up to 1024 values of a tensor, bit by bit, those that this process holds, and the number of the first of them:
    one step at a rate of 1e-6 must show.
    """
    step, rows = max(1, tensor.numel() // _SAMPLES), own_slices(tensor) if is_sharded(tensor) else None
    if rows is None or local(tensor).shape[1:] != tensor.shape[1:]:
        rows, tensor = (slice(0, None),), tensor.full_tensor() if is_sharded(tensor) else tensor
    before = rows[0].start * (tensor.numel() // max(1, len(tensor)) if tensor.ndim else 1)
    first = -(-before // step)
    values = local(tensor).reshape(-1)[first * step - before :: step].contiguous().cpu()
    return first, values.view(torch.uint8).numpy().tobytes()
