"""Sample weights for training code that calls ``F.mse_loss`` once, by the noise level that its scheduler applied.

    loss = mean_i(w_i * mean((input_i - target_i)^2)),    w_i from log SNR_i = 2 log(alpha_i / sigma_i)

Inside the context, ``F.mse_loss`` returns the weighted loss. The noise levels come from the call of the scheduler's
``add_noise`` (or ``scale_noise``): the scheduler is applied to a sample of 1 with noise 0, which gives alpha, and to a
sample of 0 with noise 1, which gives sigma, at the same timesteps in float64. This works for every scheduler that
computes alpha x + sigma eps, without access to its tables.
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

_METHODS = ("add_noise", "scale_noise")  # names in diffusers, for diffusion and for flow matching
_INSTEAD = 'return sample losses instead: {"loss", "sample_loss": [B], "log_snr": [B]}'


@contextmanager
def weigh_mse_loss(
    scheduler: object, weights_of: Callable[[Tensor], Tensor], *, who: str = "weigh_mse_loss"
) -> Iterator[None]:
    """Context manager that weights the samples in one call of ``F.mse_loss`` (or ``nn.MSELoss``).

    Args:
        scheduler: Noise scheduler with the interface of diffusers: ``add_noise(samples, noise, timesteps)`` or
            ``scale_noise(sample, timestep, noise)``. It must be called once inside the context, before the loss.
        weights_of: Function of log-SNRs [B], float64, to weights [B].
        who: Name at the beginning of error messages.

    Raises:
        ConfigurationError: If ``F.mse_loss`` is not called exactly once, if noise is not added exactly once before it,
            if both calls have different batch sizes, or for ``mse_loss(weight=)``.
    """
    levels: list[Tensor] = []
    name = noise_method(scheduler)
    original = getattr(scheduler, name)

    def record_level(*args: object, **kwargs: object) -> object:
        levels.append(_log_snr(original, name, args, kwargs))
        return original(*args, **kwargs)

    mode = _WeightedLoss(levels, weights_of, f"{type(scheduler).__name__}.{name}", who)
    previous = vars(scheduler).get(name)
    setattr(scheduler, name, record_level)
    try:
        with mode:
            yield
    finally:
        delattr(scheduler, name)
        if previous is not None:
            setattr(scheduler, name, previous)
    if mode.calls != 1:
        raise ConfigurationError(f"{who}: the step did not call F.mse_loss, so no loss was weighted; {_INSTEAD}")


class _WeightedLoss(TorchFunctionMode):
    """Mode that replaces ``F.mse_loss`` and calls every other function unchanged."""

    def __init__(self, levels: list[Tensor], weights_of: Callable[[Tensor], Tensor], source: str, who: str) -> None:
        super().__init__()
        self.levels = levels
        self.weights_of = weights_of
        self.source = source
        self.who = who
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch disables the mode inside this method, so F.mse_loss can be called below.
        if func is not F.mse_loss:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        if self.calls > 1:
            raise ConfigurationError(
                f"{self.who}: F.mse_loss was called a second time, but only one call can be weighted by the noise "
                f"level of the step; {_INSTEAD}"
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
                f"{self.who}: {self.source} was called {len(self.levels)} times before F.mse_loss, not once. If the "
                f"step adds noise in another way, {_INSTEAD}"
            )
        errors = F.mse_loss(input, target, reduction="none")
        if len(errors) != len(self.levels[0]):
            raise ConfigurationError(
                f"{self.who}: F.mse_loss got {len(errors)} samples, but noise was added to {len(self.levels[0])}"
            )
        weights = self.weights_of(self.levels[0]).to(errors)
        if reduction == "mean":
            return (errors.reshape(len(errors), -1).mean(1) * weights).mean()
        errors = errors * weights.view(-1, *[1] * (errors.ndim - 1))
        return errors.sum() if reduction == "sum" else errors


def _log_snr(method: Callable[..., Tensor], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the log-SNRs [B] of a call of the scheduler, in float64 if the device supports it."""
    if name == "scale_noise":
        sample, step = "sample", "timestep"
        order = (sample, step, "noise")
    else:
        sample, step = "original_samples", "timesteps"
        order = (sample, "noise", step)
    given = dict(zip(order, args)) | kwargs
    device = given[sample].device
    ones = torch.ones(len(given[sample]), 1, dtype=widest_float(device), device=device)
    zeros = torch.zeros_like(ones)
    alpha = method(**{sample: ones, "noise": zeros, step: given[step]})
    sigma = method(**{sample: zeros, "noise": ones, step: given[step]})
    return 2 * (alpha.log() - sigma.log()).flatten()


def _methods_of(value: object) -> list[str]:
    return [name for name in _METHODS if callable(getattr(type(value), name, None))]


def noise_method(scheduler: object) -> str:
    """Return the name of the method with which a scheduler adds noise: ``add_noise`` or ``scale_noise``.

    Raises:
        ConfigurationError: If the scheduler has neither.
    """
    methods = _methods_of(scheduler)
    if methods:
        return methods[0]
    raise ConfigurationError(f"{type(scheduler).__name__} has neither {' nor '.join(_METHODS)}")


def find_scheduler(module: nn.Module, *, who: str, name: str | None = None) -> object:
    """Return the noise scheduler that is an attribute of ``module`` or one of its submodules.

    Args:
        module: Any module.
        who: Name at the beginning of error messages.
        name: End of the dotted name of the attribute. It is needed if there are several schedulers, such as one for
            training and one for sampling.

    Raises:
        ConfigurationError: If no scheduler or more than one matches.
    """
    found: list[tuple[str, object]] = []
    for path, part in module.named_modules():
        for attribute, value in vars(part).items():
            if not isinstance(value, nn.Module) and _methods_of(value):
                found.append((f"{path}.{attribute}".lstrip("."), value))
    exact = [value for own, value in found if own == name]
    ends = [value for own, value in found if name is None or own.endswith(f".{name}")]
    chosen = {id(value): value for value in exact or ends}  # two attributes may hold the same object
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    names = ", ".join(own for own, _ in found) or "none"
    if name is not None:
        raise refusal(who, "scheduler", f"the end of exactly one of these attribute names: {names}", name)
    hint = ". Name one of them by scheduler" if found else ""
    raise ConfigurationError(
        f"{who}: {type(module).__name__} must hold exactly one object with {' or '.join(_METHODS)} as an attribute (a "
        f"scheduler of diffusers, for example); it holds {names}{hint}"
    )
