"""Base of tasks that distil a latent diffusion model into one that samples in one to four steps.

The network begins with the weights of the teacher, and the teacher is the network as it was before training
(:mod:`lit_efficient.tasks.reference`). With adapters it is therefore the base, without a second network.
"""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError, ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.networks.condition import Condition
from lit_efficient.protocol import builds_no_layers
from lit_efficient.tasks.latent_diffusion import LatentDiffusion
from lit_efficient.tasks.latent_generator import Samples
from lit_efficient.tasks.latent_sampling import guided
from lit_efficient.tasks.loading import latent_diffusion_of, load_latent_diffusion
from lit_efficient.tasks.reference import Reference

_OWN_KEY = "latent_diffusion"
_START = "teacher"  # fingerprint of the teacher's weights in checkpoints


class DistilledDiffusion(LatentDiffusion):
    """Base of tasks with a teacher, which is the network before training. Checkpoints load as `LatentDiffusion`.

    Args:
        teacher: Checkpoint of `LatentDiffusion`, or a network of diffusers with trained weights, whose pipeline gives
            the settings as in `LatentDiffusion`.
        teacher_guidance: Guidance scale of the teacher, which is distilled into the network. 1 is no guidance.
        sampling_steps: Steps of the sampler lcm, 1 to 50. Sampling has no guidance.
        learning_rate: As in `LatentDiffusion`.
        samples: As in `LatentDiffusion`.
        override: As in `LatentDiffusion`.
    """

    loads_as = "LatentDiffusion"

    def __init__(
        self,
        teacher: str | DiffusersModelConfig,
        teacher_guidance: float,
        sampling_steps: int,
        learning_rate: float,
        samples: Samples,
        override: list[str] | None,
    ) -> None:
        owner = type(self).__name__
        self._teacher_codec: str | None = None  # fingerprint of the autoencoder that the teacher was trained with
        backbone: Any = teacher
        prediction = None
        process: DiffusionProcess | None = None
        if isinstance(teacher, str):
            checkpoint = read_checkpoint(teacher)
            if checkpoint.get(_OWN_KEY, {}).get("task") != "LatentDiffusion":
                raise ConfigurationError(f"{owner}: teacher={teacher!r} is not a checkpoint of LatentDiffusion")
            known = latent_diffusion_of(checkpoint, teacher)
            if known.image_condition is not None:
                allowed = "without image_condition, which distillation does not support"
                raise refusal(owner, "teacher", allowed, teacher)
            backbone = known.backbone
            prediction = known.prediction
            process = known.process
            override = list(known.settings.override)
            codec = checkpoint.get("latent_codec", {}).get("fingerprint")
        elif teacher.draws_weights:
            raise ConfigurationError(f"{owner}: teacher must have trained weights, got random ones")
        super().__init__(
            backbone,
            prediction,
            process,
            label_dropout=0.0,
            guidance_scale=1.0,
            sampling_steps=sampling_steps,
            sampler=Sampler("lcm"),
            learning_rate=learning_rate,
            samples=samples,
            override=override,
        )
        if isinstance(teacher, str):
            self._teacher_codec = codec
        check_number(owner, "teacher_guidance", teacher_guidance, least=0)
        features = self.shape.class_token.features
        if features:
            raise refusal(owner, "class_token.features of the teacher", "0", features)
        self.teacher = teacher
        self.teacher_guidance = teacher_guidance
        self._reference: Reference | None = None
        self._start: str | None = None  # fingerprint of the teacher in the run that wrote the checkpoint

    @builds_no_layers
    def setup(self, stage: str) -> None:
        super().setup(stage)
        theirs = self._teacher_codec
        if stage == "fit" and self.codec is not None and theirs is not None and theirs != self.codec.fingerprint():
            raise ConfigurationError(
                f"{type(self).__name__}: teacher was trained on latents of another autoencoder than that of the data: "
                "use the teacher's"
            )

    def configure_model(self) -> None:
        if self.network is not None:
            return
        super().configure_model()
        if isinstance(self.teacher, str):
            loaded, held = load_latent_diffusion(self.teacher)
            self.network.load_state_dict(loaded.network.state_dict())  # type: ignore[attr-defined]
            rank_zero_info(f"{type(self).__name__}: starts from the {held} weights of {self.teacher}")

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.reference()

    def reference(self) -> Reference:
        """Return the network as it was before training.

        Raises:
            CheckpointError: If it differs from the start of the run that wrote the checkpoint.
            ConflictError: If weights that must be copied are sharded by another strategy than ShardedStrategy.
        """
        assert self.network is not None
        if self._reference is None:
            made = Reference(self.network, self)
            traits = traits_of(getattr(trainer_of(self), "strategy", None))
            if made.tensors and traits.shards and not traits.shards_itself:
                raise ConflictError(
                    f"{type(self).__name__}: the teacher is a copy of weights that train, which {traits.name} shards: "
                    "only train adapters (LoRA), whose teacher is the base itself"
                )
            if self._start is not None and made.fingerprint() != self._start:
                raise CheckpointError(
                    f"{type(self).__name__}: the run of this checkpoint started from another teacher: use the same one"
                )
            self._reference = made
            rank_zero_info(f"{type(self).__name__}: the teacher is {made.describe()}")
        return self._reference

    on_sharded = reference  # before the strategy loads the weights of a checkpoint

    @torch.no_grad()
    def taught(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Return the teacher's prediction with guidance, [B, c, h, w]. Arguments as in ``forward``."""

        def null() -> Condition:
            return self.conditioning.null(self.device)

        scale = self.teacher_guidance if self.shape.conditions else 1.0
        predict = guided(self, condition, null, scale, self.sampler, self.norm_side)
        found: Tensor = self.reference()(self.network, lambda: predict(x, t))  # type: ignore[arg-type]
        return found

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        start = self._start
        if self._reference is not None:
            start = self._reference.fingerprint()
        checkpoint[_OWN_KEY][_START] = start

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._start = checkpoint.get(_OWN_KEY, {}).get(_START)
        if self.network is not None and trainer_of(self) is not None:
            self.reference()
