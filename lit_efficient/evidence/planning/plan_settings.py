"""Find the settings of a fit that hold its batch size, its context length and the rank of its adapters.

The setting of the batch size is a whole number of the data or the module that is equal to the batch size, and whose
change changes the batch of the plan. The setting of the context length changes the amount of data in a batch instead.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

from lit_efficient.declaration import Phase, techniques_of
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, batch_setting
from lit_efficient.evidence.planning.plan_search import Found, Predictions, Refusal, changed, largest
from lit_efficient.mechanisms.trials.batch_size import NAMES, stored_argument

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.plan import Plan

_LENGTH_STEP = 64  # divisor of context lengths, if it divides the current one
_DEEPEST = 3  # nesting of arguments that is searched


@dataclass(frozen=True)
class Lever:
    """Settings that share one value and are changed together."""

    names: tuple[str, ...]  # names as in a config
    now: int  # current value
    step: int = 1  # divisor of all values
    samples: bool = False  # True if the value is the number of samples in a batch

    def set(self, value: int, base: Change = AS_IT_IS) -> Change:
        """Return ``base`` with another value."""
        return changed(base, dict.fromkeys(self.names, value))

    def largest(self, predictions: Predictions, base: Change = AS_IT_IS) -> Found:
        """Search for the largest value that fits together with ``base``."""
        predictions.begin(self.names[0], 12)
        # A batch cannot have more samples than the data.
        amiss = _too_few if self.samples else None
        return largest(predictions, lambda value: self.set(value, base), self.now, step=self.step, amiss=amiss)


def _too_few(value: int, plan: "Plan") -> str:
    if plan.batch >= value:
        return ""
    return f"the data's batches have {plan.batch:,} samples at most"


def batch_lever(fit: Fit, predictions: Predictions, plan: "Plan") -> Lever:
    """Return the setting of the batch size.

    Raises:
        ConfigurationError: If no setting changes the batch of the plan.
    """
    predictions.begin("search for the setting of the batch size", 2)
    for name, now in _batch_settings(fit, plan):
        # The data may have too few samples for twice the batch.
        for value in (2 * now, now // 2):
            if not value:
                continue
            found = predictions(Change("", {name: value}))
            if not isinstance(found, Refusal) and found.batch != plan.batch:
                return Lever((name,), now, samples=now == plan.batch)
    raise ConfigurationError(
        f"plan: no setting of {_owners(fit)} changes the batch of {plan.batch}, so its size cannot be searched: "
        "give the DataModule an argument batch_size that its loaders follow, stored as self.batch_size"
    )


def _batch_settings(fit: Fit, plan: "Plan") -> Iterator[tuple[str, int]]:
    setting = batch_setting(fit)
    if setting is not None:
        yield setting
        return
    # A config can also set an argument whose value is not an attribute of that name.
    for part, owner in (("data", fit.datamodule), ("model", fit.module)):
        for name in NAMES:
            if owner is not None and name in inspect.signature(type(owner)).parameters:
                yield f"{part}.{name}", plan.batch


def length_lever(fit: Fit, predictions: Predictions, plan: "Plan") -> Lever:
    """Return the settings of the context length in tokens: of the data, and of the network if it has a limit.

    Raises:
        ConfigurationError: If no setting changes the number of tokens, or the data holds no tokens.
    """
    if plan.unit != "tokens":
        raise refusal("plan", "--solve max_length", "asked of rows of tokens", f"rows of {plan.unit}")
    predictions.begin("search for the setting of the context length", 6)
    row = plan.amount / max(1, plan.batch * int(fit.trainer.accumulate_grad_batches))
    numbers = {name: value for name, value in _numbers_of(fit) if name.startswith("data.")}
    # The number of tokens in a row is most likely equal or close to the setting.
    for name in sorted(numbers, key=lambda name: abs(numbers[name] - row)):
        now = numbers[name]
        for value in (2 * now, now // 2):
            if value <= 1:
                continue
            found = predictions(Change("", {name: value}))
            # Twice the length may be too long for the network, so half of it is tried too.
            if isinstance(found, Refusal):
                continue
            if found.batch == plan.batch and found.amount != plan.amount:
                step = 1
                if now % _LENGTH_STEP == 0:
                    step = _LENGTH_STEP
                return Lever((name, *_limit_of_network(fit, predictions, name, now)), now, step)
            break  # the setting changes something else
    raise ConfigurationError(f"plan: no setting of {_owners(fit)} changes the number of tokens in a row")


def _limit_of_network(fit: Fit, predictions: Predictions, name: str, now: int) -> list[str]:
    """Return the setting of the network without whose change a longer context is refused; empty if there is none."""
    numbers = [(one, value) for one, value in _numbers_of(fit) if one.startswith("model.") and value >= now]
    for limit in sorted({value for _, value in numbers}):
        longer = Change("", {name: 2 * limit})
        if isinstance(predictions(longer), Refusal):
            for other, value in numbers:
                if value == limit and not isinstance(predictions(changed(longer, {other: 2 * limit})), Refusal):
                    return [other]
    return []


def rank_lever(fit: Fit) -> Lever:
    """Return the setting of the rank of the adapters.

    Raises:
        ConfigurationError: If the fit has no adapters with a rank.
    """
    # Other techniques may have a rank too, such as low-rank optimizers.
    for technique in techniques_of(fit.trainer):
        rank = getattr(technique, "rank", None)
        if technique.phase is Phase.ADAPT and isinstance(rank, int) and "rank" in technique.arguments():
            return Lever((f"{type(technique).__name__}.rank",), rank)
    raise ConfigurationError("plan: --solve lora_rank: the config has no adapters with a rank; add some: -c lora")


def _owners(fit: Fit) -> str:
    return " and ".join(type(one).__name__ for one in (fit.data, fit.module) if one is not None)


def _numbers_of(fit: Fit) -> Iterator[tuple[str, int]]:
    """Yield the positive whole numbers among the constructor arguments of data and module, with their config names."""
    for part, owner in (("data", fit.data), ("model", fit.module)):
        if owner is None:
            continue
        stored = getattr(owner, "hparams", None)
        arguments = {}
        for name in inspect.signature(type(owner)).parameters:
            value = stored_argument(owner, name)
            # An argument need not be an attribute, but may be saved as a hyperparameter.
            if value is None and isinstance(stored, Mapping):
                value = stored.get(name)
            arguments[name] = value
        yield from _numbers(arguments, part)


def _numbers(tree: object, prefix: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    if isinstance(tree, int) and not isinstance(tree, bool) and tree > 0:
        yield prefix, tree
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from _numbers({field.name: getattr(tree, field.name) for field in fields(tree)}, prefix, depth)
    elif isinstance(tree, Mapping) and depth < _DEEPEST:
        for name, value in tree.items():
            yield from _numbers(value, f"{prefix}.{name}", depth + 1)
