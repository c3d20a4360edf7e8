import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.generation.sampling import sample_token
from lit_efficient.models.networks import gpt
from lit_efficient.models.networks.gpt import GPT, GPTConfig, GPTConstants, KVCache
from lit_efficient.models.probes.modes import evaluating

SMALL = GPTConfig(vocab_size=61, dim=32, depth=2, num_heads=4, num_kv_heads=2, max_length=48)


def build(config: GPTConfig = SMALL, seed: int = 0, scale: float = 4.0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(config).eval()
    with torch.no_grad():  # far from the initial weights, where every part matters
        for parameter in model.parameters():
            parameter.mul_(scale) if parameter.ndim > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def as_llama(ours: GPT) -> Any:
    """Return a model of transformers with the weights of a GPT."""
    transformers = pytest.importorskip("transformers")
    config = ours.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.mlp_dim,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_length,
            rms_norm_eps=config.constants.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.constants.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="eager",
        )
    ).eval()
    renames = [
        ("embedding.", "model.embed_tokens."),
        ("blocks.", "model.layers."),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        *(
            (f"attention.{ours_}", f"self_attn.{theirs_}_proj")
            for ours_, theirs_ in zip(("query", "key", "value", "out"), "qkvo", strict=True)
        ),
        *((f"mlp.{name}", f"mlp.{name}_proj") for name in ("gate", "up", "down")),
        ("head.", "lm_head."),
    ]
    state = {}
    for name, value in ours.state_dict().items():
        renamed = f"model.{name}" if name.startswith("norm.") else name
        for old, new in renames:
            renamed = renamed.replace(old, new)
        state[renamed] = value
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": None},
        {"num_kv_heads": 1, "tie_embeddings": False, "constants": GPTConstants(rope_theta=500.0)},
    ],
)
def test_is_the_function_of_an_independent_llama(changes: dict) -> None:
    ours = build(dataclasses.replace(SMALL, **changes))
    theirs = as_llama(ours)
    ids = tokens(3, 40)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_grouped_queries_equal_full_heads_with_repeated_weights() -> None:
    grouped = build()
    full = GPT(dataclasses.replace(SMALL, num_kv_heads=None)).eval()
    state = grouped.state_dict()
    for name in state:
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    ids = tokens(2, 20)
    torch.testing.assert_close(grouped(ids), full(ids), atol=1e-5, rtol=1e-5)
    assert sum(p.numel() for p in grouped.parameters()) < sum(p.numel() for p in full.parameters())


def test_no_token_sees_the_future() -> None:
    model = build()
    ids = tokens(2, 24)
    changed = ids.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 61
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :15], after[:, :15], atol=0, rtol=0)
    assert (before[:, 15:] - after[:, 15:]).abs().amax(dim=(0, 2)).min() > 0


def test_tied_embeddings_are_one_parameter_and_stay_so_in_a_copy() -> None:
    model = copy.deepcopy(build())
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = GPT(dataclasses.replace(SMALL, tie_embeddings=False))
    assert untied.head.weight is not untied.embedding.weight


def test_logits_are_the_head_of_the_features() -> None:
    model = build()
    ids = tokens(2, 9)
    features = model.features(ids)
    assert features.shape == (2, 9, 32)
    torch.testing.assert_close(model.head(features), model(ids))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generation_with_and_without_cache_agrees(temperature: float) -> None:
    model = build()
    both = [
        model.generate(
            tokens(3, 7),
            30,
            temperature=temperature,
            top_p=0.9,
            generator=torch.Generator().manual_seed(5),
            use_cache=use_cache,
        )
        for use_cache in (True, False)
    ]
    assert both[0].shape == (3, 37)
    assert torch.equal(*both)
    assert len(both[0][:, 7:].unique()) > 3  # not one token over and over


def test_cached_pieces_of_any_length_equal_one_pass() -> None:
    model = build()
    ids = tokens(2, 20)
    cache = [KVCache(20) for _ in model.blocks]
    pieces = [model(part, cache) for part in ids.split([6, 1, 9, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), atol=1e-5, rtol=1e-5)


def test_generation_leaves_the_global_random_state_and_the_modes_alone() -> None:
    model = build(dataclasses.replace(SMALL, dropout=0.5)).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first, again = (model.generate(tokens(1, 4), 8, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    other = model.generate(tokens(1, 4), 8, generator=torch.Generator().manual_seed(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]


def test_modes_come_back_after_an_error() -> None:
    model = build().train()
    seen = []

    def fail() -> None:
        with evaluating(model):
            seen.extend(module.training for module in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not any(seen)
    assert all(module.training for module in model.modules())


def test_nucleus_keeps_the_likeliest_tokens_in_proportion() -> None:
    probability = torch.tensor([0.1, 0.5, 0.15, 0.25])
    generator = torch.Generator().manual_seed(0)
    drawn = sample_token(probability.log().expand(4000, 4), 1.0, 0.7, generator).flatten()
    frequency = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(frequency, torch.tensor([0.0, 2 / 3, 0.0, 1 / 3]), atol=0.03, rtol=0)
    assert sample_token(probability.log()[None], 1.0, 1e-6, generator).item() == 1
    assert sample_token(probability.log()[None], 0.0, 1.0, generator).item() == 1


def test_initial_loss_is_that_of_a_uniform_guess_and_residuals_are_scaled() -> None:
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, depth=8, dim=64))
    ids = tokens(8, 32)
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(61.0).log().item(), abs=0.05)
    assert model.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert model.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_positions_survive_bfloat16_weights() -> None:
    """In bfloat16 neighbouring positions beyond 256 are one number; float32 tables keep them apart."""
    config = dataclasses.replace(SMALL, max_length=600)
    model = build(config)
    ids = tokens(1, 600)
    exact, rounded = model(ids), model.to(torch.bfloat16)(ids).float()
    late = torch.nn.functional.cosine_similarity(exact[0, 500:], rounded[0, 500:], dim=-1)
    assert late.min() > 0.98


def test_blocks_are_residual_and_keep_the_shape() -> None:
    model = build()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.zero_()
            block.mlp.down.weight.zero_()
    ids = tokens(2, 5)
    torch.testing.assert_close(model.features(ids), model.norm(model.embedding(ids)))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dim": 30}, "dim"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"depth": 0}, "depth"),
        ({"depth": 10**15}, "depth"),
        ({"dropout": 1.0}, "dropout"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_bad_configurations_are_refused_by_name(changes: dict, word: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"GPTConfig: {word} .* got {next(iter(changes.values()))}"):
        dataclasses.replace(SMALL, **changes)


def test_bad_calls_are_refused() -> None:
    model = build()
    with pytest.raises(ConfigurationError, match="max_length = 48"):
        model(tokens(1, 49))
    with pytest.raises(ConfigurationError, match="max_length = 48"):
        model.generate(tokens(1, 40), 9)
    with pytest.raises(ConfigurationError, match="temperature"):
        model.generate(tokens(1, 4), 2, temperature=-1.0)
    with pytest.raises(ConfigurationError, match="top_p"):
        model.generate(tokens(1, 4), 2, top_p=0.0)
    with pytest.raises(ConfigurationError, match="vocab_size"):
        GPT(GPTConfig())


class Attention(TorchFunctionMode):
    """Notes what each call of torch's attention is asked: heads of queries and keys, a mask, grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, bool, bool]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            masked = kwargs.get("attn_mask") is not None
            self.calls.append((args[0].shape[1], args[1].shape[1], masked, kwargs.get("enable_gqa", False)))
        return function(*args, **kwargs)


def test_grouped_heads_come_with_a_mask_or_grouped_but_never_both() -> None:
    model, ids = build(), tokens(2, 12)
    one_document = torch.arange(12).expand(2, -1)
    with Attention() as plain:
        expected = model(ids)
    with Attention() as packed:
        found = model(ids, position_ids=one_document)
    assert plain.calls == [(4, 2, False, True)] * 2
    assert packed.calls == [(4, 2, False, True)] * 4  # one document at a time: two rows, two blocks
    with FakeTensorMode(), Attention() as unread:  # lengths that nobody can read
        build()(torch.zeros(2, 12, dtype=torch.long), position_ids=torch.zeros(2, 12, dtype=torch.long))
    assert set(unread.calls) == {(4, 2, False, True)}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(out.square().mean(), list(model.parameters())) for out in (found, expected)]
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    cache = [KVCache(12) for _ in model.blocks]
    model(ids[:, :5], cache)
    with Attention() as continued:
        rest = model(ids[:, 5:], cache)
    assert continued.calls == [(4, 4, True, False)] * 2
    torch.testing.assert_close(rest, expected[:, 5:], rtol=1e-4, atol=1e-4)


def test_norms_hand_on_autocasts_dtype_which_changes_no_loss_and_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each linear layer after a norm would cast the norm's float32 output for itself and keep the result."""
    model = build().train()
    ids = tokens(2, 48)
    monkeypatch.setattr(nn.RMSNorm, "forward", _in_float32)  # as autocast computes it on CUDA
    found = []
    for cast in (gpt.in_autocast_dtype, lambda x: x):
        monkeypatch.setattr(gpt, "in_autocast_dtype", cast)
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        model.zero_grad()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).mean()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append((loss.detach(), gradients, sum(one.untyped_storage().nbytes() for one in kept.values())))
    (loss, gradients, size), (old_loss, old_gradients, old_size) = found
    assert torch.equal(loss, old_loss)
    # The gradients of the query, key and value meet in bfloat16 instead of float32.
    for new, old in zip(gradients, old_gradients, strict=True):
        assert (new - old).norm() <= 2**-7 * old.norm()
    copies = 2 * 48 * SMALL.dim * 2  # bytes of a norm's output in bfloat16
    tables = 2 * 48 * SMALL.head_dim * 2  # bytes of the rotary table in bfloat16
    # In each block two casts for the attention and one for the MLP go. Queries and keys of all blocks share a table.
    assert old_size - size == SMALL.depth * 3 * copies + (2 * SMALL.depth - 1) * tables


def _in_float32(self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps)
