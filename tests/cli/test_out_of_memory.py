"""A run that does not fit says what it could do, and what it says works."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lit_efficient
from lit_efficient.__main__ import main
from lit_efficient.catalog import PURPOSES, helping, read_cards
from lit_efficient.cli.arguments import read_command
from tests.cli.toy_runs import fit
from tests.support_cli import ToyData, ToyModel


class Greedy(ToyModel):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + torch.empty(2**58).sum()


def test_an_out_of_memory_error_says_what_this_run_could_do(capsys):
    assert fit("--model", f"{__name__}.Greedy") == 3
    said = capsys.readouterr().err
    said = said[said.index("error: ") :].splitlines()
    assert "error: out of memory: " in said[0]
    assert "you tried to allocate" in said[0]
    assert said[1].startswith("What this run could do, best first")
    names = [line.partition("[")[2].partition("]")[0] for line in said[2:]]
    # There are neither logits of a language model nor a GPU, no repeated blocks, and the optimizer has no states.
    assert names == ["MaxBatchSize", "OptimizerInBackward", "LoRA"]
    assert len(said) <= 10
    for line in said[2:]:
        Path("overlay.yaml").write_text(line.strip())
        assert fit("-c", "overlay.yaml", "--trainer.max_steps", "1") == 0, line
    assert fit("--model", f"{__name__}.Greedy", "--trainer.callbacks+=LoRA", "--trainer.max_steps", "1") == 3
    assert "[LoRA]" not in capsys.readouterr().err


class Fixed(ToyData):
    """Data whose batch size no attribute holds."""

    def __init__(self) -> None:
        super().__init__()
        del self.batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(4, 3)), 2)

    val_dataloader = train_dataloader


def test_no_other_batch_size_is_advised_where_none_can_be_set(capsys):
    assert fit("--model", f"{__name__}.Greedy", "--data", f"{__name__}.Fixed") == 3
    said = capsys.readouterr().err
    assert "[LoRA]" in said
    assert "MaxBatchSize" not in said


class Deep(ToyModel):
    """Blocks, and too little memory in the hook of a name."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)])
        setattr(self, hook, lambda *_: torch.empty(2**58))


@pytest.mark.parametrize(
    ("hook", "arguments", "advised"),
    [
        ("training_step", [], {"MaxBatchSize", "ActivationCheckpointing", "LoRA"}),
        ("on_validation_epoch_end", ["--trainer.num_sanity_val_steps=0"], {"MaxBatchSize", "LoRA"}),
        ("on_validation_epoch_end", [], {"MaxBatchSize"}),
    ],
)
def test_an_evaluation_is_not_told_to_save_what_only_training_has(hook, arguments, advised, capsys):
    assert fit("--model", f"{__name__}.Deep", "--model.hook", hook, *arguments) == 3
    said = capsys.readouterr().err
    assert {name for name in ("MaxBatchSize", "ActivationCheckpointing", "LoRA") if f"[{name}]" in said} == advised


@pytest.mark.parametrize("purpose", [*PURPOSES, "oom"])
def test_the_catalogue_lists_the_same(purpose, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["techniques", "--for", purpose]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    what = "memory" if purpose == "oom" else purpose
    found = helping(read_cards(), what)
    for number, ((name, reason), line) in enumerate(zip(found, lines, strict=False), 1):
        assert name in line.split()
        assert line.endswith(reason)
        assert line.split()[0] == (f"{number}." if purpose == "oom" else name)
    ranks = [getattr(lit_efficient, name).helps[what][0] for name, _ in found]
    assert ranks == sorted(set(ranks))
    assert len(ranks) >= 3
    assert main(["techniques", "--for", purpose, "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == [name for name, _ in found]


def test_what_to_try_out_of_memory_is_appended_as_it_stands(capsys):
    assert main(["techniques", "--for", "oom"]) == 0
    said = [line.split()[1:3] for line in capsys.readouterr().out.splitlines() if line[:2].strip().isdigit()]
    assert said[0] == ["-c", "max_batch_size"]
    for words in said:
        read_command(["fit", *words])  # which knows the config
    assert main(["techniques", "--for", "money"]) == 2
