"""Train a diffusion model on preferences between two images (Diffusion-DPO).

    loss = -log sigmoid(-beta / 2 [(e_w - e_l) - (r_w - r_l)]);   e = mean |network(x_t, t, condition) - target|^2

w is the preferred image of a pair and l the other one. Both have the same time and the same noise. r is the error of
the reference, which is the network before training. So it is the DPO loss of :mod:`lit_efficient.losses.preference`
with -e / 2 as log-probability.

Saves: with adapters, a second model: the reference is the network itself with disabled adapters
Costs: two images for each pair, and a forward pass of the reference; without adapters also a copy of the weights
Source: Wallace et al. (2023), https://arxiv.org/abs/2311.12908.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_strategies import data_rank
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler, SamplerName
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule
from lit_efficient.losses.preference import Kind, check_dpo, dpo_loss
from lit_efficient.losses.timesteps import Distribution, TimestepSampling
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.networks.dit import DiTConfig
from lit_efficient.surgery import moved
from lit_efficient.tasks import latent_source
from lit_efficient.tasks.keeps_reference import KeepsReference
from lit_efficient.tasks.latent_conditions import Conditioning, TextTraining
from lit_efficient.tasks.latent_diffusion import LatentDiffusion
from lit_efficient.tasks.latent_generator import FIXED_SEED, Samples
from lit_efficient.tasks.pairs import Comparison, pairs_of


class DiffusionPreference(KeepsReference, LatentDiffusion):
    """Preference learning on pairs of images with one caption.

    Batches have ``images`` or their latents, and ``condition`` [B, C, H, W] or its latents, the other image of each
    pair. `ImageData` makes such batches from two folders with the same names: ``images`` and ``condition`` of a set.
    Both get the same crop and flip. A cache that rounds latents stores those of both (``condition: latents``).

    Logs ``loss``, ``accuracy`` (share of pairs whose preferred image has the higher reward), ``margin``,
    ``rewards/chosen`` and ``rewards/rejected`` under ``train/``, ``val/`` and ``test/``. The reward of an image is
    ``beta / 2`` times the reference's error minus the network's.

    Args:
        backbone: As in `LatentDiffusion`, with trained weights.
        beta: Strength of the reference, above 0.
        loss: ``sigmoid`` (DPO), ``hinge`` or ``ipo``.
        label_smoothing: Probability that a pair is labelled the wrong way round, in [0, 0.5). Only for sigmoid.
        labelled: Whether the ``labels`` of a batch say which image of a pair is preferred: 1 for ``images``, 0 for
            ``condition``.
        prediction: As in `LatentDiffusion`.
        schedule: As in `LatentDiffusion`.
        timestep_sampling: As in `LatentDiffusion`.
        label_dropout: As in `LatentDiffusion`. Both images of a pair lose their caption.
        guidance_scale: As in `LatentDiffusion`.
        sampling_steps: As in `LatentDiffusion`.
        sampler: As in `LatentDiffusion`.
        learning_rate: As in `LatentDiffusion`.
        samples: As in `LatentDiffusion`.
        override: As in `LatentDiffusion`.
        text_training: As in `LatentDiffusion`, without new words. The reference reads captions with frozen encoders.
    """

    reads: ClassVar[tuple[str, ...]] = ("loss_weight", "mask", "condition")

    def __init__(
        self,
        backbone: DiTConfig | DiffusersModelConfig = DiTConfig(),  # noqa: B008 (frozen)
        beta: float = 5000.0,
        loss: Kind = "sigmoid",
        label_smoothing: float = 0.0,
        labelled: bool = False,
        prediction: Prediction | None = None,
        schedule: Schedule | DiffusionProcess | None = None,
        timestep_sampling: Distribution | TimestepSampling | None = None,
        label_dropout: float = 0.1,
        guidance_scale: float = 2.0,
        sampling_steps: int = 20,
        sampler: SamplerName | Sampler = "builtin",
        learning_rate: float = 1e-5,
        samples: Samples = Samples(),  # noqa: B008 (frozen)
        override: list[str] | None = None,
        text_training: TextTraining | None = None,
    ) -> None:
        super().__init__(
            backbone=backbone,
            prediction=prediction,
            schedule=schedule,
            timestep_sampling=timestep_sampling,
            label_dropout=label_dropout,
            guidance_scale=guidance_scale,
            sampling_steps=sampling_steps,
            sampler=sampler,
            learning_rate=learning_rate,
            samples=samples,
            override=override,
            text_training=text_training,
        )
        check_dpo("DiffusionPreference", beta, loss, label_smoothing)
        features = self.shape.class_token.features
        if features:
            raise refusal("DiffusionPreference", "backbone.variant.class_token.features", "0", features)
        share = self.timestep_sampling.second_share
        if share:
            raise refusal("DiffusionPreference", "timestep_sampling.second_share", "0", share)
        if self.text_training is not None and self.text_training.tokens is not None:
            allowed = "null, because the reference has no new words"
            raise refusal("DiffusionPreference", "text_training.tokens", allowed, self.text_training.tokens)
        self.beta = beta
        self.loss = loss
        self.label_smoothing = label_smoothing
        self.labelled = labelled
        own = {"beta": beta, "loss": loss, "label_smoothing": label_smoothing, "labelled": labelled}
        self.save_hyperparameters(own)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: Any = self._source()
        if getattr(data, "cached", False) and getattr(data, "condition", None) == "pixels":
            number = "int8" if data.format == "int8" else data.dtype
            if number != "float32":
                allowed = f"latents for a cache in {number}, so that both images of a pair are rounded alike"
                raise refusal("DiffusionPreference", "condition of LatentData", allowed, data.condition)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss over pairs, and the loss of each pair ``[B]`` for techniques that reweight samples."""
        count = latent_source.batch_size(batch)
        done = self._compared(batch, self._drawn_hidden(count), self.process, None)
        for name, value in done.figures().items():
            shown = name in ("loss", "accuracy") and logs_in_bar(value)
            self.log(f"train/{name}", value, prog_bar=shown, batch_size=count)
        losses = done.losses
        if "loss_weight" in batch:
            losses = losses * moved(batch["loss_weight"], losses.device).to(losses.dtype)
        return {"loss": losses.mean(), "sample_loss": losses}

    def _evaluate(self, stage: str, batch: dict[str, Any], batch_idx: int) -> None:
        seed = FIXED_SEED + batch_idx * self.trainer.world_size + data_rank(self.trainer)
        process = replace(self.process, input_perturbation=0.0)  # only for training
        if self.shape.takes_text:
            self._prompts.gather(batch)
        done = self._compared(batch, None, process, torch.Generator().manual_seed(seed))
        for name, value in done.figures().items():
            shown = name in ("loss", "accuracy")
            self.log(f"{stage}/{name}", value, prog_bar=shown, batch_size=len(done.losses), sync_dist=True)

    def _compared(
        self, batch: dict[str, Any], hidden: Tensor | None, process: DiffusionProcess, generator: torch.Generator | None
    ) -> Comparison:
        """Return the losses and rewards of the pairs of a batch, without the captions that are ``hidden`` [B]."""
        pairs = self._pairs(batch)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._text_trains()):
            condition = self._condition(batch, hidden, self.conditioning)
        before = condition
        if self.live_text is not None:
            frozen = Conditioning(self.shape, self.text_encoder, self.sampler.empty_prompt)
            before = self._condition(batch, hidden, frozen)
        x0 = latent_source.draw_latents(pairs, generator)
        noised = self._noised(x0, process, generator, pairs=True)

        def scores(condition: Condition) -> Tensor:
            both = condition.followed_by(condition)
            return -self._errors(pairs, noised, both, process)["sample_loss"] / 2.0

        reference = self.reference()
        assert reference is not None
        assert self.network is not None
        # It runs first, so that its activations are freed before the policy saves its own for the backward pass.
        refs = pairs_of(reference(self.network, partial(scores, before)))
        policy = pairs_of(scores(condition))
        losses = dpo_loss(*policy, *refs, self.beta, self.loss, self.label_smoothing)
        chosen, rejected = (own.detach() - ref for own, ref in zip(policy, refs))
        return Comparison(losses, self.beta * chosen, self.beta * rejected)

    def _pairs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the latents of the preferred images of a batch, followed by those of the others, and their masks."""
        ours = latent_source.with_posterior(batch, self.codec)
        names = ("latents",) if "latents" in ours else ("mean", "logvar") if "logvar" in ours else ("mean",)
        theirs = self._others(batch, names[0])
        missing = [name for name in names if name not in theirs]
        if missing:
            raise ConfigurationError(
                f"DiffusionPreference: a batch has the {' and '.join(names)} of one image of each pair, and no "
                f"{' and '.join(missing)} of the other one. Give batches both, or the pixels of both; LatentData with "
                "condition: latents stores both"
            )
        found = {name: torch.cat([ours[name], theirs[name]]) for name in names}
        if self.labelled:
            order = self._order(batch, self.device)
            found = {name: values[order] for name, values in found.items()}
        if "mask" in ours:
            found["mask"] = ours["mask"].repeat(2, 1, 1, 1)
        return found

    def _others(self, batch: dict[str, Any], name: str) -> dict[str, Any]:
        """Return the latents of the other images of a batch, or their posterior. ``name`` is the entry of the mean."""
        if "condition_latents" in batch:
            found = {name: batch["condition_latents"]}
            if "condition_logvar" in batch:
                found["logvar"] = batch["condition_logvar"]
            return found
        if "condition" not in batch:
            raise ConfigurationError(
                "DiffusionPreference: a batch must have a condition, the other image of each pair; this one has "
                f"{', '.join(sorted(batch))}. Use a set of images with a condition"
            )
        encoded = latent_source.with_posterior({"images": batch["condition"]}, self.codec)
        # Latents beside an encoder that has a posterior are rounded, or drawn.
        if name == "latents" and "logvar" not in encoded:
            return {"latents": encoded["mean"]}
        return encoded

    def _order(self, batch: dict[str, Any], device: torch.device) -> Tensor:
        """Return the rows of the preferred images among those of all pairs, then the rows of the others, [2 B]."""
        labels = moved(batch["labels"], device) if "labels" in batch else None
        if labels is None or not ((labels == 0) | (labels == 1)).all():
            found = "none" if labels is None else labels.tolist()
            raise refusal("DiffusionPreference", "the labels of a batch", "0 or 1 with labelled", found)
        rows = torch.arange(len(labels), device=device)
        others = rows + len(labels)
        first = labels == 1
        return torch.cat([torch.where(first, rows, others), torch.where(first, others, rows)])
