"""Parameter groups: weight decay for matrices, none for what only shifts or scales.

    decays(p)  =  p has two or more dimensions     (biases, norms' weights and learned scales have one or none)

Source: the rule of GPT-2's and BERT's training codes; Loshchilov and Hutter (2019), https://arxiv.org/abs/1711.05101
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

Groups = list[dict[str, Any]]


def decays(parameter: Tensor) -> bool:
    """Whether weight decay makes sense for a tensor: not for biases, norms and other one-dimensional ones."""
    return parameter.ndim >= 2


def parameter_groups(
    parameters: nn.Module | Iterable[Any], weight_decay: float, decay_norm_and_bias: bool = False
) -> Groups:
    """Groups for any ``torch.optim`` class in which only matrices decay, ordered by their first tensors; none is empty.

    Args:
        parameters: A module, whose parameters that train are taken, tied ones once; or tensors; or groups (dicts),
            which keep their own options.
        weight_decay: Decay of the tensors that decay, where a group names none of its own.
        decay_norm_and_bias: Let tensors with fewer than two dimensions decay, too. Then nothing is split.
    """
    if isinstance(parameters, nn.Module):
        parameters = [parameter for parameter in parameters.parameters() if parameter.requires_grad]
    items = list(parameters)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    split: Groups = []
    for group in groups:
        tensors = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        decay = {"weight_decay": weight_decay, **group}
        if decay_norm_and_bias:
            split.append({**decay, "params": tensors})
            continue
        split.append({**decay, "params": [p for p in tensors if decays(p)]})
        split.append({**decay, "params": [p for p in tensors if not decays(p)], "weight_decay": 0.0})
    return [group for group in split if group["params"]]
