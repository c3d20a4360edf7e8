"""Min-SNR weighting: stop the nearly clean samples from dominating the training of a diffusion model.

    loss = mean_i(w_i * sample_loss_i),    w = min(SNR, gamma) for x0, converted to eps, v or flow

Saves: training steps; the paper reports 3.4 times fewer to the same FID for ViT diffusion on ImageNet
Costs: a few elementwise operations on [B] a step
Source: Hang et al. (2023), https://arxiv.org/abs/2303.09556
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.snr import PREDICTIONS, check_snr_arguments, min_snr_weight
from lit_efficient.technique import Phase, Report, Technique

# How diffusers' schedulers call the targets.
_ALIASES = {"epsilon": "eps", "v_prediction": "v", "sample": "x0", "flow_prediction": "flow"}


class SNRWeighting(Technique):
    """Weigh each sample's loss by its signal-to-noise ratio.

    ``training_step`` returns ``{"loss", "sample_loss": [B], "log_snr": [B]}``. Instead of ``log_snr`` it may return
    integer ``timesteps`` [B] if the module (or its ``noise_scheduler``) has ``alphas_cumprod``.

    Args:
        rule: The weighting rule: ``min_snr``.
        gamma: Where the weight of the clean sample is capped, above 0.
        prediction: What ``sample_loss`` measures the error of: ``eps``, ``v``, ``x0`` or ``flow``. ``auto`` reads it
            from the module: ``prediction``, ``prediction_type`` or ``noise_scheduler.config.prediction_type``.
        zero_snr: At zero SNR (a zero-terminal schedule), ``unit`` gives the weight 1 and ``error`` raises.

    Raises:
        ConfigurationError: For an argument out of range; in the first step if the module does not return the protocol.

    Example:
        >>> Trainer(callbacks=[SNRWeighting(gamma=5)])  # doctest: +SKIP
    """

    phase = Phase.LOSS
    conflicts: ClassVar[dict[str, str]] = {}

    def __init__(
        self, rule: str = "min_snr", gamma: float = 5.0, prediction: str = "auto", zero_snr: str = "unit"
    ) -> None:
        super().__init__()
        if rule != "min_snr":
            raise ConfigurationError(f"SNRWeighting: rule must be min_snr, got {rule!r}")
        if prediction != "auto" and prediction not in PREDICTIONS:
            allowed = ", ".join(("auto", *PREDICTIONS))
            raise ConfigurationError(f"SNRWeighting: prediction must be one of {allowed}; got {prediction!r}")
        check_snr_arguments(gamma, "eps", zero_snr)
        self.rule = rule
        self.gamma = gamma
        self.prediction = prediction
        self.zero_snr = zero_snr

    def describe(self, module: nn.Module) -> Report:
        """The rule and the target it is converted to."""
        prediction = self.prediction if self.prediction != "auto" else _prediction_of(module)
        return Report(f"{self.rule} with gamma {self.gamma:g} for a network that predicts {prediction}")

    def sample_weights(self, output: Mapping[str, Any], module: nn.Module) -> Tensor:
        """Weights [B] from the noise levels in ``output``."""
        prediction = self.prediction if self.prediction != "auto" else _prediction_of(module)
        return min_snr_weight(_log_snr(output, module), self.gamma, prediction, self.zero_snr)


def _prediction_of(module: nn.Module) -> str:
    config = getattr(getattr(module, "noise_scheduler", None), "config", None)
    for owner, name in ((module, "prediction"), (module, "prediction_type"), (config, "prediction_type")):
        value = getattr(owner, name, None)
        if isinstance(value, str):
            value = _ALIASES.get(value, value)
            if value in PREDICTIONS:
                return value
            raise ConfigurationError(
                f"SNRWeighting: {type(owner).__name__}.{name} is {value!r}; allowed: {', '.join(PREDICTIONS)}, or "
                f"diffusers' {', '.join(_ALIASES)}"
            )
    raise ConfigurationError(
        f"SNRWeighting: {type(module).__name__} does not say what it predicts; set prediction= to one of "
        f"{', '.join(PREDICTIONS)}, or give the module an attribute `prediction`"
    )


def _log_snr(output: Mapping[str, Any], module: nn.Module) -> Tensor:
    if "log_snr" in output:
        return output["log_snr"]
    scheduler = getattr(module, "noise_scheduler", None)
    alphas_cumprod = getattr(module, "alphas_cumprod", getattr(scheduler, "alphas_cumprod", None))
    if "timesteps" not in output or alphas_cumprod is None:
        raise ConfigurationError(
            f"SNRWeighting: {type(module).__name__}.training_step must return log_snr [B], or timesteps [B] with "
            f"alphas_cumprod on the module or its noise_scheduler; it returned {sorted(output)}"
        )
    signal = torch.as_tensor(alphas_cumprod, device=output["timesteps"].device)[output["timesteps"].long()]
    return torch.logit(signal.double()).float()
