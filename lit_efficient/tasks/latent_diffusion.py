"""Train a diffusion network on latents, and look at what it samples.

    x_t = alpha x0 + sigma eps;   loss = mean |network(x_t, t, condition) - target|^2;   target: flow, eps, v, x0 or edm

Validation measures the same loss at fixed draws, over all and by the range of log SNR, then samples with guidance and
has the data module judge the images. With a technique that evaluates averaged weights (EMA), ``val/loss`` is the
average's and ``val/loss_raw`` that of the weights that train, at the same draws.

The parts: the model without its training, :mod:`lit_efficient.tasks.latent_generator`; what data must offer and batches
may hold, :mod:`lit_efficient.tasks.latent_source`; what the network gets of labels and captions,
:mod:`lit_efficient.tasks.latent_conditions`; the networks, :mod:`lit_efficient.models.libraries.backbones`.

Costs: with validation, one sampling of ``samples.count`` images, two network evaluations a step; with averaged
weights each batch of it is evaluated twice.
Source: Rombach et al. (2022), https://arxiv.org/abs/2112.10752; Peebles and Xie (2022), https://arxiv.org/abs/2212.09748.
"""

from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.distributed.ranks import data_rank
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses import diffusion
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler, SamplerName
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule
from lit_efficient.losses.timesteps import Distribution, TimestepSampling, check_sampling, sample_timesteps
from lit_efficient.mechanisms.averages.shadow import ShadowWeights
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.dit_to_diffusers import diffusers_fields
from lit_efficient.models.networks.class_token import apart, with_token
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.networks.dit import DiTConfig
from lit_efficient.optimizers.fused_adamw import FusedAdamW
from lit_efficient.optimizers.schedules import warmup_cosine
from lit_efficient.protocol import builds_no_layers
from lit_efficient.surgery import moved
from lit_efficient.tasks import latent_source
from lit_efficient.tasks.latent_generator import FIXED_SEED, LatentGenerator, Samples, check, described, to_uint8
from lit_efficient.tasks.latent_source import LatentSource
from lit_efficient.tasks.loss_by_noise import LossByNoise

__all__ = ["LatentDiffusion", "LatentSource", "Samples", "to_uint8"]

_WARMUP_STEPS = 100


class LatentDiffusion(LatentGenerator):
    """Diffusion on latents: of classes, of captions, of both or of neither, as the backbone takes them.

    Batches hold latents, their posterior or images, and labels, captions or their embeddings. Autoencoder and text
    encoder come from the data module; they are no submodules, but travel in the checkpoint beside the weights, so it
    alone samples images, and ``parameters()`` is only what trains. Random weights are drawn on the run's device: for
    one seed, a GPU's are others than a CPU's.

    Args:
        backbone: The network: the shape of our diffusion transformer, or a model of diffusers. That of a UNet with
            classes has one row more than there are classes (``num_class_embeds``), for "no label".
        prediction: What the network predicts: flow, eps, v, x0 or edm. eps learns the classes many times slower.
        schedule: The noise schedule by name (flow, cosine, squared_cosine, linear, scaled_linear, edm), or the whole
            process: betas, zero terminal SNR, offset noise and input perturbation.
        timestep_sampling: Distribution of training times by name (uniform, logit_normal, mode, log_normal), or with its
            location, scale and shift.
        label_dropout: Probability that a training sample's conditions are hidden, in [0, 1): its label and its text
            together, by one draw.
        guidance_scale: Strength of classifier-free guidance when sampling; 1 is none.
        sampling_steps: Steps of the sampler.
        sampler: The sampler by name (builtin, and diffusers' ddim, euler, heun, dpmsolver++), or with its shift and the
            rescaling of guidance.
        learning_rate: AdamW's peak rate; 100 steps of warm-up (a tenth of short runs), then a cosine to zero.
        samples: How many images are sampled at each validation, of which captions, and how they are shown.
    """

    logs: ClassVar[tuple[str, ...]] = ("train/loss", "val/loss")  # and more whose names begin so
    commands_after_fit: ClassVar[tuple[str, ...]] = ("sample --ckpt {ckpt} --output {output}.png",)

    def __init__(
        self,
        backbone: DiTConfig | DiffusersModelConfig = DiTConfig(),  # noqa: B008 (frozen)
        prediction: Prediction = "flow",
        schedule: Schedule | DiffusionProcess = "flow",
        timestep_sampling: Distribution | TimestepSampling = "logit_normal",
        label_dropout: float = 0.1,
        guidance_scale: float = 2.0,
        sampling_steps: int = 20,
        sampler: SamplerName | Sampler = "builtin",
        learning_rate: float = 3e-3,
        samples: Samples = Samples(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(backbone, prediction, schedule, guidance_scale, sampling_steps, sampler, samples)
        self.timestep_sampling = described(TimestepSampling, "timestep_sampling", timestep_sampling, Distribution)
        check_sampling("LatentDiffusion", self.timestep_sampling, self.process)
        check_number("LatentDiffusion", "label_dropout", label_dropout, least=0, below=1)
        check_number("LatentDiffusion", "learning_rate", learning_rate, above=0)
        if label_dropout == 0.0:
            allowed = "1 when label_dropout is 0 (untrained null)"
            check("guidance_scale", guidance_scale, allowed, guidance_scale == 1.0)
        self.label_dropout = label_dropout
        self.learning_rate = learning_rate
        # Primitives only, so that checkpoints load with weights_only=True.
        names = "prediction label_dropout guidance_scale sampling_steps learning_rate"
        values = {name: getattr(self, name) for name in names.split()}
        values |= {"backbone": asdict(self.backbone), "schedule": asdict(self.process)}
        values |= {"timestep_sampling": asdict(self.timestep_sampling), "sampler": asdict(self.sampler)}
        values |= {"samples": asdict(self.samples)}
        self.save_hyperparameters(values)
        self._by_noise = LossByNoise()
        self._judged = True

    @builds_no_layers
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and isinstance(self.backbone, DiTConfig):
            _say_if_not_exported(self.backbone)
        if stage == "fit" and self.codec is not None and self.text_encoder is None and self.shape.takes_text:
            allowed = "0 without a text encoder, of which the empty caption is needed: give the data one (text_encoder)"
            check("label_dropout", self.label_dropout, allowed, self.label_dropout == 0.0)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Loss, and per sample the loss, the time, the log-SNR, what was predicted and its target, for techniques."""
        count = latent_source.batch_size(batch)
        condition = self.conditioning.of_batch(batch, self.device)
        if self.shape.conditions:
            hidden = torch.rand(count, device=self.device) < self.label_dropout
            if self.label_dropout:
                condition = condition.dropped(hidden, self.conditioning.null(self.device))
        encoded = latent_source.with_posterior(batch, self.codec)
        output = self._losses(encoded, condition, self.process, None)
        if "class_loss" in output:
            output["sample_loss"] = output["sample_loss"] + self.shape.class_token.weight * output.pop("class_loss")
            output["loss"] = output["sample_loss"].mean()
        self.log("train/loss", output["loss"], prog_bar=logs_in_bar(output["loss"]), batch_size=count)
        return output

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate("test", batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self._by_noise.reset()
        self._prompts.begin()

    def on_test_epoch_start(self) -> None:
        self._by_noise.reset()
        self._prompts.begin()

    def on_validation_epoch_end(self) -> None:
        """Log the averages; sample and judge, a handful in the sanity check."""
        self._conclude("val")

    def on_test_epoch_end(self) -> None:
        self._conclude("test")

    def configure_optimizers(self) -> Any:
        """AdamW over what trains, with warm-up and a cosine to zero over the length of the run."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = FusedAdamW(trainable, self.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
        total = float(self.trainer.estimated_stepping_batches)
        warmup = int(min(_WARMUP_STEPS, total // 10))
        factor = partial(warmup_cosine, warmup=warmup, total=total)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _losses(
        self, batch: dict[str, Any], condition: Condition, process: DiffusionProcess, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """The loss protocol's dictionary; every draw comes from ``generator`` (None: the global one)."""
        x0, features = latent_source.draw_latents(batch, generator), self.shape.class_token.features
        if features:
            x0 = with_token(x0, self._class_features(batch, features))
        t = sample_timesteps(len(x0), self.timestep_sampling, generator, x0.device, process)
        eps, seen = diffusion.draw_noise(x0, process, generator)
        output = self(diffusion.add_noise(x0, seen, t, process), t, condition)
        wanted = diffusion.target(x0, eps, t, process, self.prediction)
        of_token = {}
        if features:
            (output, drawn), (wanted, meant) = apart(output, features), apart(wanted, features)
            of_token = {"class_loss": (drawn - meant).square().mean(dim=1)}
        sample_loss = (output - wanted).square().flatten(1).mean(dim=1)
        snr = process.log_snr(t)
        losses = {"loss": sample_loss.mean(), "sample_loss": sample_loss, "timesteps": t, "log_snr": snr}
        return losses | {"predicted": output, "target": wanted} | of_token

    def _class_features(self, batch: dict[str, Any], features: int) -> Tensor:
        """What an encoder says of each clean image, [B, features]."""
        callbacks: list[Any] = getattr(trainer_of(self), "callbacks", None) or []
        source = next((one for one in callbacks if getattr(one, "gives_class_token", False)), None)
        if "class_token" not in batch and source is None:
            raise ConfigurationError(
                "LatentDiffusion: the backbone has a variant.class_token, and nothing says an image's: let batches "
                "hold class_token [B, features], or add HiddenAlignment with head.class_layer, whose teacher gives it"
            )
        given = batch["class_token"] if "class_token" in batch else source.class_token(self, batch)  # type: ignore[union-attr]
        found: Tensor = moved(given, self.device)
        allowed = f"[B, {features}], as variant.class_token.features says"
        check("the class token", list(found.shape), allowed, found.ndim == 2 and found.shape[1] == features)
        return found

    def _evaluate(self, stage: str, batch: dict[str, Any], batch_idx: int) -> None:
        seed = FIXED_SEED + batch_idx * self.trainer.world_size + data_rank(self.trainer)
        process = replace(self.process, input_perturbation=0.0)  # a means of training; samplers do not perturb
        condition = self.conditioning.of_batch(batch, self.device)
        encoded = latent_source.with_posterior(batch, self.codec)
        if self.shape.takes_text:
            self._prompts.gather(batch)

        def evaluate() -> dict[str, Tensor]:
            return self._losses(encoded, condition, process, torch.Generator().manual_seed(seed))

        losses = evaluate()
        self._by_noise.add(losses["sample_loss"], losses["log_snr"])
        shared: dict[str, Any] = {"batch_size": latent_source.batch_size(batch), "sync_dist": True}
        self.log(f"{stage}/loss", losses["loss"], prog_bar=True, **shared)
        if "class_loss" in losses:
            self.log(f"{stage}/class_loss", losses["class_loss"].mean(), **shared)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        average = next((callback for callback in callbacks if isinstance(callback, ShadowWeights)), None)
        if average is not None:
            with average.raw(self) as averaged:
                self.log(f"{stage}/loss_raw", evaluate()["loss"] if averaged else losses["loss"], **shared)

    def _conclude(self, stage: str) -> None:
        if self.shape.takes_text:
            self._prompts.settle(self.trainer.strategy.broadcast, final=not self.trainer.sanity_checking)
        averages = self._by_noise.averages(lambda totals: self.trainer.strategy.reduce(totals, reduce_op="sum"))
        for name, value in averages.items():
            self.log(f"{stage}/loss_{name}", value, sync_dist=True)
        self._judge(stage)

    def _judge(self, stage: str) -> None:
        """Every process samples and judges the same images: a sharded network needs all of them in step."""
        data = self._source()
        if data is None or self.samples.count == 0 or not self._judged:
            return
        score = getattr(data, "score_samples", None)
        if self.codec is None or score is None or not getattr(data, "judges_samples", True):
            self._judged = False
            rank_zero_info(
                f"LatentDiffusion: {type(data).__name__} has no judge of samples, or no autoencoder to decode them: "
                "there will be no scores."
            )
            return
        count = self.samples.count
        if self.trainer.sanity_checking:
            count = min(count, max(2, self.shape.num_classes or 2))
        asked = self.in_turn(count)
        labels = asked.get("labels", self._prompts.labels_of(count) if "captions" in asked else None)
        latents = self.sample(**asked, generator=torch.Generator().manual_seed(FIXED_SEED))
        for name, value in score(self._decode(latents), labels).items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "sample_accuracy", sync_dist=True)


def _say_if_not_exported(config: DiTConfig) -> None:
    """Say before training what would be learned after it."""
    try:
        diffusers_fields(config)
    except ConfigurationError as error:
        rank_zero_info(
            f"LatentDiffusion: `export --format diffusers` will refuse this network, whatever it learns: {error} Other "
            "formats and sampling here are not concerned."
        )
