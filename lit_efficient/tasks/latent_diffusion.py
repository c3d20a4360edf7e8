"""Train a diffusion network on latents, and look at what it samples.

    x_t = alpha x0 + sigma eps;    loss = mean |network(x_t, t, condition) - target|^2;    target: flow, eps, v, x0 or edm

Validation measures the same loss at fixed draws, over all and by the range of log SNR, then samples with guidance and
has the data module judge the images. With a technique that evaluates averaged weights (EMA), ``val/loss`` is the
average's and ``val/loss_raw`` that of the weights that train, at the same draws.

The parts: what data must offer and batches may hold, :mod:`lit_efficient.tasks.latent_source`; what the network is told
of labels and captions, :mod:`lit_efficient.tasks.latent_conditions`; sampling, :mod:`lit_efficient.tasks.latent_sampling`;
the networks, :mod:`lit_efficient.models.backbones`.

Costs: with validation, one sampling of ``validation_samples`` images, two network evaluations a step; with averaged
weights each batch of it is evaluated twice.
Source: Rombach et al. (2022), https://arxiv.org/abs/2112.10752; Peebles and Xie (2022), https://arxiv.org/abs/2212.09748.
"""

import math
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses import diffusion
from lit_efficient.losses.diffusers_sampling import check_sampler, check_steps
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler, SamplerName
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule
from lit_efficient.losses.timesteps import Distribution, TimestepSampling, check_sampling, sample_timesteps
from lit_efficient.models import backbones
from lit_efficient.models.backbone_shape import BackboneShape
from lit_efficient.models.condition import Condition
from lit_efficient.models.diffusers_model import DiffusersModelConfig
from lit_efficient.models.dit import DiTConfig
from lit_efficient.models.latent_codec import LatentCodec
from lit_efficient.models.preview_decoder import PreviewDecoder
from lit_efficient.models.text_encoder import TextEncoder
from lit_efficient.optimizers.schedules import warmup_cosine
from lit_efficient.shadow import ShadowWeights
from lit_efficient.tasks import latent_source
from lit_efficient.tasks.latent_conditions import Conditioning, Prompts
from lit_efficient.tasks.latent_sampling import draw_noise, guided, sample_latents
from lit_efficient.tasks.latent_source import LatentSource
from lit_efficient.tasks.loss_by_noise import LossByNoise

_VALIDATION_SEED = 1_000_003
_WARMUP_STEPS = 100
_CODEC_KEY, _TEXT_KEY, _OWN_KEY = "latent_codec", "text_encoder", "latent_diffusion"
_T = TypeVar("_T")


class LatentDiffusion(LightningModule):
    """Diffusion on latents: of classes, of captions, of both or of neither, as the backbone takes them.

    Batches hold latents, their posterior or images, and labels, captions or their embeddings. Autoencoder and text
    encoder come from the data module; they are no submodules, but travel in the checkpoint beside the weights, so it
    alone samples images, and ``parameters()`` is only what trains.

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
        validation_samples: Images sampled and judged at each validation; 0 for none.
        preview: An AutoencoderTiny (TAESD) that imitates the data's autoencoder: while fitting, `SampleImages` decodes
            by it. What is measured, and all else, goes through the autoencoder itself.
        prompts: Captions that samples are made for; null: the first 64 of the validation data.
    """

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
        validation_samples: int = 200,
        preview: DiffusersModelConfig | None = None,
        prompts: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbones.as_spec(backbone) if isinstance(backbone, dict) else backbone  # as checkpoints store
        self.process = _described(DiffusionProcess, "schedule", schedule, Schedule)
        self.timestep_sampling = _described(TimestepSampling, "timestep_sampling", timestep_sampling, Distribution)
        self.sampler = _described(Sampler, "sampler", sampler, SamplerName)
        self.preview = DiffusersModelConfig(**preview) if isinstance(preview, dict) else preview
        diffusion.check_prediction("LatentDiffusion", prediction, self.process)
        check_sampling("LatentDiffusion", self.timestep_sampling, self.process)
        _check("label_dropout", label_dropout, "in [0, 1)", 0.0 <= label_dropout < 1.0)
        _check("guidance_scale", guidance_scale, "a finite number >= 0", 0.0 <= guidance_scale < math.inf)
        _check("sampling_steps", sampling_steps, ">= 1", sampling_steps >= 1)
        check_sampler(self.process, self.sampler, prediction)
        check_steps(self.process, self.sampler, sampling_steps)
        _check("learning_rate", learning_rate, "a finite number > 0", 0.0 < learning_rate < math.inf)
        samples = validation_samples
        _check("validation_samples", samples, "0 or >= 2", samples == 0 or samples >= 2)
        if label_dropout == 0.0:
            allowed = "1 when label_dropout is 0 (untrained null)"
            _check("guidance_scale", guidance_scale, allowed, guidance_scale == 1.0)
        _check("prompts", prompts, "null or a list of at least one caption", prompts is None or len(prompts) > 0)
        self.prediction: Prediction = prediction
        self.label_dropout = label_dropout
        self.guidance_scale = guidance_scale
        self.sampling_steps = sampling_steps
        self.learning_rate = learning_rate
        self.validation_samples = validation_samples
        self.prompts = None if prompts is None else list(prompts)
        # Primitives only, so that checkpoints load with weights_only=True.
        names = "prediction label_dropout guidance_scale sampling_steps learning_rate validation_samples prompts"
        values = {name: getattr(self, name) for name in names.split()}
        values |= {"backbone": asdict(self.backbone), "schedule": asdict(self.process)}
        values |= {"timestep_sampling": asdict(self.timestep_sampling), "sampler": asdict(self.sampler)}
        values |= {"preview": None if self.preview is None else asdict(self.preview)}
        self.save_hyperparameters(values)
        self._by_noise = LossByNoise()
        self._prompts = Prompts(self.prompts)
        self._judged = True
        self._preview: PreviewDecoder | None = None
        self.network: nn.Module | None = None
        self.codec: LatentCodec | None = None
        self.text_encoder: TextEncoder | None = None
        self.latent_size: tuple[int, int] | None = None

    @cached_property
    def shape(self) -> BackboneShape:
        """What the backbone takes, from its description."""
        return backbones.shape_of(self.backbone)

    @property
    def conditioning(self) -> Conditioning:
        """Makes what the network is told."""
        return Conditioning(self.shape, self.text_encoder)

    def setup(self, stage: str) -> None:
        """Take the encoders from the data module, and check that shapes, classes and text agree with the backbone."""
        data = self._source()
        if data is None:
            return
        channels, height, width = data.latent_shape
        self.shape.check_latents(channels, height, width, "LatentDiffusion")
        if isinstance(self.backbone, DiTConfig) and height == width != self.backbone.size:
            raise ConfigurationError(
                f"LatentDiffusion: backbone.size must be {height}, as the data's latents are, not {self.backbone.size}."
            )
        encoder = latent_source.text_encoder_of(data)
        Conditioning(self.shape, encoder).check(data.num_classes)
        if encoder is None and self.shape.conditions & {"text", "pooled"}:
            raise ConfigurationError(
                f"LatentDiffusion: the backbone {self.shape.name} takes text, and the data module has no text_encoder."
            )
        self.codec, self.text_encoder, self.latent_size = data.codec, encoder, (height, width)
        self._preview = None if self.preview is None or stage != "fit" else PreviewDecoder(self.codec, self.preview)

    def configure_model(self) -> None:
        """Build the network, once."""
        if self.network is not None:
            return
        if not self.shape.conditions:
            allowed = "1 for a backbone that takes no conditions"
            _check("guidance_scale", self.guidance_scale, allowed, self.guidance_scale == 1.0)
        self.network = backbones.build_backbone(self.backbone)
        if self.shape.learned_variance:
            rank_zero_info(
                f"LatentDiffusion: {self.shape.name} has twice as many output channels as input channels. The second "
                "half, a variance, is neither trained nor used."
            )

    def forward(self, x: Tensor, t: Tensor, condition: Condition | Tensor | None = None) -> Tensor:
        """Predict.

        Args:
            x: Noisy latents, [B, c, h, w].
            t: Times, [B] in [0, 1].
            condition: What the backbone takes; labels [B] alone stand for a condition of them.

        Returns:
            [B, c, h, w] float32.
        """
        assert self.network is not None, "configure_model() builds the network"
        told = condition if isinstance(condition, Condition) else Condition(labels=condition)
        scaled = x * diffusion.per_sample(self.process.input_scale(t), x)
        return backbones.call_backbone(self.network, scaled, t, told, self.process).float()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Loss, and per sample the loss, the time and the log-SNR, for techniques that reweight."""
        count = latent_source.batch_size(batch)
        condition = self.conditioning.of_batch(batch, self.device)
        if self.shape.conditions:
            hidden = torch.rand(count, device=self.device) < self.label_dropout
            if self.label_dropout:
                condition = condition.dropped(hidden, self.conditioning.null(self.device))
        encoded = latent_source.with_posterior(batch, self.codec)
        output = self._losses(encoded, condition, self.process, None)
        self.log("train/loss", output["loss"], prog_bar=True, batch_size=count)
        return output

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """The same posterior samples, times and noise at every validation."""
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """As validation."""
        self._evaluate("test", batch, batch_idx)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """One new image for each sample's label and caption: uint8 [B, C, H, W]."""
        generator = torch.Generator().manual_seed(_VALIDATION_SEED + batch_idx)
        condition = self.conditioning.of_batch(batch, self.device)
        size = latent_source.latent_size(batch, self.codec)
        latents = self._sample(condition, latent_source.batch_size(batch), generator, size=size)
        return to_uint8(self._decoder().decode(latents))

    def on_validation_epoch_start(self) -> None:
        """Begin the averages by noise level."""
        self._by_noise.reset()

    def on_test_epoch_start(self) -> None:
        """Likewise."""
        self._by_noise.reset()

    def on_validation_epoch_end(self) -> None:
        """Log the averages; sample and judge, a handful in the sanity check."""
        self._prompts.settle(self.trainer.strategy.broadcast)
        self._log_by_noise("val")
        self._judge("val")

    def on_test_epoch_end(self) -> None:
        """As validation."""
        self._prompts.settle(self.trainer.strategy.broadcast)
        self._log_by_noise("test")
        self._judge("test")

    @torch.no_grad()
    def sample(
        self,
        labels: Tensor | None = None,
        generator: torch.Generator | None = None,
        guidance_scale: float | None = None,
        steps: int | None = None,
        *,
        captions: list[str] | None = None,
        count: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Draw latents; put the module in evaluation mode first.

        Args:
            labels: Classes, [B] int64, for a backbone that takes them.
            generator: Source of the noise; None is torch's global generator. A CPU generator serves every device.
            guidance_scale: None takes the module's.
            steps: None takes the module's ``sampling_steps``.
            captions: B captions, for a backbone that takes text.
            count: B, for a backbone that takes neither.
            size: Height and width of the latents; None: those of the training data.

        Returns:
            Normalised latents [B, c, h, w], float32.
        """
        given = {"labels": labels, "captions": captions}
        told = {name: value for name, value in given.items() if value is not None}
        condition = self.conditioning.of_batch(told, self.device)
        counted = latent_source.batch_size(told) if told else count
        if counted is None:
            raise ConfigurationError("LatentDiffusion: sample needs count, the number of samples.")
        return self._sample(condition, counted, generator, guidance_scale, steps, size)

    def sample_images(self, num: int, seed: int) -> Tensor:
        """``num`` images: uint8 [num, C, H, W]. Touches no global generator.

        Classes and prompts in turn; by ``preview`` while fitting.
        """
        latents = self.sample(**self._in_turn(num), generator=torch.Generator().manual_seed(seed))
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
        """Put the encoders, the size and the prompts beside the weights: the checkpoint alone samples images."""
        if self.codec is not None:
            checkpoint[_CODEC_KEY] = self.codec.state_dict()
        if self.text_encoder is not None:
            checkpoint[_TEXT_KEY] = self.text_encoder.state_dict()
        size = None if self.latent_size is None else list(self.latent_size)
        checkpoint[_OWN_KEY] = {"latent_size": size, "prompts": self._prompts.state()}
        held = checkpoint.get("state_dict", {})
        if self.network is not None and all(f"network.{name}" in held for name in self.network.state_dict()):
            # All weights are here: where they came from need not be there when this is loaded.
            arguments = dict(checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {}))
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = arguments | {
                "backbone": backbones.self_contained(self.backbone)
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the encoders from the checkpoint, unless weights and data disagree about the latents or the text."""
        must_agree = not (self._trainer is not None and self._trainer.predicting)  # which needs nothing of the data
        if _CODEC_KEY in checkpoint:
            what, way_out = "latents of another autoencoder", "Use the cache of the original run, or start anew."
            saved = checkpoint[_CODEC_KEY]
            self.codec = latent_source.restored(LatentCodec, saved, self.codec, must_agree, what, way_out)
        if _TEXT_KEY in checkpoint:
            what, way_out = "texts of another encoder", "Give the data the encoder of the original run, or start anew."
            saved = checkpoint[_TEXT_KEY]
            self.text_encoder = latent_source.restored(TextEncoder, saved, self.text_encoder, must_agree, what, way_out)
        own = checkpoint.get(_OWN_KEY)
        if own is not None:
            self._prompts.load(own["prompts"])
            if self.latent_size is None and own["latent_size"] is not None:
                self.latent_size = (own["latent_size"][0], own["latent_size"][1])

    def _losses(
        self, batch: dict[str, Any], condition: Condition, process: DiffusionProcess, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """The loss protocol's dictionary; every draw comes from ``generator`` (None: the global one)."""
        x0 = latent_source.draw_latents(batch, generator)
        t = sample_timesteps(len(x0), self.timestep_sampling, generator, x0.device, process)
        eps, seen = diffusion.draw_noise(x0, process, generator)
        output = self(diffusion.add_noise(x0, seen, t, process), t, condition)
        wanted = diffusion.target(x0, eps, t, process, self.prediction)
        sample_loss = (output - wanted).square().flatten(1).mean(dim=1)
        snr = process.log_snr(t)
        return {"loss": sample_loss.mean(), "sample_loss": sample_loss, "timesteps": t, "log_snr": snr}

    def _evaluate(self, stage: str, batch: dict[str, Any], batch_idx: int) -> None:
        seed = _VALIDATION_SEED + batch_idx * self.trainer.world_size + self.global_rank
        process = replace(self.process, input_perturbation=0.0)  # a means of training; samplers do not perturb
        condition = self.conditioning.of_batch(batch, self.device)
        encoded = latent_source.with_posterior(batch, self.codec)
        self._prompts.gather(batch)

        def evaluate() -> dict[str, Tensor]:
            return self._losses(encoded, condition, process, torch.Generator().manual_seed(seed))

        losses = evaluate()
        self._by_noise.add(losses["sample_loss"], losses["log_snr"])
        shared: dict[str, Any] = {"batch_size": latent_source.batch_size(batch), "sync_dist": True}
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
        if data is None or self.validation_samples == 0 or not self._judged:
            return
        score = getattr(data, "score_samples", None)
        count = self.validation_samples
        if self.trainer.sanity_checking:
            count = min(count, max(2, self.shape.num_classes or 2))
        told = self._in_turn(count)
        labels = told.get("labels", self._prompts.labels_of(count) if "captions" in told else None)
        scores = {}
        if score is not None:
            latents = self.sample(**told, generator=torch.Generator().manual_seed(_VALIDATION_SEED))
            scores = score(self._decoder().decode(latents), labels)
        if not scores:
            self._judged = False
            rank_zero_info(f"LatentDiffusion: {type(data).__name__} has no judge of samples: there will be no scores.")
        for name, value in scores.items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "sample_accuracy", sync_dist=True)

    def _in_turn(self, count: int) -> dict[str, Any]:
        """Arguments of ``sample`` for ``count`` samples: classes and prompts in turn."""
        told: dict[str, Any] = {}
        if self.shape.conditions & {"text", "pooled"}:
            told["captions"] = self._prompts.first(count)
        if self.shape.num_classes:
            labels = self._prompts.labels_of(count) if "captions" in told else None
            told["labels"] = torch.arange(count) % self.shape.num_classes if labels is None else labels
        return told or {"count": count}

    @torch.no_grad()
    def _sample(
        self,
        condition: Condition,
        count: int,
        generator: torch.Generator | None,
        guidance_scale: float | None = None,
        steps: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        scale = self.guidance_scale if guidance_scale is None else guidance_scale
        if not self.shape.conditions:
            _check("guidance_scale", scale, "1 for a backbone that takes no conditions", scale == 1.0)
        size = size or self.latent_size or self.shape.size
        if size is None:
            raise ConfigurationError(
                f"LatentDiffusion: sample needs size, height and width of the latents: {self.shape.name} says none."
            )
        noise = draw_noise((count, self.shape.channels, *size), generator, self.device)
        nothing = partial(self.conditioning.null, self.device)
        predict = guided(self, condition, nothing, scale, self.sampler.guidance_rescale)
        steps = self.sampling_steps if steps is None else steps
        return sample_latents(predict, noise, steps, self.process, self.prediction, self.sampler)

    def _decoder(self) -> LatentCodec:
        if self.codec is None:
            raise ConfigurationError(
                "LatentDiffusion has no autoencoder to make images with: load a checkpoint that was trained with a "
                "data module such as LatentDigits, or set codec to a LatentCodec. sample() gives latents without one."
            )
        return self.codec

    def _source(self) -> LatentSource | None:
        """The data module, if there is one that has an autoencoder."""
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
