"""MixtureOfDepths: equal to blocks under a mask of the chosen tokens, causal in generation, with and without caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient import ConfigurationError, DiT, DiTConfig, MixtureOfDepths
from lit_efficient.mechanisms.flops import FlopMeter
from lit_efficient.mechanisms.side_terms import SideTerms, parts_of
from lit_efficient.models.networks.depth_routing import DepthRouted, choose_tokens
from lit_efficient.models.networks.document_attention import document_starts
from lit_efficient.models.networks.gpt import GPT, GPTConfig, KVCache, rotary_table, rotate
from lit_efficient.testing import Run
from tests.contract.effects import moved, training
from tests.contract.row import Row
from tests.mechanisms.adapters.decoders import decoder
from tests.support import AttentionNet, Toy

CONFIG = GPTConfig(64, dim=16, depth=4, num_heads=2, num_kv_heads=1, hidden_dim=24, max_length=64)
IDS = torch.randint(0, 64, (3, 13), generator=torch.Generator().manual_seed(3))


def passes_by(run: Run) -> None:
    """In training, attention in a routed block sees a quarter of the tokens, and router and predictor learn."""
    parts = parts_of(run.module, DepthRouted)
    assert len(parts) == 2
    seen: list[int] = []
    hooks = [part.attention.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1])) for part in parts]
    with training(run) as x:
        run.module._sample_loss((x,)).mean()
    for hook in hooks:
        hook.remove()
    assert all(4 * count == x.shape[-1] for count in seen)
    learns = {name for step in run.steps for name, g in step.gradients.items() if ".depth_" in name and g.any()}
    assert learns or run.technique("ReplaceHead") is not None  # which trains the head alone at first
    assert learns <= {*moved(run, r"\.depth_")}


ROW = Row(lambda: MixtureOfDepths(0.25, loss_weight=0.1), passes_by, network=AttentionNet)


def _gpt() -> Any:
    torch.manual_seed(0)
    return GPT(CONFIG)


def _llama(attention: str = "sdpa") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=attention))  # type: ignore[arg-type]


def _routed(network: Any, capacity: float = 0.4, **arguments: Any) -> Any:
    """Return the network with routers and predictors whose scores differ between tokens."""
    MixtureOfDepths(capacity, **arguments).transform(network)
    generator = torch.Generator().manual_seed(5)
    for part in parts_of(network, DepthRouted):
        for p in (part.depth_router, part.depth_predictor):
            p.data = torch.randn(p.shape, generator=generator) * 0.5
    return network


def _block_under_mask(block: Any, x: Tensor, kept: Tensor, starts: Tensor | None) -> Tensor:
    """Return a block of the GPT for all tokens, whose attention sees only the kept tokens, [B, T, D]."""
    attention, length = block.attention, x.shape[1]
    normed = block.attention_norm(x)
    heads = [
        f(normed).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (attention.query, attention.key, attention.value)
    ]
    index = torch.arange(length)
    table = rotary_table(0, length, 8, 10_000.0, x.device)
    if starts is not None:
        table = torch.stack([rotary_table(0, length, 8, 10_000.0, x.device)[0][:, index - s] for s in starts])
    q, k = (
        torch.stack([rotate(row[None], table[i % len(table)][None])[0] for i, row in enumerate(h)]) for h in heads[:2]
    )
    seen = (index <= index[:, None])[None] & kept[:, None, :] | torch.eye(length, dtype=torch.bool)
    if starts is not None:
        seen &= index >= starts[:, :, None]
    k, v = (h.expand(-1, q.shape[1], -1, -1) for h in (k, heads[2]))
    weights = (q @ k.mT / 8**0.5).masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    x = x + attention.out((weights @ v).transpose(1, 2).flatten(2))
    return x + block.mlp(block.mlp_norm(x))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_a_block_computes_what_it_does_under_a_mask_of_the_chosen_with_its_gradients(mode: str, packed: bool) -> None:
    network = _routed(_gpt()).train(mode == "training")
    block, plain = network.blocks[1], _gpt().blocks[1]
    x = torch.randn(3, 13, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    positions = torch.tensor([[*range(13)], [*range(5), *range(8)], [*range(9), *range(4)]])
    starts = document_starts(positions) if packed else None
    table = rotary_table(0, 13, 8, 10_000.0, x.device)
    if packed:
        table = table[0][:, positions].transpose(0, 1).unsqueeze(2)
    found = block(x, table, None, starts)

    normed = x / x.square().mean(-1, keepdim=True).add(torch.finfo(torch.float32).eps).sqrt()
    scores = normed @ block.depth_router
    kept = torch.zeros(3, 13, dtype=torch.bool)
    if mode == "training":
        for row, best in enumerate(scores.detach().argsort(dim=1, descending=True)[:, :6]):  # ceil(0.4 * 13)
            kept[row, best] = True
    else:
        kept = normed.detach() @ block.depth_predictor[:-1] + block.depth_predictor[-1] > 0
        assert len({*kept.sum(1).tolist()}) > 1
    y = _block_under_mask(plain, x, kept, starts)
    wanted = torch.where(kept[..., None], x + 2 * scores.sigmoid()[..., None] * (y - x), x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weigh = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad((found * weigh).sum(), [x, block.depth_router, *block.mlp.parameters()])
    theirs = torch.autograd.grad((wanted * weigh).sum(), [x, block.depth_router, *plain.mlp.parameters()])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert ours[1].abs().sum() > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_computes_what_its_layers_do_under_masks_of_the_chosen(attention: str) -> None:
    network, plain = _routed(_llama(attention)).train(), _llama(attention)
    found = network(input_ids=IDS, use_cache=False).logits
    x = plain.model.embed_tokens(IDS)
    rotary = plain.model.rotary_emb(x, position_ids=torch.arange(13)[None])
    causal = torch.ones(13, 13, dtype=torch.bool).tril()[None, None]
    for layer, routed in zip(plain.model.layers, network.model.layers, strict=True):
        kept = torch.ones(3, 13, dtype=torch.bool)
        scores = None
        if isinstance(routed, DepthRouted):
            scores = F.rms_norm(x, (16,)) @ routed.depth_router  # type: ignore[operator]
            kept = torch.zeros_like(kept).scatter(1, choose_tokens(scores, 6), value=True)
        seen = causal & kept[:, None, None, :] | torch.eye(13, dtype=torch.bool)
        mask = torch.zeros(3, 1, 13, 13).masked_fill(~seen, torch.finfo(torch.float32).min)
        y = layer(x, attention_mask=mask, position_embeddings=rotary)
        gate = torch.ones(3, 13) if scores is None else 2 * scores.sigmoid()
        x = torch.where(kept[..., None], x + gate[..., None] * (y - x), x)
    torch.testing.assert_close(found, plain.lm_head(plain.model.norm(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("predict", ["predictor", "router"])
def test_generates_the_same_with_a_cache_and_validates_what_it_generates(predict: str) -> None:
    gpt = _routed(_gpt(), predict=predict).eval()
    ours = [gpt.generate(IDS, 24, temperature=0, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*ours)
    # In parts of a prompt, too; whole rows are what their tokens are one by one: nothing reads ahead.
    cache = [KVCache(13) for _ in gpt.blocks]
    with torch.no_grad():
        parts = [gpt(part, cache) for part in IDS.split([4, 1, 1, 5, 2], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), gpt(IDS), rtol=1e-4, atol=1e-5)
    skipped = [c.kept.logical_not().sum() for c in cache if c.kept is not None]
    assert len(skipped) == 2
    assert all(0 < n < IDS.numel() for n in skipped)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_generates_the_same_with_a_cache_behind_padding_too(attention: str) -> None:
    llama = _routed(_llama(attention)).eval()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    for given in (torch.ones_like(IDS), mask):
        settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "attention_mask": given}
        settings |= {"output_scores": True, "return_dict_in_generate": True}
        runs = [llama.generate(IDS, **settings, use_cache=cached) for cached in (True, False)]
        assert torch.equal(runs[0].sequences, runs[1].sequences)
        torch.testing.assert_close(torch.stack(runs[0].scores), torch.stack(runs[1].scores), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigurationError, match="its cache was reordered or cut, as beam search does"):
        llama.generate(IDS, max_new_tokens=4, num_beams=2, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("family", ["gpt", "sdpa", "eager"])
def test_padding_is_not_chosen_and_changes_nothing(family: str) -> None:
    network = _routed(_gpt() if family == "gpt" else _llama(family), capacity=0.5).train()
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    block = parts_of(network, DepthRouted)[0]

    def run(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        inner = block.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        seen: list[Tensor] = []
        block.side_terms = []
        if family == "gpt":
            for part in parts_of(network, DepthRouted):
                part.token_rows = {"attention_mask": mask}
            logits = network(ids)
        else:
            logits = network(input_ids=ids, attention_mask=mask, use_cache=False).logits
        inner.remove()
        assert seen[-1].shape[1] == -(-ids.shape[1] // 2)
        return logits, block.side_terms[0]

    logits, term = run(IDS[:2], mask[:2])
    alone, own = run(IDS[1:2, :7], mask[1:2, :7])  # the row without its padding chooses the same of its tokens
    torch.testing.assert_close(logits[1:, :7], alone, rtol=1e-4, atol=1e-5)
    _, first = run(IDS[:1], mask[:1])
    torch.testing.assert_close(term, (13 * first + 7 * own) / 20)


def test_a_block_whose_queries_are_normalised_is_as_wide_as_its_stream() -> None:
    qwen = _routed(decoder("Qwen3"))
    assert {part.depth_router.shape for part in parts_of(qwen, DepthRouted)} == {(qwen.config.hidden_size,)}
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    runs = [qwen.generate(IDS % 32, **settings, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*runs)


def test_a_block_that_is_not_causal_is_refused_although_one_token_of_many_moves_the_others_little() -> None:
    torch.manual_seed(0)
    dit = DiT(DiTConfig(width=16, depth=2, heads=2)).train()
    for p in dit.parameters():
        nn.init.normal_(p, std=0.1)
    MixtureOfDepths(0.5).transform(dit)
    with pytest.raises(ConfigurationError, match=r"block 'blocks\.1' cannot run on part of the tokens: .* not causal"):
        dit(torch.randn(2, 4, 8, 8), torch.rand(2), torch.tensor([1, 2]))


def test_a_token_that_no_row_chose_runs_through_no_block() -> None:
    gpt = _routed(_gpt()).eval()
    ran: list[int] = []
    for part in parts_of(gpt, DepthRouted):
        part.depth_predictor.data.zero_()[-1] = -1.0
        part.attention.register_forward_pre_hook(lambda _, args: ran.append(args[0].shape[1]))
    one, other = (gpt.generate(IDS, 6, temperature=0, use_cache=cached) for cached in (True, False))
    assert torch.equal(one, other)
    assert 1 not in ran  # beside the prompt, which makes the cache, and the first look at a block


def test_counts_the_operations_of_the_chosen_tokens_alone() -> None:
    def operations(network: Any) -> int:
        with FlopMeter() as meter:
            network.features(ids).sum().backward()
        return meter.sums.total()

    ids = IDS.repeat(1, 4)[:, :48]
    dense, routed = _gpt(), _routed(_gpt(), 0.25)
    for network in (dense, routed):
        network.features(ids)  # the first look at the blocks
    layers = 2 * 3 * 48 * sum(p.numel() for p in dense.blocks[0].parameters() if p.ndim == 2)
    pairs = 2 * 2 * 3 * 48 * 48 * 16
    whole, part = 3 * layers + int(3.5 * pairs), 0.25 * 3 * layers + 0.0625 * 3.5 * pairs
    router = 2 * 3 * 48 * 16 * (2 + 2)
    assert abs(operations(dense) - 4 * whole) < 0.02 * whole
    assert abs(operations(routed) - 2 * whole - 2 * (part + router)) < 0.05 * whole


def test_the_predictor_learns_the_choice_and_teaches_nothing_else() -> None:
    for predict in ("predictor", "router"):
        network = _routed(_gpt(), predict=predict).train()
        with (terms := SideTerms("", DepthRouted)).collecting(network):
            network(IDS)
            term = terms.mean(network)
        term.squeeze().backward()  # type: ignore[union-attr]
        taught = {name.rpartition(".")[2] for name, p in network.named_parameters() if p.grad is not None}
        assert (taught == {"depth_predictor"}) == (predict == "predictor")
    block: Any = _routed(_gpt(), 0.25).blocks[1]
    block.depth_predictor.data.zero_()
    x, table = (
        torch.randn(16, 16, 16, generator=torch.Generator().manual_seed(0)),
        rotary_table(0, 16, 8, 1e4, torch.device("cpu")),
    )
    optimizer = torch.optim.Adam([block.depth_predictor], lr=0.1)
    for _ in range(60):
        block.side_terms = []
        block(x, table)
        optimizer.zero_grad()
        block.side_terms[0].sum().backward()
        optimizer.step()
    scores, guess = block._scores(x)
    chosen = torch.zeros(16, 16, dtype=torch.bool).scatter(1, choose_tokens(scores, 4), value=True)
    assert ((guess > 0) == chosen).float().mean() > 0.85


@pytest.mark.parametrize("predict", ["predictor", "router"])
def test_what_is_fresh_chooses_the_share_and_mostly_what_the_router_does(predict: str) -> None:
    wide = GPT(GPTConfig(64, dim=64, depth=2, num_heads=2, max_length=64))
    MixtureOfDepths(0.25, predict=predict).transform(wide)
    block: Any = wide.blocks[1]
    scores, guess = block._scores(torch.randn(16, 64, 64, generator=torch.Generator().manual_seed(0)))
    assert 0.2 < (guess > 0).float().mean() < 0.3
    chosen = torch.zeros(16, 64, dtype=torch.bool).scatter(1, choose_tokens(scores, 16), value=True)
    assert ((guess > 0) == chosen).float().mean() > 0.9
    network = _gpt().eval()
    logits = network(IDS)
    MixtureOfDepths(1.0, predict=predict).transform(network)
    assert (network.eval()(IDS) - logits).abs().max() < 0.05 * logits.abs().max()  # all run, by gates near 1


def test_refuses_by_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"MixtureOfDepths: capacity must be.*got 0"):
        MixtureOfDepths(0.0)
    with pytest.raises(ConfigurationError, match="every must be at most 4, the number of blocks, got 5"):
        MixtureOfDepths(every=5).transform(_gpt())

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(self.norm(x)) + x.mean(1, keepdim=True)

    blocks = nn.Sequential(*(Mixing() for _ in range(2)))
    MixtureOfDepths().transform(blocks)
    with pytest.raises(ConfigurationError, match="'1' cannot run on part of the tokens: without the last token"):
        blocks(torch.randn(2, 5, 16))
    wide = copy.deepcopy(Toy(network=AttentionNet).net)
    MixtureOfDepths(blocks=[r"blocks\.0"]).transform(wide)
    assert isinstance(wide.gpt.blocks[0], DepthRouted)  # type: ignore[union-attr, index]
