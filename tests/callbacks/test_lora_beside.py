"""Several LoRA adapters on one base: peft's numbers when they are switched, mixed by weights and chosen row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import ConfigurationError, LoRA, adapters_by_row, apply, merge_adapters, mix_adapters, restore
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.mechanisms.adapters.low_rank import learned_tokens, rank_for
from lit_efficient.mechanisms.adapters.several import one_adapter
from tests.support import QUIET

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft

IDS = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(0))
NAMES = ("own", "code", "sums")


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def configs() -> dict[str, Any]:
    task = {"task_type": "CAUSAL_LM", "lora_dropout": 0.0}
    return {
        "own": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], **task),
        "code": peft.LoraConfig(
            r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"], rank_pattern={"1.self_attn.q_proj": 3}, **task
        ),
        "sums": peft.LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=["v_proj"], **task),
    }


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a peft model of three adapters with random factors, and the folders in which they are saved."""
    folder, found = tmp_path_factory.mktemp("adapters"), configs()
    model = peft.get_peft_model(llama(), found["own"], adapter_name="own")
    for name in NAMES[1:]:
        model.add_adapter(name, found[name])
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if ".lora_" in key:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, selected_adapters=[*NAMES])
    return model.eval(), folder


def ours(folder: Path, **more: Any) -> Any:
    model = llama()
    beside = {name: str(folder / name) for name in NAMES[1:]}
    apply(model, [LoRA(start_from=str(folder / "own"), beside=beside, **more)])
    return model


def logits(model: Any, ids: torch.Tensor = IDS, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, **more).logits
    return found


def test_switching_is_set_adapter(theirs: tuple[Any, Path]) -> None:
    model, folder = theirs
    mine = ours(folder)
    for name, own in zip(NAMES, ("default", "code", "sums"), strict=True):
        model.set_adapter(name)
        mix_adapters(mine, [own])
        assert torch.allclose(logits(mine), logits(model), atol=1e-5)
    mix_adapters(mine, [])
    assert torch.equal(logits(mine), logits(llama()))
    mix_adapters(mine, ["default"])
    model.set_adapter("own")
    assert torch.allclose(logits(mine), logits(model), atol=1e-5)


def test_a_weighted_mixture_is_add_weighted_adapter_and_merges(theirs: tuple[Any, Path]) -> None:
    model, folder = theirs
    weights = {"own": 0.7, "code": 0.25, "sums": 1.5}
    name = "mixture"
    model.add_weighted_adapter([*weights], [*weights.values()], name, combination_type="cat")
    model.set_adapter(name)
    wanted = logits(model)
    model.set_adapter("own")
    model.delete_adapter(name)
    mine = ours(folder)
    mix_adapters(mine, {"default": 0.7, "code": 0.25, "sums": 1.5})
    assert torch.allclose(logits(mine), wanted, atol=1e-5)
    merge_adapters(mine)
    assert torch.allclose(logits(mine), wanted, atol=1e-5)
    assert mine.state_dict().keys() == llama().state_dict().keys()


def test_rows_choose_as_adapter_names_do(theirs: tuple[Any, Path]) -> None:
    model, folder = theirs
    model.set_adapter("own")
    mine = ours(folder)
    with adapters_by_row(mine, ["code", None, "default"]):
        found = logits(mine)
        grown = mine.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        with pytest.raises(ConfigurationError, match="chosen for 3 rows"):
            logits(mine, IDS[:2])
    assert torch.allclose(found, logits(model, adapter_names=["code", "__base__", "own"]), atol=1e-5)
    for row, name in enumerate(([("code")], [], ["default"])):
        mix_adapters(mine, name)
        alone = mine.generate(IDS[row : row + 1], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(alone[0], grown[row])


class Task(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2, weight_decay=0.5)


def test_only_the_own_one_trains_and_a_checkpoint_brings_all_and_the_mixture(
    theirs: tuple[Any, Path], tmp_path: Path
) -> None:
    _, folder = theirs
    technique = LoRA(start_from=str(folder / "own"), beside={"code": str(folder / "code")})
    module = Task().train()
    trainer = L.Trainer(callbacks=[technique], **{**QUIET, "max_steps": 2})
    trainer.fit(module, DataLoader(IDS, batch_size=3))
    layer: Any = module.model.model.layers[0].self_attn.q_proj
    fresh = ours(folder).model.layers[0].self_attn.q_proj
    assert torch.equal(layer.lora_A_code, fresh.lora_A_code)
    assert not torch.equal(layer.lora_A, fresh.lora_A)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    export_checkpoint(tmp_path / "one.ckpt", tmp_path / "folder", "peft", check=False)
    module.eval()
    again = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "folder")).eval()
    assert torch.allclose(logits(again), logits(module.model), atol=1e-5)

    mix_adapters(module, {"default": 0.5, "code": 2.0})
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    wanted = logits(module.model)
    for name in ("code", "own"):
        (folder / name).rename(folder / f"{name}_gone")  # a checkpoint needs no folder
    try:
        back = restore(Task(), tmp_path / "two.ckpt")
        assert torch.equal(logits(back.eval().model), wanted)
    finally:
        for name in ("code", "own"):
            (folder / f"{name}_gone").rename(folder / name)
    with pytest.raises(ConfigurationError, match="validated with the mixture"):
        export_checkpoint(tmp_path / "two.ckpt", tmp_path / "refused", "peft", check=False)


def test_what_cannot_stand_beside_is_refused(theirs: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = theirs
    with pytest.raises(
        ConfigurationError, match=r"also adapts 'model.layers.0.mlp.down_proj' \(Linear\), which has no adapter"
    ):
        apply(llama(), [LoRA(targets=["q_proj"], beside={"code": str(folder / "code")})])
    with pytest.raises(ConfigurationError, match="an identifier other than default"):
        LoRA(beside={"default": str(folder / "code")})
    with pytest.raises(ConfigurationError, match="left out for variant dora"):
        LoRA(variant="dora", beside={"code": str(folder / "code")})
    with pytest.raises(ConfigurationError, match="among default, code, sums"):
        mix_adapters(ours(folder), ["prose"])
    with pytest.raises(ConfigurationError, match="has no adapters"):
        mix_adapters(llama(), ["default"])
    dora = peft.get_peft_model(llama(), peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"]))
    dora.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="variant='dora', which changes the base for all"):
        LoRA(beside={"code": str(tmp_path)})


def trained(make: Any, **arguments: Any) -> Any:
    """A model with all that trains at other values than at the start."""
    model = make()
    apply(model, [LoRA(rank=2, **arguments)])
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    return model


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (mixtral, {"targets": "all-linear+experts"}),
        (llama, {"trainable_token_indices": [int(IDS[0, 0]), 3]}),
        (llama, {"variant": "olora"}),
    ],
)
def test_the_base_alone_is_the_base_also_without_experts_rows_and_other_variants(make: Any, arguments: Any) -> None:
    expected = logits(make())
    model = trained(make, **arguments)
    assert not torch.allclose(logits(model), expected, atol=1e-2)
    with one_adapter(model, None):
        assert torch.equal(logits(model), expected)
    with pytest.raises(ConfigurationError), adapters_by_row(model, ["default", None, "default"]):
        pass


@pytest.mark.parametrize("arguments", [{"bias": "all"}, {"modules_to_save": ["norm"]}])
def test_the_base_is_refused_where_its_own_parameters_have_trained(arguments: Any) -> None:
    model = trained(llama, **arguments)
    (name,) = arguments
    with pytest.raises(ConfigurationError, match=f"because {name} change the base"), one_adapter(model, None):
        pass
    for active in ([], {"default": 0.5}):
        with pytest.raises(ConfigurationError, match=f"because {name} change the base for all adapters"):
            mix_adapters(model, active)
    mix_adapters(model, {"default": 1.0})


def test_a_rank_for_the_tokens_of_an_epoch_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    labels = torch.full((32,), 3)
    labels[:12] = -100  # a prompt
    rows = [{"input_ids": labels.clamp_min(0), "labels": labels}] * 40

    class Mapped(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

    technique = LoRA(1, targets=["layers.0.self_attn.q_proj"])
    settings = {**QUIET, "max_steps": 6, "accumulate_grad_batches": 2}
    with caplog.at_level("INFO"):
        L.Trainer(callbacks=[technique], **settings).fit(Mapped().train(), DataLoader(rows, batch_size=4))
    (said,) = [record.message for record in caplog.records if "rule of thumb" in record.message]
    tokens, parameters = 10 * 4 * 20, 32 + 32  # an epoch of ten batches, of which all are learned from
    assert f"about {tokens:,} different tokens" in said
    assert f"{parameters} parameters" in said
    assert f"than with a rank of about {rank_for(tokens, parameters)}." in said
    assert rank_for(tokens, parameters) == 7
    assert learned_tokens({"shift_labels": labels[None]}) == 20
    assert learned_tokens({"labels": torch.arange(3)}) is None
    assert learned_tokens([labels]) is None
