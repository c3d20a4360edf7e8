"""Samples with their rewards, and the choice of prompts whose samples have different rewards (dynamic sampling).

    answer the first prompts of a batch -> as many further ones as had samples of one reward -> ... -> keep some

Saves: optimizer steps whose samples are all right or all wrong, and so have no effect
Costs: generation for prompts that are not used
Source: DAPO, https://arxiv.org/abs/2503.14476.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lit_efficient.losses.policy import differing
from lit_efficient.tasks.conversations import as_messages, transcript
from lit_efficient.tasks.rollout import Answers


@dataclass
class JudgedSamples:
    """Samples with their rewards. Each group of neighbours answers one prompt.

    Args:
        prompts: Prompt of each sample.
        written: The samples.
        parts: Weighted rewards by function, ``[N, functions]``.
        rewards: Rewards after penalties ``[N]``; NaN for samples without one.
        learned: The same, with NaN also for samples that are left out of the loss.
        lengths: Number of tokens ``[N]``.
        cut: Whether a sample ends because of the limit of tokens, ``[N]`` bool.
    """

    prompts: list[Any]
    written: Answers
    parts: Tensor
    rewards: Tensor
    learned: Tensor
    lengths: Tensor
    cut: Tensor


def table_of(found: JudgedSamples, names: Sequence[str], advantage: Tensor) -> list[dict[str, Any]]:
    """Return for each sample its prompt, completion, rewards, advantage, length and end, by column.

    Messages are written with their roles. The completion of a conversation is all that follows its prompt.

    Args:
        found: The samples.
        names: Names of the functions of the rewards.
        advantage: ``[N]``, or ``[N, T]`` for each token, of which the mean over the sample is taken.
    """
    if advantage.ndim == 2:
        advantage = advantage.sum(1) / found.lengths
    rows = []
    for i, prompt in enumerate(found.prompts):
        completion = found.written.texts[i]
        if found.written.conversations:
            talk = found.written.conversations[i]
            prompt = talk.messages[: talk.begun]  # noqa: PLW2901
            completion = transcript(talk.messages[talk.begun :])
        row = {
            "prompt": prompt if isinstance(prompt, str) else transcript(as_messages(prompt)),
            "completion": completion,
            "reward": float(found.rewards[i]),
        }
        row |= {f"reward/{name}": float(part) for name, part in zip(names, found.parts[i])}
        row |= {"advantage": float(advantage[i]), "length": int(found.lengths[i]), "end": found.written.samples[i].end}
        rows.append(row)
    return rows


def enough_samples(
    answer: Callable[[range], JudgedSamples], count: int, wanted: int, group: int
) -> tuple[JudgedSamples, JudgedSamples]:
    """Answer prompts until ``wanted`` have samples with different rewards, or all have been answered.

    Args:
        answer: Function that answers prompts by their numbers in a batch.
        count: Number of prompts in the batch.
        wanted: Number of prompts to keep, at most ``count``.
        group: Samples of a prompt.

    Returns:
        All samples; and those of ``wanted`` prompts, in the order of the batch. Prompts whose samples have one reward
        are among these if there are not enough others, so that their number is the same in all processes.
    """
    found = answer(range(wanted))
    answered = wanted
    while answered < count:
        missing = wanted - int(differing(found.learned, group).sum())
        if missing <= 0:
            break
        numbers = range(answered, min(answered + missing, count))
        found = _joined(found, answer(numbers))
        answered = numbers.stop
    if answered == wanted:
        return found, found
    differ = differing(found.learned, group).tolist()
    kept = sorted(sorted(range(answered), key=lambda i: not differ[i])[:wanted])
    return found, _taken(found, [i * group + number for i in kept for number in range(group)])


def _joined(first: Any, second: Any) -> Any:
    """Return the samples of two objects whose fields are lists, tensors or again such objects."""
    if isinstance(first, Tensor):
        return torch.cat((first, second))
    if isinstance(first, list):
        return first + second
    names = [field.name for field in fields(first)]
    return type(first)(**{name: _joined(getattr(first, name), getattr(second, name)) for name in names})


def _taken(values: Any, places: list[int]) -> Any:
    """Return some samples of an object as in :func:`_joined`."""
    if isinstance(values, Tensor):
        return values[places]
    if isinstance(values, list):
        return [values[place] for place in places] if values else []  # there need not be conversations
    return type(values)(**{field.name: _taken(getattr(values, field.name), places) for field in fields(values)})
