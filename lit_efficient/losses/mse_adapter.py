"""Weigh the one ``F.mse_loss`` of code that knows nothing of sample weights, by the noise its scheduler added.

    loss = mean_i(w_i * mean((input_i - target_i)^2)),    w_i from log SNR_i = 2 log(alpha_i / sigma_i)

While the context is open, the scheduler's ``add_noise`` (or ``scale_noise``) is listened to, and ``F.mse_loss`` is
answered by the weighted loss. alpha and sigma are asked of the scheduler itself: noise is added to a one without noise,
and to a zero with noise one, at the same timesteps in float64. So any scheduler that scales and adds will do, whatever
its tables look like.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.torch_tensors import widest_float

_METHODS = ("add_noise", "scale_noise")  # diffusers' names: of diffusion, and of flow matching


@contextmanager
def weigh_mse_loss(
    scheduler: Any, weights_of: Callable[[Tensor], Tensor], *, who: str = "weigh_mse_loss"
) -> Iterator[None]:
    """A context in which exactly one call of ``F.mse_loss`` (or ``nn.MSELoss``) is weighted sample by sample.

    Args:
        scheduler: A noise scheduler in the manner of diffusers, with ``add_noise(samples, noise, timesteps)`` or
            ``scale_noise(sample, timestep, noise)``; one of them is called once inside, before the loss.
        weights_of: Takes log-SNRs [B], float64, and returns weights [B].
        who: Name for the errors.

    Raises:
        ConfigurationError: If inside the context ``F.mse_loss`` is not called exactly once, or noise was not added
            exactly once before it; also for a size that differs, or ``mse_loss(weight=)``.
    """
    levels: list[Tensor] = []
    name = noise_method(scheduler)
    original = getattr(scheduler, name)

    def listen(*args: Any, **kwargs: Any) -> Any:
        levels.append(_log_snr(original, name, args, kwargs))
        return original(*args, **kwargs)

    mode = _WeightedLoss(levels, weights_of, f"{type(scheduler).__name__}.{name}", who)
    previous = vars(scheduler).get(name)
    setattr(scheduler, name, listen)
    try:
        with mode:
            yield
    finally:
        delattr(scheduler, name)
        if previous is not None:
            setattr(scheduler, name, previous)
    if mode.calls != 1:
        raise ConfigurationError(
            f"{who}: the step did not call F.mse_loss, so no loss was weighted; return sample losses instead: "
            '{"loss", "sample_loss": [B], "log_snr": [B]}'
        )


class _WeightedLoss(TorchFunctionMode):
    """Answers ``F.mse_loss`` itself and lets every other function pass."""

    def __init__(self, levels: list[Tensor], weights_of: Callable[[Tensor], Tensor], source: str, who: str) -> None:
        super().__init__()
        self.levels, self.weights_of, self.source, self.who = levels, weights_of, source, who
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Part of the mode's protocol; the mode itself is off in here."""
        if func is not F.mse_loss:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        if self.calls > 1:
            raise ConfigurationError(
                f"{self.who}: F.mse_loss was called a second time, and only one call can be weighted by the noise of "
                'the step; return sample losses instead: {"loss", "sample_loss": [B], "log_snr": [B]}'
            )
        return self._weighted(*args, **(kwargs or {}))

    def _weighted(
        self,
        input: Tensor,
        target: Tensor,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
    ) -> Tensor:
        if weight is not None or size_average is not None or reduce is not None:
            raise ConfigurationError(f"{self.who}: F.mse_loss(weight=, size_average=, reduce=) is not supported")
        if len(self.levels) != 1:
            raise ConfigurationError(
                f"{self.who}: {self.source} was called {len(self.levels)} times before F.mse_loss, not once. "
                'Where noise is added by other means, return {"loss", "sample_loss": [B], "log_snr": [B]} instead'
            )
        errors = F.mse_loss(input, target, reduction="none")
        if len(errors) != len(self.levels[0]):
            raise ConfigurationError(
                f"{self.who}: F.mse_loss got {len(errors)} rows, but noise was added to {len(self.levels[0])} samples"
            )
        weights = self.weights_of(self.levels[0]).to(errors)
        if reduction == "mean":
            return (errors.reshape(len(errors), -1).mean(1) * weights).mean()
        errors = errors * weights.view(-1, *[1] * (errors.ndim - 1))
        return errors.sum() if reduction == "sum" else errors


def _log_snr(method: Callable[..., Tensor], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """log-SNRs [B] of a call, in float64 where the device has it."""
    order = ("sample", "timestep", "noise") if name == "scale_noise" else ("original_samples", "noise", "timesteps")
    given = dict(zip(order, args)) | kwargs
    sample, noise, step = order[0], "noise", order[2 if name == "add_noise" else 1]
    device = given[sample].device
    one = torch.ones(len(given[sample]), 1, dtype=widest_float(device), device=device)
    none = torch.zeros_like(one)
    alpha = method(**{sample: one, noise: none, step: given[step]})
    sigma = method(**{sample: none, noise: one, step: given[step]})
    return 2 * (alpha.log() - sigma.log()).flatten()


def noise_method(scheduler: Any) -> str:
    """Which of ``add_noise`` and ``scale_noise`` a scheduler has.

    Raises:
        ConfigurationError: If it has neither.
    """
    for name in _METHODS:
        if callable(getattr(type(scheduler), name, None)):
            return name
    raise ConfigurationError(f"{type(scheduler).__name__} has neither {' nor '.join(_METHODS)}")


def find_scheduler(module: nn.Module, *, who: str, name: str | None = None) -> Any:
    """The noise scheduler among the attributes of ``module`` and its submodules: the one ``name``, or the only one.

    Args:
        module: Any module.
        who: Name for the errors.
        name: End of its dotted name, where there are several, as one for training and one for sampling.

    Raises:
        ConfigurationError: If there is none, or more than one.
    """
    found: list[tuple[str, Any]] = []
    for path, part in module.named_modules():
        for attribute, value in vars(part).items():
            if not isinstance(value, nn.Module) and any(callable(getattr(type(value), m, None)) for m in _METHODS):
                found.append((f"{path}.{attribute}".lstrip("."), value))
    exact = [value for own, value in found if own == name]
    ends = [value for own, value in found if name is None or own.endswith(f".{name}")]
    chosen = {id(value): value for value in exact or ends}
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    names = ", ".join(own for own, _ in found) or "none"
    if name is not None:
        raise refusal(who, "scheduler", f"the end of one attribute's name, of {names}", name)
    raise ConfigurationError(
        f"{who}: {type(module).__name__} must hold exactly one object with {' or '.join(_METHODS)} as an attribute (a "
        f"scheduler of diffusers, for example); it holds {names}{': name one by scheduler' if found else ''}"
    )
