"""Test of a network: do its outputs depend on the embeddings of padding, which the attention mask hides?

Two calls with the same tokens get different embeddings of the padding. Networks that mask padding give equal outputs.
Networks that mix all tokens (FNet), and those that read the last position whatever it holds (XLNet), do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.mechanisms.documents import undisturbed

_REAL = 6  # tokens of the text
_PADDING = 4
_POWERS = (1, 2)  # of the numbers from -1 to 1, as embeddings of padding; no norm makes them equal


def reads_padding(network: Any, call: Callable[[Tensor, Tensor], Tensor], pad: int, left: bool = False) -> bool:
    """Return whether outputs of a network depend on padding.

    Args:
        network: Network of transformers.
        call: Function of ids and attention mask ``[1, T]`` whose result is compared: ``[1, ...]``, or ``[1, T, C]`` of
            which only the tokens of the text count.
        pad: Id of the padding.
        left: Put the padding before the text.
    """
    table = network.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        return False
    end = getattr(network.config.get_text_config(), "eos_token_id", None)
    ids = [index for index in range(_REAL + 2) if index not in (pad, end)][:_REAL]
    if isinstance(end, int) and end != pad:  # BART reads the state of this token
        ids[-1] = end
    padding = [pad] * _PADDING
    device = next(network.parameters()).device
    tokens = torch.tensor([padding + ids if left else ids + padding], device=device)
    results = []
    with undisturbed(network, device):
        for power in _POWERS:
            handle = table.register_forward_hook(partial(_fill, pad=pad, power=power))
            try:
                result = call(tokens, (tokens != pad).long()).float()
            finally:
                handle.remove()
            results.append(result[tokens != pad] if result.ndim == 3 else result)
    first, second = results
    return bool((first - second).abs().max() > 1e-4 * first.abs().max())


def _fill(table: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, pad: int, power: int) -> Tensor:
    filling = torch.linspace(-1, 1, output.shape[-1], device=output.device, dtype=output.dtype) ** power
    return torch.where((inputs[0] == pad)[..., None], filling, output)
