import math
from functools import partial
from pathlib import Path

import lightning.pytorch.callbacks
import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity

from lit_efficient import PUBLIC
from lit_efficient.callbacks.sample_text import SampleText
from lit_efficient.data.python_corpus import PythonCorpus
from lit_efficient.data.text.arguments import CorpusFiles
from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE, sample_means, token_losses
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.tasks.language_modeling import LanguageModeling
from lit_efficient.tasks.token_metrics import TokenMetrics
from tests import support

SMALL = GPTConfig(dim=16, depth=2, num_heads=2, max_length=64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for index in range(30):
        body = f"def function_{index}(self):\n    return self.value + {index}\n\n\n"
        (folder / f"file{index}.py").write_text(body * 4)
    return folder


def corpus(source: Path, **changes) -> PythonCorpus:
    settings = {"vocab_size": 300, "sequence_length": 16, "batch_size": 8, "val_fraction": 0.2}
    return PythonCorpus(**(settings | {"files": CorpusFiles([str(source)]), "prompts": ["def", "class"]} | changes))


trainer = partial(support.trainer, max_epochs=-1, max_steps=4, num_sanity_val_steps=1, limit_val_batches=1.0)


def fitted(tmp_path: Path, source: Path, **changes) -> tuple[LanguageModeling, Trainer]:
    torch.manual_seed(0)
    model = LanguageModeling(SMALL, learning_rate=1e-2, warmup_steps=2)
    run = trainer(default_root_dir=tmp_path, **changes)
    run.fit(model, datamodule=corpus(source))
    return model, run


@pytest.mark.turns(4, family="learns")
def test_training_learns_and_logs(tmp_path: Path, source: Path) -> None:
    model, run = fitted(tmp_path, source, max_steps=60)
    figures = run.callback_metrics
    assert figures["val/loss"] < 2.5 < math.log(300)
    assert figures["val/perplexity"].item() == pytest.approx(math.exp(figures["val/loss"].item()), rel=1e-5)
    assert 0 < figures["val/bits_per_byte"] < figures["val/loss"] / math.log(2)
    assert "train/loss" in figures
    assert model.network is not None
    assert model.network.config.vocab_size == run.datamodule.vocab_size


def test_validation_figures_are_those_of_all_tokens_at_once(tmp_path: Path, source: Path) -> None:
    model, run = fitted(tmp_path, source)
    windows = run.datamodule.val_windows
    with torch.no_grad():
        batch = torch.utils.data.default_collate([windows[i] for i in range(len(windows))])
        logits = model.eval()(batch["input_ids"])
    figures = run.validate(model, datamodule=run.datamodule, verbose=False)[0]
    reference = Perplexity()
    reference.update(logits, batch["shift_labels"])
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    assert figures["val/perplexity"] == pytest.approx(reference.compute().item(), rel=1e-4)
    assert figures["val/bits_per_byte"] == pytest.approx(
        nats.item() / math.log(2) / batch["num_bytes"].sum().item(), rel=1e-5
    )
    tested = run.test(model, datamodule=run.datamodule, verbose=False)[0]
    assert tested["test/loss"] == pytest.approx(figures["val/loss"])


def test_figures_are_weighted_by_tokens_and_ignore_what_does_not_count() -> None:
    metrics = TokenMetrics()
    labels = torch.tensor([[1, 2, IGNORE, IGNORE]])
    metrics.update(torch.tensor([[4.0, 2.0, 0.0, 0.0]]), labels)
    metrics.update(torch.ones(1, 4), torch.ones(1, 4, dtype=torch.long))
    assert metrics.compute()["loss"].item() == pytest.approx(10 / 6)
    assert "bits_per_byte" not in metrics.compute()


def test_losses_of_samples_ignore_what_does_not_count() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, IGNORE, 4], [IGNORE, IGNORE, IGNORE]])
    losses = token_losses(logits, labels)
    expected = -logits.log_softmax(-1)
    assert losses[0].tolist() == pytest.approx([expected[0, 0, 1].item(), 0.0, expected[0, 2, 4].item()])
    loss, sample_loss = sample_means(losses, labels)
    assert loss.item() == pytest.approx(losses.sum().item() / 2)
    assert sample_loss.tolist() == pytest.approx([losses[0].sum().item() / 2, 0.0])


def test_training_step_gives_the_loss_of_each_sample(tmp_path: Path, source: Path) -> None:
    model, run = fitted(tmp_path, source)
    batch = next(iter(run.datamodule.train_dataloader()))
    model.log = lambda *_, **__: None
    output = model.training_step(batch, 0)
    assert output["sample_loss"].shape == (8,)
    assert output["sample_loss"].requires_grad
    torch.testing.assert_close(output["loss"], output["sample_loss"].mean())


def test_a_checkpoint_alone_gives_a_model_that_writes(tmp_path: Path, source: Path) -> None:
    model, run = fitted(tmp_path, source)
    path = tmp_path / "model.ckpt"
    run.save_checkpoint(path, weights_only=True)
    loaded = LanguageModeling.load_from_checkpoint(path, weights_only=True)
    assert loaded.model == SMALL
    assert loaded.generate_text(["def", ""], max_new_tokens=12) == model.generate_text(["def", ""], max_new_tokens=12)
    assert loaded.generate_text("def", max_new_tokens=12)[0].startswith("def")
    assert loaded.network.head.weight is loaded.network.embedding.weight


def test_text_depends_on_the_seed_and_not_on_the_other_prompts(tmp_path: Path, source: Path) -> None:
    model, _ = fitted(tmp_path, source)
    alone = model.generate_text("def", max_new_tokens=12, seed=1)
    assert model.generate_text(["x = ", "def"], max_new_tokens=12, seed=0)[1] == alone[0]
    assert model.generate_text("def", max_new_tokens=12, seed=2) != alone
    with pytest.raises(
        ConfigurationError, match=r"max_new_tokens must be at least 1 and below the model's max_length, 64, got 64"
    ):
        model.generate_text("def", max_new_tokens=64)
    assert model.generate_text("self " * 100, max_new_tokens=8)[0].startswith("self self")  # longer than max_length


def test_resumed_equals_uninterrupted(tmp_path: Path, source: Path) -> None:
    """Without shuffling, so that the module alone is on trial: schedule, optimizer, weights and figures."""

    class Ordered(PythonCorpus):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(self.train_windows, self.batch_size, drop_last=True)

    class SaveEpoch(Callback):
        def on_train_epoch_end(self, trainer: Trainer, *_) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "four.ckpt")

    def run(ckpt_path: Path | None = None) -> tuple[LanguageModeling, Trainer]:
        torch.manual_seed(0)
        model = LanguageModeling(SMALL, learning_rate=1e-2, warmup_steps=2)
        data = Ordered(
            vocab_size=300, sequence_length=16, batch_size=8, val_fraction=0.2, files=CorpusFiles([str(source)])
        )
        one = trainer(default_root_dir=tmp_path, max_steps=8, limit_train_batches=4, callbacks=[SaveEpoch()])
        one.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return model, one

    whole, whole_run = run()
    resumed, resumed_run = run(tmp_path / "four.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert torch.equal(whole_run.callback_metrics["val/loss"], resumed_run.callback_metrics["val/loss"])


def test_a_checkpoint_of_another_network_is_refused_by_name(tmp_path: Path, source: Path) -> None:
    _, run = fitted(tmp_path, source)
    path = tmp_path / "model.ckpt"
    run.save_checkpoint(path)
    other = LanguageModeling(GPTConfig(dim=32, depth=2, num_heads=2, max_length=128))
    with pytest.raises(
        ConfigurationError, match="another network: dim is 16 in the checkpoint and 32 here; hidden_dim"
    ):
        trainer(default_root_dir=tmp_path).fit(other, datamodule=corpus(source), ckpt_path=path, weights_only=True)
    longer = LanguageModeling.load_from_checkpoint(path, model=GPTConfig(dim=16, depth=2, num_heads=2, max_length=128))
    assert longer.network.config.max_length == 128


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path, source: Path) -> None:
    model, run = fitted(tmp_path, source)
    path = tmp_path / "model.ckpt"
    run.save_checkpoint(path)
    for index in range(30):
        (source / f"file{index}.py").write_text(f"class Other{index}:\n    other_{index} = None\n" * 8)
    new = LanguageModeling(SMALL)
    with pytest.raises(ConfigurationError, match="tokenizer of the checkpoint differs from that of the model"):
        trainer(default_root_dir=tmp_path).fit(new, datamodule=corpus(source), ckpt_path=path, weights_only=True)
    with pytest.raises(ConfigurationError, match="tokenizer of the data differs from that of the model"):
        trainer(default_root_dir=tmp_path).fit(model, datamodule=corpus(source))
    model.tokenizer.save(str(tmp_path / "tokenizer.json"))
    more = trainer(default_root_dir=tmp_path, max_steps=6)
    more.fit(model, datamodule=corpus(source, tokenizer_file=str(tmp_path / "tokenizer.json")))
    assert more.global_step == 6


def test_the_vocabulary_must_be_that_of_the_data(tmp_path: Path, source: Path) -> None:
    wrong = LanguageModeling(GPTConfig(vocab_size=999, dim=16, depth=1, num_heads=2))
    with pytest.raises(ConfigurationError, match=r"model.vocab_size must be that of the data, \d+ .* got 999"):
        trainer(default_root_dir=tmp_path).fit(wrong, datamodule=corpus(source))
    ids = torch.zeros(8, dtype=torch.long)
    loader = DataLoader([{"input_ids": ids, "shift_labels": ids}] * 4, batch_size=2)
    with pytest.raises(ConfigurationError, match="vocab_size must be a number for data without vocab_size, got None"):
        trainer(default_root_dir=tmp_path).fit(LanguageModeling(SMALL), loader, loader)


def test_plain_loaders_work_with_a_given_vocabulary(tmp_path: Path) -> None:
    ids = torch.arange(8)
    loader = DataLoader([{"input_ids": ids, "shift_labels": ids}] * 4, batch_size=2)
    model = LanguageModeling(GPTConfig(vocab_size=9, dim=16, depth=1, num_heads=2))
    run = trainer(default_root_dir=tmp_path)
    run.fit(model, loader, loader)
    assert "val/perplexity" in run.callback_metrics
    assert "val/bits_per_byte" not in run.callback_metrics
    loss = run.validate(model, loader, verbose=False)[0]["val/loss"]
    losses = torch.cat(run.predict(model, loader))
    assert losses.shape == (4,)
    assert losses.mean().item() == pytest.approx(loss, rel=1e-5)
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        model.generate_text("def")


class StepsByItself(SingleDeviceStrategy):
    """As DeepSpeed's strategy says of itself."""

    handles_gradient_accumulation = True


def test_a_strategy_that_accumulates_by_itself_is_taken_and_what_it_does_is_said(tmp_path: Path) -> None:
    ids = torch.arange(8)
    loader = DataLoader([{"input_ids": ids, "shift_labels": ids}] * 4, batch_size=2)
    model = LanguageModeling(GPTConfig(vocab_size=9, dim=16, depth=1, num_heads=2))
    strategy = StepsByItself(torch.device("cpu"))
    run = trainer(default_root_dir=tmp_path, accumulate_grad_batches=2, max_steps=1, strategy=strategy)
    with pytest.warns(UserWarning, match="StepsByItself gives all batches of a step the same weight"):
        run.fit(model, loader, loader)
    assert run.global_step == 1


def test_fit_validate_predict_fit_builds_the_network_once(tmp_path: Path, source: Path) -> None:
    model, run = fitted(tmp_path, source)
    network = model.network
    data = run.datamodule
    run.validate(model, datamodule=data, verbose=False)
    model.generate_text = lambda prompts: [f"{prompt}!" for prompt in prompts]
    assert run.predict(model, datamodule=data) == [["def!"], ["class!"]]
    trainer(default_root_dir=tmp_path).fit(model, datamodule=data)
    assert model.network is network


def test_matrices_alone_decay_and_the_rate_follows_the_schedule(tmp_path: Path, source: Path) -> None:
    model, run = fitted(tmp_path, source, max_steps=8)
    optimizer = run.optimizers[0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(p.ndim == 2 for p in optimizer.param_groups[0]["params"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)  # the run is over


@pytest.mark.parametrize("changes", [{"learning_rate": 0.0}, {"weight_decay": -1.0}, {"warmup_steps": -1}])
def test_bad_arguments_are_refused_by_name(changes: dict) -> None:
    name, value = next(iter(changes.items()))
    with pytest.raises(ConfigurationError, match=f"LanguageModeling: {name} .* got {value}"):
        LanguageModeling(**changes)


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": {}, "pytorch-lightning_version": "2.6.0"}, path)
    with pytest.raises(ConfigurationError, match="not a checkpoint of LanguageModeling"):
        LanguageModeling.load_from_checkpoint(path, weights_only=True)


def test_the_shipped_configuration_names_what_exists_and_fits_together() -> None:
    config = yaml.safe_load((Path(__file__).parents[2] / "configs" / "tasks" / "language_model.yaml").read_text())
    assert (config["model"]["class_path"], config["data"]["class_path"]) == ("LanguageModeling", "PythonCorpus")
    model = LanguageModeling(**config["model"]["init_args"])
    data = PythonCorpus(**config["data"]["init_args"])
    assert data.sequence_length <= model.model.max_length
    for callback in config["trainer"]["callbacks"]:
        assert callback["class_path"] in PUBLIC or hasattr(lightning.pytorch.callbacks, callback["class_path"])
    sampling = next(c["init_args"] for c in config["trainer"]["callbacks"] if c["class_path"] == "SampleText")
    assert SampleText(**sampling).max_new_tokens < model.model.max_length
