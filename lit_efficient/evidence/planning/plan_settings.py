"""Which settings of a fit are its batch, its context and its adapters' rank: found by changing one and looking.

A whole number of the data's or the module's that has the value of the batch, and whose change changes the plan's batch,
is its batch; one that changes the amount in it and not the batch is its context.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from lit_efficient.declaration import Phase, techniques_of
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, batch_setting
from lit_efficient.evidence.planning.plan_search import Found, Predictions, Refusal, changed, largest

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.plan import Plan

_STEP = 64  # of contexts, where what is set is a multiple of it
_DEEP = 3  # blocks of arguments in blocks


@dataclass(frozen=True)
class Lever:
    """Settings that have one value, and what they are for."""

    names: tuple[str, ...]  # the settings, as in a config
    now: int  # their value
    step: int = 1  # what values are multiples of
    samples: bool = False  # whether it is how many samples a batch has: more than there are make no larger one

    def set(self, value: int, base: Change = AS_IT_IS) -> Change:
        """A change with another value."""
        return changed(base, dict.fromkeys(self.names, value))

    def largest(self, predictions: Predictions, base: Change = AS_IT_IS) -> Found:
        """The largest value that fits, beside a change."""
        predictions.begin(self.names[0], 12)
        amiss = _too_few if self.samples else None
        return largest(predictions, lambda value: self.set(value, base), self.now, step=self.step, amiss=amiss)


def _too_few(value: int, plan: "Plan") -> str:
    return "" if plan.batch >= value else f"the data's batches have {plan.batch:,} samples at most"


def batch_lever(fit: Fit, predictions: Predictions, plan: "Plan") -> Lever:
    """The setting that is the batch's size.

    Raises:
        ConfigurationError: If there is none.
    """
    predictions.begin("which setting is the batch", 2)
    named = batch_setting(fit)
    if named is not None:
        name, now = named
        for value in (2 * now, now // 2):
            found = predictions(Change("", {name: value})) if value else Refusal("")
            if not isinstance(found, Refusal) and found.batch != plan.batch:
                return Lever((name,), now, samples=now == plan.batch)
    raise ConfigurationError(
        f"plan: no setting of {_owners(fit)} changes the batch of {plan.batch}, so that its size cannot be searched: "
        "give the DataModule an argument batch_size that its loaders follow"
    )


def length_lever(fit: Fit, predictions: Predictions, plan: "Plan") -> Lever:
    """The settings that are the context, in tokens, and go up together: of the data, and of the network if it has one.

    Raises:
        ConfigurationError: If there is none.
    """
    if plan.unit != "tokens":
        raise refusal("plan", "--solve max_length", "asked of rows of tokens", f"rows of {plan.unit}")
    predictions.begin("which setting is the context", 6)
    row = plan.amount / max(1, plan.batch * int(fit.trainer.accumulate_grad_batches))
    numbers = {name: value for name, value in _numbers_of(fit) if name.startswith("data.")}
    for name in sorted(numbers, key=lambda name: abs(numbers[name] - row)):
        for value in (2 * numbers[name], numbers[name] // 2):
            found = predictions(Change("", {name: value})) if value > 1 else Refusal("")
            if isinstance(found, Refusal):
                continue
            if found.batch == plan.batch and found.amount != plan.amount:
                now = numbers[name]
                return Lever((name, *_beside(fit, predictions, name, now)), now, _STEP if now % _STEP == 0 else 1)
            break  # it was tried, and changes something else
    raise ConfigurationError(f"plan: no setting of {_owners(fit)} changes how many tokens a row has")


def _beside(fit: Fit, predictions: Predictions, name: str, now: int) -> Iterator[str]:
    """What has to grow, too, for a context that is refused without it."""
    limits = sorted({value for one, value in _numbers_of(fit) if one.startswith("model.") and value >= now})
    for limit in limits:
        alone = Change("", {name: 2 * limit})
        if not isinstance(predictions(alone), Refusal):
            continue
        for other in (one for one, value in _numbers_of(fit) if one.startswith("model.") and value == limit):
            if not isinstance(predictions(changed(alone, {other: 2 * limit})), Refusal):
                yield other
                return


def rank_lever(fit: Fit) -> Lever:
    """The rank of the adapters.

    Raises:
        ConfigurationError: If there are no adapters that have one.
    """
    for technique in techniques_of(fit.trainer):
        rank = getattr(technique, "rank", None)
        if technique.phase is Phase.ADAPT and isinstance(rank, int) and "rank" in technique.arguments():
            return Lever((f"{type(technique).__name__}.rank",), rank)
    raise ConfigurationError("plan: --solve lora_rank: the config has no adapters of a rank; add some: -c lora")


def _owners(fit: Fit) -> str:
    return " and ".join(type(one).__name__ for one in (fit.data, fit.module) if one is not None)


def _numbers_of(fit: Fit) -> Iterator[tuple[str, int]]:
    """Whole numbers above 0 among the constructor's arguments of data and module, by their names in a config."""
    for part, owner in (("data", fit.data), ("model", fit.module)):
        if owner is not None:
            known = inspect.signature(type(owner)).parameters
            values = {name: getattr(owner, name, None) for name in known}
            hparams = getattr(owner, "hparams", None)
            stored = hparams if isinstance(hparams, Mapping) else {}
            yield from _numbers({name: stored.get(name) if v is None else v for name, v in values.items()}, part)


def _numbers(tree: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    if isinstance(tree, int) and not isinstance(tree, bool) and tree > 0:
        yield prefix, tree
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from _numbers({field.name: getattr(tree, field.name) for field in fields(tree)}, prefix, depth)
    elif isinstance(tree, Mapping) and depth < _DEEP:
        for name, value in tree.items():
            yield from _numbers(value, f"{prefix}.{name}", depth + 1)
