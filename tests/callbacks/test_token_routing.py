"""TokenRouting: exact against a loop over samples, in four packages' transformers; whole in evaluation; less work."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lit_efficient import (
    GPT,
    ConfigurationError,
    DiT,
    DiTConfig,
    DiTVariant,
    GPTConfig,
    LatentDiffusion,
    Sampler,
    TokenRouting,
    apply,
    draw_tokens,
)
from lit_efficient.callbacks.token_routing import TokenFusion
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.internals.torch_trees import tree_map
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.probes.modes import path_dropped
from lit_efficient.tasks.latent_sampling import guided
from lit_efficient.testing import Case, Run, check_resumes
from tests.contract.effects import training
from tests.contract.row import Row
from tests.support import WIDTH, Block, Net, TokenAttentionNet

SEED, RATE = 11, 0.6
BLOCKS = r"(?<!gpt\.)(blocks|steps)\.\d"


def four_tokens(x: Tensor) -> Tensor:
    """[B, 4, WIDTH] of rows that may be shorter."""
    whole = nn.functional.pad(x, (0, WIDTH - x.shape[-1]))
    return torch.stack([whole.roll(shift, -1) for shift in range(4)], 1)


class Tokens(Net):
    """Four tokens a row, each of the blocks on each of them alone."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return super().forward(four_tokens(x)).mean(1)[..., : x.shape[-1]]


class TokensAndAttention(TokenAttentionNet):
    """For techniques that need attention: the route lies beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        y, tokens = super().forward(x, labels), four_tokens(x)
        for step in self.steps:
            tokens = step(tokens)
        return y + (tokens.mean((1, 2)) if y.ndim == 1 else tokens.mean(1)[..., : y.shape[-1]])


Tokens.with_attention = TokensAndAttention  # type: ignore[attr-defined]


def tokens_are_left_out(run: Run) -> None:
    """In training the blocks of the route run on fewer tokens than the one before it, in evaluation on all."""
    names = [name for name, _ in run.module.named_modules() if re.search(rf"{BLOCKS}\.up$", name)][:2]
    seen: list[int] = []
    hooks = [
        run.module.get_submodule(name).register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
        for name in names
    ]
    with torch.compiler.set_stance("force_eager"), training(run) as x:  # hooks of compiled blocks are not called
        for _ in range(8):  # blocks may be dropped
            run.module._sample_loss((x,))
        assert sorted({count / max(seen) for count in seen}) == [0.5, 1]
        seen.clear()
        run.module.eval()
        run.module._sample_loss((x,))
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2
    assert len({*seen}) == 1


ROW = Row(
    lambda: TokenRouting(0.5, 1, 1, mode="sprint", path_drop=0.1, blocks=[BLOCKS]),
    tokens_are_left_out,
    lambda: TokenRouting(0.0, 1, 1, blocks=[BLOCKS]),
    network=Tokens,
)


# Families: a network, its call on some rows, the route's blocks and what of their arguments has entries by token


def dit(**further: Any) -> DiT:
    return DiT(DiTConfig(size=4, width=16, depth=4, heads=2, mlp_ratio=2, **further))


def diffusers_model(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**arguments)

    return make


LATENTS = torch.linspace(-1, 1, 3 * 4 * 16).view(3, 4, 4, 4).sin()
TEXT = torch.linspace(-1, 1, 3 * 4 * 16).view(3, 4, 16).cos()  # as many tokens as the image has
POOLED = torch.linspace(-1, 1, 24).view(3, 8)
TIMES = torch.tensor([0.1, 0.5, 0.9])
SHAPE = {"num_attention_heads": 2, "attention_head_dim": 8}
JOINT = {**SHAPE, "in_channels": 4, "joint_attention_dim": 16, "pooled_projection_dim": 8, "patch_size": 2}


def _flux(net: nn.Module, rows: slice) -> Tensor:
    places = torch.arange(12.0).view(4, 3)
    tokens = LATENTS.reshape(3, 4, 16)[rows]
    given = {"hidden_states": tokens, "encoder_hidden_states": TEXT[rows], "pooled_projections": POOLED[rows]}
    return net(**given, timestep=TIMES[rows], img_ids=places, txt_ids=torch.zeros(4, 3)).sample


def _sd3(net: nn.Module, rows: slice) -> Tensor:
    given = {"hidden_states": LATENTS[rows], "encoder_hidden_states": TEXT[rows], "pooled_projections": POOLED[rows]}
    return net(**given, timestep=1000 * TIMES[rows]).sample


Family = tuple[Callable[[], nn.Module], Callable[[nn.Module, slice], Tensor], tuple[str, ...], tuple[int, int] | None]
FAMILIES: dict[str, Family] = {
    "DiT": (
        dit,
        lambda net, rows: net(LATENTS[rows], TIMES[rows], torch.arange(3)[rows]),
        ("blocks.1", "blocks.2"),
        None,
    ),
    "DiT with text and rope": (
        lambda: dit(context_width=16, variant=DiTVariant("rope", qk_norm=True)),
        lambda net, rows: net(LATENTS[rows], TIMES[rows], torch.arange(3)[rows], TEXT[rows]),
        ("blocks.1", "blocks.2"),
        (1, 0),  # axis and offset of the entries in rotary_emb
    ),
    "diffusers' DiT": (
        diffusers_model(
            "DiTTransformer2DModel", in_channels=4, num_layers=4, sample_size=4, num_embeds_ada_norm=9, **SHAPE
        ),
        lambda net, rows: net(LATENTS[rows], torch.arange(3)[rows], class_labels=torch.arange(3)[rows]).sample,
        ("transformer_blocks.1", "transformer_blocks.2"),
        None,
    ),
    "SD3": (
        diffusers_model(
            "SD3Transformer2DModel",
            sample_size=4,
            num_layers=4,
            caption_projection_dim=16,
            pos_embed_max_size=4,
            **JOINT,
        ),
        _sd3,
        ("transformer_blocks.1", "transformer_blocks.2"),
        None,
    ),
    "Flux": (
        diffusers_model(
            "FluxTransformer2DModel",
            num_layers=2,
            num_single_layers=2,
            axes_dims_rope=(4, 2, 2),
            **{**JOINT, "patch_size": 1, "in_channels": 16},
        ),
        _flux,
        ("transformer_blocks.1", "single_transformer_blocks.0"),
        (0, 4),
    ),
}


def randomised(net: nn.Module) -> nn.Module:
    """No weight is zero, as those of gates are at first, and no label is dropped."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    for part in net.modules():
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0
    return net.train()


def by_sample(family: Family, net: nn.Module, kept: Tensor, fusion: TokenFusion | None) -> Tensor:
    """The slow reference: one sample at a time, tokens taken out before the first block and put back after the last."""
    _, call, names, places = family
    blocks = [net.get_submodule(name) for name in names]
    outputs = []
    for row in range(3):
        held: dict[str, Tensor] = {}

        def take(block: nn.Module, args: Any, kwargs: Any, row: int = row, held: dict = held) -> Any:
            args, kwargs = list(args), dict(kwargs)
            if block is blocks[0]:
                name = "hidden_states" if "hidden_states" in kwargs else None
                held["x"] = kwargs[name] if name else args[0]
                part = torch.stack([held["x"][0, token] for token in kept[row]])[None]
                if name:
                    kwargs[name] = part
                else:
                    args[0] = part
            if places is not None:
                axis, offset = places
                order = [*range(offset), *(offset + int(token) for token in kept[row])]
                key = next(key for key in kwargs if "rotary" in key)
                kwargs[key] = tree_map(lambda table: table.transpose(0, axis)[order].transpose(0, axis), kwargs[key])
            return tuple(args), kwargs

        def put(block: nn.Module, args: Any, output: Any, row: int = row, held: dict = held) -> Any:
            y = output[1] if isinstance(output, tuple) else output
            whole = held["x"].clone() if fusion is None else fusion.mask.expand_as(held["x"]).clone()
            for place, token in enumerate(kept[row]):
                whole[0, token] = y[0, place]
            if fusion is not None:
                whole = torch.cat([held["x"], whole], -1) @ fusion.weight.T
            return (output[0], whole) if isinstance(output, tuple) else whole

        hooks = [block.register_forward_pre_hook(take, with_kwargs=True) for block in blocks]
        hooks.append(blocks[-1].register_forward_hook(put))
        outputs.append(call(net, slice(row, row + 1)))
        for hook in hooks:
            hook.remove()
    return torch.cat(outputs)


@pytest.mark.parametrize("mode", ["tread", "sprint"])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_computes_what_a_loop_over_samples_computes(name: str, mode: str) -> None:
    family = FAMILIES[name]
    make, call, names, places = family
    plain = randomised(make())
    routed = copy.deepcopy(plain)
    technique = TokenRouting(RATE, before=1, after=1, mode=mode)
    assert technique.transform(routed).modules == names
    torch.testing.assert_close(call(routed.eval(), slice(None)), call(plain.eval(), slice(None)))
    fusion = next((part for part in routed.modules() if isinstance(part, TokenFusion)), None)
    if fusion is not None:
        nn.init.normal_(fusion.weight)
        nn.init.normal_(fusion.mask)
    routed.train()
    plain.train()
    routed.get_submodule(names[0])._route.seed = SEED  # type: ignore[union-attr]
    kept = draw_tokens(3, 4, RATE, torch.Generator().manual_seed(SEED), shared=places is not None)
    assert kept.shape == (3, 2)
    output, wanted = call(routed, slice(None)), by_sample(family, plain, kept, fusion)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)
    first = [next(p for p in net.get_submodule(names[0]).parameters() if p.ndim > 1) for net in (routed, plain)]
    gradients = [torch.autograd.grad(y.square().mean(), p)[0] for y, p in zip((output, wanted), first, strict=True)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def without_route(family: Family, net: nn.Module, fusion: TokenFusion, rows: slice) -> Tensor:
    """The slow reference of a dropped path: what the route's blocks compute is thrown away."""
    _, call, names, _ = family
    blocks = [net.get_submodule(name) for name in names]
    held: dict[str, Tensor] = {}

    def put(block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        x = kwargs.get("hidden_states", args[0] if args else None)
        held.setdefault("x", x)
        if block is blocks[-1]:
            x = torch.cat([held["x"], fusion.mask.expand_as(held["x"])], -1) @ fusion.weight.T
        return (kwargs["encoder_hidden_states"], x) if isinstance(output, tuple) else x

    hooks = [block.register_forward_hook(put, with_kwargs=True) for block in blocks]
    output = call(net, rows)
    for hook in hooks:
        hook.remove()
    return output


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dropped_path_is_a_network_without_its_route(name: str) -> None:
    family = FAMILIES[name]
    make, call, names, places = family
    plain = randomised(make())
    routed = copy.deepcopy(plain)
    TokenRouting(RATE, 1, 1, mode="sprint", path_drop=0.5).transform(routed)
    fusion = next(part for part in routed.modules() if isinstance(part, TokenFusion))
    nn.init.normal_(fusion.weight)
    nn.init.normal_(fusion.mask)
    routed.eval()
    whole = call(routed, slice(None))
    with path_dropped(routed):
        torch.testing.assert_close(call(routed, slice(None)), without_route(family, plain.eval(), fusion, slice(None)))
    torch.testing.assert_close(call(routed, slice(None)), whole)
    routed.train()
    plain.train()
    route: Any = routed.get_submodule(names[0])._route
    route.seed = 3  # of three rows' draws some fall on each side
    kept = draw_tokens(3, 4, RATE, torch.Generator().manual_seed(3), shared=places is not None)
    left_out = torch.rand(3, generator=torch.Generator().manual_seed(mix_seed(3, 1))) < 0.5
    assert len({*left_out.tolist()}) == 2
    with_, without = by_sample(family, plain, kept, fusion), without_route(family, plain, fusion, slice(None))
    wanted = torch.stack([(without if out else with_)[row] for row, out in enumerate(left_out)])
    torch.testing.assert_close(call(routed, slice(None)), wanted, rtol=1e-4, atol=1e-4)


def test_sampling_guides_by_the_dropped_path_for_less_work() -> None:
    def module(**sampler: Any) -> LatentDiffusion:
        config = DiTConfig(size=4, width=16, depth=6, heads=2)
        made = LatentDiffusion(config, guidance_scale=3.0, sampling_steps=2, sampler=Sampler(**sampler))
        made.configure_model()
        randomised(made.network)  # type: ignore[arg-type]
        apply(made, [TokenRouting(0.5, 1, 1, mode="sprint", path_drop=0.1)])
        return made.eval()

    ours, plain = module(path_drop=True), module()
    labels = torch.arange(3)
    x, t = torch.randn(3, 4, 4, 4), torch.full((3,), 0.5)
    with torch.no_grad():
        with_ = ours(x, t, labels)
        with path_dropped(ours):
            without = ours(x, t, torch.full((3,), 10))
        null = partial(ours.conditioning.null, ours.device)
        predict = guided(ours, Condition(labels=labels), null, 3.0, ours.sampler)
        torch.testing.assert_close(predict(x, t), without + 3 * (with_ - without))
    work = []
    for one in (ours, plain):
        one.sample(labels, torch.Generator().manual_seed(0))  # asks the blocks
        with FlopCounterMode(display=False) as counter:
            one.sample(labels, torch.Generator().manual_seed(0))
        work.append(counter.get_total_flops())
    assert work[0] < 0.75 * work[1]  # 6 blocks and 2 of 12
    with pytest.raises(ConfigurationError, match="this network was not trained to run without"):
        LatentDiffusion(DiTConfig(), sampler=Sampler(path_drop=True)).on_fit_start()
    with pytest.raises(ConfigurationError, match="path_drop must be false at guidance_scale 1"):
        LatentDiffusion(DiTConfig(), guidance_scale=1.0, sampler=Sampler(path_drop=True))


def test_the_work_of_tokens_left_out_is_not_done() -> None:
    def operations(net: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            net(torch.zeros(2, 4, 8, 8), torch.tensor([0.1, 0.5]), torch.tensor([0, 1])).sum().backward()
        return counter.get_total_flops()

    def net(blocks: int) -> DiT:
        return DiT(DiTConfig(size=8, width=16, depth=blocks, heads=2))

    whole, two = operations(net(4)), operations(net(2))
    routed = net(4)
    TokenRouting(0.75, 1, 1).transform(routed)
    operations(routed)  # asks the blocks
    modulation = 2 * 3 * 2 * 2 * 16 * 96  # of the conditions, which belong to no token
    linear = 2 * 3 * 2 * 2 * 16 * (12 * 16 * 16)
    products, pairs = (whole - two - modulation - linear), 0.25
    assert operations(routed) == two + modulation + linear * 0.25 + products * pairs**2


def test_recomputed_blocks_give_the_same_gradients() -> None:
    net = randomised(dit())
    TokenRouting(RATE, 1, 1, mode="sprint", path_drop=0.5).transform(net)
    again = copy.deepcopy(net)
    for block in again.blocks:
        forward = block.forward
        block.forward = lambda *a, run=forward, **k: checkpoint(run, *a, use_reentrant=False, **k)
    results = []
    for one in (net, again):
        one.blocks[1]._route.seed = SEED
        one(LATENTS, TIMES, torch.arange(3)).square().mean().backward()
        results.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(*results)


def test_a_route_that_ends_resumes() -> None:
    check_resumes(Case(lambda: [TokenRouting(0.5, 1, 1, stop_at=3)], lambda run: None, network=Tokens))


def test_sprint_loads_a_base_without_its_layer() -> None:
    plain, routed = dit(), dit()
    TokenRouting(RATE, 1, 1, mode="sprint").transform(routed)
    routed.load_state_dict(plain.state_dict())


def test_outside_of_a_trainer_all_blocks_share_a_draw() -> None:
    net = randomised(dit())
    TokenRouting(RATE, 1, 1).transform(net)
    torch.manual_seed(0)
    first = net(LATENTS, TIMES, torch.arange(3))
    seed = net.blocks[1]._route.drawn
    net.blocks[1]._route.seed = seed
    torch.testing.assert_close(net(LATENTS, TIMES, torch.arange(3)), first)
    net.blocks[1]._route.seed = None
    assert not torch.equal(net(LATENTS, TIMES, torch.arange(3)), first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 1.0}, r"TokenRouting: rate must be .*got 1.0"),
        ({"before": -1}, "before must be"),
        ({"path_drop": 0.1}, "path_drop must be 0 with mode='tread'"),
        ({"mode": "mae"}, "mode must be one of tread, sprint"),
        ({"stop_at": 0}, "stop_at must be"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TokenRouting(**arguments)


def test_what_it_cannot_route_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one of 4 blocks is on the route"):
        TokenRouting(0.5, 2, 2).transform(dit())
    gpt = GPT(GPTConfig(vocab_size=8, dim=16, depth=3, num_heads=2, max_length=8))
    TokenRouting(0.5, 1, 1).transform(gpt)
    with pytest.raises(ConfigurationError, match=r"block 'blocks\.1' does not compute the same.*causal"):
        gpt(torch.arange(8)[None])
    net = dit()
    TokenRouting(0.1, 1, 1).transform(net)
    with pytest.raises(ConfigurationError, match="rate must be large enough to leave out one of 4 tokens"):
        net(LATENTS, TIMES, torch.arange(3))
