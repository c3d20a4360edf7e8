"""ChunkedCrossEntropy: real architectures and our GPT train as with whole logits, which are never made."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import GPT, ChunkedCrossEntropy, ConfigurationError, GPTConfig, LoRA, QuantizeBase
from lit_efficient.application import apply
from lit_efficient.losses.deferred_logits import ChunkedLoss, defer
from lit_efficient.losses.next_token import token_losses
from tests.losses.test_chunked_cross_entropy import Largest
from tests.support import Toy, data, trainer

V, B, T = 311, 2, 24
DECODER = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": V, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ELEUTHER = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": V, "bos_token_id": 1}
ELEUTHER |= {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DECODER, "tie_word_embeddings": False},
    "qwen3": {**DECODER, "tie_word_embeddings": True},
    "mistral": DECODER,
    "gemma2": {**DECODER, "final_logit_softcapping": 2.0},
    "cohere": {**DECODER, "logit_scale": 0.25},
    "granite": {**DECODER, "logits_scaling": 3.0},
    "gpt2": ELEUTHER,
    "codegen": {**ELEUTHER, "rotary_dim": 8},  # a head with a bias
    "qwen3_moe": {
        **DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "output_router_logits": True,
    },
    "mixtral": {**DECODER, "num_local_experts": 4, "output_router_logits": True},
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def build(kind: str = "llama", **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes}))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def pair(network: Any, **arguments: Any) -> tuple[Any, Any]:
    """The network, and a copy of it under the technique."""
    chunked = copy.deepcopy(network)
    apply(chunked, [ChunkedCrossEntropy(chunk_size=7, **arguments)])
    return network, chunked


def assert_same(plain: Any, chunked: Any, **kwargs: Any) -> Any:
    outputs = []
    for network in (plain, chunked):
        network.zero_grad()
        with Largest() as largest:
            outputs.append(network(**batch(), **kwargs))
            outputs[-1].loss.backward()
        assert (largest.numel >= B * T * V) is (network is plain)
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=1e-5, atol=1e-6)
    ours, theirs = dict(chunked.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        if not parameter.requires_grad:
            assert ours[name].grad is None
        else:
            torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-5, atol=1e-5, msg=name)
    return outputs[1]


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_real_architectures_train_as_with_whole_logits(kind: str) -> None:
    plain, chunked = pair(build(kind))
    output = assert_same(plain, chunked)
    assert output.logits is None
    assert ("aux_loss" in output) is ("output_router_logits" in CONFIGS[kind])
    assert_same(plain, chunked, num_items_in_batch=torch.tensor(11))
    assert chunked.state_dict().keys() == plain.state_dict().keys()


def test_what_a_call_without_labels_does_is_untouched() -> None:
    plain, chunked = pair(build())
    ids = batch()["input_ids"]
    assert torch.equal(plain(ids).logits, chunked(ids).logits)
    assert torch.equal(*(m.generate(ids[:, :5], max_new_tokens=5, do_sample=False) for m in (plain, chunked)))
    assert inspect.signature(chunked.forward) == inspect.signature(plain.forward)
    assert len(chunked(**batch(), return_dict=False)) == len(plain(**batch(), return_dict=False)) - 1
    twin = copy.deepcopy(plain)
    defer(twin, ChunkedLoss(7))
    twin = pickle.loads(pickle.dumps(twin))
    assert torch.equal(twin(**batch()).loss, chunked(**batch()).loss)


def test_labels_may_be_positional_or_shifted_already() -> None:
    plain, chunked = pair(build())
    given = batch()
    arguments = [given["input_ids"], None, None, None, None, given["labels"]]
    torch.testing.assert_close(chunked(*arguments).loss, plain(*arguments).loss)
    shifted = {"shift_labels": given["labels"].roll(-1, 1)}
    torch.testing.assert_close(chunked(**given, **shifted).loss, plain(**given, **shifted).loss)
    assert not torch.equal(chunked(**given, **shifted).loss, chunked(**given).loss)


def test_smoothing_and_z_loss_in_training_only() -> None:
    plain, chunked = pair(build(), label_smoothing=0.1, z_loss=1e-2)
    given = batch()
    with torch.no_grad():
        logits = plain(given["input_ids"]).logits[:, :-1].flatten(0, 1)
    labels = given["labels"][:, 1:].flatten()
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    expected = expected + 1e-2 * logits.logsumexp(1).square()[labels != -100].mean()
    torch.testing.assert_close(chunked(**given).loss, expected)
    with torch.no_grad():
        torch.testing.assert_close(chunked.eval()(**given).loss, plain.eval()(**given).loss)


def _lora_on_head(network: Any) -> None:
    apply(network, [LoRA(rank=2, targets=["q_proj", "lm_head"])])


def _dora_on_head(network: Any) -> None:
    apply(network, [LoRA(rank=2, targets=["lm_head"], variant="dora")])


def _qlora(network: Any) -> None:
    apply(network, [QuantizeBase(skip=()), LoRA(rank=2, targets=["lm_head"])])


@pytest.mark.turns(3)
@pytest.mark.parametrize("adapt", [_lora_on_head, _dora_on_head, _qlora])
def test_heads_under_our_adapters(adapt: Any) -> None:
    network = build()
    adapt(network)
    for name, parameter in network.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.1)
    assert_same(*pair(network))


@pytest.mark.parametrize("arguments", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_heads_under_peft(arguments: dict[str, Any]) -> None:
    import peft

    network = peft.get_peft_model(build(), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **arguments))
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert_same(*pair(network))


def test_a_frozen_head_makes_no_weight_gradient() -> None:
    network = build()
    network.lm_head.weight.requires_grad_(False)
    plain, chunked = pair(network)
    assert_same(plain, chunked)


@pytest.mark.parametrize("tied", [True, False])
def test_our_gpt(tied: bool) -> None:
    torch.manual_seed(0)
    plain, chunked = pair(GPT(GPTConfig(vocab_size=V, dim=32, depth=2, num_heads=4, max_length=T, tie_embeddings=tied)))
    given = batch()
    whole = token_losses(plain(given["input_ids"]), given["labels"])
    with Largest() as largest:
        losses = chunked(given["input_ids"], labels=given["labels"])
        (losses.sum() / 7).backward()
    assert largest.numel < B * T * V
    torch.testing.assert_close(losses, whole)
    assert torch.equal(plain(given["input_ids"], labels=given["labels"]), whole)
    (whole.sum() / 7).backward()
    for ours, theirs in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    weights = torch.linspace(0, 1, T)  # another weight for each token: the gradients of a second pass
    for network in (plain, chunked):
        network.zero_grad()
        (network(given["input_ids"], labels=given["labels"]) * weights).sum().backward()
    torch.testing.assert_close(chunked.head.weight.grad, plain.head.weight.grad, rtol=1e-5, atol=1e-6)


class Tuner(L.LightningModule):
    """What a user writes around a transformers model."""

    def __init__(self, with_labels: bool = True) -> None:
        super().__init__()
        self.with_labels = with_labels

    def configure_model(self) -> None:
        self.network = build()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.with_labels:
            return self.network(**batch).loss
        logits = self.network(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit(module: L.LightningModule, callbacks: list[Any], **arguments: Any) -> L.LightningModule:
    loader = DataLoader([{key: value[0] for key, value in batch().items()}] * 6, batch_size=2)
    trainer(callbacks, **arguments).fit(module, loader)
    return module


@pytest.mark.parametrize("techniques", [[], [LoRA(rank=2)], [QuantizeBase(), LoRA(rank=2)]])
def test_trains_a_users_module_alike(techniques: list[Any]) -> None:
    plain = fit(Tuner(), list(techniques))
    chunked = fit(Tuner(), [ChunkedCrossEntropy(chunk_size=5), *techniques])
    for ours, theirs in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_refuses_a_module_that_never_gives_labels() -> None:
    with pytest.raises(ConfigurationError, match="did not call LlamaForCausalLM with labels"):
        fit(Tuner(with_labels=False), [ChunkedCrossEntropy()])


def test_refuses_a_module_without_a_causal_language_model() -> None:
    with pytest.raises(ConfigurationError, match="Toy has no causal language model"):
        trainer([ChunkedCrossEntropy()]).fit(Toy("init"), data())


def test_refuses_logits_that_are_more_than_scaled_and_bounded() -> None:
    class Biased(GPT):
        def forward(self, input_ids: Any, cache: Any = None, labels: Any = None) -> Any:
            logits = self.head(self.features(input_ids)).softmax(-1)
            return self.loss_function(logits, labels)

    network = Biased(GPTConfig(vocab_size=V, dim=16, depth=1, num_heads=2, max_length=T))
    apply(network, [ChunkedCrossEntropy()])
    with pytest.raises(ConfigurationError, match="applies softmax to its logits"):
        network(**batch())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1 or null, got 0"),
        ({"backend": "cuda"}, "backend must be one of auto, torch, liger, got 'cuda'"),
        ({"z_loss": -1.0}, "z_loss must be at least 0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1"),
    ],
)
def test_refuses_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ChunkedCrossEntropy(**arguments)


@pytest.mark.gpu
def test_ligers_kernel_agrees() -> None:
    pytest.importorskip("liger_kernel")
    plain, chunked = pair(build("gemma2").cuda(), backend="liger")
    given = {key: value.cuda() for key, value in batch().items()}
    losses = [network(**given).loss for network in (plain, chunked)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chunked.lm_head.weight.grad, plain.lm_head.weight.grad, rtol=1e-3, atol=1e-4)
