"""Latent diffusion model without its training: network, encoders, sampling and checkpoints.

    noise -> [sampler: network with guidance] -> latents -> [autoencoder] -> images

Autoencoder and text encoder come from the data module. They are stored in the checkpoint, which is enough to draw
samples. Neither is a submodule, so ``parameters()`` only contains parameters that train.

Costs: one evaluation of the network a step, two with guidance.
Source: Rombach et al. (2022), https://arxiv.org/abs/2112.10752.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number, checks_types, refusal
from lit_efficient.internals.lightning_strategies import NamesUnused, data_rank
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses import diffusion
from lit_efficient.losses.diffusers_sampling import check_sampler, check_steps
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.named_schedulers import clips
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule
from lit_efficient.losses.timesteps import on_latents, shift_at
from lit_efficient.mechanisms.adapters.added_rows import AddedRows, add_words
from lit_efficient.mechanisms.adapters.base import ADDED_ROWS, freeze_base, has_frozen_base, leaves_base_out, trim
from lit_efficient.mechanisms.adapters.base import check as check_base
from lit_efficient.mechanisms.adapters.merge import without_adapters
from lit_efficient.models.libraries import backbones
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.image_condition import ImageCondition, shape_with, without_paths
from lit_efficient.models.libraries.latent_codec import LatentCodec, PreviewDecoder
from lit_efficient.models.libraries.live_text import LiveText
from lit_efficient.models.libraries.pipeline_folder import Scaling, in_pipeline
from lit_efficient.models.libraries.text_encoder import TextEncoder
from lit_efficient.models.networks.backbone_shape import BackboneShape
from lit_efficient.models.networks.class_token import rows_of, split_token
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.networks.dit import DiTConfig
from lit_efficient.models.probes.modes import deep_path
from lit_efficient.protocol import builds_no_layers
from lit_efficient.surgery import moved, own_draws
from lit_efficient.tasks import latent_source
from lit_efficient.tasks.deferred_weights import weights_may_wait
from lit_efficient.tasks.image_inputs import image_input
from lit_efficient.tasks.latent_conditions import Conditioning, Prompts, TextTraining
from lit_efficient.tasks.latent_sampling import draw_noise, guided, sample_latents
from lit_efficient.tasks.latent_source import LatentSource
from lit_efficient.tasks.pipeline_settings import PipelineSettings

_SAMPLED_AT_ONCE = 64
_DECODED_AT_ONCE = 32
FIXED_SEED = 1_000_003  # of random numbers that are the same in each validation and prediction
_CODEC_KEY = "latent_codec"
_TEXT_KEY = "text_encoder"
_OWN_KEY = "latent_diffusion"
_T = TypeVar("_T")


def check(name: str, value: object, allowed: str, holds: bool) -> None:
    """Raise ConfigurationError for an argument unless ``holds``. ``allowed`` is read after "must be"."""
    if not holds:
        raise refusal("LatentDiffusion", name, allowed, value)


@checks_types
@dataclass(frozen=True)
class Samples:
    """Images that a task samples in validation.

    Args:
        count: Number of images that are sampled and scored in each validation. 0 for none.
        prompts: Captions of the samples. null takes the first 64 of the validation data.
        preview: A trained AutoencoderTiny (TAESD) that approximates the data's autoencoder. `SampleImages` decodes with
            it during a fit. Metrics always use the autoencoder.
        negative: Negative prompt of the samples, from which guidance moves away. null is the empty prompt.
    """

    count: int = 200
    prompts: list[str] | None = None
    preview: DiffusersModelConfig | None = None
    negative: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.preview, dict):  # from a checkpoint
            object.__setattr__(self, "preview", DiffusersModelConfig(**self.preview))
        check("samples.count", self.count, "0 or >= 2", self.count == 0 or self.count >= 2)
        allowed = "null or a list of at least one caption"
        check("samples.prompts", self.prompts, allowed, self.prompts is None or len(self.prompts) > 0)


class LatentGenerator(NamesUnused, ChecksTypes, LightningModule):
    """Sampling of latents and images for labels, captions, both or neither, depending on the backbone."""

    trains_on: ClassVar[tuple[str, ...]] = ("latents", "images")
    loads_as: ClassVar[str] = "LatentDiffusion"  # public class as which checkpoints of this task are loaded

    def __init__(
        self,
        backbone: DiTConfig | DiffusersModelConfig,
        prediction: Prediction | None,
        schedule: Schedule | DiffusionProcess | None,
        guidance_scale: float,
        sampling_steps: int,
        sampler: str | Sampler,
        samples: Samples,
        override: Sequence[str],
        image_condition: ImageCondition | None = None,
        text_training: TextTraining | None = None,
    ) -> None:
        super().__init__()
        # Arguments are dicts if they come from a checkpoint.
        self.backbone = backbones.as_spec(backbone) if isinstance(backbone, dict) else backbone
        if isinstance(self.backbone, DiffusersModelConfig):
            self.backbone = in_pipeline(self.backbone, ("transformer", "unet"))
        self.origin = self.backbone  # of a checkpoint: the backbone of its training
        self.samples = Samples(**samples) if isinstance(samples, dict) else samples
        self.image_condition = image_condition
        if isinstance(image_condition, dict):
            self.image_condition = ImageCondition(**image_condition)
        self.text_training = TextTraining(**text_training) if isinstance(text_training, dict) else text_training
        if self.text_training is not None:
            allowed = f"null for {self.shape.name}, which takes no text"
            check("text_training", self.text_training, allowed, self.shape.takes_text)
        self.settings = PipelineSettings(self.backbone, override)
        self.prediction: Prediction = self.settings.prediction(prediction)
        self.process = self.settings.process(schedule)
        self.sampler = self.settings.sampler(sampler, self.process)
        diffusion.check_prediction("LatentDiffusion", self.prediction, self.process)
        check_number("LatentDiffusion", "guidance_scale", guidance_scale, least=0)
        check_number("LatentDiffusion", "sampling_steps", sampling_steps, least=1, whole=True)
        drops = self.sampler.path_drop
        allowed = "false at guidance_scale 1, which applies no guidance"
        check("sampler.path_drop", drops, allowed, guidance_scale != 1 or not drops)
        try:
            check_sampler(self.process, self.sampler, self.prediction)
            check_steps(self.process, self.sampler, sampling_steps, self.prediction)
        except ConfigurationError as error:
            if not isinstance(sampler, dict):
                raise
            # A checkpoint must load even if its sampler is not available here.
            self.sampler = replace(self.sampler, name="builtin", options=None)
            rank_zero_warn(f"{error}. The checkpoint's sampler is replaced by builtin")
        if self.samples.negative is not None:  # the shape of the network is read only if it matters
            allowed = "null for a backbone without text, and without guidance (guidance_scale 1)"
            used = self.shape.takes_text and guidance_scale != 1
            check("samples.negative", self.samples.negative, allowed, used)
        self.guidance_scale = guidance_scale
        self.sampling_steps = sampling_steps
        self._prompts = Prompts(self.samples.prompts)
        self._preview: PreviewDecoder | None = None
        self._described: dict[str, Any] | None = None
        self._described_image: dict[str, Any] | None = None
        self.network: nn.Module | None = None
        self.codec: LatentCodec | None = None
        self.text_encoder: TextEncoder | None = None  # frozen
        self.live_text: LiveText | None = None  # the same encoder with the networks that train
        self.text_networks: nn.ModuleDict | None = None  # these networks
        self.text_is_stored = False  # batches have embeddings of captions
        self.latent_size: tuple[int, int] | None = None
        self.class_names: list[str] = []  # of the training data

    @cached_property
    def shape(self) -> BackboneShape:
        """Inputs and sizes of the backbone, from its config."""
        return shape_with(backbones.shape_of(self.backbone), self.image_condition, "LatentDiffusion")

    @property
    def export_format(self) -> str | None:
        """Format of ``export`` that checkpoints of this run have; None for the default."""
        if self.image_condition is not None and self.image_condition.kind != "sequence":
            return "diffusers"
        if leaves_base_out(self):
            return "peft"
        return None

    @property
    def conditioning(self) -> Conditioning:
        """Builder of the network's conditions."""
        encoder = self.live_text or self.text_encoder
        live = self.live_text is not None
        return Conditioning(self.shape, encoder, self.sampler.empty_prompt, live, self.text_is_stored and not live)

    def check_latents(self, channels: int, height: int, width: int) -> None:
        """Raise ConfigurationError for latents that do not fit the backbone."""
        self.shape.check_latents(channels, height, width, "LatentDiffusion")
        if isinstance(self.backbone, DiTConfig) and height == width:
            allowed = f"{height}, as the data's latents are"
            check("backbone.size", self.backbone.size, allowed, self.backbone.size == height)

    @property
    def latent_scaling(self) -> Scaling | None:
        """Mean and standard deviation of each channel of latents that the network's pipeline declares, if it does."""
        meaning = self.settings.meaning
        if meaning is None or "vae_scaling" in self.settings.override:
            return None
        return meaning.scaling

    def tokens(self, size: tuple[int, int]) -> int:
        """Return the number of the network's tokens for latents of a height and width."""
        return size[0] * size[1] // self.shape.sides.multiple**2

    @property
    def norm_side(self) -> int:
        """Side of the patches whose norm guidance keeps; 0 for most networks."""
        if self.shape.keeps_norms:
            return self.shape.sides.multiple
        return 0

    def sampler_at(self, size: tuple[int, int]) -> Sampler:
        """Return the sampler for latents of a height and width, with its shift as a number."""
        return replace(self.sampler, shift=shift_at(self.sampler.shift, self.tokens(size)))

    @builds_no_layers
    def setup(self, stage: str) -> None:
        data = self._source()
        if data is None:
            return
        channels, height, width = data.latent_shape
        self.check_latents(channels, height, width)
        if data.codec is not None:
            self.codec = data.codec
            self._check_clipping()
        self.text_encoder = getattr(data, "text_encoder", None) or self.text_encoder
        self.text_is_stored = getattr(data, "caches_text", False)
        if stage == "fit":
            scaling = getattr(data, "latent_scaling", None)
            if data.codec is not None:
                scaling = (data.codec.mean.tolist(), data.codec.std.tolist())
            self.settings.check_encoders(scaling, self.text_encoder)
        self.latent_size = (height, width)
        self.class_names = [str(name) for name in getattr(data, "class_names", None) or self.class_names]
        self.conditioning.check(data.num_classes)
        self._check_nothing()
        if self.text_training is not None and stage == "fit":
            held = self.text_is_stored
            allowed = (
                "null with cached embeddings of captions: set cached_text: false in LatentData to encode them live"
            )
            check("text_training", self.text_training, allowed, not held)
            allowed = "null without a text encoder in the data: set text_encoder in LatentData"
            check("text_training", self.text_training, allowed, self.text_encoder is not None)
        if self.samples.preview is not None and stage == "fit":
            allowed = "null for data without an autoencoder (codec) to approximate"
            check("samples.preview", self.samples.preview, allowed, self.codec is not None)
            self._preview = PreviewDecoder(self._decoder(), self.samples.preview)
            if self.samples.preview.draws_weights:
                rank_zero_info("LatentDiffusion: samples.preview has random weights, so its images are meaningless")

    def _check_clipping(self) -> None:
        if self.codec is not None and clips(self.sampler):
            allowed = "without thresholding and clip_sample unless the data is pixels in [-1, 1], to which both clip"
            check("sampler.options", self.sampler.options, allowed, self.codec.keeps_pixels)

    def configure_model(self) -> None:
        if self.network is not None:
            return
        if not self.shape.conditions:
            allowed = "1 for a backbone that takes no conditions"
            check("guidance_scale", self.guidance_scale, allowed, self.guidance_scale == 1.0)
        own = type(self).configure_model is LatentGenerator.configure_model
        self.network = backbones.build_backbone(self.backbone, own and weights_may_wait(self), self.image_condition)
        self._described = backbones.self_contained(self.backbone)
        if self.image_condition is not None:
            self._described, self._described_image = without_paths(self._described, self.image_condition, self.shape)
        self._build_text()
        if self.shape.learned_variance:
            rank_zero_info(
                f"LatentDiffusion: {self.shape.name} has twice as many output channels as input channels. The second "
                "half, a variance, is neither trained nor used"
            )

    @property
    def awaits_data(self) -> bool:
        """Whether further networks are built when the data is known."""
        return self.text_training is not None and self.text_networks is None

    def _build_text(self) -> None:
        """Build the text encoders that train, as soon as the frozen encoder is known."""
        if self.text_training is None or self.text_encoder is None or self.live_text is not None:
            return
        self.live_text = LiveText.of(self.text_encoder, self.text_training.encoders)
        self.text_networks = self.live_text.networks
        training = self.text_training
        if training.tokens is not None:
            who = "LatentDiffusion: text_training.tokens"
            rows = add_words(self.live_text.trained, training.words, training.tokens, training.seed, who)
            freeze_base(self, rows)
            described = ", ".join(f"{word} ({len(tokens)})" for word, tokens in training.words.items())
            rank_zero_info(f"LatentDiffusion: new words and their numbers of embeddings: {described}")

    def _described_tokens(self) -> dict[str, Any] | None:
        """Return the new words, and the name of their rows in each text encoder, as primitives for a checkpoint."""
        if self.text_training is None or self.text_training.tokens is None or self.text_networks is None:
            return None
        rows = {}
        kinds = {}
        for encoder, network in self.text_networks.items():
            kinds[encoder] = network.config.model_type  # type: ignore[union-attr]
            for name, part in network.named_modules():
                if isinstance(part, AddedRows):
                    rows[encoder] = f"text_networks.{encoder}.{name}.{ADDED_ROWS}"
        assert self.live_text is not None
        encoders = len(self.live_text.parts)
        return {"words": self.text_training.words, "rows": rows, "kinds": kinds, "encoders": encoders}

    def unused_parameters(self) -> list[str]:
        """Return the names of parameters of text encoders after the hidden state that the network reads."""
        if self.live_text is None:
            return []
        parts = self.live_text.unread(pooled=bool(self.shape.pooled_width))
        unused = {id(parameter) for part in parts for parameter in part.parameters()}
        return [name for name, parameter in self.named_parameters() if id(parameter) in unused]

    def on_fit_start(self) -> None:
        if self.sampler.path_drop:
            deep_path(self)

    def forward(self, x: Tensor, t: Tensor, condition: Condition | Tensor | None = None) -> Tensor:
        """Predict the target from noisy latents.

        Args:
            x: Noisy latents [B, c, h, w].
            t: Times [B] in [0, 1]; or [B, N] for a network that takes a time for each token.
            condition: Conditions, or labels [B].

        Returns:
            [B, c, h, w], float32.
        """
        assert self.network is not None, "configure_model() builds the network"
        return self.prediction_of(self.network, x, t, condition)

    def prediction_of(
        self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition | Tensor | None = None
    ) -> Tensor:
        """Predict the target with a network of the same kind. Arguments and result are those of :meth:`forward`."""
        known = condition if isinstance(condition, Condition) else Condition(labels=condition)
        if known.sizes is None and self.shape.takes_text and self.codec is not None:
            # The sizes of uncropped images that have these latents.
            height, width = (self.codec.factor * side for side in x.shape[2:])
            sizes = moved(torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32), x.device)
            known = replace(known, sizes=sizes.expand(len(x), -1))
        at = on_latents(t, (x.shape[2], x.shape[3]), self.shape.sides.multiple)
        scaled = x * diffusion.per_sample(self.process.input_scale(at), x)
        return backbones.call_backbone(network, scaled, t, known, self.process).float()

    def with_image(
        self, condition: Condition, batch: dict[str, Any], generator: torch.Generator | None
    ) -> tuple[Condition, dict[str, Any]]:
        """Return conditions with the image that the network sees, and the batch with the weights of the loss (mask)."""
        if self.image_condition is None:
            return condition, batch
        image, weights = image_input(batch, self.image_condition, self.codec, self.device, generator)
        batch = {name: value for name, value in batch.items() if name != "mask"}
        if weights is not None:
            batch["mask"] = weights
        return replace(condition, image=image), batch

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Sample one image for the label and caption of each sample in the batch: uint8 [B, C, H, W]."""
        # Every batch of every process gets other noise.
        seed = FIXED_SEED + batch_idx * self.trainer.world_size + data_rank(self.trainer)
        generator = torch.Generator().manual_seed(seed)
        condition, batch = self.with_image(self.conditioning.of_batch(batch, self.device), batch, generator)
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
        negative: str | None = None,
        count: int | None = None,
        size: tuple[int, int] | None = None,
        image: Tensor | None = None,
    ) -> Tensor:
        """Sample normalised latents [B, c, h, w], float32. The module must be in evaluation mode.

        Args:
            labels: Classes, [B] int64, for a backbone with classes.
            generator: Random generator of the noise, or one for each sample. None takes torch's global generator. A CPU
                generator works for every device.
            guidance_scale: Guidance scale. None takes the module's.
            steps: Steps of the sampler. None takes the module's ``sampling_steps``.
            captions: B captions, for a backbone with text.
            negative: Negative prompt, from which guidance moves away. None is that of ``samples``, or the empty prompt
                of the training.
            count: B, for a backbone with neither.
            size: Height and width of the latents. None takes those of the training data.
            image: Image that the network sees, as in `Condition`, for a module with an image condition.

        Raises:
            ConfigurationError: For conditions that the backbone does not support, and arguments out of range.
        """
        given = {"labels": labels, "captions": captions}
        known = {name: value for name, value in given.items() if value is not None}
        counted = self._check_request(labels, captions, count)
        check_number("LatentDiffusion", "guidance_scale", guidance_scale, least=0, null=True)
        check_number("LatentDiffusion", "steps", steps, least=1, whole=True, null=True)
        condition = self.conditioning.of_batch(known, self.device)
        allowed = f"null for {self.shape.name}, which takes no text"
        check("negative", negative, allowed, negative is None or self.shape.takes_text)
        if image is not None:
            condition = replace(condition, image=moved(image, self.device))
        return self._sample(condition, counted, generator, guidance_scale, steps, size, negative)

    def sample_images(self, num: int, seed: int) -> Tensor:
        """Sample images for all classes and prompts, repeated as necessary, without using the global generator.

        During a fit, ``samples.preview`` decodes them if it is set.

        Args:
            num: Number of images.
            seed: Seed of the noise.

        Returns:
            uint8 [num, C, H, W].
        """
        latents = self.sample(**self.in_turn(num), generator=torch.Generator().manual_seed(seed))
        trainer = trainer_of(self)
        fitting = trainer is not None and trainer.state.fn == "fit" and not trainer.state.finished
        return to_uint8(self._decode(latents, self._preview if fitting else None))

    def image_captions(self, num: int) -> list[str]:
        """Return the class and the caption of each of :meth:`sample_images`. Empty without conditions."""
        asked = self.in_turn(num)
        parts = []
        if "labels" in asked:
            parts.append([self.class_label(int(i)) for i in asked["labels"]])
        if "captions" in asked:
            parts.append(asked["captions"])
        return [": ".join(names) for names in zip(*parts)]

    def in_turn(self, count: int) -> dict[str, Any]:
        """Return arguments of ``sample`` for ``count`` samples with all classes and prompts, repeated as necessary."""
        known: dict[str, Any] = {}
        labels = None
        if self.shape.takes_text:
            known["captions"] = self._prompts.first(count)
            labels = self._prompts.labels_of(count)
        if self.image_condition is not None:
            known["image"] = self._prompts.first_images(count)
        if self.shape.num_classes:
            known["labels"] = torch.arange(count) % self.shape.num_classes if labels is None else labels
        return known or {"count": count}

    def class_label(self, number: int) -> str:
        """Return the number of a class, followed by its name if they differ."""
        if number >= len(self.class_names) or self.class_names[number] == str(number):
            return str(number)
        return f"{number} {self.class_names[number]}"

    def draw_images(
        self,
        seeds: Sequence[int],
        labels: Sequence[int] | None = None,
        captions: list[str] | None = None,
        negative: str | None = None,
        pictures: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        """Sample one image for each seed, with its label and caption, and a negative prompt: uint8 [N, C, H, W].

        An image does not depend on the others: its noise is that of ``sample`` for one image with this seed.

        Args:
            seeds: Seed of each image.
            labels: Classes.
            captions: Captions.
            negative: Negative prompt.
            pictures: Images [N, C, H, W] in [-1, 1] that the network sees, for a module with an image condition.
            masks: Parts of the pictures to fill in, [N, 1, H, W] in [0, 1], for inpainting.
        """
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        given = None if labels is None else torch.tensor(labels)
        image = None
        if self.image_condition is not None and pictures is not None:
            seen = []
            for number, generator in enumerate(generators):  # each draws its own sample of the posterior
                row = {"condition": pictures[number : number + 1], "images": pictures[number : number + 1]}
                if masks is not None:
                    row["mask"] = masks[number : number + 1]
                seen.append(image_input(row, self.image_condition, self.codec, self.device, generator)[0])
            image = torch.cat(seen)
        asked: dict[str, Any] = {"captions": captions, "negative": negative, "count": len(seeds), "image": image}
        return to_uint8(self._decode(self.sample(given, generators, **asked)))

    def usual_prompts(self, count: int) -> list[str]:
        """Return the captions of samples, repeated as necessary."""
        return self._prompts.first(count)

    def check_before_training(self) -> None:
        """Raise ConfigurationError if there was no network before training that could be sampled."""
        if self.image_condition is not None and not has_frozen_base(self):
            raise ConfigurationError(
                "LatentDiffusion: the network before training is not drawn with image_condition, because it may see no "
                "images, except below adapters: leave --before out"
            )
        if not has_frozen_base(self) and not _is_pretrained(self.origin):
            raise ConfigurationError(
                "LatentDiffusion: the network before training has random weights, because backbone names no pretrained "
                "model and there are no adapters: there is nothing to compare with"
            )

    @contextmanager
    def before_training(self) -> Iterator[None]:
        """Context in which samples come from the network before training: the pretrained one, without adapters.

        It is a second network on the device, read from the folder or the hub that ``backbone`` named when training
        began. If there is none, the frozen weights below the adapters are copied.

        Raises:
            ConfigurationError: If the network was trained from scratch.
        """
        self.check_before_training()
        trained = self.network
        live_text = self.live_text
        with own_draws(0):
            if _is_pretrained(self.origin):
                before = backbones.build_backbone(self.origin)
            else:
                before = backbones.build_backbone(self.backbone)
                whole = without_adapters(self)
                prefix = "network."
                own = {name[len(prefix) :]: tensor for name, tensor in whole.items() if name.startswith(prefix)}
                before.load_state_dict(own)
        self.network = before.to(self.device).eval()
        self.live_text = None  # captions are encoded by the frozen encoder
        try:
            yield
        finally:
            self.network = trained
            self.live_text = live_text

    def check_sample_images(self) -> None:
        """Raise ConfigurationError, before the first step, if there is no autoencoder to decode samples."""
        self._decoder()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the encoders, the size and the prompts, so that the checkpoint is enough to sample images."""
        if self.codec is not None:
            checkpoint[_CODEC_KEY] = self.codec.state_dict()
        if self.text_encoder is not None:
            checkpoint[_TEXT_KEY] = self.text_encoder.state_dict()
        checkpoint[_OWN_KEY] = {
            "task": self.loads_as,
            "latent_size": None if self.latent_size is None else list(self.latent_size),
            "prompts": self._prompts.state(),
            "backbone": self._described,
            "origin": asdict(self.origin),
            "class_names": self.class_names,
            "tokens": self._described_tokens(),
        }
        if self.text_training is not None and self.text_training.tokens is not None:
            checkpoint.setdefault("lit_efficient", {})
            trim(self, checkpoint)
        held = checkpoint.get("state_dict", {})
        whole = self._described and all(f"network.{name}" in held for name, _ in self.network.named_parameters())  # type: ignore[union-attr]
        if whole and not leaves_base_out(self):  # techniques would remove the base from the checkpoint later
            # With all weights in the checkpoint, loading it does not need the source of the backbone.
            arguments = dict(checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})) | {"backbone": self._described}
            if self._described_image is not None:
                arguments["image_condition"] = self._described_image
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = arguments

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = trainer_of(self)
        must_agree = trainer is None or not trainer.predicting  # prediction does not use the encoders of the data
        if _CODEC_KEY in checkpoint:
            self.codec = latent_source.restored(
                LatentCodec,
                checkpoint[_CODEC_KEY],
                self.codec,
                must_agree,
                "latents of another autoencoder",
                "Use the cache of the original run, or start again",
            )
        if _TEXT_KEY in checkpoint:
            self.text_encoder = latent_source.restored(
                TextEncoder,
                checkpoint[_TEXT_KEY],
                self.text_encoder,
                must_agree,
                "texts of another encoder",
                "Use the text encoder of the original run for the data, or start again",
            )
        if self.network is not None:
            self._build_text()
        if self.text_training is not None and self.text_training.tokens is not None:
            check_base(self, checkpoint)
        own = checkpoint.get(_OWN_KEY)
        if own is not None:
            self._prompts.load(own["prompts"])
            self.origin = backbones.as_spec(own["origin"])
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
        negative: str | None = None,
    ) -> Tensor:
        self._check_clipping()
        scale = guidance_scale
        if scale is None:
            scale = self.guidance_scale
        if steps is None:
            steps = self.sampling_steps
        if not self.shape.conditions:
            check("guidance_scale", scale, "1 for a backbone that takes no conditions", scale == 1.0)
        allowed = "given for a network that sees an image: predict on data with images, or pass it to sample"
        seen = (self.image_condition is None) == (condition.image is None)
        check("image", condition.image, allowed if self.image_condition else "null", seen)
        size = size or self._image_size(condition.image) or self.latent_size or self.shape.size
        if size is None:
            raise ConfigurationError(
                f"LatentDiffusion: sample needs size, the height and width of the latents, because {self.shape.name} "
                "does not define it"
            )
        features = self.shape.class_token.features
        rows = rows_of(features, self.shape.channels, size[1])
        noise = draw_noise((count, self.shape.channels, size[0] + rows, size[1]), generator, self.device)
        if negative is None:
            negative = self.samples.negative
        null = partial(self.conditioning.null, self.device, negative)
        sampler = self.sampler_at(size)
        drawn = []
        draws = generator
        for start in range(0, count, _SAMPLED_AT_ONCE):
            part = slice(start, start + _SAMPLED_AT_ONCE)
            if isinstance(generator, Sequence):
                draws = generator[part]
            drawn.append(self._integrated(condition.rows(part), noise[part], null, scale, steps, sampler, draws))
        whole = torch.cat(drawn)
        if features:
            whole, _ = split_token(whole, features)
        return whole

    def _integrated(
        self,
        condition: Condition,
        noise: Tensor,
        null: Callable[[], Condition],
        scale: float,
        steps: int,
        sampler: Sampler,
        generator: torch.Generator | Sequence[torch.Generator] | None,
    ) -> Tensor:
        """Integrate noise to latents, [B, c, h, w] each, float32.

        Args:
            condition: Conditions of the samples.
            noise: Standard normal noise.
            null: Returns the empty condition of a sample.
            scale: Guidance scale.
            steps: Steps of the sampler.
            sampler: The sampler.
            generator: Generator of further noise, or one for each sample. None takes torch's global generator.
        """
        predict = guided(self, condition, null, scale, sampler, self.norm_side)
        return sample_latents(predict, noise, steps, self.process, self.prediction, sampler, generator)

    def _image_size(self, image: Tensor | None) -> tuple[int, int] | None:
        """Return the height and width of the latents for an image that the network sees."""
        if image is None:
            return None
        factor = 1
        if self.image_condition is not None and self.image_condition.kind == "controlnet":
            factor = self._decoder().factor
        return image.shape[2] // factor, image.shape[3] // factor

    def _check_nothing(self) -> None:
        """Raise ConfigurationError for guidance without a text encoder, which embeds the empty caption."""
        if self.text_encoder is None and self.shape.takes_text:
            allowed = "1 without a text encoder: add one to the data or the module (text_encoder)"
            check("guidance_scale", self.guidance_scale, allowed, self.guidance_scale == 1.0)

    def _check_request(self, labels: Tensor | None, captions: list[str] | None, count: int | None) -> int:
        """Return the number of samples. Raise ConfigurationError for conditions that the backbone does not support."""
        name = self.shape.name
        classes = self.shape.num_classes
        check("captions", captions, f"null for {name}, which takes no text", captions is None or self.shape.takes_text)
        check("labels", labels, f"null for {name}, which takes none", labels is None or classes > 0)
        if labels is not None:
            known = bool(((labels >= 0) & (labels <= classes)).all())
            check("labels", labels.tolist(), f"in [0, {classes}], the last of which is no label", known)
        numbers = {len(given) for given in (labels, captions) if given is not None}
        if count is not None:
            numbers.add(count)
        if len(numbers) != 1:
            allowed = "the same in labels, captions and count"
            raise refusal("LatentDiffusion", "the number of samples", allowed, sorted(numbers))
        return numbers.pop()

    def _decode(self, latents: Tensor, viewer: PreviewDecoder | None = None) -> Tensor:
        """Decode latents to images, in parts to bound the memory."""
        decoder = viewer or self._decoder()
        images = []
        for part in latents.split(_DECODED_AT_ONCE):
            images.append(decoder.decode(part))
            decoder.check_decoded()
        return torch.cat(images)

    def _decoder(self) -> LatentCodec:
        if self.codec is None:
            raise ConfigurationError(
                "LatentDiffusion has no autoencoder to decode images: load a checkpoint that was trained with a data "
                "module such as LatentDigits, or set codec to a LatentCodec. sample() draws latents without one"
            )
        return self.codec

    def _source(self) -> LatentSource | None:
        """Return the data module if it can have an autoencoder, else ``None``."""
        data = getattr(trainer_of(self), "datamodule", None)
        if isinstance(data, LatentSource):
            return data
        return None


def _is_pretrained(spec: DiTConfig | DiffusersModelConfig) -> bool:
    return isinstance(spec, DiffusersModelConfig) and not spec.draws_weights


def to_uint8(images: Tensor) -> Tensor:
    """Convert images in [-1, 1] to uint8, 0 to 255, on the CPU."""
    return ((images.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8).cpu()
