"""SNR weighting: stop the nearly clean samples from dominating the training of a diffusion model.

    loss = mean_i(w_i * sample_loss_i),    w = w_x0(SNR) / (dT/dx0)^2;    Min-SNR: w_x0 = min(SNR, gamma)

Saves: training steps; the paper reports 3.4 times fewer to the same FID for ViT diffusion on ImageNet
Costs: a few elementwise operations on [B] a step; with `adapter`, a microsecond or so for each torch function called
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

# How diffusers' schedulers call the targets.
_ALIASES = {"epsilon": "eps", "v_prediction": "v", "sample": "x0", "flow_prediction": "flow"}
_ADAPTERS = ("none", "mse_loss")


class SNRWeighting(LossHooks, Technique):
    """Weigh each sample's loss by its signal-to-noise ratio.

    ``training_step`` returns ``{"loss", "sample_loss": [B], "log_snr": [B]}``. Instead of ``log_snr`` it may return
    integer ``timesteps`` [B] if the module (or its ``noise_scheduler``) has ``alphas_cumprod``. A module that returns
    no such thing needs an ``adapter``.

    Args:
        rule: The weighting rule: ``min_snr``, ``soft_min_snr``, ``p2``, ``debiased``, ``truncated``, or of SD3's
            training ``sigma_sqrt`` and ``cosmap``.
        gamma: Above 0: for ``min_snr`` and ``soft_min_snr`` the cap of the clean sample's weight, for ``p2`` the
            exponent. Unset it is the paper's: 5, 4 and 1. The other rules have none.
        prediction: What ``sample_loss`` measures the error of: ``eps``, ``v``, ``x0``, ``flow`` or ``edm``. ``auto``
            reads it from the module: ``prediction``, ``prediction_type`` or ``noise_scheduler.config.prediction_type``;
            for ``edm`` the standard deviation of the data is ``process.sigma_data``, 1 without one.
        zero_snr: At exactly zero SNR (a zero-terminal schedule), ``unit`` gives the weight 1 and ``error`` raises.
        adapter: ``mse_loss`` is for an unchanged module that calls ``add_noise`` (or ``scale_noise``) of the one
            scheduler that it holds, then ``F.mse_loss``, each once a step, and returns what it likes: that call is
            weighted where it happens. ``none`` expects the protocol above.
        scheduler: With ``mse_loss``, the attribute whose noise counts, by the end of its dotted name, in a module that
            holds several; ``None``: the only one.

    Raises:
        ConfigurationError: For an argument out of range; in the first step if the module does not return the protocol,
            or does not do what the adapter listens to.
    """

    phase = Phase.LOSS
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (3, "weighs the noise levels of diffusion")}

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
        gamma = self.gamma if self.gamma is not None else GAMMAS.get(self.rule)
        strength = "" if gamma is None else f" with gamma {gamma:g}"
        where = " where it calls F.mse_loss" if self.adapter == "mse_loss" else ""
        return Report(f"{self.rule}{strength} for a network that predicts {self._prediction_of(module)}{where}")

    def sample_weights(self, output: Mapping[str, Any], module: nn.Module) -> Tensor:
        levels = _log_snr(output, module)
        spread = float(getattr(getattr(module, "process", None), "sigma_data", 1.0))
        return snr_weight(levels, self.rule, self.gamma, self._prediction_of(module), self.zero_snr, spread)

    def weigh_inside(
        self, module: nn.Module, weights_of: Callable[[Mapping[str, Any]], Tensor]
    ) -> AbstractContextManager[None] | None:
        """With an adapter: a context in which the module's own ``F.mse_loss`` is weighted."""
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
            if noise_method(scheduler) == "scale_noise":  # schedulers of flow matching say nothing else
                return "flow"
        return _prediction_of(module, getattr(scheduler, "config", None))


def _prediction_of(module: nn.Module, config: Any) -> str:
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
    times = output["timesteps"].long()
    signal = moved(torch.as_tensor(alphas_cumprod), times.device)[times]
    return torch.logit(signal.to(widest_float(signal.device))).float()
