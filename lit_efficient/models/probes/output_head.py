"""A causal language model in two halves: hidden states, and the head that makes logits of them.

For losses that must not hold tokens x vocabulary. The network is called as it is, with all its hooks and auxiliary
losses, except that its head is shown the last position only and what it would have been given is kept; the head is
then called on a few tokens at a time. What networks do to logits after the head is repeated: a factor (Granite,
Cohere) and a soft bound (Gemma); `check_head` finds what is not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.models.probes.modes import evaluating

_OWNER = "OutputHead"
_WANTED = "what can be split is a head that is called once, before a constant factor and a bound c tanh(x / c)"


@dataclass(frozen=True)
class OutputHead:
    """From hidden states to logits."""

    module: nn.Module  # the linear map, whatever techniques made of it
    scale: float = 1.0  # factor on its output
    softcap: float | None = None  # bound c of ``c tanh(x / c)``, after the factor; None for none

    @property
    def rows(self) -> int:
        """Number of logits."""
        return int(self.module.out_features)  # type: ignore[arg-type]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` for ``[..., H]``."""
        logits: Tensor = self.module(hidden)
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def output_head(network: nn.Module) -> OutputHead:
    """The head of a `GPT` or of a causal model of transformers."""
    if isinstance(network, GPT):
        return OutputHead(network.head)
    module = network.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{_OWNER}: {type(network).__name__} has no output embeddings; {_WANTED}.")
    config: Any = network.config.get_text_config()  # type: ignore[operator, union-attr]
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return OutputHead(module, scale, getattr(config, "final_logit_softcapping", None))


def hidden_states(network: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """What the head would get, ``[B, T, H]``, and the network's output, with logits of the last position alone.

    Raises:
        ConfigurationError: if the head was not called.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(arguments[0])
        return (arguments[0][:, -1:], *arguments[1:])

    with output_head(network).module.register_forward_pre_hook(keep):
        output = network(**inputs)
    if len(seen) != 1:
        raise ConfigurationError(
            f"{_OWNER}: {type(network).__name__} called its head {len(seen)} times in one forward pass; {_WANTED}."
        )
    return seen[0], output


@torch.no_grad()
def check_head(network: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Compare the network's own logits of the last position with those of its `output_head`, on the first row.

    It is run once in eval mode.

    Raises:
        ConfigurationError: if they differ: the network does something to its logits that is not known here.
    """
    with evaluating(network):
        first = {name: value[:1] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        hidden, output = hidden_states(network, first)
        theirs = (output if isinstance(output, Tensor) else output.logits).float()
        ours = output_head(network)(hidden[:, -1:]).float()
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max())):
        raise ConfigurationError(
            f"{_OWNER}: {type(network).__name__} changes its logits after the head in a way that is not known here; "
            f"{_WANTED}."
        )
