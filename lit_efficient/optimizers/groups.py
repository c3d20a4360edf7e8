"""Parameter groups with weight decay for matrices only.

    decays(p)  =  p has two or more dimensions     (biases, weights of norms and learned scales have one or none)

Source: the rule of GPT-2's and BERT's training codes; Loshchilov and Hutter (2019), https://arxiv.org/abs/1711.05101
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

Groups = list[dict[str, Any]]


def decays(parameter: Tensor) -> bool:
    """Return whether a parameter gets weight decay: True for tensors with two or more dimensions."""
    return parameter.ndim >= 2


def tensor_of(entry: Any) -> Tensor:
    """Return the parameter of an entry of a group, which torch's optimizers take with its name, too: (name, tensor)."""
    return entry[1] if isinstance(entry, tuple) else entry


def parameter_groups(
    parameters: nn.Module | Iterable[Any], weight_decay: float, decay_norm_and_bias: bool = False
) -> Groups:
    """Return parameter groups for any ``torch.optim`` class in which only matrices decay. No group is empty.

    Args:
        parameters: A module (all parameters that train, tied ones once), tensors, pairs of names and tensors
            (``named_parameters()``), or groups (dicts), which keep their options.
        weight_decay: Weight decay of matrices in groups that do not set their own.
        decay_norm_and_bias: Apply the decay to tensors with fewer than two dimensions too. Groups are not split then.
    """
    if isinstance(parameters, nn.Module):
        parameters = [parameter for parameter in parameters.parameters() if parameter.requires_grad]
    items = list(parameters)
    if items and isinstance(items[0], dict):
        groups = items
    else:
        groups = [{"params": items}]
    split: Groups = []
    for group in groups:
        if isinstance(group["params"], Tensor):
            tensors = [group["params"]]
        else:
            tensors = list(group["params"])
        options = {"weight_decay": weight_decay, **group}
        if decay_norm_and_bias:
            split.append({**options, "params": tensors})
        else:
            split.append({**options, "params": [p for p in tensors if decays(tensor_of(p))]})
            split.append({**options, "params": [p for p in tensors if not decays(tensor_of(p))], "weight_decay": 0.0})
    return [group for group in split if group["params"]]
