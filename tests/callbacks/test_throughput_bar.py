import io
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.callbacks.throughput_bar import ThroughputBar, count_batch, short_number
from lit_efficient.cli.defaults import add_default_parts
from lit_efficient.errors import ConfigurationError
from tests import support


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(batch["input_ids"].float()).square().mean()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), prog_bar=True, batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield {"input_ids": torch.ones(4)}


def loader(count: int = 20) -> DataLoader:
    return DataLoader([{"input_ids": torch.ones(4)}] * count, batch_size=2)


trainer = partial(
    support.trainer, max_epochs=-1, num_sanity_val_steps=2, limit_val_batches=1.0, enable_progress_bar=True
)


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"\d+(/\d+)?  ", line)]


def test_plain_output_has_few_lines_that_say_all(capsys: pytest.CaptureFixture[str]) -> None:
    trainer([ThroughputBar(lines=4)], max_epochs=4).fit(Model(), loader(), loader(4))
    printed = capsys.readouterr().out
    lines = lines_of(printed)
    assert [line.split()[0] for line in lines if "left" in line][:1] == ["10/40"]
    assert len(lines) == 4 + 4  # four of the run, one a validation
    assert lines[-1].startswith("40/40")
    assert re.search(
        r"loss [\d.e-]+  tokens/s [\d.]+[kM]?  lr [\d.e-]+  val/loss [\d.e-]+  \d\d:\d\d < \d\d:\d\d left", lines[-1]
    )
    assert "\r" not in printed
    assert "v_num" not in printed


def test_terminal_shows_one_bar_over_all_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    trainer([ThroughputBar(refresh_rate=5)], max_epochs=3, num_sanity_val_steps=0).fit(Model(), loader(), loader(4))
    shown = terminal.getvalue()
    positions = [int(n) for n, total in re.findall(r"(\d+)/(\d+) \[", shown) if total == "30"]
    assert positions == sorted(positions)  # it never starts anew
    assert positions[-1] == 30
    assert "Epoch 2: 100%" in shown
    assert "tokens/s=" in shown
    assert "lr=" in shown
    assert "val/loss=" in shown


def test_a_narrow_terminal_shows_the_loss_and_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    trainer([ThroughputBar(refresh_rate=5)], max_epochs=1, limit_val_batches=0).fit(Model(), loader(), loader())
    last = terminal.getvalue().split("\r")[-1].rstrip()
    assert "loss=" in last
    assert "tokens/s=" in last
    assert "lr=" not in last


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_max_steps_ends_the_bar_and_a_resume_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = trainer([ThroughputBar(lines=2)], max_steps=6, limit_val_batches=0)
    first.fit(Model(), loader(), loader())
    assert lines_of(capsys.readouterr().out)[-1].startswith("6/6")
    first.save_checkpoint(tmp_path / "six.ckpt")
    bar = ThroughputBar(lines=4)
    second = trainer([bar], max_steps=16, limit_val_batches=0)
    second.fit(Model(), loader(), loader(), ckpt_path=tmp_path / "six.ckpt", weights_only=True)
    assert [line.split()[0] for line in lines_of(capsys.readouterr().out)] == ["8/16", "12/16", "16/16"]
    assert bar._start == 6


def test_counts_optimizer_steps_under_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    for limit, end in (({"max_steps": 3}, "3/3"), ({"max_epochs": 1}, "10/10")):
        run = trainer([ThroughputBar(lines=1)], accumulate_grad_batches=2, limit_val_batches=0, **limit)
        run.fit(Model(), loader(), loader())
        assert lines_of(capsys.readouterr().out)[-1].startswith(end)


def test_endless_data_without_an_end_works(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_efficient.callbacks.throughput_bar._SECONDS_PER_LINE", 0.0)
    run = trainer([ThroughputBar()], max_epochs=1, limit_val_batches=0)

    class Stopping(Model):
        def on_train_batch_end(self, *_) -> None:
            self.trainer.should_stop = self.trainer.global_step == 3

    run.fit(Stopping(), DataLoader(Endless(), batch_size=2), loader())
    assert [line.split()[0] for line in lines_of(capsys.readouterr().out)] == ["1", "2", "3"]


def test_the_rate_counts_all_tokens_and_no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("lit_efficient.callbacks.throughput_bar.time.monotonic", lambda: clock[0])

    class Slow(Model):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            clock[0] += 2.0
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            clock[0] += 100.0

    bar = ThroughputBar(lines=2)
    trainer([bar], max_steps=8, val_check_interval=3).fit(Slow(), loader(), loader(4))
    assert bar._rate == pytest.approx(8 / 2.0)  # 2 windows of 4 tokens in 2 seconds


def test_the_device_is_asked_at_refreshes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = ThroughputBar.get_metrics
    monkeypatch.setattr(ThroughputBar, "get_metrics", lambda *args: asked.append(1) or original(*args))
    trainer([ThroughputBar(lines=2)], max_steps=10, limit_val_batches=0).fit(Model(), loader(), loader())
    assert len(asked) == 2


def test_a_loss_that_was_not_logged_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Quiet(Model):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
            return {"loss": self._loss(batch)}

    trainer([ThroughputBar(lines=1)], max_steps=2, limit_val_batches=0).fit(Quiet(), loader(), loader())
    assert re.search(r"2/2  loss [\d.]+", capsys.readouterr().out)


def test_validate_alone_and_prints_work(capsys: pytest.CaptureFixture[str]) -> None:
    class Printing(Model):
        def on_validation_epoch_end(self) -> None:
            self.print("said by the module")

    trainer([ThroughputBar()]).validate(Printing(), loader(4), verbose=False)
    assert "said by the module" in capsys.readouterr().out


def test_counting_batches() -> None:
    ids = torch.ones(3, 5, dtype=torch.long)
    assert count_batch({"labels": ids[:1], "input_ids": ids}) == (15, "tokens")
    assert count_batch([torch.ones(7, 2), torch.ones(7)]) == (7, "samples")
    assert count_batch({"text": ["a"], "image": (torch.ones(6, 1),)}) == (6, "samples")
    assert count_batch("nothing") == (0, "samples")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (950.4, "950"), (999.7, "1k"), (12345.0, "12.3k"), (4.56e7, "45.6M"), (1.55e15, "1.55P")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize("name", ["refresh_rate", "lines"])
def test_bad_arguments_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ThroughputBar: {name} must be a whole number of at least 1, got 0"):
        ThroughputBar(**{name: 0})


def test_a_long_validation_prints_lines_without_a_terminal(monkeypatch, capsys) -> None:
    def printed() -> list[str]:
        bar = ThroughputBar()
        trainer(callbacks=[bar], max_steps=10, num_sanity_val_steps=0).fit(Model(), loader(), loader(6))
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation")]

    assert not printed()
    monkeypatch.setattr("lit_efficient.callbacks.throughput_bar._SECONDS_PER_LINE", 0.0)
    assert printed() == [f"validation: batch {number}/3" for number in (1, 2, 3)]


def test_a_run_without_bars_says_how_to_leave_it_out() -> None:
    said = r"trainer.callbacks has ThroughputBar, and .*enable_progress_bar is False.*--without ThroughputBar"
    with pytest.raises(ConfigurationError, match=said):
        add_default_parts({"callbacks": [ThroughputBar()], "enable_progress_bar": False}, "fit")
