"""Train a diffusion transformer on latents, and look at what it samples.

    x_t = alpha x0 + sigma eps;    loss = mean |network(x_t, t, label) - target|^2;    target: flow, eps, v, x0 or edm

Validation measures the same loss at fixed draws, over all and by the range of log SNR, then samples with guidance and
has the data module judge the images. With a technique that evaluates averaged weights (EMA), ``val/loss`` is the
average's and ``val/loss_raw`` that of the weights that train, at the same draws.

Costs: with validation, one sampling of ``validation_samples`` images, two network evaluations a step; with averaged
weights each batch of it is evaluated twice.
Source: Rombach et al. (2022), https://arxiv.org/abs/2112.10752; Peebles and Xie (2022), https://arxiv.org/abs/2212.09748.
"""

import math
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.losses import diffusion
from lit_efficient.losses.diffusers_sampling import check_sampler, check_steps, sample_with_diffusers
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler, SamplerName, ddim_sample, guide, sampling_times
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule
from lit_efficient.losses.timesteps import Distribution, TimestepSampling, check_sampling, sample_timesteps
from lit_efficient.models.autoencoder import sample_posterior
from lit_efficient.models.diffusers_model import DiffusersModelConfig
from lit_efficient.models.dit import DiT, DiTConfig
from lit_efficient.models.latent_codec import LatentCodec
from lit_efficient.models.preview_decoder import PreviewDecoder
from lit_efficient.optimizers.schedules import warmup_cosine
from lit_efficient.shadow import ShadowWeights
from lit_efficient.tasks.loss_by_noise import LossByNoise

_VALIDATION_SEED = 1_000_003
_WARMUP_STEPS = 100
_CODEC_KEY = "latent_codec"
_T = TypeVar("_T")


@runtime_checkable
class LatentSource(Protocol):
    """What a data module offers so that this task can decode and judge its samples. ``LatentDigits`` does."""

    codec: LatentCodec
    num_classes: int

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a latent."""

    def score_samples(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Metrics by name, of images [M, C, H, W] in [-1, 1] that were meant to be ``labels`` [M]."""


class LatentDiffusion(LightningModule):
    """Class-conditional diffusion on latents.

    Batches are dictionaries with "labels" [B] and either "latents" [B, c, h, w] or "mean" and "logvar" of a posterior
    that is sampled at each step; of mean 0 and variance 1 in each channel. The autoencoder is no submodule: it travels
    in the checkpoint beside the weights, so it alone samples images, and ``parameters()`` is only what trains.

    Args:
        backbone: Shape of the diffusion transformer.
        prediction: What the network predicts: flow, eps, v, x0 or edm. eps learns the classes many times slower. With
            edm, whose loss is weighted already, SNRWeighting needs to be told ``prediction: v``.
        schedule: The noise schedule by name (flow, cosine, squared_cosine, linear, scaled_linear, edm), or the whole
            process: betas, zero terminal SNR, offset noise and input perturbation.
        timestep_sampling: Distribution of training times by name (uniform, logit_normal, mode, log_normal), or with its
            location, scale and shift.
        label_dropout: Probability that a training sample's label is hidden, in [0, 1).
        guidance_scale: Strength of classifier-free guidance when sampling; 1 is none.
        sampling_steps: Steps of the sampler.
        sampler: The sampler by name (builtin, and diffusers' ddim, euler, heun, dpmsolver++), or with its shift and the
            rescaling of guidance.
        learning_rate: AdamW's peak rate; 100 steps of warm-up (a tenth of short runs), then a cosine to zero.
        validation_samples: Images sampled and judged at each validation; 0 for none.
        preview: An AutoencoderTiny (TAESD) that imitates the data's autoencoder: while fitting, `SampleImages` decodes
            by it. What is measured, and all else, goes through the autoencoder itself.
    """

    def __init__(
        self,
        backbone: DiTConfig = DiTConfig(),  # noqa: B008 (frozen)
        prediction: Prediction = "flow",
        schedule: Schedule | DiffusionProcess = "flow",
        timestep_sampling: Distribution | TimestepSampling = "logit_normal",
        label_dropout: float = 0.1,
        guidance_scale: float = 2.0,
        sampling_steps: int = 20,
        sampler: SamplerName | Sampler = "builtin",
        learning_rate: float = 3e-3,
        validation_samples: int = 200,
        preview: DiffusersModelConfig | None = None,
    ) -> None:
        super().__init__()
        if isinstance(backbone, dict):  # as a checkpoint stores it
            backbone = DiTConfig(**backbone)
        self.process = _described(DiffusionProcess, "schedule", schedule, Schedule)
        self.timestep_sampling = _described(TimestepSampling, "timestep_sampling", timestep_sampling, Distribution)
        self.sampler = _described(Sampler, "sampler", sampler, SamplerName)
        diffusion.check_prediction("LatentDiffusion", prediction, self.process)
        check_sampling("LatentDiffusion", self.timestep_sampling, self.process)
        _check("label_dropout", label_dropout, "in [0, 1)", 0.0 <= label_dropout < 1.0)
        _check("guidance_scale", guidance_scale, "a finite number >= 0", 0.0 <= guidance_scale < math.inf)
        _check("sampling_steps", sampling_steps, ">= 1", sampling_steps >= 1)
        check_sampler(self.process, self.sampler, prediction)
        check_steps(self.process, self.sampler, sampling_steps)
        _check("learning_rate", learning_rate, "a finite number > 0", 0.0 < learning_rate < math.inf)
        _check(
            "validation_samples", validation_samples, "0 or >= 2", validation_samples == 0 or validation_samples >= 2
        )
        if label_dropout == 0.0:
            _check(
                "guidance_scale", guidance_scale, "1 when label_dropout is 0 (untrained null)", guidance_scale == 1.0
            )
        self.backbone = backbone
        self.prediction: Prediction = prediction
        self.label_dropout = label_dropout
        self.guidance_scale = guidance_scale
        self.sampling_steps = sampling_steps
        self.learning_rate = learning_rate
        self.validation_samples = validation_samples
        self.preview = DiffusersModelConfig(**preview) if isinstance(preview, dict) else preview
        # Primitives only, so that checkpoints load with weights_only=True.
        names = "prediction label_dropout guidance_scale sampling_steps learning_rate validation_samples"
        values = {name: getattr(self, name) for name in names.split()}
        values |= {"backbone": asdict(backbone), "schedule": asdict(self.process)}
        values |= {"timestep_sampling": asdict(self.timestep_sampling), "sampler": asdict(self.sampler)}
        values |= {"preview": None if self.preview is None else asdict(self.preview)}
        self.save_hyperparameters(values)
        self._by_noise = LossByNoise()
        self.network: DiT | None = None
        self.codec: LatentCodec | None = None
        self._preview: PreviewDecoder | None = None

    def setup(self, stage: str) -> None:
        """Take the autoencoder from the data module, and check that shapes and classes agree."""
        data = self._source()
        if data is None:
            return
        ours = (self.backbone.channels, self.backbone.size, self.backbone.size)
        if ours != tuple(data.latent_shape):
            raise ConfigurationError(
                f"LatentDiffusion: backbone.channels and backbone.size give latents {ours}; the data's are "
                f"{tuple(data.latent_shape)}."
            )
        if self.backbone.num_classes != data.num_classes:
            raise ConfigurationError(
                f"LatentDiffusion: backbone.num_classes must be {data.num_classes}, as the data has, "
                f"not {self.backbone.num_classes}."
            )
        self.codec = data.codec
        self._preview = None if self.preview is None or stage != "fit" else PreviewDecoder(self.codec, self.preview)

    def configure_model(self) -> None:
        """Build the network, once."""
        if self.network is None:
            self.network = DiT(self.backbone)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Noisy latents [B, c, h, w], times [B] in [0, 1] and labels [B] to the prediction, float32."""
        assert self.network is not None, "configure_model() builds the network"
        scaled = x * diffusion.per_sample(self.process.input_scale(t), x)
        return self.network(scaled, self.process.network_time(t), labels).float()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Loss, and per sample the loss, the time and the log-SNR, for techniques that reweight."""
        labels = batch["labels"]
        hidden = torch.rand(labels.shape, device=labels.device) < self.label_dropout
        labels = labels.masked_fill(hidden, self.backbone.num_classes)
        output = self._losses(batch, labels, self.process, None)
        self.log("train/loss", output["loss"], prog_bar=True, batch_size=len(labels))
        return output

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """The same posterior samples, times and noise at every validation."""
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """As validation."""
        self._evaluate("test", batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """One new image for each label of the batch: uint8 [B, C, H, W]."""
        generator = torch.Generator().manual_seed(_VALIDATION_SEED + batch_idx)
        return to_uint8(self._decoder().decode(self.sample(batch["labels"], generator)))

    def on_validation_epoch_start(self) -> None:
        """Begin the averages by noise level."""
        self._by_noise.reset()

    def on_test_epoch_start(self) -> None:
        """Likewise."""
        self._by_noise.reset()

    def on_validation_epoch_end(self) -> None:
        """Log the averages; sample and judge, a handful in the sanity check."""
        self._log_by_noise("val")
        self._judge("val")

    def on_test_epoch_end(self) -> None:
        """As validation."""
        self._log_by_noise("test")
        self._judge("test")

    @torch.no_grad()
    def sample(
        self,
        labels: Tensor,
        generator: torch.Generator | None = None,
        guidance_scale: float | None = None,
        steps: int | None = None,
    ) -> Tensor:
        """Draw latents; put the module in evaluation mode first.

        Args:
            labels: Classes, [B] int64.
            generator: Source of the noise; None is torch's global generator. A CPU generator serves every device.
            guidance_scale: None takes the module's.
            steps: None takes the module's ``sampling_steps``.

        Returns:
            Normalised latents [B, c, h, w], float32.
        """
        scale = self.guidance_scale if guidance_scale is None else guidance_scale
        labels = labels.to(self.device)
        null = torch.full_like(labels, self.backbone.num_classes)

        def predict(x: Tensor, t: Tensor) -> Tensor:
            if scale == 1.0:
                return self(x, t, labels)
            both = self(x.repeat(2, 1, 1, 1), t.repeat(2), torch.cat([labels, null]))
            conditional, unconditional = both.chunk(2)
            return guide(conditional, unconditional, scale, self.sampler.guidance_rescale)

        shape = (len(labels), self.backbone.channels, self.backbone.size, self.backbone.size)
        noise = torch.randn(shape, generator=generator, device="cpu" if generator is None else generator.device)
        steps = self.sampling_steps if steps is None else steps
        noise = noise.to(self.device)
        if self.sampler.name != "builtin":
            return sample_with_diffusers(predict, noise, steps, self.process, self.prediction, self.sampler)
        times = sampling_times(steps, self.prediction, self.process, self.sampler.shift)
        return ddim_sample(predict, noise, times, self.process, self.prediction)

    def sample_images(self, num: int, seed: int) -> Tensor:
        """``num`` images, classes in turn: uint8 [num, C, H, W]; by ``preview`` while fitting. Draws of its own."""
        labels = torch.arange(num) % self.backbone.num_classes
        latents = self.sample(labels, torch.Generator().manual_seed(seed))
        fitting = self._trainer is not None and self._trainer.state.fn == "fit"
        viewer = self._preview if fitting and self._preview is not None else self._decoder()
        return to_uint8(viewer.decode(latents))

    def configure_optimizers(self) -> Any:
        """AdamW over what trains, with warm-up and a cosine to zero over the length of the run."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, self.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
        total = float(self.trainer.estimated_stepping_batches)
        warmup = int(min(_WARMUP_STEPS, total // 10))
        factor = partial(warmup_cosine, warmup=warmup, total=total)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the autoencoder beside the weights: the checkpoint alone samples images."""
        if self.codec is not None:
            checkpoint[_CODEC_KEY] = self.codec.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the autoencoder from the checkpoint, unless weights and data disagree about the latent space."""
        if _CODEC_KEY not in checkpoint:
            return
        saved = LatentCodec.from_state_dict(checkpoint[_CODEC_KEY])
        generating = self._trainer is not None and self._trainer.predicting  # needs no latents of the data
        if self.codec is not None and not generating and saved.fingerprint() != self.codec.fingerprint():
            raise CheckpointError(
                f"The checkpoint was trained on latents of another autoencoder ({saved.fingerprint()[:12]}) than the "
                f"data module's ({self.codec.fingerprint()[:12]}). Use the cache of the original run, or start anew."
            )
        self.codec = saved

    def _losses(
        self, batch: dict[str, Tensor], labels: Tensor, process: DiffusionProcess, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """The loss protocol's dictionary; every draw comes from ``generator`` (None: the global one)."""
        if "latents" in batch:
            x0 = batch["latents"].float()
        else:
            x0 = sample_posterior(batch["mean"].float(), batch["logvar"].float(), generator)
        t = sample_timesteps(len(x0), self.timestep_sampling, generator, x0.device, process)
        eps, seen = diffusion.draw_noise(x0, process, generator)
        output = self(diffusion.add_noise(x0, seen, t, process), t, labels)
        wanted = diffusion.target(x0, eps, t, process, self.prediction)
        sample_loss = (output - wanted).square().flatten(1).mean(dim=1)
        snr = process.log_snr(t)
        return {"loss": sample_loss.mean(), "sample_loss": sample_loss, "timesteps": t, "log_snr": snr}

    def _evaluate(self, stage: str, batch: dict[str, Tensor], batch_idx: int) -> None:
        seed = _VALIDATION_SEED + batch_idx * self.trainer.world_size + self.global_rank
        process = replace(self.process, input_perturbation=0.0)  # a means of training; samplers do not perturb

        def evaluate() -> dict[str, Tensor]:
            return self._losses(batch, batch["labels"], process, torch.Generator().manual_seed(seed))

        losses = evaluate()
        self._by_noise.add(losses["sample_loss"], losses["log_snr"])
        shared: dict[str, Any] = {"batch_size": len(batch["labels"]), "sync_dist": True}
        self.log(f"{stage}/loss", losses["loss"], prog_bar=True, **shared)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        average = next((callback for callback in callbacks if isinstance(callback, ShadowWeights)), None)
        if average is not None:
            with average.raw(self) as stood:
                self.log(f"{stage}/loss_raw", evaluate()["loss"] if stood else losses["loss"], **shared)

    def _log_by_noise(self, stage: str) -> None:
        averages = self._by_noise.averages(lambda totals: self.trainer.strategy.reduce(totals, reduce_op="sum"))
        for name, value in averages.items():
            self.log(f"{stage}/loss_{name}", value, sync_dist=True)

    def _judge(self, stage: str) -> None:
        """Every process samples and judges the same images: a sharded network needs all of them in step."""
        data = self._source()
        if data is None or self.validation_samples == 0:
            return
        count = min(self.validation_samples, self.backbone.num_classes) if self.trainer.sanity_checking else None
        labels = torch.arange(count or self.validation_samples) % self.backbone.num_classes
        latents = self.sample(labels, torch.Generator().manual_seed(_VALIDATION_SEED))
        scores = data.score_samples(self._decoder().decode(latents), labels)
        for name, value in scores.items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "sample_accuracy", sync_dist=True)

    def _decoder(self) -> LatentCodec:
        if self.codec is None:
            raise ConfigurationError(
                "LatentDiffusion has no autoencoder to make images with: load a checkpoint that was trained with a "
                "data module such as LatentDigits, or set codec to a LatentCodec. sample() gives latents without one."
            )
        return self.codec

    def _source(self) -> LatentSource | None:
        """The data module, if there is one that can decode and judge."""
        data = getattr(self._trainer, "datamodule", None)
        return data if isinstance(data, LatentSource) else None


def to_uint8(images: Tensor) -> Tensor:
    """Images in [-1, 1] to 0..255, uint8, on the CPU."""
    return ((images.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8).cpu()


def _described(kind: type[_T], name: str, value: Any, names: Any) -> _T:
    """A description as such, by its name alone, or as a checkpoint stores it."""
    if isinstance(value, kind):
        return value
    if isinstance(value, dict):
        return kind(**value)
    diffusion.check_choice("LatentDiffusion", name, value, names)
    return kind(value)  # type: ignore[call-arg]


def _check(name: str, value: object, allowed: str, holds: bool) -> None:
    if not holds:
        raise ConfigurationError(f"LatentDiffusion: {name} must be {allowed}, not {value!r}.")
