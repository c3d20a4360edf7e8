"""Train an encoder or decoder of transformers to label texts: with classes or a number, or a class of each word.

    class     loss = -log softmax(W h)_y         h: the state that the model's own head reads, one of each text
    classes   loss = -mean_c log s(+- (W h)_c)   +: the text is of class c; s: the logistic function
    number    loss = (w . h - y)^2
    tags      loss = -mean_t log softmax(W h_t)_{y_t}

The network is ``AutoModelForSequenceClassification`` or ``AutoModelForTokenClassification``, unchanged, so an export
gives transformers the same outputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelAUROC,
    MultilabelF1Score,
)
from torchmetrics.regression import MeanAbsoluteError, PearsonCorrCoef, SpearmanCorrCoef

from lit_efficient.data.text.plain_texts import Labels
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses.next_token import IGNORE, sample_means
from lit_efficient.models.libraries.causal_lm import CausalLMConfig, Head
from lit_efficient.tasks.language_modeling import LanguageModeling
from lit_efficient.tasks.text_task import TextTask

_KEY = "text_labelling"
_PROBLEMS = {"class": "single_label_classification", "classes": "multi_label_classification"}


class TextLabelling(TextTask):
    """Training of classifiers, taggers and regressions on batches of texts with labels.

    Batches have ``input_ids``, ``attention_mask`` and perhaps ``token_type_ids`` ``[B, T]``, and ``labels``: a class
    ``[B]``, 1 or 0 for each class ``[B, C]``, a number ``[B]``, or classes of tokens ``[B, T]`` with -100 for tokens
    that do not count. Decoders read the last token that is not padding, found by its id: the padding token becomes that
    of the data. The layers that the files lack are drawn: with adapters, list them in ``modules_to_save`` (``score`` or
    ``classifier``).

    Logs ``train/loss``. Under ``val/`` and ``test/`` it logs ``loss`` and, for classes, ``accuracy``, ``f1`` (mean over
    the classes) and ``auroc`` (of classes of texts only; it keeps the outputs of an epoch); for numbers ``mae``,
    ``pearson`` and ``spearman``. The accuracy of several classes is the share of right decisions, one for each class of
    each text. Prediction returns the logits ``[B, C]``, the numbers ``[B]``, or the logits of tokens ``[B, T, C]``.

    Args:
        model: Encoder or decoder of transformers, by ``name_or_path`` or ``config_fields``.
        labels: ``class``, ``classes``, ``number`` or ``tags``, as those of the data.
        names: Names of the classes by number, or null to take those of the data.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of the matrices.
        warmup_steps: As in `LanguageModeling`.
    """

    logs: ClassVar[tuple[str, ...]] = (
        *("train/loss", "val/loss", "val/accuracy", "val/f1", "val/auroc"),
        *("val/mae", "val/pearson", "val/spearman"),
    )
    loads_as = "TextLabelling"
    trains_on = ("labelled texts",)
    cannot_generate = "the model gives labels and cannot generate texts"

    def __init__(
        self,
        model: CausalLMConfig,
        labels: Labels = "class",
        names: Sequence[str] | None = None,
        learning_rate: float = 2e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__(model, learning_rate, weight_decay, warmup_steps)
        allowed = "null for numbers" if labels == "number" else "a list of at least 2 different names, or null"
        if names is not None and (labels == "number" or isinstance(names, str) or not 2 <= len({*names}) == len(names)):
            raise refusal("TextLabelling", "names", allowed, names)
        self.labels: Labels = labels
        self.names = None if names is None else list(names)
        self.save_hyperparameters({"labels": labels, "names": self.names})
        self.figures: MetricCollection | None = None
        self._pad: int | None = None  # id that pads the batches of the data

    @property
    def head(self) -> Head:
        """Model of transformers around the body."""
        if self.labels == "number":
            return Head("AutoModelForSequenceClassification", {"num_labels": 1, "problem_type": "regression"})
        names = self.names or []
        fields: dict[str, Any] = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
        if self.labels == "tags":
            return Head("AutoModelForTokenClassification", fields)
        return Head("AutoModelForSequenceClassification", {**fields, "problem_type": _PROBLEMS[self.labels]})

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(trainer_of(self), "datamodule", None)
        theirs = getattr(data, "labels", self.labels)
        if theirs != self.labels:
            raise refusal("TextLabelling", "labels", f"that of the data, {theirs}", self.labels)
        names = getattr(data, "label_names", None)
        if names is not None:
            self._adopt_names(list(names), "the data")
        self._pad = getattr(data, "pad_id", self._pad)

    def _adopt_names(self, names: list[str], origin: str) -> None:
        if self.names is not None and self.names != names:
            raise refusal("TextLabelling", "names", f"those of {origin}, {names}", self.names)
        self.names = names

    def configure_model(self) -> None:
        """Build the network once the classes are known, and the figures of validation."""
        known = self.names is not None or self.labels == "number"
        if not known and trainer_of(self) is not None:
            raise refusal("TextLabelling", "names", "the names of the classes, for data without label_names", None)
        if known:
            super().configure_model()
        if self.network is not None:
            self._finish()

    def _finish(self) -> None:
        """Set the padding token of the network, and make the figures of validation."""
        if self._pad is not None:
            config: Any = self._built().config
            config.get_text_config().pad_token_id = self._pad
        if self.figures is not None:
            return
        if self.labels == "number":
            found: dict[str, Any] = {"mae": MeanAbsoluteError(), "pearson": PearsonCorrCoef()}
            found["spearman"] = SpearmanCorrCoef()
        elif self.labels == "classes":
            count = len(self.names or ())
            found = {"accuracy": MultilabelAccuracy(count, average="micro"), "f1": MultilabelF1Score(count)}
            found["auroc"] = MultilabelAUROC(count)
        else:
            count = len(self.names or ())
            ignored = IGNORE if self.labels == "tags" else None
            found = {"accuracy": MulticlassAccuracy(count, average="micro", ignore_index=ignored)}
            found["f1"] = MulticlassF1Score(count, average="macro", ignore_index=ignored)
            if self.labels == "class":
                found["auroc"] = MulticlassAUROC(count)
        self.figures = MetricCollection(found)

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks of `LanguageModeling` for tags, whose loss is a mean over tokens; else none."""
        if self.labels == "tags":
            return LanguageModeling.configure_callbacks(self)
        return []

    def num_tokens(self, batch: dict[str, Tensor]) -> int:
        """Return the number of labels that contribute to the loss."""
        if self.labels == "tags":
            return int((batch["labels"] != IGNORE).sum())
        return len(batch["labels"])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **further: Tensor) -> Tensor:
        """Return logits ``[B, C]`` or ``[B, T, C]``, or numbers ``[B]``."""
        output = self._call(input_ids, attention_mask, further)
        logits: Tensor = output.logits
        if self.labels == "number":
            return logits[:, 0]
        return logits

    def _outcome(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs, the mean loss, and the loss of each row ``[B]``."""
        outputs = self(**self._inputs(batch))
        labels = batch["labels"]
        if self.labels == "number":
            losses = F.mse_loss(outputs.float(), labels.float(), reduction="none")
            return outputs, losses.mean(), losses
        if self.labels == "classes":
            targets = labels.to(torch.float32)
            losses = F.binary_cross_entropy_with_logits(outputs.float(), targets, reduction="none").mean(1)
            return outputs, losses.mean(), losses
        losses = F.cross_entropy(outputs.float().flatten(0, -2), labels.flatten(), reduction="none")
        if self.labels == "class":
            return outputs, losses.mean(), losses
        return (outputs, *sample_means(losses.view_as(labels), labels))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss, and the loss of each row ``[B]`` for techniques that reweight samples."""
        _, loss, sample_loss = self._outcome(batch)
        self._log_step(loss)
        return {"loss": loss, "sample_loss": sample_loss}

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        if self.figures is not None:
            self.figures.reset()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        outputs, _, sample_loss = self._outcome(batch)
        labels = batch["labels"]
        if self.labels == "tags":
            # As sums over tokens, so that the mean of an epoch does not depend on its batches.
            counts = (labels != IGNORE).sum(1)
            self.epoch_metrics.update((sample_loss * counts)[:, None], labels)
        else:
            counted = torch.zeros_like(sample_loss, dtype=torch.long)  # one label of each row, which is not ignored
            self.epoch_metrics.update(sample_loss[:, None], counted[:, None])
        assert self.figures is not None
        if self.labels == "number":
            self.figures.update(outputs.float(), labels.float())
        elif self.labels == "classes":
            self.figures.update(outputs.float().sigmoid(), labels.long())
        else:
            outputs = outputs.float().movedim(-1, 1).softmax(1)  # [B, C] or [B, C, T]
            self.figures.update(outputs, labels)

    def _log_epoch(self, prefix: str) -> None:
        assert self.figures is not None
        found = {"loss": self.epoch_metrics.compute()["loss"], **self.figures.compute()}
        self.log_dict({f"{prefix}/{name}": value for name, value in found.items()}, prog_bar=True, sync_dist=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return logits or numbers, as :meth:`forward`."""
        return self(**self._inputs(batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_KEY] = {"labels": self.labels, "names": self.names, "pad": self._pad}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the checkpoint as `LanguageModeling` does. Raise ConfigurationError for other labels."""
        saved = checkpoint.get(_KEY)
        if saved is None:
            raise ConfigurationError("TextLabelling: this is not a checkpoint of TextLabelling: name a folder as model")
        if saved["labels"] != self.labels:
            raise refusal("TextLabelling", "labels", f"that of the checkpoint, {saved['labels']}", self.labels)
        if saved["names"] is not None:
            self._adopt_names(list(saved["names"]), "the checkpoint")
        if self._pad is None:
            self._pad = saved["pad"]
        super().on_load_checkpoint(checkpoint)
        self._finish()
