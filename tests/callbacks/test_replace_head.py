"""A new head: found in networks of every family, new under its old name, and trained alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import (
    EMA,
    IA3,
    CheckpointAverage,
    ConfigurationError,
    ExactResume,
    GradualUnfreezing,
    LoRA,
    QuantizeBase,
    ReplaceHead,
    replace_head,
)
from lit_efficient.callbacks.replace_head import find_head, outputs_of
from lit_efficient.cli.errors import explain
from lit_efficient.errors import CheckpointError
from tests.callbacks.test_gradual_unfreezing import Watch
from tests.mechanisms.blocks.test_freezing import FAMILIES
from tests.support import WIDTH, Net, Toy, assert_equal, data, trainer, weights
from tests.timm_models import import_timm


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, num_labels=3, pad_token_id=0,
        )
    )  # fmt: skip


def _convolutional() -> nn.Module:
    resnet = import_timm().models.resnet
    model = resnet.ResNet(resnet.BasicBlock, [2, 2, 2, 2], channels=(4, 4, 4, 4), stem_width=4, num_classes=3)
    model.fc = nn.Conv2d(4, 3, 1)
    return model


HEADS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt": (FAMILIES["gpt"][0], "head"),
    "dit": (FAMILIES["dit"][0], "patch_out"),
    "gpt2": (_gpt2, "score"),
    "llama": (FAMILIES["llama"][0], "score"),
    "bert": (FAMILIES["bert"][0], "classifier"),
    "roberta": (_roberta, "classifier.out_proj"),
    "vit": (FAMILIES["vit"][0], "classifier"),
    "timm_vit": (FAMILIES["timm_vit"][0], "head"),
    "timm_resnet": (FAMILIES["timm_resnet"][0], "fc"),
    "conv": (_convolutional, "fc"),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", HEADS)
def test_the_last_layer_gets_new_weights_under_its_old_names(family: str) -> None:
    make, name = HEADS[family]
    module = make()
    before, layer, keys = weights(module), module.get_submodule(name), list(module.state_dict())
    assert replace_head(module, 7) == name
    assert module.get_submodule(name) is layer
    assert outputs_of(layer) == 7
    assert list(module.state_dict()) == keys
    changed = {key for key, tensor in weights(module).items() if tensor.shape != before[key].shape}
    assert changed == {key for key in keys if key in (f"{name}.weight", f"{name}.bias")}
    if hasattr(module, "config") and hasattr(module, "num_labels"):
        assert module.num_labels == module.config.num_labels == 7
        assert len(module.config.id2label) == 7
    if hasattr(module, "get_classifier"):
        assert module.num_classes == 7


class Counted(Net):
    """It says how many classes it has, as what its head tells."""

    @property
    def num_classes(self) -> int:
        """Rows of the head."""
        return len(self.head.weight)


def test_a_number_of_classes_that_is_derived_from_the_head_follows_it() -> None:
    module = Counted()
    assert module.num_classes != 7
    replace_head(module, 7)
    assert module.num_classes == 7


def test_transformers_compute_their_loss_with_the_new_outputs() -> None:
    module = HEADS["llama"][0]()
    module.config.pad_token_id = 0
    replace_head(module, 7)
    output = module(input_ids=torch.tensor([[1, 2, 3], [4, 5, 6]]), labels=torch.tensor([6, 0]))
    assert output.logits.shape == (2, 7)
    expected = nn.functional.cross_entropy(output.logits, torch.tensor([6, 0]))
    torch.testing.assert_close(output.loss, expected)


def test_gpt2s_conv1d_has_its_outputs_last() -> None:
    from transformers.pytorch_utils import Conv1D

    net = nn.Sequential(nn.Linear(3, 4), Conv1D(2, 4))
    assert replace_head(net, 5) == "1"
    assert net(torch.zeros(2, 3)).shape == (2, 5)
    assert net[1].weight.shape == (4, 5)


def test_weights_have_their_own_seed_and_keep_format_bias_and_ties() -> None:
    heads = []
    for seed, noise in ((3, 0), (3, 1), (4, 0)):
        torch.manual_seed(noise)
        layer = nn.Linear(512, 3, bias=False, dtype=torch.bfloat16)
        state = torch.get_rng_state()
        replace_head(net := nn.Sequential(layer), 64, std=0.5, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        assert (net[0].weight.dtype, net[0].bias) == (torch.bfloat16, None)
        heads.append(net[0].weight.detach())
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].float().std().item() == pytest.approx(0.5, rel=0.02)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)
            self.out.weight = self.table.weight

    tied = Tied()
    table = tied.table.weight.detach().clone()
    replace_head(tied, 3)
    assert torch.equal(tied.table.weight, table)
    assert tied.out.weight.shape == (3, 4)
    assert not tied.out.bias.any()


def test_what_is_ambiguous_or_absent_lists_candidates() -> None:
    two = nn.ModuleDict({"head": nn.Linear(2, 2), "fc": nn.Linear(2, 2)})
    with pytest.raises(ConfigurationError, match=r"the network has 2 last layers .* for example: head, fc"):
        find_head(two)
    assert find_head(two, "fc") == "fc"
    ends = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    with pytest.raises(ConfigurationError, match=r"the network has no last layers .* for example: 0"):
        find_head(ends)
    with pytest.raises(ConfigurationError, match="'hed' matches none"):
        find_head(two, "hed")
    with pytest.raises(ConfigurationError, match="num_outputs must be a whole number of at least 1, got 0"):
        ReplaceHead(0)
    with pytest.raises(ConfigurationError, match="std must be at least 0, got -1"):
        ReplaceHead(2, std=-1)
    with pytest.raises(ConfigurationError, match="meta device"):
        replace_head(nn.Sequential(nn.Linear(2, 2, device="meta")), 3)


def _fit(callbacks: list[Any], module: Any = None, ckpt_path: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    run = trainer(callbacks, **arguments)
    run.fit(module or Toy("configure_model"), data(), data(), ckpt_path=ckpt_path)
    return run


def _moved(callbacks: list[Any], module: Any = None) -> set[str]:
    module = module or Toy("init")
    before = weights(module)
    _fit(callbacks, module)
    return {key for key, tensor in weights(module).items() if key not in before or not torch.equal(tensor, before[key])}


def test_alone_only_the_head_trains_and_afterwards_all_is_as_before() -> None:
    module = Toy("init")
    module.net.stem.requires_grad_(False)
    assert _moved([ReplaceHead(16)], module) == {"net.head.weight", "net.head.bias"}
    assert {n for n, p in module.named_parameters() if not p.requires_grad} == {"net.stem.weight", "net.stem.bias"}


def test_the_rest_thaws_below_it_or_has_adapters_beside_it() -> None:
    thawing = _moved([ReplaceHead(16), GradualUnfreezing(every_n_steps=3)])
    assert {name.rpartition(".")[0].split(".")[1] for name in thawing} == {"head", "blocks"}
    assert all(".3." in name for name in thawing if "blocks" in name)
    adapted = _moved([ReplaceHead(16), LoRA(rank=2)])
    assert {name for name in adapted if "lora_" not in name} == {"net.head.weight", "net.head.bias"}
    assert not any("head.lora" in name for name in adapted)
    with pytest.raises(ConfigurationError, match="new head has an adapter"):
        _fit([ReplaceHead(16), LoRA(rank=2, targets=["head", "up"])])


def test_beside_a_quantised_base_the_head_stays_whole(tmp_path: Path) -> None:
    module = Toy("init")
    _fit([ReplaceHead(16), QuantizeBase(), LoRA(rank=2)], module).save_checkpoint(tmp_path / "a.ckpt")
    assert module.net.head.weight.dtype == torch.float32
    assert module.net.stem.weight.dtype == torch.uint8
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["net.head.weight"], module.net.head.weight)
    assert "net.stem.weight" not in saved


def test_beside_a_frozen_base_the_head_is_no_part_of_it(tmp_path: Path) -> None:
    """A checkpoint of a resumed run says the same of the base as the one that it went on from."""
    for number, resumed in enumerate((None, tmp_path / "0.ckpt")):
        run = _fit([ReplaceHead(16), IA3([], ["down"]), ExactResume(0)], max_epochs=1 + number, ckpt_path=resumed)
        run.save_checkpoint(tmp_path / f"{number}.ckpt")
    bases = [torch.load(tmp_path / f"{n}.ckpt", weights_only=True)["lit_efficient"]["base"] for n in (0, 1)]
    assert bases[0] == bases[1]
    assert bases[0]
    assert not any("head" in name for name in bases[0])


@pytest.mark.turns(4, family="resumed")
@pytest.mark.parametrize("average", [lambda: EMA(decay=0.5), lambda: CheckpointAverage(2, 1), lambda: LoRA(2)])
def test_resumes_mid_epoch_bit_exactly(average: Callable[[], Any], tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [ReplaceHead(16), GradualUnfreezing(every_n_steps=2), average(), ExactResume(0)]

    whole = _fit(callbacks(), max_epochs=2)
    _fit([*callbacks(), Watch(tmp_path)], max_epochs=1)
    resumed = _fit(callbacks(), max_epochs=2, ckpt_path=tmp_path / "3.ckpt")
    assert_equal(weights(whole.lightning_module), weights(resumed.lightning_module))
    assert_equal(whole.optimizers[0].state_dict(), resumed.optimizers[0].state_dict())


def test_a_checkpoint_of_the_old_head_is_refused(tmp_path: Path) -> None:
    old = _fit([])
    old.save_checkpoint(tmp_path / "old.ckpt", weights_only=False)
    with pytest.raises(
        CheckpointError, match=r"'net\.head\.weight' has the shape \[16, 16\] in the checkpoint, but \[3, 16\]"
    ):
        trainer([ReplaceHead(3)]).validate(Toy("configure_model"), data(), ckpt_path=tmp_path / "old.ckpt")
    new = _fit([ReplaceHead(16)])
    new.save_checkpoint(tmp_path / "new.ckpt", weights_only=False)
    with pytest.raises(ConfigurationError, match="num_outputs was 16 and is 3"):
        trainer([ReplaceHead(3)]).validate(Toy("configure_model"), data(), ckpt_path=tmp_path / "new.ckpt")


def test_an_optimizer_over_the_old_weights_is_refused() -> None:
    class Early(Toy):
        def __init__(self) -> None:
            super().__init__("init")
            self.early = torch.optim.SGD(self.net.parameters(), lr=0.1)

        def configure_optimizers(self) -> Any:
            return self.early

    with pytest.raises(ConfigurationError, match=r"ReplaceHead: no optimizer holds 2 of .*net\.head\.weight"):
        _fit([ReplaceHead(16)], Early())


def test_a_network_without_repeated_blocks_has_a_head_too() -> None:
    assert find_head(Net(4, 1)) == "head"
    assert find_head(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))) == "2"


def test_code_that_counts_on_the_old_number_of_outputs_is_told_so() -> None:
    class Reshaping(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).view(len(batch[0]), WIDTH).mean()

    run = trainer([ReplaceHead(3)])
    with pytest.raises(RuntimeError, match="invalid for input of size") as error:
        run.fit(Reshaping(), data(), data())
    assert any("3 new outputs instead of" in note for note in error.value.__notes__)


def test_targets_beyond_the_new_outputs_are_an_error_that_names_num_outputs() -> None:
    class Classifies(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), torch.full((len(batch[0]),), 3))

    run = trainer([ReplaceHead(3)])
    with pytest.raises(IndexError, match="Target 3 is out of bounds") as error:
        run.fit(Classifies(), data(), data())
    message = explain(error.value)
    assert message is not None
    assert message.startswith("Target 3 is out of bounds.")
    assert f"3 new outputs instead of {WIDTH}" in message
    assert "Set num_outputs" in message
