"""Exports load in the libraries they are for, and compute what the trained module computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file

from lit_efficient import ConfigurationError, LoRA, QuantizeBase, merge_adapters
from lit_efficient.application import apply
from lit_efficient.application.ledger import ledger
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer, save_tokenizer
from lit_efficient.data.text.token_cache import END_OF_TEXT
from lit_efficient.internals.bitsandbytes_cpu import keep_unpacked
from lit_efficient.mechanisms.adapters.merge import dequantize_layers
from tests.mechanisms.adapters.test_architectures import MODELS
from tests.support import QUIET, Toy, assert_equal, data, trainer, weights
from tests.support_cli import export as run


def _llama(tie: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=tie,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Language(L.LightningModule):
    def __init__(self, network: Any, lr: float = 0.05) -> None:
        super().__init__()
        self.network, self.lr = network, lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.network(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(IDS, 2)


def export(arguments: list[str]) -> int:
    """Without the check: these tests are it."""
    return run([*arguments, "--no-check"])


IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0))


def _trained(tmp_path: Path, *others: Any, tie: bool = False, **arguments: Any) -> tuple[Path, torch.Tensor]:
    torch.manual_seed(0)
    module = Language(_llama(tie))
    run = L.Trainer(callbacks=[LoRA(rank=2, **arguments), *others], **QUIET, max_epochs=2)
    run.fit(module)
    run.save_checkpoint(tmp_path / "lora.ckpt", weights_only=True)
    return tmp_path / "lora.ckpt", _logits(module.network)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


PEFT_CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"variant": "rslora"},
    "dora": {"variant": "dora"},
    "pissa": {"variant": "pissa"},
    "everything": {"targets": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    "one_layer": {"targets": [r"layers\.1\.mlp\.up_proj"]},
    "patterns": {"variant": "rslora", "patterns": {"q_proj": {"rank": 3, "alpha": 5}, "1.mlp.up_proj": {"alpha": 9}}},
    "patterns of pissa": {"variant": "pissa", "patterns": {"down_proj": {"rank": 3}}},
}


@pytest.mark.turns(3)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
@pytest.mark.parametrize("case", PEFT_CASES)
def test_peft_loads_the_adapter(case: str, tmp_path: Path) -> None:
    from peft import PeftModel

    path, expected = _trained(tmp_path, **PEFT_CASES[case])
    assert export([str(path), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    model = PeftModel.from_pretrained(_llama(), tmp_path / "out")
    torch.testing.assert_close(_logits(model), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(_logits(_llama()), expected, atol=1e-3)


@pytest.mark.parametrize("tie", [False, True])
def test_transformers_loads_the_merged_model(tie: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    patterns: Any = {"down_proj": {"rank": 3, "alpha": 2}}
    targets = ["q_proj", "down_proj", "lm_head"]
    path, expected = _trained(tmp_path, tie=tie, targets=targets, variant="dora", patterns=patterns)
    _llama(tie).save_pretrained(tmp_path / "base")
    arguments = [str(path), "--format", "merged", "--output", str(tmp_path / "out"), "--base", str(tmp_path / "base")]
    assert export(arguments) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_logits(model), expected, rtol=1e-5, atol=1e-5)


QUANTIZED: dict[str, tuple[Any, dict[str, Any]]] = {
    "nf4": (QuantizeBase("nf4", double_quant=False), {}),
    "int4": (QuantizeBase("int4", group_size=8), {"variant": "qalora"}),
    "int4_lora": (QuantizeBase("int4", group_size=8), {"targets": ["q_proj"]}),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("save_base", [False, True])
@pytest.mark.parametrize("case", QUANTIZED)
def test_a_quantised_base_is_merged_as_it_was_trained(
    case: str, save_base: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the checkpoint's own base; else from the float one, which is rounded as the run rounded it."""
    from transformers import AutoModelForCausalLM

    quantize, arguments = QUANTIZED[case]
    path, expected = _trained(tmp_path, quantize, save_base=save_base, **arguments)
    _llama().save_pretrained(tmp_path / "base")
    command = [str(path), "--format", "merged", "--output", str(tmp_path / "out")]
    if not save_base:
        assert export(command) == 2
        assert "format merged needs base: the folder of the transformers model; the checkpoint lacks" in (
            capsys.readouterr().err
        )
        command += ["--base", str(tmp_path / "base")]
    assert export(command) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(_logits(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_peft_gets_qalora_as_a_plain_adapter_beside_the_dequantised_base(tmp_path: Path) -> None:
    from peft import PeftModel

    path, expected = _trained(tmp_path, QuantizeBase("int4", group_size=8), variant="qalora")
    assert export([str(path), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    base = torch.nn.ModuleDict({"network": _llama()})
    apply(base, [QuantizeBase("int4", group_size=8)])
    dequantize_layers(base)
    model = PeftModel.from_pretrained(base["network"], tmp_path / "out")
    torch.testing.assert_close(_logits(model), expected, rtol=1e-5, atol=1e-5)


def exported_adapter(kind: str, folder: Path, variant: str = "lora") -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Export an adapter of a network of diffusers to ``folder / "out"``; the base's weights and the outputs with it."""
    make, output, _, _ = MODELS[kind]
    torch.manual_seed(0)
    model: Any = make().eval()
    base = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    targets = ["to_q", "to_v", "conv1"] if kind == "unet" else ["to_q", "linear_1"]
    root = torch.nn.ModuleDict({"network": model})
    apply(root, [LoRA(rank=2, targets=targets, alpha=6.0, variant=variant, patterns={"to_q": {"rank": 3, "alpha": 2}})])
    for name, p in root.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    expected = output(model).detach()
    checkpoint: dict[str, Any] = {"state_dict": root.state_dict(), "lit_efficient": {}}
    checkpoint["lit_efficient"]["transforms"] = [entry.record for entry in ledger(root)]
    LoRA.trim_checkpoint(root, checkpoint)
    torch.save(checkpoint, folder / "lora.ckpt")
    assert export([str(folder / "lora.ckpt"), "--format", "peft", "--output", str(folder / "out")]) == 0
    return base, expected


@pytest.mark.parametrize("kind", ["unet", "sd3"])
def test_diffusers_loads_the_adapter(kind: str, tmp_path: Path) -> None:
    make, output, _, _ = MODELS[kind]
    base, expected = exported_adapter(kind, tmp_path)
    fresh: Any = make().eval()
    fresh.load_state_dict(base)
    fresh.load_lora_adapter(tmp_path / "out", prefix="base_model.model", weight_name="adapter_model.safetensors")
    torch.testing.assert_close(output(fresh).detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "variant"), [("unet", "lora"), ("unet", "rslora"), ("sd3", "pissa")])
def test_a_pipeline_of_diffusers_loads_the_folder_and_kohyas_file(kind: str, variant: str, tmp_path: Path) -> None:
    import diffusers
    from safetensors.torch import load_file

    make, output, _, _ = MODELS[kind]
    base, expected = exported_adapter(kind, tmp_path, variant)

    def loaded(**names: str) -> torch.Tensor:
        fresh: Any = make().eval()
        fresh.load_state_dict(base)
        parts: Any = {
            "vae": None,
            "text_encoder": None,
            "tokenizer": None,
            "scheduler": diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        }
        if kind == "unet":
            without = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
            pipeline: Any = diffusers.StableDiffusionPipeline(unet=fresh, **parts, **without)
        else:
            more = {f"{part}_{i}": None for part in ("text_encoder", "tokenizer") for i in (2, 3)}
            parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler()
            pipeline = diffusers.StableDiffusion3Pipeline(transformer=fresh, **parts, **more)
        assert not torch.allclose(output(fresh).detach(), expected, atol=1e-3)
        pipeline.load_lora_weights(tmp_path / "out", **names)
        return output(fresh).detach()

    torch.testing.assert_close(loaded(), expected, rtol=1e-5, atol=1e-5)
    if kind == "sd3":  # diffusers reads no file with the authors' names of SD3
        again = torch.nn.ModuleDict({"network": make()})
        again["network"].load_state_dict(base)
        apply(again, [LoRA(start_from=str(tmp_path / "out" / "kohya.safetensors"))])
        torch.testing.assert_close(output(again["network"].eval()).detach(), expected, rtol=1e-5, atol=1e-5)
        return
    torch.testing.assert_close(loaded(weight_name="kohya.safetensors"), expected, rtol=1e-5, atol=1e-5)
    theirs = diffusers.utils.convert_state_dict_to_kohya(
        load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    )
    assert theirs.keys() == load_file(tmp_path / "out" / "kohya.safetensors").keys()


@pytest.mark.turns(2)
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_that_transformers_quantised_trains_resumes_and_merges(bits: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    _llama().save_pretrained(tmp_path / "base")
    kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if bits == 4 else {"load_in_8bit": True}

    def load() -> Language:
        config = BitsAndBytesConfig(**kind)
        arguments = {"quantization_config": config, "device_map": "cpu", "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **arguments).train()
        keep_unpacked(model)  # a plain one, whose sizes its kernel refuses on some processors
        # At 0.05 a residual sum of terms near 9 cancels to an RMS of 0.05, and the next norm makes 2e-5 of float32's
        # rounding; here 1e-7 is left of it.
        return Language(model, lr=0.02)

    def fit(epochs: int, ckpt_path: Path | None = None) -> Any:
        torch.manual_seed(0)
        run = L.Trainer(callbacks=[LoRA(rank=2)], **QUIET, max_epochs=epochs)
        run.fit(load(), ckpt_path=ckpt_path)
        return run

    with pytest.raises(
        ConfigurationError, match=r"is already quantised: 14 layers, first 'network.*Leave out QuantizeBase"
    ):
        apply(load(), [QuantizeBase()])
    whole = fit(2)
    fit(1).save_checkpoint(tmp_path / "half.ckpt")
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert {key.rpartition(".")[2] for key in state} == {"lora_A", "lora_B"}
    resumed = fit(2, tmp_path / "half.ckpt")
    assert_equal(weights(whole.lightning_module), weights(resumed.lightning_module))
    module = whole.lightning_module
    expected = _logits(module.network)
    merge_adapters(module)
    tolerance = 1e-5 if bits == 4 else 2e-2  # int8 rounds its inputs, too
    assert (expected - _logits(load().network)).abs().max() > 0.1  # the adapters matter
    torch.testing.assert_close(_logits(module.network), expected, rtol=1e-5, atol=tolerance)
    module.network.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    torch.testing.assert_close(_logits(again), _logits(module.network))


@pytest.mark.parametrize("save_base", [False, True])
def test_safetensors_hold_the_merged_weights_under_the_plain_names(save_base: bool, tmp_path: Path) -> None:
    torch.save(Toy().state_dict(), tmp_path / "base.pt")
    run = trainer([LoRA(rank=2, save_base=save_base)])
    run.fit(module := Toy(), data(), data())
    run.save_checkpoint(tmp_path / "lora.ckpt", weights_only=True)
    arguments = [str(tmp_path / "lora.ckpt"), "--format", "safetensors", "--output", str(tmp_path / "out")]
    assert export(arguments if save_base else [*arguments, "--base", str(tmp_path / "base.pt")]) == 0
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state.keys() == Toy().state_dict().keys()
    merge_adapters(module)
    torch.testing.assert_close(state, dict(module.state_dict()))


def test_a_plain_checkpoint_becomes_safetensors(tmp_path: Path) -> None:
    run = trainer([])
    run.fit(module := Toy(), data(), data())
    run.save_checkpoint(tmp_path / "plain.ckpt")
    assert export([str(tmp_path / "plain.ckpt"), "--output", str(tmp_path / "out")]) == 0
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), dict(module.state_dict()))


def test_what_cannot_be_exported_is_said_in_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer([LoRA(rank=2)])
    run.fit(Toy(), data(), data())
    run.save_checkpoint(tmp_path / "lora.ckpt", weights_only=True)
    trainer([]).fit(module := Toy(), data(), data())
    torch.save(module.state_dict(), tmp_path / "plain.ckpt")
    (tmp_path / "broken.ckpt").write_bytes(b"no checkpoint")
    before = sorted(tmp_path.iterdir())
    cases = [
        (["lora.ckpt"], "'net.stem.weight', which an adapter changes, is not in the checkpoint: name the base"),
        (["plain.ckpt", "--format", "peft"], "has no adapter"),
        (["lora.ckpt", "--format", "merged"], "format merged needs base"),
        (["missing.ckpt"], "there is no file"),
        (["broken.ckpt"], "broken.ckpt is damaged or truncated"),
    ]
    for (name, *rest), message in cases:
        assert export([str(tmp_path / name), *rest, "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_bare_tokenizer_becomes_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.train_from_iterator(["def f(x): return x"] * 4, trainers.BpeTrainer(special_tokens=[END_OF_TEXT]))
    save_tokenizer(pack_tokenizer(bare), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("return f") == bare.encode("return f").ids
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END_OF_TEXT, END_OF_TEXT)
