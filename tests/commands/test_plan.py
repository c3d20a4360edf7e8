"""Tests of ``plan`` on a small network: its output adds up, and its advice is confirmed by the same command."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_efficient.__main__ import main
from lit_efficient.cli.fits import ConfigFit
from lit_efficient.commands.plan import _size
from lit_efficient.evidence.fits import Change
from lit_efficient.evidence.planning.advice import Adviser
from tests.support_cli import ToyData


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu().tanh())


class Tower(LightningModule):
    interrupts = 0  # the size of a batch in whose step somebody presses Ctrl-C

    def __init__(self, width: int = 16, masked: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.width, self.masked = width, masked

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(batch) == Tower.interrupts:
            raise KeyboardInterrupt
        for block in self.blocks:
            batch = block(batch)
        return (batch[torch.rand_like(batch) < 0.5] if self.masked else batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Rows(LightningDataModule):
    """DataModule with rows for the tower."""

    def __init__(self, batch_size: int = 4, count: int = 24) -> None:
        super().__init__()
        self.batch_size, self.count = batch_size, count

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(self.count, 16, 16), batch_size=self.batch_size)


class Shorthand(Rows):
    """DataModule that stores its batch size under another name."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        del self.batch_size
        self.b = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(self.count, 16, 16), batch_size=self.b)


class Sizeless(ToyData):
    """DataModule without a setting of the batch size."""

    def __init__(self) -> None:
        super().__init__()
        del self.batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(8, 16), batch_size=2)


@pytest.fixture(autouse=True)
def _config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = {"accelerator": "cpu", "max_steps": 2, "logger": False, "enable_checkpointing": False}
    parts = {"model": {"class_path": f"{__name__}.Tower"}, "data": {"class_path": f"{__name__}.Rows"}}
    Path("tower.yaml").write_text(yaml.safe_dump({**parts, "trainer": trainer}))


def plan(*words: str) -> int:
    return main(["plan", "--allow-import", "tests", "-c", "tower.yaml", "--quiet", *words])


def answer(capsys, *words: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = plan("--json", *words)
    return code, json.loads(capsys.readouterr().out)


PARAMETERS = sum(p.numel() for p in Tower().parameters())


@pytest.mark.turns(2, family="plans that try much")
def test_what_fits_adds_up_and_the_largest_batch_is_found(capsys):
    pytest.importorskip("matplotlib")
    code, whole = answer(capsys, "--device-memory", "400KiB", "--output", "step.png")
    found, largest = whole["plan"], whole["largest"]
    assert code == 0
    assert whole["fits"] is True
    assert found["parameters"] == found["trainable"] == PARAMETERS
    assert (found["batch"], found["unit"], found["amount"]) == (4, "samples", 4)
    sums = [sum(moment["kinds"].values()) for moment in found["timeline"]]
    assert found["peak"] == sum(found["kinds"].values()) == max(sums)
    assert found["kinds"]["weights"] == 4 * PARAMETERS
    assert abs(found["kinds"]["states"] - 8 * PARAMETERS) < 100
    assert Path("step.png").read_bytes()[:4] == b"\x89PNG"
    assert largest["settings"] == ["data.batch_size"]
    assert largest["next"] == largest["value"] + 1 > 5
    assert largest["peak"] <= 400 * 1024 < largest["next_peak"]
    assert plan("--device-memory", "400KiB", "--no-advice", "--data.batch_size", str(largest["next"])) == 3
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["step.png", "tower.yaml"]  # and no run


@pytest.mark.turns(6, family="slow")
def test_a_batch_size_under_another_name_is_searched_by_its_argument(capsys):
    words = ["--device-memory", "200KiB", "--solve", "train_batch_size"]
    code, named = answer(capsys, *words)
    found = answer(capsys, *words, "--data", f"{__name__}.Shorthand", "--data.batch_size", "2")[1]
    assert code == 0
    assert found["solve"] == named["solve"]


def test_a_bound_says_so_first_and_does_not_decide_what_it_cannot(capsys):
    masked = ["--no_advice", "--model.masked", "true"]
    assert plan("--device-memory", "400KiB", *masked) == 0
    assert capsys.readouterr().out.startswith("AT MOST")
    assert plan("--device-memory", "100KiB", *masked) == 5
    assert "CANNOT BE SAID" in capsys.readouterr().out


@pytest.mark.turns(2, family="plans that try much")
def test_advice_is_what_the_same_command_finds_with_it(capsys):
    limit = ["--device-memory", "200KiB"]
    code, whole = answer(capsys, *limit)
    assert code == 3
    assert whole["fits"] is False
    smaller, same = whole["advice"]
    assert smaller["options"][0] == "--data.batch_size"
    assert same["options"][0] == "-c"
    assert {one["changes"] for one in same["techniques"]} == {"same"}
    Path("more.yaml").write_text(same["yaml"])
    for advice, words in ((smaller, smaller["options"]), (same, ["-c", "more.yaml"])):
        code, after = answer(capsys, *limit, *words, "--no_advice")
        assert code == 0
        assert after["plan"]["peak"] == advice["peak"] <= after["device"]["bytes"] == 200 * 1024
        same_step = ("amount", "flops") if advice is smaller else ("amount",)
        assert [after["plan"][name] for name in same_step] == [whole["plan"][name] for name in same_step]


def test_devices_have_what_the_strategy_keeps_there(capsys):
    two = ["--devices", "2", "--trainer.strategy", "ddp"]
    code, alone = answer(capsys, "--device-memory", "1GiB", "--no_advice", *two)
    assert (code, alone["device"]["strategy"]) == (0, "DDPStrategy")
    assert alone["plan"]["kinds"]["communication"] == 4 * PARAMETERS
    code, whole = answer(capsys, "--device-memory", "1KiB", "--solve", "devices")
    assert (code, whole["solve"]["value"]) == (3, None)
    assert whole["solve"]["peak"] == alone["plan"]["peak"] - 4 * PARAMETERS


@pytest.mark.turns(6, family="slow")
def test_strategies_are_sized_by_bytes_and_the_first_that_fits_is_a_config(capsys, tmp_path):
    code, whole = answer(capsys, "--device-memory", "1GiB", "--no_advice", "--devices", "8")
    assert code == 0
    assert yaml.safe_load(whole["strategy_yaml"])["trainer"]["strategy"]["class_path"].endswith("ReplicatedStrategy")
    peaks = {}
    for one in whole["strategies"]:
        name = one["strategy"]["class_path"]
        peaks[name.rpartition(".")[2], one["strategy"].get("init_args", {}).get("stage", 0)] = one["peak"]
        Path("with.yaml").write_text(one["yaml"])
        parsed = ConfigFit(["--allow-import", "tests", "-c", "tower.yaml", "-c", "with.yaml"], tmp_path).config()
        assert parsed["trainer"]["devices"] == 8
        assert parsed["trainer"]["strategy"]["class_path"].endswith(name.rpartition(".")[2])
    assert len(whole["strategies"]) == 7
    assert peaks["ReplicatedStrategy", 0] > peaks["ZeroStrategy", 1] > peaks["ZeroStrategy", 2]
    # A limit between the largest and the smallest: the shards fit, and the config that is printed plans as much.
    sharded = whole["strategies"][3]
    assert sharded["strategy"] == {"class_path": "lit_efficient.ShardedStrategy"}
    limit = f"{sharded['peak'] // 1024 + 1}KiB"
    assert sharded["peak"] + 1024 < peaks["ReplicatedStrategy", 0]
    code, whole = answer(capsys, "--device-memory", limit, "--no_advice", "--devices", "8")
    assert (code, whole["strategy_yaml"]) == (3, sharded["yaml"])  # the config has DDP
    Path("with.yaml").write_text(whole["strategy_yaml"])
    code, after = answer(capsys, "--device-memory", limit, "--no_advice", "-c", "with.yaml")
    assert (code, after["plan"]["peak"]) == (0, sharded["peak"])
    # For one device that is too small, as many as are enough.
    code, alone = answer(capsys, "--device-memory", limit, "--no_advice")
    assert yaml.safe_load(alone["strategy_yaml"])["trainer"]["devices"] in range(2, 9)
    assert answer(capsys, "--device-memory", "1KiB", "--no_advice")[1]["strategies"] == []


@pytest.mark.turns(2, family="plans that try much")
def test_nothing_that_fits_names_the_smallest_that_was_planned(capsys, monkeypatch):
    monkeypatch.setattr("lit_efficient.evidence.planning.advice.candidates", lambda *_: [])
    assert plan("--device-memory", "1KiB") == 3
    text = " ".join(capsys.readouterr().out.split())
    words = ["--data.batch_size", "1", "--trainer.accumulate_grad_batches", "4"]
    smallest = answer(capsys, "--device-memory", "1KiB", "--no_advice", *words)[1]["plan"]["peak"]
    assert f"no change that was tried fits; the smallest needs {_size(smallest)}: {' '.join(words)}" in text


@pytest.mark.parametrize(("limit", "code"), [("200KiB", 3), ("400KiB", 0)])
def test_a_search_whose_time_is_over_says_so(capsys, limit, code):
    assert plan("--device-memory", limit, "--advice_minutes", "0") == code
    text = " ".join(capsys.readouterr().out.split())
    assert "the search ended after --advice_minutes 0" in text
    assert "Search longer: --advice_minutes 10" in text
    assert ("no change that was tried fits; the smallest needs" in text) is (code == 3)
    assert "use a smaller model" not in text


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize(
    ("limit", "says"), [("200KiB", "the smallest plan so far fits"), ("1KiB", "no change that was")]
)
def test_a_search_that_ends_names_the_smallest_plan_so_far(capsys, monkeypatch, limit, says):
    first = Adviser.all

    def ends(self):
        yield from itertools.islice(first(self), 1)
        self.skipped["LoRA"] = "it has no linear layers"
        self.predictions.end_after(0)
        self.predictions(Change("", {"data.batch_size": 3}))

    monkeypatch.setattr(Adviser, "all", ends)
    monkeypatch.setattr("lit_efficient.evidence.planning.advice.candidates", lambda *_: [])
    assert plan("--device-memory", limit, "--trainer.accumulate_grad_batches", "2") == 3
    text = " ".join(capsys.readouterr().out.split())
    assert "step 2 batches of 4, 8 samples" in text
    assert text.count("* the same result") == (limit == "200KiB")
    assert f"{says}" in text
    assert "--data.batch_size 1 " in text[text.index(says) :]
    assert "not used: LoRA: it has no linear layers" in text


def test_an_interrupted_search_leaves_what_is_known(capsys, monkeypatch):
    monkeypatch.setattr(Tower, "interrupts", 8)
    code, whole = answer(capsys, "--device-memory", "1GiB")
    assert code == 130
    assert whole["interrupted"] is True
    assert whole["plan"]["peak"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--solve", "rank"], "--solve must be one of train_batch_size, max_length, lora_rank, devices, got 'rank'"),
        (["--devices", "0"], "--devices must be a whole number of at least 1"),
        (["--device-memory", "24"], "--device-memory must be a size with its unit"),
        (["--device-memory", "much"], "--device-memory must be a number of bytes above 0 or a text like 12GiB"),
        (["--output", "no/such/step.png"], "--output must be a file in a folder that exists"),
        (["--solve", "lora_rank", "--device-memory", "1GiB"], "no adapters with a rank"),
        (["--data", f"{__name__}.Sizeless", "--solve", "train_batch_size"], "no setting of Sizeless"),
        (["--advice_minutes", "-1"], "--advice_minutes must be at least 0, got -1"),
        (["--no_such"], "no_such"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_name(words, says, capsys):
    assert plan(*words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.turns(6, family="slow")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="of a machine without a GPU")
def test_a_gpu_that_is_not_there_is_planned_for_where_its_memory_is_given(capsys):
    assert plan("--trainer.accelerator", "gpu", "--no_advice") == 2
    assert "--device-memory must be given, as there is no gpu here" in capsys.readouterr().err
    gpus = ["--trainer.accelerator", "gpu", "--trainer.devices", "8", "--device-memory", "24GiB", "--no_advice"]
    code, whole = answer(capsys, *gpus)
    assert (code, whole["device"]["devices"]) == (0, 8)
    mixed, auto = (answer(capsys, *gpus, "--trainer.precision", name)[1]["plan"] for name in ("bf16-mixed", "auto"))
    assert auto["kinds"] == mixed["kinds"] != whole["plan"]["kinds"]
    here = ["--device-memory", "24GiB", "--no_advice", "--trainer.precision", "bf16-mixed"]
    for accelerator, slow, hint in (("gpu", True, False), ("auto", False, True), ("cpu", False, False)):
        assert plan(*here, "--trainer.accelerator", accelerator) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("blocks.0.up is 16, no multiple of 64" in text) is slow
        assert ("For a GPU, add --trainer.accelerator gpu" in text) is hint


@pytest.mark.turns(6, family="slow")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize(
    ("accelerator", "spare", "noted"), [("gpu", 1.05, True), ("gpu", 1.2, False), ("cpu", 1.05, False)]
)
def test_a_gpu_that_is_nearly_full_is_noted(capsys, accelerator, spare, noted):
    words = ["--trainer.accelerator", accelerator, "--no_advice"]
    peak = answer(capsys, *words, "--device_memory", "1GiB")[1]["plan"]["peak"]
    assert plan(*words, "--device_memory", f"{spare * peak / 1024:.0f}KiB") == 0
    assert ("Less than a tenth of the memory is left" in " ".join(capsys.readouterr().out.split())) is noted


def test_the_text_has_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert plan("--device-memory", "200KiB", "--no_advice") == 3
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "DOES NOT FIT" in text


def test_a_language_model_is_planned_before_its_data_exists(capsys):
    """With fractions of an epoch, whose length is unknown, and with all tokens of the accumulated batches."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    fields = {"model_type": "llama", "num_key_value_heads": 1, "vocab_size": 64, **sizes}
    model = {"class_path": "LanguageModeling", "init_args": {"model": {"config_fields": fields}}}
    data = {"train": "none.jsonl", "tokenizer": "none", "max_length": 32, "batch_size": 2, "pack": True}
    trainer = {"accelerator": "cpu", "max_epochs": 1, "val_check_interval": 0.25, "accumulate_grad_batches": 5}
    parts = {"trainer": trainer, "model": model, "data": {"class_path": "LanguageData", "init_args": data}}
    Path("rows.yaml").write_text(yaml.safe_dump(parts))
    assert main(["plan", "-c", "rows.yaml", "--quiet", "--json", "--no_advice", "--device_memory", "1GiB"]) == 0
    found = json.loads(capsys.readouterr().out)["plan"]
    assert (found["batch"], found["unit"], found["amount"]) == (2, "tokens", 5 * 2 * 32)
    assert found["accumulated"] == 5
    assert any(note.startswith("The data cannot be read (") for note in found["notes"])
