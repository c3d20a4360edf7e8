"""Tasks of lm-eval during training: accuracies of multiple choice, exact matches, perplexities.

Costs: the time of the evaluation; ``limit`` bounds it
Source: https://github.com/EleutherAI/lm-evaluation-harness
"""

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_efficient.data.text.chat_tokenizer import of_transformers
from lit_efficient.errors import ChecksTypes, ConfigurationError, check_installed, check_number
from lit_efficient.internals.lightning_trainer import AskedEarly
from lit_efficient.models.libraries.lm_eval_tasks import Harness, figures
from lit_efficient.traits import Trait


class TaskEvaluation(ChecksTypes, AskedEarly, Callback):
    """Run tasks of lm-eval on the network, and log their metrics as ``eval/TASK/METRIC``.

    Callbacks such as ``ModelCheckpoint`` can monitor those of a validation.

    The module needs ``network``, a causal model of transformers or our GPT, and ``tokenizer``, as ``LanguageModeling``
    has them.
    Training does not change: modes and random states are restored. Each process evaluates all rows, so that weights
    may be sharded.

    Args:
        tasks: Names of tasks or groups, whose data is downloaded, or YAML files of tasks of one's own.
        every_n_steps: Number of optimizer steps between evaluations of the weights that train. None: at the end of
            each validation, with the weights that validation uses, such as an average.
        include_path: Folder with further tasks as YAML files. Python functions that they name are run.
        limit: Number of rows of each task. None takes all.
        num_fewshot: Number of examples before each question. None takes that of the task.
        batch_size: Number of rows in a batch.
        chat: Format questions by the tokenizer's chat template.

    Raises:
        ConfigurationError: For an argument out of range, an unknown task, another kind of network, or without lm-eval.
    """

    traits = frozenset({Trait.ACTS_AT_VALIDATION, Trait.LEAVES_TRACES})

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        every_n_steps: int | None = None,
        include_path: str | None = None,
        limit: int | None = None,
        num_fewshot: int | None = None,
        batch_size: int = 8,
        chat: bool = False,
    ) -> None:
        if every_n_steps is not None:
            check_number("TaskEvaluation", "every_n_steps", every_n_steps, least=1, whole=True)
        self.tasks = tasks
        self.every_n_steps = every_n_steps
        self.include_path = include_path
        self.limit = limit
        self.num_fewshot = num_fewshot
        self.batch_size = batch_size
        self.chat = chat
        self._harness = Harness(tasks, include_path, limit, num_fewshot, batch_size, chat)
        self._harness.check("TaskEvaluation")
        self._last = 0  # step of the last evaluation

    def refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error without lm-eval, or if the module has no network and tokenizer."""
        check_installed("TaskEvaluation", "lm_eval")
        for name in ("network", "tokenizer"):
            if not hasattr(type(pl_module), name) and not hasattr(pl_module, name):
                raise ConfigurationError(
                    f"TaskEvaluation: {type(pl_module).__name__} has no {name}: give it a causal model of transformers "
                    "as `network` and its tokenizer as `tokenizer`, or leave TaskEvaluation out"
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the tasks and the network before the first step."""
        self._last = trainer.global_step
        network = pl_module.network
        self._harness.prepared("TaskEvaluation", network)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.every_n_steps is not None and step != self._last and step % self.every_n_steps == 0:
            self._last = step
            found = self._evaluate(pl_module)
            for logger in trainer.loggers:  # the module's `log` would repeat the values at the next steps
                logger.log_metrics(found, step=step)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_steps is None and not trainer.sanity_checking:
            for name, value in self._evaluate(pl_module).items():
                pl_module.log(name, value, sync_dist=True)  # the same in all processes; it avoids a warning

    def _evaluate(self, pl_module: LightningModule) -> dict[str, float]:
        tokenizer = of_transformers(pl_module.tokenizer)
        stop = (getattr(pl_module, "tokenizer_state", None) or {}).get("stop", ())
        found = self._harness.run("TaskEvaluation", pl_module.network, tokenizer, stop, errors=False)
        return {f"eval/{name}": value for name, value in figures(found).items()}
