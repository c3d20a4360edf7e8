"""Generated text at each validation: the first text is printed, and all are logged.

    tokens are drawn one by one, with a separately seeded generator per prompt, so sampling does not change training

Costs: ``len(prompts) * max_new_tokens`` forward passes of one token at each validation
"""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lit_efficient.errors import ChecksTypes, ConfigurationError, check_list, check_number, diagnostic, refusal
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.runs import samples_file
from lit_efficient.internals.lightning_trainer import AskedEarly
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.traits import Trait


class SampleText(ChecksTypes, AskedEarly, Callback):
    """Print and log generated text at the end of each validation, and print the texts that ``predict`` generates.

    Texts go to each TensorBoard and W&B logger of the trainer, and to ``samples/step_XXXXXXX.txt`` in the run's folder.
    The module needs ``generate_text(prompts, *, max_new_tokens, temperature, top_p, seed) -> list[str]``.

    Args:
        prompts: Texts to continue, at least one. All continuations are logged, and the first is printed.
        max_new_tokens: Number of tokens to generate per prompt, at least 1.
        temperature: Temperature of sampling, at least 0. 0 takes the most probable token.
        top_p: Sample from the most probable tokens whose probabilities sum to this, above 0 and at most 1.
        seed: Seed of sampling. It is the same at each validation, so that only the model changes the texts.
        chat: True to pass each prompt as a user's turn in the chat template of the tokenizer. ``generate_text`` is then
            called with ``chat=True``.
        images: For each prompt a list of image files, which may be empty. ``generate_text`` is then called with
            ``images=images``. Needs ``chat`` and a model that was trained with a processor.
        folder: Folder that contains ``samples``. ``None``: the folder of the run, or outside of the command line that
            of the logger.

    Raises:
        ConfigurationError: For an argument out of range, or if the module has no ``generate_text``.
    """

    traits = frozenset({Trait.ACTS_AT_VALIDATION, Trait.LEAVES_TRACES})

    def __init__(
        self,
        prompts: Sequence[str] = ("def main(", "class Reader:"),
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
        chat: bool = False,
        images: Sequence[Sequence[str]] = (),
        folder: str | None = None,
    ) -> None:
        check_list("SampleText", "prompts", prompts, "a list of at least one text")
        self._check_images(prompts, images, chat)
        check_number("SampleText", "max_new_tokens", max_new_tokens, least=1, whole=True)
        Sampling(temperature, top_p).check("SampleText")
        self.prompts = list(prompts)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed
        self.chat = chat
        self.images = [list(own) for own in images]
        self.folder = folder

    def _check_images(self, prompts: Sequence[str], images: Sequence[Sequence[str]], chat: bool) -> None:
        allowed = f"a list of files for each of the {len(prompts)} prompts"
        check_list("SampleText", "images", images, allowed, empty=True)
        for own in images:
            if not isinstance(own, list | tuple) or not all(isinstance(file, str) for file in own):
                raise refusal("SampleText", "images", allowed, images)
        if len(images) not in (0, len(prompts)):
            raise refusal("SampleText", "images", allowed, images)
        if images and not chat:
            raise refusal("SampleText", "chat", "true with images, whose places the chat template writes", chat)
        for file in (file for own in images for file in own):
            if not Path(file).is_file():
                raise refusal("SampleText", "images", "files that exist", file)

    def refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error if the module cannot generate text."""
        if not callable(getattr(pl_module, "generate_text", None)):
            raise ConfigurationError(
                f"SampleText: {type(pl_module).__name__} has no generate_text(prompts, *, max_new_tokens, temperature, "
                "top_p, seed) -> list[str]. Add one, or leave SampleText out"
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate in every process, because sharded weights need all of them. Print and log in the first."""
        if trainer.sanity_checking:
            return
        # These arguments are passed only if they are needed: a module without chats or images need not accept them.
        options: dict[str, Any] = {"chat": True} if self.chat else {}
        if self.images:
            options["images"] = self.images
        texts: list[str] = []
        # Several processes wait for each other while they generate: one that went on alone would let them wait forever.
        safely = diagnostic("SampleText", "generated text") if trainer.world_size == 1 else nullcontext()
        with safely, evaluating(pl_module):
            texts = pl_module.generate_text(  # type: ignore[operator]
                self.prompts,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                seed=self.seed,
                **options,
            )
        log_dir = trainer.log_dir  # a broadcast, so all processes must read it
        if trainer.is_global_zero and texts:
            with diagnostic("SampleText", "generated text"):
                pl_module.print(framed(f"sample at step {trainer.global_step}", texts[0]))
                self._log(trainer, texts, log_dir)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, list):
            return
        for text in outputs:
            if isinstance(text, str):
                pl_module.print(framed("prediction", text))

    def _log(self, trainer: Trainer, texts: list[str], log_dir: str | None) -> None:
        step = trainer.global_step
        content = "\n".join(framed(prompt, text) for prompt, text in zip(self.prompts, texts))
        with replacing(samples_file(step, ".txt", trainer.default_root_dir, log_dir, self.folder)) as file:
            file.write(content.encode())
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                fenced = "\n\n".join(f"```\n{text}\n```" for text in texts)
                logger.experiment.add_text("samples", fenced, step)
            elif isinstance(logger, WandbLogger):
                rows = [list(row) for row in zip(self.prompts, texts, strict=True)]
                logger.log_text("samples", columns=["prompt", "text"], data=rows, step=step)


def framed(title: str, text: str) -> str:
    """Return ``text`` between two rules, the first with ``title``, as wide as the terminal, at most 100 columns."""
    width = min(100, shutil.get_terminal_size().columns)
    return f"{f'── {title} ':─<{width}}\n{text}\n{'─' * width}"
