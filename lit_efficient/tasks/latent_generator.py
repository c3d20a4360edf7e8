"""A latent diffusion model that samples: network, encoders and checkpoint, without its training.

    noise -> [sampler: network under guidance] -> latents -> [autoencoder] -> images

Autoencoder and text encoder come from the data module and travel in the checkpoint beside the weights, so that the
checkpoint alone samples. Neither is a submodule: ``parameters()`` is only what trains.

Costs: one evaluation of the network a step, two with guidance.
Source: Rombach et al. (2022), https://arxiv.org/abs/2112.10752.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_efficient.distributed.ranks import data_rank
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses import diffusion
from lit_efficient.losses.diffusers_sampling import check_sampler, check_steps
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler, SamplerName
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule
from lit_efficient.mechanisms.adapters.base import leaves_base_out
from lit_efficient.models.libraries import backbones
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.latent_codec import LatentCodec, PreviewDecoder
from lit_efficient.models.libraries.text_encoder import TextEncoder
from lit_efficient.models.networks.backbone_shape import BackboneShape
from lit_efficient.models.networks.class_token import apart, rows_of
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.networks.dit import DiTConfig
from lit_efficient.models.probes.modes import deep_path
from lit_efficient.protocol import builds_no_layers
from lit_efficient.surgery import moved
from lit_efficient.tasks import latent_source
from lit_efficient.tasks.deferred_weights import weights_may_wait
from lit_efficient.tasks.latent_conditions import Conditioning, Prompts
from lit_efficient.tasks.latent_sampling import draw_noise, guided, sample_latents
from lit_efficient.tasks.latent_source import LatentSource

_SAMPLED_AT_ONCE, _DECODED_AT_ONCE = 64, 32
FIXED_SEED = 1_000_003  # of draws that are the same each time: validation's, prediction's
_CODEC_KEY, _TEXT_KEY, _OWN_KEY = "latent_codec", "text_encoder", "latent_diffusion"
_T = TypeVar("_T")


def check(name: str, value: object, allowed: str, holds: bool) -> None:
    """Raise ConfigurationError unless ``holds``."""
    if not holds:
        raise refusal("LatentDiffusion", name, allowed, value)


@dataclass(frozen=True)
class Samples:
    """The images that a task shows and judges.

    Args:
        count: Images sampled and judged at each validation; 0 for none.
        prompts: Captions that samples are made for; null: the first 64 of the validation data.
        preview: A finished AutoencoderTiny (TAESD), which imitates the data's autoencoder; nothing here trains one.
            While fitting, `SampleImages` decodes by it. What is measured, and all else, goes through the autoencoder.
    """

    count: int = 200
    prompts: list[str] | None = None
    preview: DiffusersModelConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.preview, dict):  # as checkpoints store it
            object.__setattr__(self, "preview", DiffusersModelConfig(**self.preview))
        check("samples.count", self.count, "0 or >= 2", self.count == 0 or self.count >= 2)
        allowed = "null or a list of at least one caption"
        check("samples.prompts", self.prompts, allowed, self.prompts is None or len(self.prompts) > 0)


class LatentGenerator(LightningModule):
    """Draws latents and images of labels, of captions, of both or of neither, as its backbone takes them."""

    trains_on: ClassVar[tuple[str, ...]] = ("latents", "images")

    def __init__(
        self,
        backbone: DiTConfig | DiffusersModelConfig,
        prediction: Prediction,
        schedule: Schedule | DiffusionProcess,
        guidance_scale: float,
        sampling_steps: int,
        sampler: SamplerName | Sampler,
        samples: Samples,
    ) -> None:
        super().__init__()
        self.backbone = backbones.as_spec(backbone) if isinstance(backbone, dict) else backbone  # as checkpoints store
        self.samples = Samples(**samples) if isinstance(samples, dict) else samples
        self.process = described(DiffusionProcess, "schedule", schedule, Schedule)
        self.sampler = described(Sampler, "sampler", sampler, SamplerName)
        diffusion.check_prediction("LatentDiffusion", prediction, self.process)
        check_number("LatentDiffusion", "guidance_scale", guidance_scale, least=0)
        check_number("LatentDiffusion", "sampling_steps", sampling_steps, least=1, whole=True)
        drops = self.sampler.path_drop
        check(
            "sampler.path_drop",
            drops,
            "false at guidance_scale 1, which does not guide",
            guidance_scale != 1 or not drops,
        )
        try:
            check_sampler(self.process, self.sampler, prediction)
            check_steps(self.process, self.sampler, sampling_steps)
        except ConfigurationError as error:
            if not isinstance(sampler, dict):  # as checkpoints store it: what was trained is not lost by it
                raise
            self.sampler = replace(self.sampler, name="builtin")
            rank_zero_warn(f"{error} The checkpoint's sampler is replaced by builtin.")
        self.prediction: Prediction = prediction
        self.guidance_scale = guidance_scale
        self.sampling_steps = sampling_steps
        self._prompts = Prompts(self.samples.prompts)
        self._preview: PreviewDecoder | None = None
        self._described: dict[str, Any] | None = None
        self.network: nn.Module | None = None
        self.codec: LatentCodec | None = None
        self.text_encoder: TextEncoder | None = None
        self.latent_size: tuple[int, int] | None = None
        self.class_names: list[str] = []  # of the data that it was trained on, if it has some

    @cached_property
    def shape(self) -> BackboneShape:
        """What the backbone takes, from its description."""
        return backbones.shape_of(self.backbone)

    @property
    def conditioning(self) -> Conditioning:
        """Makes the conditions that the network gets."""
        return Conditioning(self.shape, self.text_encoder)

    def check_latents(self, channels: int, height: int, width: int) -> None:
        """Refuse latents that the backbone does not take."""
        self.shape.check_latents(channels, height, width, "LatentDiffusion")
        if isinstance(self.backbone, DiTConfig) and height == width:
            allowed = f"{height}, as the data's latents are"
            check("backbone.size", self.backbone.size, allowed, self.backbone.size == height)

    @builds_no_layers
    def setup(self, stage: str) -> None:
        data = self._source()
        if data is None:
            return
        channels, height, width = data.latent_shape
        self.check_latents(channels, height, width)
        self.codec = self.codec if data.codec is None else data.codec
        self.text_encoder = getattr(data, "text_encoder", None) or self.text_encoder
        self.latent_size = (height, width)
        self.class_names = [str(name) for name in getattr(data, "class_names", None) or self.class_names]
        self.conditioning.check(data.num_classes)
        self._check_nothing()
        if self.samples.preview is not None and stage == "fit":
            allowed = "null for data without an autoencoder (codec), which it would imitate"
            check("samples.preview", self.samples.preview, allowed, self.codec is not None)
            self._preview = PreviewDecoder(self._decoder(), self.samples.preview)
            if self.samples.preview.draws_weights:
                rank_zero_info("LatentDiffusion: samples.preview has random weights, and pictures by it show nothing.")

    def configure_model(self) -> None:
        if self.network is not None:
            return
        if not self.shape.conditions:
            allowed = "1 for a backbone that takes no conditions"
            check("guidance_scale", self.guidance_scale, allowed, self.guidance_scale == 1.0)
        own = type(self).configure_model is LatentGenerator.configure_model
        self.network = backbones.build_backbone(self.backbone, own and weights_may_wait(self))
        self._described = backbones.self_contained(self.backbone)
        if self.shape.learned_variance:
            rank_zero_info(
                f"LatentDiffusion: {self.shape.name} has twice as many output channels as input channels. The second "
                "half, a variance, is neither trained nor used."
            )

    def on_fit_start(self) -> None:
        if self.sampler.path_drop:
            deep_path(self)

    def forward(self, x: Tensor, t: Tensor, condition: Condition | Tensor | None = None) -> Tensor:
        """Predictions [B, c, h, w], float32, of noisy latents [B, c, h, w] at times [B] in [0, 1].

        Labels [B] alone stand for a condition of them.
        """
        assert self.network is not None, "configure_model() builds the network"
        known = condition if isinstance(condition, Condition) else Condition(labels=condition)
        if known.sizes is None and self.shape.takes_text and self.codec is not None:
            # Whole images, as large as the latents stand for.
            height, width = (self.codec.factor * side for side in x.shape[2:])
            sizes = moved(torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32), x.device)
            known = replace(known, sizes=sizes.expand(len(x), -1))
        scaled = x * diffusion.per_sample(self.process.input_scale(t), x)
        return backbones.call_backbone(self.network, scaled, t, known, self.process).float()

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """One new image for each sample's label and caption: uint8 [B, C, H, W]."""
        seed = FIXED_SEED + batch_idx * self.trainer.world_size + data_rank(self.trainer)  # no noise twice
        generator = torch.Generator().manual_seed(seed)
        condition = self.conditioning.of_batch(batch, self.device)
        size = latent_source.latent_size(batch, self.codec)
        latents = self._sample(condition, latent_source.batch_size(batch), generator, size=size)
        return to_uint8(self._decode(latents))

    @torch.no_grad()
    def sample(
        self,
        labels: Tensor | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        guidance_scale: float | None = None,
        steps: int | None = None,
        *,
        captions: list[str] | None = None,
        count: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Draw normalised latents [B, c, h, w], float32; put the module in evaluation mode first.

        Args:
            labels: Classes, [B] int64, for a backbone that takes them.
            generator: Source of the noise, or one for each sample; None is torch's global generator. A CPU generator
                serves every device.
            guidance_scale: None takes the module's.
            steps: None takes the module's ``sampling_steps``.
            captions: B captions, for a backbone that takes text.
            count: B, for a backbone that takes neither.
            size: Height and width of the latents; None: those of the training data.

        Raises:
            ConfigurationError: For what the backbone does not take, and an argument out of range.
        """
        given = {"labels": labels, "captions": captions}
        known = {name: value for name, value in given.items() if value is not None}
        counted = self._check_request(labels, captions, count)
        check_number("LatentDiffusion", "guidance_scale", guidance_scale, least=0, null=True)
        check_number("LatentDiffusion", "steps", steps, least=1, whole=True, null=True)
        condition = self.conditioning.of_batch(known, self.device)
        return self._sample(condition, counted, generator, guidance_scale, steps, size)

    def sample_images(self, num: int, seed: int) -> Tensor:
        """``num`` images: uint8 [num, C, H, W]. Touches no global generator.

        Classes and prompts in turn; by ``samples.preview`` while fitting.
        """
        latents = self.sample(**self.in_turn(num), generator=torch.Generator().manual_seed(seed))
        trainer = trainer_of(self)
        fitting = trainer is not None and trainer.state.fn == "fit" and not trainer.state.finished
        return to_uint8(self._decode(latents, self._preview if fitting else None))

    def image_captions(self, num: int) -> list[str]:
        """What each of :meth:`sample_images` is meant to be; empty if nothing is."""
        asked = self.in_turn(num)
        kinds = [asked.get("captions"), [self.class_label(int(i)) for i in asked.get("labels", ())]]
        return [": ".join(names) for names in zip(*(kind for kind in reversed(kinds) if kind))]

    def in_turn(self, count: int) -> dict[str, Any]:
        """Arguments of ``sample`` for ``count`` samples: classes and prompts in turn."""
        known: dict[str, Any] = {}
        if self.shape.takes_text:
            known["captions"] = self._prompts.first(count)
        if self.shape.num_classes:
            labels = self._prompts.labels_of(count) if "captions" in known else None
            known["labels"] = torch.arange(count) % self.shape.num_classes if labels is None else labels
        return known or {"count": count}

    def class_label(self, number: int) -> str:
        """A class by its number, and its name if that is another one."""
        name = self.class_names[number] if number < len(self.class_names) else str(number)
        return name if name == str(number) else f"{number} {name}"

    def draw_images(
        self, seeds: Sequence[int], labels: Sequence[int] | None = None, captions: list[str] | None = None
    ) -> Tensor:
        """An image of each seed and its label and caption: uint8 [N, C, H, W], the same whatever is drawn beside it.

        Its noise is that of ``sample`` for it alone, with a generator of this seed.
        """
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        given = None if labels is None else torch.tensor(labels)
        return to_uint8(self._decode(self.sample(given, generators, captions=captions, count=len(seeds))))

    def check_sample_images(self) -> None:
        """Refuse what could not make images, before the first step."""
        self._decoder()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the encoders, the size and the prompts beside the weights: the checkpoint alone samples images."""
        if self.codec is not None:
            checkpoint[_CODEC_KEY] = self.codec.state_dict()
        if self.text_encoder is not None:
            checkpoint[_TEXT_KEY] = self.text_encoder.state_dict()
        size = None if self.latent_size is None else list(self.latent_size)
        checkpoint[_OWN_KEY] = {"latent_size": size, "prompts": self._prompts.state(), "backbone": self._described}
        checkpoint[_OWN_KEY]["class_names"] = self.class_names
        held = checkpoint.get("state_dict", {})
        whole = self._described and all(f"network.{name}" in held for name, _ in self.network.named_parameters())  # type: ignore[union-attr]
        if whole and not leaves_base_out(self):  # which techniques take out of the checkpoint later
            # All weights are here: where they came from need not be there when this is loaded.
            arguments = dict(checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {}))
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = arguments | {"backbone": self._described}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = trainer_of(self)
        must_agree = not (trainer is not None and trainer.predicting)  # which needs nothing of the data
        if _CODEC_KEY in checkpoint:
            what, way_out = "latents of another autoencoder", "Use the cache of the original run, or start again."
            saved = checkpoint[_CODEC_KEY]
            self.codec = latent_source.restored(LatentCodec, saved, self.codec, must_agree, what, way_out)
        if _TEXT_KEY in checkpoint:
            what, way_out = "texts of another encoder", "Give the data the encoder of the original run, or start again."
            saved = checkpoint[_TEXT_KEY]
            self.text_encoder = latent_source.restored(TextEncoder, saved, self.text_encoder, must_agree, what, way_out)
        own = checkpoint.get(_OWN_KEY)
        if own is not None:
            self._prompts.load(own["prompts"])
            self.class_names = self.class_names or list(own.get("class_names", ()))
            if self.latent_size is None and own["latent_size"] is not None:
                self.latent_size = (own["latent_size"][0], own["latent_size"][1])

    @torch.no_grad()
    def _sample(
        self,
        condition: Condition,
        count: int,
        generator: torch.Generator | Sequence[torch.Generator] | None,
        guidance_scale: float | None = None,
        steps: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        scale = self.guidance_scale if guidance_scale is None else guidance_scale
        if not self.shape.conditions:
            check("guidance_scale", scale, "1 for a backbone that takes no conditions", scale == 1.0)
        size = size or self.latent_size or self.shape.size
        if size is None:
            raise ConfigurationError(
                f"LatentDiffusion: sample needs size, height and width of the latents: {self.shape.name} says none."
            )
        features = self.shape.class_token.features
        rows = rows_of(features, self.shape.channels, size[1])
        noise = draw_noise((count, self.shape.channels, size[0] + rows, size[1]), generator, self.device)
        nothing = partial(self.conditioning.null, self.device)
        steps = self.sampling_steps if steps is None else steps
        drawn = []
        for start in range(0, count, _SAMPLED_AT_ONCE):
            part = slice(start, start + _SAMPLED_AT_ONCE)
            predict = guided(self, condition.rows(part), nothing, scale, self.sampler)
            drawn.append(sample_latents(predict, noise[part], steps, self.process, self.prediction, self.sampler))
        whole = torch.cat(drawn)
        return apart(whole, features)[0] if features else whole

    def _check_nothing(self) -> None:
        """Refuse guidance without the empty caption's embedding, of which a text encoder is needed."""
        if self.text_encoder is None and self.shape.takes_text:
            where = "without a text encoder: give the data or the module one (text_encoder)"
            check("guidance_scale", self.guidance_scale, f"1 {where}", self.guidance_scale == 1.0)

    def _check_request(self, labels: Tensor | None, captions: list[str] | None, count: int | None) -> int:
        """How many samples are asked for; refuses what the backbone does not take."""
        name, classes = self.shape.name, self.shape.num_classes
        check("captions", captions, f"null for {name}, which takes no text", captions is None or self.shape.takes_text)
        check("labels", labels, f"null for {name}, which takes none", labels is None or classes > 0)
        if labels is not None:
            known = bool(((labels >= 0) & (labels <= classes)).all())
            check("labels", labels.tolist(), f"in [0, {classes}], the last of which is no label", known)
        numbers = {len(given) for given in (labels, captions) if given is not None}
        numbers |= set() if count is None else {count}
        if len(numbers) != 1:
            allowed = "one, given by labels, captions or count"
            raise refusal("LatentDiffusion", "the number of samples", allowed, sorted(numbers))
        return numbers.pop()

    def _decode(self, latents: Tensor, viewer: PreviewDecoder | None = None) -> Tensor:
        """Latents to images, some at a time."""
        decoder = viewer or self._decoder()
        return torch.cat([decoder.decode(part) for part in latents.split(_DECODED_AT_ONCE)])

    def _decoder(self) -> LatentCodec:
        if self.codec is None:
            raise ConfigurationError(
                "LatentDiffusion has no autoencoder to make images with: load a checkpoint that was trained with a "
                "data module such as LatentDigits, or set codec to a LatentCodec. sample() gives latents without one."
            )
        return self.codec

    def _source(self) -> LatentSource | None:
        """The data module, if there is one that has an autoencoder."""
        data = getattr(trainer_of(self), "datamodule", None)
        return data if isinstance(data, LatentSource) else None


def to_uint8(images: Tensor) -> Tensor:
    """Images in [-1, 1] to 0..255, uint8, on the CPU."""
    return ((images.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8).cpu()


def described(kind: type[_T], name: str, value: Any, names: Any) -> _T:
    """A description as such, by its name alone, or as a checkpoint stores it."""
    if isinstance(value, kind):
        return value
    if isinstance(value, dict):
        return kind(**value)
    check_choice("LatentDiffusion", name, value, get_args(names))
    return kind(value)  # type: ignore[call-arg]
