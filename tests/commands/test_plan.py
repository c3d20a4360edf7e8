"""``plan`` on a small language model: what it prints adds up, and what it advises is what the same command then finds."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lit_efficient import LanguageModeling
from lit_efficient.__main__ import main
from lit_efficient.models.gpt import GPTConfig
from tests.support_cli import ToyData

NET = {"vocab_size": 40, "dim": 16, "depth": 2, "num_heads": 2, "max_length": 24}


class Rows(LightningDataModule):
    """Rows of tokens; one size of batch is interrupted."""

    interrupts = 0

    def __init__(self, batch_size: int = 4, tokens: int = 16, count: int = 64) -> None:
        super().__init__()
        if batch_size == Rows.interrupts:
            raise KeyboardInterrupt
        self.batch_size, self.tokens, self.count = batch_size, tokens, count

    def train_dataloader(self) -> DataLoader:
        ids = torch.arange(self.count * self.tokens).reshape(self.count, self.tokens) % 40
        return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=self.batch_size)


class Sizeless(ToyData):
    """Has no size that could be set."""

    def __init__(self) -> None:
        super().__init__()
        del self.batch_size

    def _loader(self) -> DataLoader:
        return DataLoader(torch.ones(8, 3), batch_size=2)


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = {"accelerator": "cpu", "max_steps": 2, "logger": False, "enable_checkpointing": False}
    model = {"class_path": "LanguageModeling", "init_args": {"model": NET}}
    tree = {"model": model, "data": {"class_path": f"{__name__}.Rows"}, "trainer": trainer}
    Path("small.yaml").write_text(yaml.safe_dump(tree))


def plan(*words: str) -> int:
    return main(["plan", "--allow-import", "tests", "-c", "small.yaml", "--quiet", *words])


def answer(capsys, *words: str) -> tuple[int, dict]:
    code = plan("--json", *words)
    return code, json.loads(capsys.readouterr().out)


def test_what_fits_and_the_largest_batch_that_does(capsys):
    code, whole = answer(capsys, "--device-memory", "1GiB", "--output", "step.png", "--no-advice")
    found, network = whole["plan"], LanguageModeling(GPTConfig(**NET))
    network.configure_model()
    assert code == 0
    assert whole["fits"] is True
    assert found["parameters"] == found["trainable"] == sum(p.numel() for p in network.parameters())
    assert (found["batch"], found["unit"], found["amount"]) == (4, "tokens", 64)
    sums = [sum(moment["kinds"].values()) for moment in found["timeline"]]
    assert found["peak"] == sum(found["kinds"].values()) == max(sums)
    assert found["flops"] > 6 * 64 * 2 * 12 * 16 * 16
    assert Path("step.png").read_bytes()[:4] == b"\x89PNG"
    limit = f"{2 * found['peak']}"
    code, whole = answer(capsys, "--device-memory", f"{limit}B")
    largest = whole["largest"]
    assert code == 0
    assert largest["settings"] == ["data.batch_size"]
    assert largest["value"] > 4
    assert largest["next"] == largest["value"] + 1
    for size, fits in ((largest["value"], 0), (largest["next"], 3)):
        assert plan("--device-memory", f"{limit}B", "--no_advice", "--data.batch_size", str(size)) == fits
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["small.yaml", "step.png"]  # and no run


def test_advice_is_what_the_same_command_finds_with_it(capsys):
    _, before = answer(capsys, "--device-memory", "1GiB", "--no_advice")
    limit = ["--device-memory", f"{int(0.8 * before['plan']['peak'])}B"]
    code, whole = answer(capsys, *limit)
    assert code == 3
    assert whole["fits"] is False
    smaller, same = whole["advice"][:2]
    assert smaller["options"][0] == "--data.batch_size"
    assert same["options"][0] == "-c"
    assert {one["changes"] for one in same["techniques"]} == {"same"}
    assert "MaxBatchSize" not in str(whole)
    for advice in (smaller, same):
        Path("more.yaml").write_text(advice["yaml"])
        for words in (advice["options"], ["-c", "more.yaml"]):
            code, after = answer(capsys, *limit, *words, "--no_advice")
            assert code == 0
            assert after["plan"]["peak"] == advice["peak"] <= after["device"]["bytes"]
        assert after["plan"]["amount"] == before["plan"]["amount"]  # of a step, as before


def test_one_question_is_answered_alone(capsys):
    code, whole = answer(capsys, "--device-memory", "1GiB", "--solve", "max_length")
    assert code == 0
    assert whole["solve"]["settings"] == ["data.tokens", "model.model.max_length"]
    assert whole["solve"]["value"] > 24
    code, whole = answer(capsys, "--device-memory", "250KiB", "--solve", "lora_rank", "-c", "lora")
    rank = whole["solve"]["value"]
    assert whole["solve"]["settings"] == ["LoRA.rank"]
    assert code == (3 if rank is None else 0)
    code, alone = answer(capsys, "--device-memory", "1GiB", "--no_advice", "--devices", "2", "--trainer.strategy", "ddp")
    code, whole = answer(capsys, "--device-memory", "1KiB", "--solve", "devices")
    assert (code, whole["solve"]["value"]) == (3, None)
    assert alone["plan"]["peak"] == whole["solve"]["peak"] + alone["plan"]["kinds"]["communication"]


def test_an_interrupted_search_leaves_what_is_known(capsys, monkeypatch):
    monkeypatch.setattr(Rows, "interrupts", 8)
    code, whole = answer(capsys, "--device-memory", "1GiB")
    assert code == 130
    assert whole["interrupted"] is True
    assert whole["plan"]["peak"] > 0
    assert plan("--device-memory", "1GiB") == 130
    assert "together" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--solve", "rank"], "--solve must be one of train_batch_size, max_length, lora_rank, devices, got 'rank'"),
        (["--devices", "0"], "--devices must be a whole number of at least 1"),
        (["--device-memory", "24"], "--device-memory must be a size with its unit"),
        (["--device-memory", "much"], "--device-memory must be a number of bytes above 0 or a text like 12GiB"),
        (["--output", "no/such/step.png"], "--output must be a file in a folder that exists"),
        (["--trainer.accelerator", "gpu"], "--device-memory must be given, as there is no gpu here"),
        (["--solve", "lora_rank", "--device-memory", "1GiB"], "no adapters of a rank"),
        (["--data", f"{__name__}.Sizeless", "--solve", "train_batch_size"], "no setting of Sizeless"),
        (["--no_such"], "no_such"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_name(words, says, capsys):
    if torch.accelerator.is_available() and "gpu" in words:
        words = ["--trainer.accelerator", "tpu"]
        says = "tpu"
    assert plan(*words) == 2
    assert says in capsys.readouterr().err


def test_the_text_has_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert plan("--device-memory", "150KiB") == 3
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if "-c " not in line) <= 80
    assert any("DOES NOT FIT" in line for line in lines)
