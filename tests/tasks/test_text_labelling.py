"""TextLabelling: the weights of transformers' own Trainer on the same rows, figures, checkpoints and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lit_efficient import (
    EMA,
    CausalLMConfig,
    ConfigurationError,
    ExactResume,
    GPTConfig,
    LabelledTextData,
    LoRA,
    TextLabelling,
)
from lit_efficient.mechanisms.padding import reads_padding
from tests.support import QUIET, assert_equal, weights
from tests.tasks.preference_kit import SaveAfter
from tests.tasks.text_kit import FAMILIES, labelled, saved, written

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchmetrics, about classes without a row


def _data(folder: Path, family: str, labels: Any, **options: Any) -> LabelledTextData:
    source = written(folder / f"{labels}.jsonl", labelled(labels))
    options = {"val": source, "batch_size": 6, "max_length": 32, "cache_dir": str(folder / "cache"), **options}
    return LabelledTextData(train=source, tokenizer=saved(folder, family), labels=labels, **options)


class Plain(TextLabelling):
    """With plain descent at a constant rate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class InOrder(LabelledTextData):
    """With the training rows in their order."""

    def train_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


@pytest.mark.turns(12, always=("bert-class", "modernbert-tags"))
@pytest.mark.parametrize("labels", ["class", "classes", "number", "tags"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_the_trainer_of_transformers(family: str, labels: Any, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    base = saved(tmp_path, family)
    source = written(tmp_path / "rows.jsonl", labelled(labels))
    data = InOrder(
        train=source, val=source, tokenizer=base, labels=labels, batch_size=6, max_length=32, cache_dir=str(tmp_path)
    )
    data.prepare_data()
    data.setup()
    names = {} if labels == "number" else {"names": data.label_names}
    task = Plain(CausalLMConfig(base), labels, **names)
    task.configure_model()
    network: Any = task.network
    theirs = type(network)(network.config)
    theirs.load_state_dict(network.state_dict())
    theirs.config.pad_token_id = data.pad_id
    Trainer(**{**QUIET, "max_steps": 8, "max_epochs": -1, "limit_val_batches": 0}).fit(task, datamodule=data)
    rows = [{name: value[0] for name, value in data.collate([row]).items()} for row in data.val_rows]  # type: ignore[arg-type, union-attr]
    pad = {"input_ids": data.pad_id, "attention_mask": 0, "token_type_ids": 0, "labels": -100}

    def collate(found: list[Any]) -> dict[str, Any]:
        length = max(len(row["input_ids"]) for row in found)
        batch = {}
        for name in found[0]:
            values = [row[name] for row in found]
            if values[0].ndim and (name != "labels" or labels == "tags"):
                values = [torch.nn.functional.pad(v, (0, length - len(v)), value=pad[name]) for v in values]
            batch[name] = torch.stack(values)
        return batch

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=6, max_steps=8, report_to=[], disable_tqdm=True,
        train_sampling_strategy="sequential", max_grad_norm=0.0, save_strategy="no", use_cpu=True,
        remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    descent = torch.optim.SGD(theirs.parameters(), 0.1)
    constant = torch.optim.lr_scheduler.LambdaLR(descent, lambda _: 1.0)
    transformers.Trainer(
        theirs, arguments, train_dataset=rows, data_collator=collate, optimizers=(descent, constant)
    ).train()
    moved = 0.0
    for (name, ours), other in zip(network.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5, msg=name)
        moved += float(ours.detach().abs().sum())
    assert moved > 0


@pytest.mark.parametrize("labels", ["class", "classes", "number", "tags"])
def test_figures_do_not_depend_on_the_batches(labels: Any, tmp_path: Path) -> None:
    """They are those of scikit-learn over all rows."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, roc_auc_score

    torch.manual_seed(0)
    found = []
    for size in (5, 24):
        data = _data(tmp_path, "llama", labels, val_batch_size=size)
        data.prepare_data()
        data.setup()
        names = None if labels == "number" else data.label_names
        torch.manual_seed(1)
        task = TextLabelling(CausalLMConfig(saved(tmp_path, "llama")), labels, names)
        found.append(Trainer(**{**QUIET, "limit_val_batches": 1.0}).validate(task, data, verbose=False)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    with torch.no_grad():
        outputs = [(task.eval().predict_step(batch, 0), batch["labels"]) for batch in data.val_dataloader()]
    ((ours, targets),) = outputs
    if labels == "number":
        expected = {"mae": mean_absolute_error(targets, ours), "pearson": pearsonr(targets, ours)[0]}
        expected |= {"spearman": spearmanr(targets, ours)[0], "loss": float((ours - targets).square().mean())}
    elif labels == "classes":
        decided = (ours > 0).long()
        expected = {"accuracy": (decided == targets).double().mean()}
        expected["f1"] = f1_score(targets, decided, average="macro", zero_division=0)
        expected["auroc"] = roc_auc_score(targets, ours.sigmoid())
        expected["loss"] = float(torch.nn.functional.binary_cross_entropy_with_logits(ours, targets))
    else:
        kept = targets != -100
        best = ours.argmax(-1)
        expected = {"accuracy": accuracy_score(targets[kept], best[kept])}
        expected["f1"] = f1_score(targets[kept], best[kept], average="macro")
        expected["loss"] = float(torch.nn.functional.cross_entropy(ours[kept], targets[kept]))
        if labels == "class":
            expected["auroc"] = roc_auc_score(targets, ours.softmax(1), multi_class="ovr")
    assert found[1] == pytest.approx({f"val/{name}": float(value) for name, value in expected.items()}, rel=1e-4)


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("adapters", [True, False])
def test_it_learns_resumes_bit_for_bit_and_loads(adapters: bool, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"

    def run(**options: Any) -> tuple[TextLabelling, Any]:
        torch.manual_seed(0)
        task = TextLabelling(CausalLMConfig(saved(tmp_path, "llama")), learning_rate=2e-2, warmup_steps=0)
        callbacks: list[Any] = [ExactResume(), SaveAfter(4, path), EMA(decay=0.5)]
        callbacks += [LoRA(rank=4, modules_to_save=["score"])] if adapters else []
        runner = Trainer(callbacks=callbacks, **{**QUIET, "max_steps": 40, "max_epochs": -1, "limit_val_batches": 1.0})
        data = _data(tmp_path, "llama", "class")
        runner.fit(task, datamodule=data, **options)
        return task, runner.validate(task, data, verbose=False)[0]

    whole, figures = run()
    assert figures["val/accuracy"] > 0.9
    assert figures["val/auroc"] > 0.95
    again, same = run(ckpt_path=str(path))
    assert_equal(weights(again), weights(whole))
    assert same == figures
    if not adapters:
        loaded = TextLabelling.load_from_checkpoint(path)
        assert loaded.names == ["x", "y", "z"]
        assert loaded(torch.tensor([[5, 6, 7]])).shape == (1, 3)


def test_networks_that_read_padding_are_refused_or_told(tmp_path: Path) -> None:
    """XLNet reads the last position, whatever is there; FNet mixes all positions."""
    fit = Trainer(**{**QUIET, "max_steps": 1, "max_epochs": -1}).fit
    data = _data(tmp_path, "xlnet", "class")
    with pytest.raises(ConfigurationError, match="outputs of XLNetForSequenceClassification depend on padding"):
        fit(TextLabelling(CausalLMConfig(saved(tmp_path, "xlnet"))), datamodule=data)
    fit(TextLabelling(CausalLMConfig(saved(tmp_path, "xlnet")), "tags"), datamodule=_data(tmp_path, "xlnet", "tags"))
    with pytest.warns(UserWarning, match="outputs of FNetForTokenClassification depend .* it masks none"):
        fit(TextLabelling(CausalLMConfig(saved(tmp_path, "fnet")), "tags"), datamodule=_data(tmp_path, "fnet", "tags"))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_networks_do_not_read_padding(family: str, tmp_path: Path) -> None:
    for labels in ("class", "tags"):
        task = TextLabelling(CausalLMConfig(saved(tmp_path, family)), labels, ["a", "b"])
        task.configure_model()
        network: Any = task.network
        before = {name: value.clone() for name, value in network.state_dict().items()}
        pad = 3 if family in ("llama", "qwen3", "gpt2") else 0
        network.config.pad_token_id = pad
        assert not reads_padding(network, task, pad)
        assert_equal(before, dict(network.state_dict()))
    if family in ("gpt2", "bert"):  # positions are counted from the left
        assert not reads_padding(network, task, pad, left=True)


def test_a_frozen_head_and_other_labels_are_refused(tmp_path: Path) -> None:
    data = _data(tmp_path, "llama", "class")
    model = CausalLMConfig(saved(tmp_path, "llama"))
    with pytest.raises(ConfigurationError, match=r"score.weight are not in the files .*modules_to_save=\['score'\]"):
        Trainer(callbacks=[LoRA(rank=2)], **QUIET).fit(TextLabelling(model), datamodule=data)
    with pytest.raises(ConfigurationError, match="labels must be that of the data, class, got 'tags'"):
        Trainer(**QUIET).fit(TextLabelling(model, "tags"), datamodule=data)
    with pytest.raises(
        ConfigurationError, match=r"names must be those of the data, \['x', 'y', 'z'\], got \['a', 'b'\]"
    ):
        Trainer(**QUIET).fit(TextLabelling(model, names=["a", "b"]), datamodule=data)
    with pytest.raises(ConfigurationError, match="names must be null for numbers"):
        TextLabelling(model, "number", ["a", "b"])
    with pytest.raises(ConfigurationError, match="model must be a CausalLMConfig"):
        TextLabelling(GPTConfig())  # type: ignore[arg-type]
    task = TextLabelling(model, names=["a", "b"])
    task.configure_model()
    with pytest.raises(ConfigurationError, match="gives labels and cannot generate texts"):
        task.generate_text("a")
    with pytest.raises(ConfigurationError, match="a batch must have input_ids and attention_mask; got tokens"):
        task.predict_step({"tokens": torch.zeros(1)}, 0)
