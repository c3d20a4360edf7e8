"""Split of a causal language model into hidden states and the head that computes logits from them.

It serves losses that must not hold tokens x vocabulary logits. The network is called as usual, with all its hooks and
auxiliary losses, but its head receives only the last position. The full input of the head is kept, and the head is then
called on a few tokens at a time. Operations on logits after the head are repeated: a factor (Granite, Cohere,
Falcon-H1) and a soft cap (Gemma). `check_head` detects other operations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.models.probes.noise import enlarged, noise_for_vectors, noise_for_zeros, replaced, shards_again

_OWNER = "OutputHead"
_WANTED = "supported is a head that is called once, followed by a constant factor and a soft cap c tanh(x / c)"


@dataclass(frozen=True)
class OutputHead:
    """Map from hidden states to logits."""

    module: nn.Module  # the linear layer, possibly changed by techniques
    scale: float = 1.0  # factor on its output
    softcap: float | None = None  # limit c of ``c tanh(x / c)``, applied after the factor; None: no limit

    @property
    def rows(self) -> int:
        """Return the number of logits."""
        return int(self.module.out_features)  # type: ignore[arg-type]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]`` for hidden states ``[..., H]``."""
        return self.finish(self.module(hidden))

    def finish(self, logits: Tensor) -> Tensor:
        """Return logits for the output of the linear layer."""
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)


def scaled_head(network: nn.Module) -> OutputHead:
    """Return the head of a `GPT` or of a causal model of transformers, with its factor and soft cap.

    Raises:
        ConfigurationError: if the model has no output embeddings.
    """
    module = network.get_output_embeddings()  # type: ignore[operator]
    if isinstance(network, GPT):
        return OutputHead(module)
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{_OWNER}: {type(network).__name__} has no output embeddings; {_WANTED}.")
    config = network.config.get_text_config()  # type: ignore[operator, union-attr]
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    scale *= getattr(config, "lm_head_multiplier", None) or 1.0
    return OutputHead(module, scale, getattr(config, "final_logit_softcapping", None))


def hidden_states(network: nn.Module, inputs: Mapping[str, object]) -> tuple[Tensor, Any]:
    """Return the head's input ``[B, T, H]``, and the network's output with logits of the last position only.

    Raises:
        ConfigurationError: if the head was not called exactly once.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(arguments[0])
        return (arguments[0][:, -1:], *arguments[1:])

    with scaled_head(network).module.register_forward_pre_hook(keep):
        output = network(**inputs)
    if len(seen) != 1:
        raise ConfigurationError(
            f"{_OWNER}: {type(network).__name__} called its head {len(seen)} times in one forward pass; {_WANTED}."
        )
    return seen[0], output


@torch.no_grad()
def check_head(network: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Compare what the network does to the output of its head with what its `scaled_head` does.

    The network runs in eval mode on the first row, with numbers in the place of the output of its head: small ones and
    large ones, because a soft cap leaves the small logits of new weights as they are. Factors, biases and matrices of
    zero are noise, and small matrices are enlarged, because they may have no effect at first.

    Raises:
        ConfigurationError: if they differ, so that the network does more to its logits than is repeated here.
    """
    head = scaled_head(network)
    first = {name: value[:1] if isinstance(value, Tensor) else value for name, value in inputs.items()}
    free = shards_again(network)
    noise = noise_for_zeros(network) + noise_for_vectors(network)
    free()
    with evaluating(network), enlarged(network), replaced(noise):
        try:
            for size in (0.1, 10.0, 1000.0):
                given: list[Tensor] = []
                with head.module.register_forward_hook(partial(_numbers_for, size, given)):
                    _, output = hidden_states(network, first)
                theirs = (output if isinstance(output, Tensor) else output.logits).float()
                ours = head.finish(given[0]).float()
                close = 2e-2 * float(theirs.abs().max())
                if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=2e-2, atol=close):
                    raise ConfigurationError(
                        f"{_OWNER}: {type(network).__name__} changes its logits after the head in a way that is not "
                        f"supported; {_WANTED}."
                    )
        finally:
            free()


def _numbers_for(size: float, given: list[Tensor], module: nn.Module, arguments: object, logits: Tensor) -> Tensor:
    """Return numbers of about ``size`` in the place of ``logits``, and append them to ``given``."""
    numbers = torch.arange(logits.numel(), device=logits.device).mul(2.4).sin().mul(size)
    given.append(numbers.to(logits).view_as(logits))
    return given[-1]
