"""An export is the model that was validated: its weights, all of them, beside the base they were trained with."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lit_efficient import EMA, IA3, CausalLMConfig, CheckpointAverage, LanguageModeling, LoRA
from lit_efficient.export import adapters
from lit_efficient.export.check import difference
from lit_efficient.files.checkpoints import save_atomically
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import save_tensors
from tests import processes
from tests.support import QUIET
from tests.support_cli import export

IDS = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
# A model's configuration, and LoRA's arguments: GPT-2's Conv1D, a tied head of which one use is saved, and mixtures of
# experts: dense and shared layers that are named as single experts once were, stacked experts that multiply from the
# right.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": ({"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}, {"variant": "dora"}),
    "gemma": ({**SIZES, "head_dim": 8}, {"modules_to_save": ["lm_head"]}),
    "deepseek_v3": (
        {**SIZES, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        {"dropout": 0.1},
    ),
    "ernie4_5_moe": (
        {**SIZES, "moe_intermediate_size": 8, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
        {"modules_to_save": ["mlp.gate"]},
    ),
    "gpt_oss": (
        {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"targets": "all-linear+experts", "variant": "rslora"},
    ),
}  # fmt: skip


def base_of(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family][0]))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


@dataclass
class Run:
    folder: Path
    checkpoint: Path
    averaged: torch.Tensor
    raw: torch.Tensor


def fit(module: Any, *callbacks: Any, steps: int = 2) -> Any:
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = L.Trainer(callbacks=[*callbacks], **QUIET, max_epochs=steps)
    trainer.fit(module, torch.utils.data.DataLoader(rows, 4), torch.utils.data.DataLoader(rows, 4))
    return trainer


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture(scope="module", params=FAMILIES)
def run(request: Any, tmp_path_factory: Any) -> Run:
    """A run with adapters and a moving average of them, on a model of Hugging Face in a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    base_of(request.param).save_pretrained(folder / "base")
    ema = EMA(decay=0.5, warmup=None)
    module = LanguageModeling(CausalLMConfig(str(folder / "base")), learning_rate=0.05, warmup_steps=0)
    fit(module, ema, LoRA(rank=2, **FAMILIES[request.param][1])).save_checkpoint(folder / "a.ckpt")
    with ema.averaged(module):
        averaged = logits(module.network)
    return Run(folder, folder / "a.ckpt", averaged, logits(module.network))


def made(path: Path, output: Path, form: str, *more: str) -> Path:
    assert export([str(path), "--format", form, "--output", str(output), "--no-check", *more]) == 0
    return output


@pytest.mark.turns(3)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_peft_loads_the_average_beside_the_base_that_the_folder_names(run: Run, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert (run.averaged - run.raw).abs().max() > 1e-2
    for weights, expected in (("auto", run.averaged), ("raw", run.raw)):
        folder = made(run.checkpoint, tmp_path / weights, "peft", "--weights", weights)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["task_type"]) == (str(run.folder / "base"), "CAUSAL_LM")
        base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
        torch.testing.assert_close(logits(PeftModel.from_pretrained(base, folder)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.turns(3)
def test_merged_and_plain_weights_are_the_average_too(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made(run.checkpoint, tmp_path / "merged", "merged"))
    torch.testing.assert_close(logits(model), run.averaged, rtol=1e-4, atol=1e-4)
    assert "ema weights; not checked" in capsys.readouterr().err
    folder = made(run.checkpoint, tmp_path / "plain", "safetensors", "--weights", "raw")
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("network."): tensor for name, tensor in state.items()})
    torch.testing.assert_close(logits(model), run.raw, rtol=1e-4, atol=1e-4)
    assert "raw weights; not checked" in capsys.readouterr().err


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_fresh_process_finds_another_model(
    forked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not forked:
        monkeypatch.setattr(subprocess, "run", processes.run_command)
    base_of("gpt2").save_pretrained(tmp_path / "base")
    module = LanguageModeling(CausalLMConfig(str(tmp_path / "base")), learning_rate=0.05, warmup_steps=0)
    fit(module, LoRA(rank=2)).save_checkpoint(tmp_path / "a.ckpt")
    before = sorted(tmp_path.iterdir())
    right = adapters.to_peft

    def doubled(*arguments: Any) -> Any:
        tensors, config = right(*arguments)
        return tensors, config | {"lora_alpha": 2 * config["lora_alpha"]}

    command = [str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out"), "--format"]
    with monkeypatch.context() as wrong:
        wrong.setattr(adapters, "to_peft", doubled)
        assert export([*command, "peft"]) == 2
    assert "the exported model is not the trained one: outputs of peft differ by" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    assert export([*command, "merged"]) == 0
    assert "raw weights; outputs of transformers differ by" in capsys.readouterr().err
    check_sums(tmp_path / "out")
    listed = {line.split("  ")[1] for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in (tmp_path / "out").iterdir()} - {"SHA256SUMS"}


def test_an_adapter_of_one_use_of_a_tied_weight_is_merged_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    base_of("gemma").save_pretrained(tmp_path / "base")
    module = LanguageModeling(CausalLMConfig(str(tmp_path / "base")), learning_rate=0.05, warmup_steps=0)
    fit(module, LoRA(rank=2, targets=["embed_tokens", "q_proj"])).save_checkpoint(tmp_path / "a.ckpt")
    model = AutoModelForCausalLM.from_pretrained(made(tmp_path / "a.ckpt", tmp_path / "out", "merged"))
    torch.testing.assert_close(logits(model), logits(module.network), rtol=1e-4, atol=1e-4)
    assert export([str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "no"), "--no-check"]) == 2
    assert "'network.model.embed_tokens.weight', which is tied to 'network.lm_head.weight'" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["peft", "merged", "safetensors", "diffusers"])
def test_a_flipped_bit_ends_every_export(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.arange(16.0)
    save_atomically({"state_dict": {"network.weight": weight}, "hyper_parameters": {}}, tmp_path / "a.ckpt")
    content = bytearray((tmp_path / "a.ckpt").read_bytes())
    content[content.index(weight.numpy().tobytes()) + 5] ^= 1
    (tmp_path / "a.ckpt").write_bytes(content)
    assert export([str(tmp_path / "a.ckpt"), "--format", form, "--output", str(tmp_path / "out")]) == 2
    assert "a.ckpt is damaged: its record" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


class Own(L.LightningModule):
    """Somebody's module: a network with statistics, and a head beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.score = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.encoder(x))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(3 + torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), 4)

    val_dataloader = train_dataloader


class Tied(L.LightningModule):
    """A module of one's own, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(batch["input_ids"])).mT, batch["labels"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)


@pytest.mark.parametrize("beside", ["", "base.ckpt", "base.safetensors", "one.safetensors"])
def test_one_use_of_a_tied_weight_in_a_module_of_ones_own_is_refused(
    beside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The format safetensors knows no ties: its files hold copies, or one of the names."""
    module = Tied()
    state = dict(module.state_dict())
    save_atomically({"state_dict": state}, tmp_path / "base.ckpt")
    save_tensors(tmp_path / "base.safetensors", state)
    save_tensors(tmp_path / "one.safetensors", {k: v for k, v in state.items() if k != "embedding.weight"})
    trainer = fit(module, LoRA(rank=2, targets=["head"], save_base=not beside), steps=1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    base = ["--base", str(tmp_path / beside)] if beside else []
    assert export([str(tmp_path / "run.ckpt"), "--output", str(tmp_path / "out"), *base]) == 2
    names = ("head", "embedding") if beside.endswith("safetensors") else ("embedding", "head")
    said = "one use of '{}.weight', which is tied to '{}.weight'".format(*names)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_peft_gets_all_that_trained_in_a_module_of_ones_own(tmp_path: Path) -> None:
    """The head beside the network, and the statistics that changed meanwhile."""
    from peft import PeftModel

    trainer = L.Trainer(callbacks=[LoRA(rank=2, modules_to_save=["score"])], **QUIET, max_epochs=2)
    trainer.fit(module := Own())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    x = torch.randn(3, 4)
    theirs = PeftModel.from_pretrained(Own(), made(tmp_path / "a.ckpt", tmp_path / "out", "peft")).eval()
    torch.testing.assert_close(theirs(x), module.eval()(x))
    assert not torch.allclose(module(x), Own().eval()(x), atol=1e-2)


def test_peft_gets_the_statistics_that_changed_beside_ia3(tmp_path: Path) -> None:
    from peft import PeftModel

    ia3 = IA3(targets=[r"encoder\.2"], feedforward=["score"])
    trainer = L.Trainer(callbacks=[ia3], **QUIET, max_epochs=2)
    trainer.fit(module := Own())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    x = torch.randn(3, 4)
    theirs = PeftModel.from_pretrained(Own(), made(tmp_path / "a.ckpt", tmp_path / "out", "peft")).eval()
    torch.testing.assert_close(theirs(x), module.eval()(x))


def test_an_average_is_exported_with_the_statistics_that_were_computed_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    average = CheckpointAverage(last_k=2, every_n_steps=1)
    trainer = L.Trainer(callbacks=[average], **{**QUIET, "limit_val_batches": 1}, max_epochs=2)
    trainer.fit(module := Own())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = load_file(made(tmp_path / "a.ckpt", tmp_path / "out", "safetensors") / "model.safetensors")
    with average.averaged(module):
        torch.testing.assert_close(state, dict(module.state_dict()))
    assert not torch.equal(state["encoder.1.running_mean"], module.encoder[1].running_mean)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["callbacks"]["CheckpointAverage"]["statistics"] = {}
    torch.save(checkpoint, tmp_path / "b.ckpt")
    assert export([str(tmp_path / "b.ckpt"), "--output", str(tmp_path / "none")]) == 2
    assert "not its statistics of BatchNorm" in capsys.readouterr().err


class Wrapped(L.LightningModule):
    """Somebody's module around a model of transformers."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"llm": base_of(family)})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.parts["llm"](**batch).loss

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def test_a_model_that_trained_whole_under_another_name_is_merged_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    fit(module := Wrapped("gpt2")).save_checkpoint(tmp_path / "a.ckpt")
    for name in ("gpt2", "gemma"):
        base_of(name).save_pretrained(tmp_path / name)
    folder = made(tmp_path / "a.ckpt", tmp_path / "out", "merged", "--base", str(tmp_path / "gpt2"))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(module.parts["llm"]))
    arguments = [str(tmp_path / "a.ckpt"), "--format", "merged", "--output", str(tmp_path / "no"), "--base"]
    assert export([*arguments, str(tmp_path / "gemma")]) == 2
    assert "the checkpoint has no weight of the base" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


class Scored(L.LightningModule):
    """A module of one's own with a layer beside the model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = base_of("gpt2")
        self.score = nn.Linear(32, 1, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.score(self.network(input_ids=batch).logits).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def test_what_trained_beside_the_model_is_not_left_out_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base_of("gpt2").save_pretrained(tmp_path / "base")
    lora = LoRA(rank=2, modules_to_save=["score"], save_base=True)
    trainer = L.Trainer(callbacks=[lora], **QUIET, max_epochs=1)
    trainer.fit(Scored(), torch.utils.data.DataLoader(IDS, 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    arguments = [str(tmp_path / "a.ckpt"), "--format", "merged", "--output", str(tmp_path / "out")]
    assert export([*arguments, "--base", str(tmp_path / "base")]) == 2
    said = capsys.readouterr().err
    assert "holds only 'network', and the run's techniques also acted outside of it: LoRA: modules_to_save" in said
    folder = made(tmp_path / "a.ckpt", tmp_path / "peft", "peft")
    assert "base_model.model.score.weight" in load_file(folder / "adapter_model.safetensors")


def test_what_transformers_quantised_comes_out_in_the_format_and_layout_of_the_rest(tmp_path: Path) -> None:
    """GPT-2's Conv1D, whose codes are stored the other way round, in a network of bfloat16."""
    from transformers import AutoModelForCausalLM

    base_of("gpt2").save_pretrained(tmp_path / "base")
    spec = CausalLMConfig(str(tmp_path / "base"), dtype="bfloat16", quantize="nf4")
    fit(module := LanguageModeling(spec, learning_rate=0.05), LoRA(rank=2)).save_checkpoint(tmp_path / "a.ckpt")
    model = AutoModelForCausalLM.from_pretrained(made(tmp_path / "a.ckpt", tmp_path / "out", "merged"), dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert difference(logits(module.network).float(), logits(model).float(), 5e-2) < 5e-2
    plain = load_file(made(tmp_path / "a.ckpt", tmp_path / "plain", "safetensors") / "model.safetensors")
    assert {name: t.shape for name, t in plain.items()} == {
        f"network.{name}": t.shape for name, t in model.state_dict().items()
    }
