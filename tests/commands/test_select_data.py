"""select-data: the scores of both formulas in loops, and an overlay that LanguageData reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_efficient import ConfigurationError, LanguageChat, LanguageData, LanguageModeling, LoRA
from lit_efficient.__main__ import main
from lit_efficient.commands import select_data
from lit_efficient.commands.preview import build_data
from lit_efficient.losses.data_selection import adam_direction, influence, project
from lit_efficient.models.networks.gpt import GPTConfig
from tests.support import trainer

TINY = GPTConfig(dim=16, depth=1, num_heads=2, hidden_dim=16, max_length=32)


@pytest.mark.turns(6, family="slow")
def test_influence_is_the_mean_cosine_of_adams_steps() -> None:
    torch.manual_seed(0)
    gradients, targets = torch.randn(3, 9000).double(), torch.randn(2, 9000).double()
    mean, square = torch.randn(9000).double(), torch.rand(9000).double()
    found = adam_direction(gradients, mean, square, (0.9, 0.99))
    for row in range(3):
        for i in range(0, 9000, 97):
            g = float(gradients[row, i])
            up, down = 0.9 * float(mean[i]) + 0.1 * g, 0.99 * float(square[i]) + 0.01 * g * g + 1e-8
            assert float(found[row, i]) == pytest.approx(up / math.sqrt(down), rel=1e-12)
    few, others = project(found, 50, seed=3), project(targets, 50, seed=3)
    assert torch.equal(project(found, 50, seed=3), few)
    assert not torch.equal(project(found, 50, seed=4), few)
    for row, score in zip(few, influence(few, others)):
        cosines = [float(row @ other / (row.norm() * other.norm())) for other in others]
        assert float(score) == pytest.approx(sum(cosines) / 2, rel=1e-9)
    wide = project(found, 20_000, seed=0)  # many directions keep the angles
    torch.testing.assert_close(
        influence(wide, project(targets, 20_000, 0)), influence(found, targets), rtol=0, atol=0.02
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, a config, and checkpoints of a model, of a reference and of adapters."""
    folder = tmp_path_factory.mktemp("selection")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for name, count in (("train", 12), ("val", 4)):
        rows = [{"text": " ".join(words[(i * k) % 10] for k in range(1, 9))} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {"train": str(folder / "train.jsonl"), "val": str(folder / "val.jsonl"), "max_length": 32}
    given |= {"cache_dir": str(folder / "cache"), "pack": False, "batch_size": 4, "chat": {"vocab_size": 300}}
    config = {"data": {"class_path": "LanguageData", "init_args": given}, "model": {"class_path": "LanguageModeling"}}
    (folder / "base.yaml").write_text(yaml.safe_dump(config))
    adapters = [LoRA(rank=2, save_base=True)]
    for name, callbacks, epochs in (("model", [], 1), ("reference", [], 3), ("lora", adapters, 2)):
        torch.manual_seed(0)
        data = LanguageData(**{**given, "chat": LanguageChat(vocab_size=300)})
        run = trainer(callbacks, max_epochs=epochs)
        run.fit(LanguageModeling(TINY, warmup_steps=0), datamodule=data)
        run.save_checkpoint(folder / f"{name}.ckpt")
    return folder


def command(folder: Path, output: str, *words: str) -> int:
    shared = ["--output", str(folder / output), "--batch_size", "5", "--device", "cpu", "-c", str(folder / "base.yaml")]
    return main(["select-data", *words, *shared])


def scores(folder: Path) -> list[float]:
    return [json.loads(line)["score"] for line in (folder / "scores.jsonl").read_text().splitlines()]


def rows(path: Path) -> list[Any]:
    return [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]


@pytest.mark.turns(6, family="slow")
def test_the_reducible_loss_selects_rows_and_the_overlay_trains_on_them(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--method", "rho", "--ckpt", str(trained / "model.ckpt"), "--reference", str(trained / "reference.ckpt"))
    assert command(trained, "rho", *words, "--keep", "0.25", "--rest_weight", "0.5") == 0
    said = capsys.readouterr()
    assert "a forward pass of the model and of the reference for 12 of 12 rows" in said.err
    found = scores(trained / "rho")
    kept, rest = rows(trained / "rho/selected.jsonl"), rows(trained / "rho/rest.jsonl")
    assert (len(kept), len(rest)) == (3, 9)
    models = [LanguageModeling.load_from_checkpoint(trained / f"{name}.ckpt").eval() for name in ("model", "reference")]
    expected = {}
    for ids in (*kept, *rest):
        losses = []
        for model in models:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).double()[0]
            terms = [float(logits[t].logsumexp(0) - logits[t, ids[t + 1]]) for t in range(len(ids) - 1)]
            losses.append(sum(terms) / len(terms))
        expected[tuple(ids)] = losses[0] - losses[1]
    assert sorted(found) == pytest.approx(sorted(expected[tuple(ids)] for ids in (*kept, *rest)), abs=1e-5)
    assert min(expected[tuple(ids)] for ids in kept) >= max(expected[tuple(ids)] for ids in rest) - 1e-5
    lines = (trained / "rho/scores.jsonl").read_text().splitlines(keepends=True)
    (trained / "rho/scores.jsonl").write_text("".join(lines[:5]) + lines[5][:4])  # killed in its second batch
    (trained / "rho/SHA256SUMS").unlink()
    assert command(trained, "rho", *words, "--keep", "0.25", "--rest_weight", "0.5") == 0
    assert "for 7 of 12 rows" in capsys.readouterr().err
    assert scores(trained / "rho") == pytest.approx(found, abs=1e-6)
    overlay = yaml.safe_load((trained / "rho/data.yaml").read_text())["data"]["init_args"]
    assert [(source["name"], source["weight"]) for source in overlay["train"]] == [("selected", 3.0), ("rest", 4.5)]
    other = ["--data.train", str(trained / "val.jsonl"), "--output", str(trained / "other")]
    assert main(["select-data", *words, "-c", str(trained / "base.yaml"), *other]) == 2
    assert "the data has another tokenizer than " in capsys.readouterr().err
    assert main(["preview", "-c", str(trained / "base.yaml"), "-c", str(trained / "rho/data.yaml")]) == 0
    assert command(trained, "rho", *words[:3], str(trained / "lora.ckpt"), *words[4:]) == 2
    assert "was started with ckpt" in capsys.readouterr().err
    for name in ("selected.jsonl", "scores.jsonl"):
        file = trained / "rho" / name
        file.write_text(file.read_text().replace("1", "2", 1))
    assert main(["preview", "-c", str(trained / "base.yaml"), "-c", str(trained / "rho/data.yaml")]) == 2
    assert "selected.jsonl is missing, or not what was written" in capsys.readouterr().err
    assert command(trained, "rho", *words) == 2
    assert "scores.jsonl is missing, or not what was written" in capsys.readouterr().err
    (trained / "rho/SHA256SUMS").unlink()
    (trained / "rho/scores.jsonl").write_text("".join([lines[0], *lines[2:]]))
    assert command(trained, "rho", *words) == 2
    assert "is damaged: a row is missing in scores.jsonl. Delete it to start again" in capsys.readouterr().err


def test_influence_reads_adams_moments_of_the_adapters(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--method", "less", "--ckpt", str(trained / "lora.ckpt"), "--dim", "64")
    assert command(trained, "less", *words) == 0, capsys.readouterr().err
    checkpoint = torch.load(trained / "lora.ckpt", weights_only=True)
    model, _ = select_data._loaded(str(trained / "lora.ckpt"), "cpu", {})
    named = {name: p for name, p in model.named_parameters() if name.endswith(("lora_A", "lora_B"))}
    states = checkpoint["optimizer_states"][0]["state"]
    assert len(named) == len(states)
    (group,) = checkpoint["optimizer_states"][0]["param_groups"]

    def gradient(ids: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([ids]))[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(named.values()))])

    mean, square = (torch.cat([states[i][key].flatten() for i in group["params"]]) for key in ("exp_avg", "exp_avg_sq"))
    targets = project(torch.stack([gradient(ids) for ids in rows(trained / "less/val.jsonl")]), 64, 0)
    expected = []
    for ids in [*rows(trained / "less/selected.jsonl"), *rows(trained / "less/rest.jsonl")]:
        step = adam_direction(gradient(ids)[None], mean, square, tuple(group["betas"]))
        expected.append(float(influence(project(step, 64, 0), targets)))
    assert sorted(scores(trained / "less")) == pytest.approx(sorted(expected), abs=1e-4)
    assert min(expected[:6]) >= max(expected[6:]) - 1e-4
    other = ["--output", str(trained / "less"), "-c", str(trained / "base.yaml")]
    assert main(["select-data", *words, *other, "--data.val", str(trained / "train.jsonl")]) == 2
    assert "was started with val_rows" in capsys.readouterr().err
    (trained / "less/settings.json").unlink()
    torch.save({**checkpoint, "optimizer_states": []}, trained / "none.ckpt")
    assert command(trained, "none", "--method", "less", "--ckpt", str(trained / "none.ckpt")) == 2
    assert "no moments of Adam for its" in capsys.readouterr().err
    for key in ("exp_avg", "exp_avg_sq"):
        checkpoint["optimizer_states"][0]["state"][0][key].fill_(float("nan"))
    torch.save(checkpoint, trained / "nan.ckpt")
    assert command(trained, "nan", "--method", "less", "--ckpt", str(trained / "nan.ckpt")) == 2
    assert "the score of row 0 is nan" in capsys.readouterr().err
    assert not scores(trained / "nan")


def moments(*groups: list[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A checkpoint whose moments are the numbers of the parameters, and the parameters."""
    shapes = {"q.lora_A": (2, 4), "q.lora_B": (4, 2), "v.lora_A": (2, 4), "v.lora_B": (4, 2), "norm": (4,)}
    numbers = dict(zip(shapes, range(5)))
    states, stored, at = {}, [], 0
    for group in groups:
        stored.append({"params": [*range(at, at + len(group))]})
        for name in group:
            full = torch.full(shapes[name], float(numbers[name]))
            states[at] = {"exp_avg": full, "exp_avg_sq": full + 10}
            at += 1
    names = {name: torch.empty(shapes[name]) for name in shapes if any(name in group for group in groups)}
    return {"optimizer_states": [{"state": states, "param_groups": stored}]}, names


def test_moments_belong_to_their_parameters_or_are_refused() -> None:
    """In groups of rates of their own, as many shapes agree as with the parameters in their order."""
    qa, qb, va, vb, norm = "q.lora_A", "q.lora_B", "v.lora_A", "v.lora_B", "norm"
    for groups in ([[qa, qb, va, vb]], [[qa, va], [qb, vb]], [[qa, qb, va, vb], [norm]]):
        checkpoint, names = moments(*groups)
        mean, square = select_data.adam_moments(checkpoint, names)
        expected = torch.cat([torch.full((p.numel(),), float(i)) for i, p in enumerate(names.values())])
        assert torch.equal(mean, expected)
        assert torch.equal(square, expected + 10)
    checkpoint, names = moments([va, vb], [qa, qb])
    with pytest.raises(ConfigurationError, match="2 parameter groups do not show which belong to which"):
        select_data.adam_moments(checkpoint, names)


def test_the_mixture_of_the_config_does_not_change_the_weights_of_the_selection(trained: Path) -> None:
    name = str(trained / "train.jsonl")
    config = yaml.safe_load((trained / "base.yaml").read_text())
    config["data"]["init_args"] |= {
        "train": [{"path": name, "weight": 1.0}],
        "mixture": {"by": "tokens", "temperature": 4.0},
    }
    (trained / "mixed.yaml").write_text(yaml.safe_dump(config))
    words = ["select-data", "--method", "rho", "--ckpt", str(trained / "model.ckpt"), "--device", "cpu", "--reference"]
    words += [str(trained / "reference.ckpt"), "-c", str(trained / "mixed.yaml")]
    for rest in (0.0, 0.25):
        output = trained / f"mixed{rest}"
        assert main([*words, "--output", str(output), "--rest_weight", str(rest)]) == 0
        data = build_data(["-c", str(trained / "mixed.yaml"), "-c", str(output / "data.yaml")], "test")
        data.prepare_data()
        data.setup("fit")
        if rest:
            selected, others = data._passes()[0]
            assert selected == pytest.approx(4 * others)
        else:
            assert len(data.train_rows) == 6
