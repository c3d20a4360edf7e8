"""aLoRA: peft's numbers, also in generation and with recomputed blocks; what cannot be done is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lit_efficient import ActivationCheckpointing, ConfigurationError, LoRA, apply, merge_adapters, restore
from lit_efficient.errors import ConflictError
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.mechanisms.adapters.activated import activated
from lit_efficient.models.generation.batched import generate
from lit_efficient.models.generation.sampling import Sampling
from tests.callbacks.test_lora_beside import llama
from tests.support import QUIET, assert_equal, weights

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft

TOKENS = [7, 8]
IDS = torch.tensor(
    [[7, 8, 1, 2, 7, 8, 3, 4], [1, 2, 3, 7, 4, 8, 7, 7], [7, 8, 5, 5, 5, 5, 5, 5], [1, 1, 1, 1, 1, 1, 7, 8]]
)


def test_the_last_invocation_counts() -> None:
    assert activated(IDS, TOKENS).sum(1).tolist() == [4, 0, 8, 2]
    assert not activated(IDS[:, :1], TOKENS).any()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return an aLoRA of peft with random factors, and its folder."""
    folder = tmp_path_factory.mktemp("alora")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], alora_invocation_tokens=TOKENS,
        task_type="CAUSAL_LM", init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), config).eval()
    model.save_pretrained(folder)
    return model, folder


class Task(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama().train()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


@pytest.mark.parametrize("callbacks", [[], [ActivationCheckpointing()]])
def test_outputs_and_gradients_are_pefts(callbacks: list[Any], theirs: tuple[Any, Path]) -> None:
    other, folder = theirs
    module = Task()
    apply(module, [*callbacks, LoRA(start_from=str(folder))])
    ours = copy.deepcopy(module.model)  # the copy has positions of its own
    module.model(input_ids=IDS[:1])
    found = ours(input_ids=IDS)
    wanted = other(input_ids=IDS)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.logits[1], llama()(input_ids=IDS).logits[1])
    found.logits.square().mean().backward()
    other.zero_grad()
    wanted.logits.square().mean().backward()
    layer = ours.model.layers[0].self_attn.q_proj
    peers = other.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_A.grad.abs().max() > 0
    torch.testing.assert_close(layer.lora_A.grad, peers.lora_A["default"].weight.grad, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(layer.lora_B.grad, peers.lora_B["default"].weight.grad, rtol=1e-3, atol=1e-6)


def test_generated_rows_are_pefts(theirs: tuple[Any, Path]) -> None:
    """Also those of this package, which reads the rows without a cache."""
    other, folder = theirs
    module = Task().eval()
    apply(module, [LoRA(start_from=str(folder))])
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = other.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), **options)[:, IDS.shape[1] :]
    plain = llama().generate(IDS, attention_mask=torch.ones_like(IDS), **options)[:, IDS.shape[1] :]
    assert torch.equal(wanted[1], plain[1])
    assert not torch.equal(wanted, plain)
    found = module.model.generate(IDS, attention_mask=torch.ones_like(IDS), use_cache=False, **options)
    assert torch.equal(found[:, IDS.shape[1] :], wanted)
    greedy = Sampling(0.0, 1.0, 0)
    samples = generate(
        module.model, IDS.tolist(), 4, sampling=greedy, seeds=range(4), stop=set(), rows=2, device=torch.device("cpu")
    )
    assert [sample.tokens for sample in samples] == wanted.tolist()
    with pytest.raises(ConfigurationError, match="Generate without a cache"):
        module.model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)


def fit(module: Any, ckpt_path: Any = None, **settings: Any) -> Any:
    technique = LoRA(rank=2, variant="alora", invocation_tokens=TOKENS)
    trainer = L.Trainer(callbacks=[technique], **{**QUIET, **settings})
    trainer.fit(module, DataLoader(IDS, batch_size=2), ckpt_path=ckpt_path)
    return trainer


def test_a_run_resumes_exactly_and_its_export_computes_the_same_in_peft(tmp_path: Path) -> None:
    whole = fit(module := Task(), max_epochs=2)
    fit(Task(), max_epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    fit(again := Task(), tmp_path / "half.ckpt", max_epochs=2)
    assert_equal(weights(module), weights(again))
    whole.save_checkpoint(tmp_path / "end.ckpt")
    module.eval()
    expected = module.model(input_ids=IDS).logits
    assert not torch.allclose(expected, llama()(input_ids=IDS).logits, atol=1e-3)
    restored = restore(Task(), tmp_path / "end.ckpt").eval()
    assert torch.equal(restored.model(input_ids=IDS).logits, expected)
    export_checkpoint(tmp_path / "end.ckpt", tmp_path / "made", "peft", check=False)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "made").eval()
    torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigurationError, match="acts on a part of the tokens"):
        export_checkpoint(tmp_path / "end.ckpt", tmp_path / "merged", "safetensors", check=False)
    with pytest.raises(ConfigurationError, match="cannot be merged"):
        merge_adapters(module)


def test_a_first_batch_without_the_invocation_is_reported() -> None:
    trainer = L.Trainer(callbacks=[LoRA(rank=2, variant="alora", invocation_tokens=[9, 9])], max_steps=2, **QUIET)
    with pytest.warns(UserWarning, match=r"no row of the first batch has invocation_tokens=\[9, 9\], and rows") as seen:
        trainer.fit(module := Task(), DataLoader(IDS, batch_size=2))
    assert sum("invocation" in str(one.message) for one in seen) == 1
    assert not any(p.any() for name, p in module.named_parameters() if name.endswith("lora_B"))


def test_what_cannot_be_activated_is_refused() -> None:
    def technique(**arguments: Any) -> LoRA:
        return LoRA(rank=2, variant="alora", invocation_tokens=TOKENS, **arguments)

    with pytest.raises(ConfigurationError, match=r"in the input_ids of a model of transformers, and '0' is not in one"):
        apply(torch.nn.Sequential(torch.nn.Linear(3, 3)), [technique(targets=["0"])])
    with pytest.raises(ConfigurationError, match=r"is for linear layers, and 'model.*embed_tokens' is none"):
        apply(Task(), [technique(targets=["embed_tokens"])])
    module = Task()
    apply(module, [technique()])
    with pytest.raises(ConfigurationError, match="searches input_ids"):
        module.model(inputs_embeds=torch.randn(1, 4, 32))

    class Packed(L.LightningDataModule):
        pack = True

        def train_dataloader(self) -> Any:
            return DataLoader(IDS, batch_size=2)

    with pytest.raises(ConflictError, match="packed rows have several texts"):
        L.Trainer(callbacks=[technique()], max_steps=1, **QUIET).fit(Task(), datamodule=Packed())
    module = Task()
    apply(module, [ActivationCheckpointing(), technique()])
    loss = module.training_step(IDS[:2], 0)
    module.model(input_ids=IDS[2:])
    with pytest.raises(ConfigurationError, match="recomputed after the network has read another batch"):
        loss.backward()
