"""SNR weighting: weight the noise levels of a diffusion model, so that nearly clean samples do not dominate.

    loss = mean_i(w_i * sample_loss_i),    w = w_x0(SNR) / (dT/dx0)^2;    Min-SNR: w_x0 = min(SNR, gamma)

Saves: training steps; the paper reports 3.4 times fewer to the same FID for a diffusion ViT on ImageNet
Costs: a few elementwise operations on [B] per step; with ``adapter`` about a microsecond per call of a torch function
Source: Hang et al. (2023), https://arxiv.org/abs/2303.09556; the other rules: see :mod:`lit_efficient.losses.snr`
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.application.loss import LossHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_choice, refusal
from lit_efficient.internals.torch_tensors import widest_float
from lit_efficient.losses.mse_adapter import find_scheduler, noise_method, weigh_mse_loss
from lit_efficient.losses.snr import GAMMAS, PREDICTIONS, check_snr_arguments, snr_weight
from lit_efficient.surgery import moved
from lit_efficient.technique import Technique

# Names of the targets in diffusers' schedulers.
_ALIASES = {"epsilon": "eps", "v_prediction": "v", "sample": "x0", "flow_prediction": "flow"}
_ADAPTERS = ("none", "mse_loss")


class SNRWeighting(LossHooks, Technique):
    """Weight each sample's loss by its signal-to-noise ratio.

    ``training_step`` returns ``{"loss", "sample_loss": [B], "log_snr": [B]}``. Instead of ``log_snr`` it may return
    integer ``timesteps`` [B] if the module or its ``noise_scheduler`` has ``alphas_cumprod``. A module that returns
    something else needs an ``adapter``.

    Args:
        rule: The weighting rule: ``min_snr``, ``soft_min_snr``, ``p2``, ``debiased``, ``truncated``, or ``sigma_sqrt``
            and ``cosmap`` from the training of SD3.
        gamma: For ``min_snr`` and ``soft_min_snr`` the largest weight of the error of the clean sample, for ``p2`` the
            exponent, above 0. ``None``: the value of the paper, which is 5, 4 and 1. Other rules have no gamma.
        prediction: The network's target, whose error ``sample_loss`` is: ``eps``, ``v``, ``x0``, ``flow`` or ``edm``.
            ``auto`` reads it from the module: ``prediction``, ``prediction_type`` or
            ``noise_scheduler.config.prediction_type``. For ``edm`` the standard deviation of the data is
            ``process.sigma_data`` of the module, or 1.
        zero_snr: Weight at exactly zero SNR, as in a schedule that ends with pure noise. ``unit``: 1. ``error`` raises
            an error.
        adapter: ``mse_loss`` is for an unchanged module that calls ``add_noise`` or ``scale_noise`` of its scheduler
            and then ``F.mse_loss``, each once per step. The call of ``F.mse_loss`` is then weighted, and
            ``training_step`` may return anything. ``none``: ``training_step`` returns the values above.
        scheduler: With ``mse_loss``, the end of the dotted name of the scheduler to use, if the module has several.
            ``None``: the only one.

    Raises:
        ConfigurationError: For an argument out of range. In the first step if ``training_step`` does not return these
            values, or does not make the calls that the adapter needs.
    """

    phase = Phase.LOSS
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (3, "weights the noise levels of diffusion")}

    def __init__(
        self,
        rule: str = "min_snr",
        gamma: float | None = None,
        prediction: str = "auto",
        zero_snr: str = "unit",
        adapter: str = "none",
        scheduler: str | None = None,
    ) -> None:
        super().__init__()
        check_snr_arguments(rule, gamma, "eps", zero_snr, who="SNRWeighting")
        check_choice("SNRWeighting", "prediction", prediction, ("auto", *PREDICTIONS))
        check_choice("SNRWeighting", "adapter", adapter, _ADAPTERS)
        if scheduler is not None and adapter == "none":
            raise refusal("SNRWeighting", "scheduler", "None without adapter='mse_loss'", scheduler)
        self.rule = rule
        self.gamma = gamma
        self.prediction = prediction
        self.zero_snr = zero_snr
        self.adapter = adapter
        self.scheduler = scheduler

    def describe(self, module: nn.Module) -> Report:
        summary = self.rule
        gamma = self.gamma
        if gamma is None:
            gamma = GAMMAS.get(self.rule)
        if gamma is not None:
            summary += f" with gamma {gamma:g}"
        summary += f" for a network that predicts {self._prediction_of(module)}"
        if self.adapter == "mse_loss":
            summary += ", in the call of F.mse_loss"
        return Report(summary)

    def sample_weights(self, output: Mapping[str, object], module: nn.Module) -> Tensor:
        levels = _log_snr(output, module)
        spread = float(getattr(getattr(module, "process", None), "sigma_data", 1.0))
        return snr_weight(levels, self.rule, self.gamma, self._prediction_of(module), self.zero_snr, spread)

    def weigh_inside(
        self, module: nn.Module, weights_of: Callable[[Mapping[str, Any]], Tensor]
    ) -> AbstractContextManager[None] | None:
        """Return a context in which ``F.mse_loss`` is weighted, or ``None`` without an adapter."""
        if self.adapter == "none":
            return None
        scheduler = find_scheduler(module, who="SNRWeighting", name=self.scheduler)
        return weigh_mse_loss(scheduler, lambda levels: weights_of({"log_snr": levels.float()}), who="SNRWeighting")

    def _prediction_of(self, module: nn.Module) -> str:
        if self.prediction != "auto":
            return self.prediction
        scheduler = getattr(module, "noise_scheduler", None)
        if self.adapter == "mse_loss":
            scheduler = find_scheduler(module, who="SNRWeighting", name=self.scheduler)
            if noise_method(scheduler) == "scale_noise":  # schedulers of flow matching have no other sign
                return "flow"
        return _prediction_of(module, getattr(scheduler, "config", None))


def _prediction_of(module: nn.Module, config: object) -> str:
    """Return the network's target, from the module or from the ``config`` of its scheduler."""
    for owner, name in ((module, "prediction"), (module, "prediction_type"), (config, "prediction_type")):
        value = getattr(owner, name, None)
        if isinstance(value, str):
            value = _ALIASES.get(value, value)
            if value in PREDICTIONS:
                return value
            raise ConfigurationError(
                f"SNRWeighting: {type(owner).__name__}.{name} is {value!r}. Allowed: {', '.join(PREDICTIONS)}, and "
                f"the names of diffusers {', '.join(_ALIASES)}"
            )
    raise ConfigurationError(
        f"SNRWeighting: {type(module).__name__} has no attribute `prediction` with the target of its network. Add it, "
        f"or set prediction= to one of {', '.join(PREDICTIONS)}"
    )


def _log_snr(output: Mapping[str, Any], module: nn.Module) -> Tensor:
    """Return the logarithm of the SNR [B], as returned by ``training_step`` or computed from time steps."""
    if "log_snr" in output:
        return output["log_snr"]
    scheduler = getattr(module, "noise_scheduler", None)
    alphas_cumprod = getattr(module, "alphas_cumprod", getattr(scheduler, "alphas_cumprod", None))
    if "timesteps" not in output or alphas_cumprod is None:
        raise ConfigurationError(
            f"SNRWeighting: {type(module).__name__}.training_step must return log_snr [B], or timesteps [B] with "
            f"alphas_cumprod on the module or its noise_scheduler, but it returned {sorted(output)}"
        )
    times = output["timesteps"].long()
    signal = moved(torch.as_tensor(alphas_cumprod), times.device)[times]
    return torch.logit(signal.to(widest_float(signal.device))).float()
