from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader

from lit_efficient.callbacks.sample_text import SampleText, framed
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.runs import write_record


class Writer(LightningModule):
    """Any module that writes: it tells its mode and its step, and draws from the generator of the seed only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.frozen = torch.nn.Dropout()
        self.calls: list[dict] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean() + torch.rand(()) * 0

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> list[str]:
        return [f"written {batch_idx}"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def generate_text(self, prompts: list[str], **how) -> list[str]:
        self.calls.append({"training": self.training, "step": self.trainer.global_step, **how})
        return [f"{prompt} (): pass" for prompt in prompts]


class Silent(Writer):
    generate_text = None


def loader() -> DataLoader:
    return DataLoader(torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), batch_size=2)


def fit(tmp_path: Path, callbacks: list, logger: object = False, model: Writer | None = None) -> Writer:
    model = model or Writer()
    trainer = Trainer(
        max_steps=4,
        val_check_interval=2,
        accelerator="cpu",
        logger=logger,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        log_every_n_steps=1,
    )
    trainer.fit(model, loader(), loader())
    return model


def test_writes_at_each_validation_but_not_in_the_sanity_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    model = fit(tmp_path, [SampleText(["def", "class"], **how)])
    assert model.calls == [{"training": False, "step": step, **how} for step in (2, 4)]
    printed = capsys.readouterr().out
    assert "── sample at step 2 ─" in printed
    assert "def (): pass" in printed
    assert "class (): pass" not in printed
    texts = {path.name: path.read_text() for path in (tmp_path / "samples").iterdir()}
    assert sorted(texts) == ["step_0000002.txt", "step_0000004.txt"]
    assert "class (): pass" in texts["step_0000002.txt"]


def test_a_chat_is_asked_for_by_name(tmp_path: Path) -> None:
    """Only of modules that know the word."""
    assert [call["chat"] for call in fit(tmp_path, [SampleText(["hello"], chat=True)]).calls] == [True, True]
    assert not any("chat" in call for call in fit(tmp_path, [SampleText(["hello"])]).calls)


def test_modes_and_random_state_are_left_alone(tmp_path: Path) -> None:
    class Check(SampleText):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            pl_module.train()
            pl_module.frozen.eval()
            state = torch.get_rng_state()
            super().on_validation_end(trainer, pl_module)
            assert torch.equal(state, torch.get_rng_state())
            assert pl_module.layer.training
            assert not pl_module.frozen.training

    assert len(fit(tmp_path, [Check()]).calls) == 2


def test_tensorboard_gets_all_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="")
    fit(tmp_path, [SampleText(["def", "class"])], logger)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path)).Reload().Tensors("samples/text_summary")
    assert [event.step for event in events] == [2, 4]
    assert "class (): pass" in events[0].tensor_proto.string_val[0].decode()
    assert "class (): pass" in (tmp_path / "samples" / "step_0000002.txt").read_text()


@pytest.mark.turns(4, family="whole programs")
def test_wandb_gets_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(WandbLogger, "log_text", lambda _, key, **values: calls.append((key, values)))
    monkeypatch.setattr(WandbLogger, "log_hyperparams", lambda *_: None)
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda *_: None)
    fit(tmp_path, [SampleText(["def"])], WandbLogger(save_dir=tmp_path, offline=True))
    assert calls[0] == (
        "samples",
        {"columns": ["prompt", "text"], "data": [["def", "def (): pass"]], "step": 2},
    )


def test_other_loggers_get_a_file_beside_theirs(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="run", version="one")
    fit(tmp_path, [SampleText(["def"])], logger)
    assert "def (): pass" in (tmp_path / "run" / "one" / "samples" / "step_0000004.txt").read_text()


def test_a_run_of_the_command_line_and_a_folder_of_choice_go_before_the_loggers(tmp_path: Path) -> None:
    write_record(tmp_path / "run", {})
    for callback in (SampleText(["def"]), SampleText(["def"], folder=str(tmp_path / "mine"))):
        fit(tmp_path / "run", [callback], CSVLogger(tmp_path / "elsewhere"))
    assert len(list((tmp_path / "run" / "samples").iterdir())) == len(list((tmp_path / "mine").rglob("*.txt"))) == 2
    assert not (tmp_path / "elsewhere" / "samples").exists()


def test_a_module_that_cannot_write_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Silent has no generate_text"):
        fit(tmp_path, [SampleText()], model=Silent())


def test_predicted_texts_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[SampleText()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.predict(Writer(), loader())
    assert "written 3" in capsys.readouterr().out


def test_frame_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert framed("title", "x").splitlines() == ["── title " + "─" * 21, "x", "─" * 30]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompts": []}, "prompts must be a list of at least one text"),
        ({"prompts": "def"}, "prompts must be a list of at least one text"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes: dict, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SampleText: {sentence}"):
        SampleText(**changes)
