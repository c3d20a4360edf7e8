"""Loss protocol: techniques weigh the losses of samples that any module's ``training_step`` computes.

    loss = mean_i(w_i * sample_loss_i) + extra_loss,    w = the product of all techniques' weights

``training_step`` returns ``{"loss", "sample_loss", ...}``. Techniques get the whole dict and return weights [B]. Later
hooks get the dict with the new ``loss`` and without the further keys of the protocol.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError

PROTOCOL = """return a dict from training_step:
  {"loss": sample_loss.mean(), "sample_loss": Tensor [B], "log_snr": Tensor [B]},
  or "timesteps": Tensor [B] for "log_snr" where the module has alphas_cumprod or a noise_scheduler;
  a further term of the loss goes into "extra_loss": a scalar, added to "loss", which no weight touches;
  or leave the module as it is: SNRWeighting(adapter="mse_loss") if it calls a scheduler's add_noise and F.mse_loss"""

_EXTRAS = ("sample_loss", "timesteps", "log_snr", "extra_loss", "predicted", "target", "cleaner")


Weigher = tuple[str, Callable[[Mapping[str, Any]], Tensor]]


def weigh(output: Any, weighers: Sequence[Weigher], owner: str) -> object:
    """Recompute ``output["loss"]`` from weighted sample losses and drop the further keys of the protocol.

    Args:
        output: Return value of ``training_step``. ``None``, which skips the step, is returned unchanged.
        weighers: Names of techniques, and functions from the output to weights [B].
        owner: Name of the module's class, for errors.

    Raises:
        ConfigurationError: If ``output`` does not follow the protocol, or its ``loss`` is not what the protocol says.
    """
    if output is None:
        return None
    sample_loss = sample_losses(output, f"{weighers[0][0]} got no sample losses from {owner}.training_step")
    for name, weights_of in weighers:
        weights = weights_of(output)
        if weights.shape != sample_loss.shape:
            raise ConfigurationError(
                f"{name} gave weights of the shape {list(weights.shape)} for sample losses of {list(sample_loss.shape)}"
            )
        sample_loss = sample_loss * weights.to(sample_loss)
    if "extra_loss" in output:
        loss = sample_loss.mean() + output["extra_loss"]
    else:
        loss = sample_loss.mean()
    return {key: value for key, value in output.items() if key not in _EXTRAS} | {"loss": loss}


def add_loss(output: Any, term: Tensor, name: str, owner: str) -> object:
    """Return the output of ``training_step`` with a term added to the tensor, or to ``loss`` in a dict.

    In a dict with ``sample_loss`` the term is also added to ``extra_loss``, which weights do not change.

    Raises:
        ConfigurationError: If ``output`` is neither a tensor nor a dict with a tensor in ``loss``.
    """
    if isinstance(output, Tensor):
        return output + term
    if not isinstance(output, Mapping) or not isinstance(output.get("loss"), Tensor):
        found = sorted(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
        raise ConfigurationError(
            f"{name} adds a term to the loss, but {owner}.training_step returned {found}: return the loss, or a dict "
            'with it in "loss"'
        )
    changed = {**output, "loss": output["loss"] + term}
    if "sample_loss" in output:
        changed["extra_loss"] = output.get("extra_loss", 0.0) + term
    return changed


def product(output: Mapping[str, object], weighers: Sequence[Weigher]) -> Tensor:
    """Return the product [B] of all weights, for losses that are weighted where they are computed."""
    return math.prod((weights_of(output) for _, weights_of in weighers[1:]), start=weighers[0][1](output))


def sample_losses(output: Any, complaint: str) -> Tensor:
    """Return the losses [B] of the samples in the output of ``training_step``.

    Raises:
        ConfigurationError: If there are none; the message begins with ``complaint``.
    """
    if not isinstance(output, Mapping):
        raise ConfigurationError(f"{complaint}, but a {type(output).__name__}; {PROTOCOL}")
    if "sample_loss" not in output:
        raise ConfigurationError(f"{complaint}, but {sorted(output)}; {PROTOCOL}")
    sample_loss: Tensor = output["sample_loss"]
    if sample_loss.ndim != 1:
        raise ConfigurationError(f'"sample_loss" must have the shape [B], got {list(sample_loss.shape)}; {PROTOCOL}')
    return sample_loss


def check_loss(output: Mapping[str, Any], module: nn.Module) -> None:
    """Check that ``loss`` equals the mean of ``sample_loss`` plus ``extra_loss``: other terms would be lost.

    Raises:
        ConfigurationError: If they differ; the message gives both values.
    """
    expected = output["sample_loss"].detach().mean() + output.get("extra_loss", 0.0)
    loss = output["loss"].detach()
    if not torch.allclose(loss, expected.to(loss), rtol=1e-3, atol=1e-6, equal_nan=True):
        raise ConfigurationError(
            f'{type(module).__name__}.training_step: "loss" is {float(loss):.6g}, but the mean of "sample_loss" plus '
            f'"extra_loss" is {float(expected):.6g}; {PROTOCOL}'
        )


def builds_no_layers(setup: Callable[..., None]) -> Callable[..., None]:
    """Mark a module's ``setup`` that builds no part of the network, which is then complete without data."""
    setup.builds_no_layers = True  # type: ignore[attr-defined]
    return setup
