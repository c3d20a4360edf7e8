"""REG's class token: packed beside latents, carried through the network, drawn with the image, kept in checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lit_efficient import (
    AlignmentHead,
    ClassToken,
    ConfigurationError,
    DiTConfig,
    DiTVariant,
    HiddenAlignment,
    LatentDiffusion,
    Samples,
    TokenRouting,
)
from lit_efficient.data.digit_images import TensorDictDataset
from lit_efficient.models.judges.conv_features import DigitFeatures
from lit_efficient.models.libraries.dit_to_diffusers import to_diffusers
from lit_efficient.models.libraries.teachers import CLASS, Teacher
from lit_efficient.models.networks.class_token import join_token, rows_of, split_token
from lit_efficient.models.networks.dit import DiT
from lit_efficient.models.networks.dit_layers import modulate
from lit_efficient.tasks.latent_conditions import Condition
from tests.support import QUIET

SHAPE = DiTConfig(channels=2, size=4, patch_size=2, width=16, depth=2, heads=2, num_classes=0)
ENTANGLED = replace(SHAPE, variant=DiTVariant(class_token=ClassToken(5)))
PLAIN = {"guidance_scale": 1.0, "label_dropout": 0.0, "samples": Samples(0)}


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 4, 4), (3, 5, 2)])
@pytest.mark.parametrize("features", [1, 7, 8, 33])
def test_what_is_packed_comes_apart(shape: tuple[int, int, int], features: int) -> None:
    latents, token = torch.randn(3, *shape), torch.randn(3, features)
    packed = join_token(latents, token)
    assert packed.shape[2] == shape[1] + rows_of(features, shape[0], shape[2])
    assert all(map(torch.equal, split_token(packed, features), (latents, token)))
    assert packed.square().sum().allclose(latents.square().sum() + token.square().sum())  # what fills it up is zero


@pytest.mark.parametrize("positions", ["sincos", "rope"])
def test_the_network_is_the_one_without_it_on_one_token_more(positions: str) -> None:
    torch.manual_seed(0)
    variant = DiTVariant(positions=positions, class_token=ClassToken(5))  # type: ignore[arg-type]
    network = DiT(replace(SHAPE, variant=variant))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, token, t = torch.randn(3, 2, 4, 4), torch.randn(3, 5), torch.rand(3)
    given = join_token(x, token).requires_grad_()
    latents, drawn = split_token(network(given, t), 5)

    c = network.time(network._embed_time(t))
    tokens = network.patch_in(x).flatten(2).transpose(1, 2)
    tokens = tokens if network.positions is None else tokens + network.positions
    tokens = torch.cat([tokens, network.class_token.enter(token)[:, None]], 1)
    for block in network.blocks:  # slowly: each head's scores, image tokens turned by hand
        tokens = _slow_block(block, tokens, c, rope=positions == "rope")
    shift, scale = network.modulation(F.silu(c)).chunk(2, dim=-1)
    ends = modulate(network.norm(tokens), shift, scale)
    assert torch.allclose(drawn, network.class_token.leave(ends[:, -1]), atol=1e-5)
    patches = F.fold(network.patch_out(ends[:, :-1]).transpose(1, 2), (4, 4), 2, stride=2)
    assert torch.allclose(latents, patches, atol=1e-5)

    (gradient,) = torch.autograd.grad(latents.square().sum(), given)
    assert split_token(gradient, 5)[1].abs().sum() > 0  # the image sees the token


def _slow_block(block, x, c, rope):
    shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(F.silu(c)).chunk(6, dim=-1)
    h = modulate(block.norm1(x), shift1, scale1)
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in block.attention.qkv(h).chunk(3, dim=-1))
    if rope:
        q, k = _turned(q), _turned(k)
    mixed = ((q @ k.transpose(-1, -2)) / 8**0.5).softmax(-1) @ v
    x = x + gate1[:, None] * block.attention.out(mixed.transpose(1, 2).flatten(2))
    return x + gate2[:, None] * block.mlp(modulate(block.norm2(x), shift2, scale2))


def _turned(x):
    """Pairs of features as complex numbers, times e^(i angle); the angles of the last token are zero."""
    rows, columns = torch.meshgrid(torch.arange(2.0), torch.arange(2.0), indexing="ij")
    frequencies = 10000.0 ** -(torch.arange(2) / 2)
    angles = torch.cat([p.reshape(-1, 1) * frequencies for p in (rows, columns)], 1)
    angles = torch.cat([angles, torch.zeros(1, 4)])
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def loader(rows: dict[str, torch.Tensor], batch_size: int = 16) -> DataLoader:
    return DataLoader(TensorDictDataset(rows), batch_size=batch_size)


def fit(backbone: DiTConfig, data: DataLoader, callbacks=(), **settings) -> tuple[LatentDiffusion, L.Trainer]:
    torch.manual_seed(0)
    module = LatentDiffusion(backbone, **PLAIN, learning_rate=1e-2)
    trainer = L.Trainer(callbacks=[*callbacks], **{**QUIET, "limit_val_batches": 0, **settings})
    trainer.fit(module, data, data)
    return module, trainer


def test_the_loss_is_both_errors_and_the_token_is_noised_with_the_latents() -> None:
    torch.manual_seed(0)
    rows = {"latents": torch.randn(6, 2, 4, 4), "class_token": torch.randn(6, 5)}
    weighed = replace(ENTANGLED, variant=DiTVariant(class_token=ClassToken(5, weight=0.5)))
    module = LatentDiffusion(weighed, **PLAIN)
    module.configure_model()
    torch.nn.init.normal_(module.network.class_token.leave.weight)
    module.log = lambda *_, **__: None
    torch.manual_seed(3)
    output = module.training_step(rows, 0)
    torch.manual_seed(3)
    losses = module._losses(rows, Condition(), module.process, None)
    assert torch.allclose(output["sample_loss"], losses["sample_loss"] + 0.5 * losses["class_loss"])
    assert torch.allclose(output["loss"], output["sample_loss"].mean())
    # the same draws by hand: a flow from data to noise
    torch.manual_seed(3)
    t = module.timestep_sampling and torch.sigmoid(torch.randn(6))
    whole = join_token(rows["latents"], rows["class_token"])
    noise = torch.randn(whole.shape)
    assert torch.allclose(losses["timesteps"], t)
    seen = (1 - t)[:, None, None, None] * whole + t[:, None, None, None] * noise
    drawn = split_token(module.network(seen, t), 5)[1]
    wanted = split_token(noise - whole, 5)[1]
    assert torch.allclose(losses["class_loss"], (drawn - wanted).square().mean(1), atol=1e-6)
    assert losses["predicted"].shape == rows["latents"].shape


def test_what_is_drawn_is_an_image_and_the_token_that_belongs_to_it(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, (256, 1), generator=generator) * 2.0 - 1
    rows = {"latents": sign[:, :, None, None].expand(-1, 2, 4, 4).clone(), "class_token": sign.expand(-1, 5).clone()}
    heavy = replace(ENTANGLED, variant=DiTVariant(class_token=ClassToken(5, weight=1.0)))
    module, trainer = fit(heavy, loader(rows, 64), max_steps=120)
    module.eval()
    kept = []

    def keep(network, given, output):
        kept.append((given[0], output))

    handle = module.network.register_forward_hook(keep)
    latents = module.sample(count=64, generator=torch.Generator().manual_seed(1), size=(4, 4), steps=20)
    handle.remove()
    assert latents.shape == (64, 2, 4, 4)
    x, velocity = kept[-1]  # the last step's: what both go to
    token = split_token(x - velocity / 20, 5)[1].mean(1)
    image = latents.mean((1, 2, 3))
    assert image.abs().mean() > 0.7  # 0.95, with a standard deviation of 0.02 over seeds
    assert 16 < int((image > 0).sum()) < 48
    assert (token.sign() == image.sign()).float().mean() > 0.8  # 0.99 (0.01); by chance a half

    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = LatentDiffusion.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True).eval()
    assert again.backbone == heavy
    copied = copy.deepcopy(again)
    drawn = [one.sample(count=4, generator=torch.Generator().manual_seed(1), size=(4, 4)) for one in (again, copied)]
    assert torch.equal(*drawn)
    with pytest.raises(ConfigurationError, match=r"cannot hold variant\.class_token"):
        to_diffusers(again.network)


def test_without_tokens_or_with_others_it_says_what_to_do() -> None:
    rows = {"latents": torch.randn(8, 2, 4, 4)}
    with pytest.raises(ConfigurationError, match=r"class_token \[B, features\] to batches, or use HiddenAlign"):
        fit(ENTANGLED, loader(rows), max_steps=1)
    with pytest.raises(ConfigurationError, match=r"the shape of class_token must be \[B, 5\]"):
        fit(ENTANGLED, loader({**rows, "class_token": torch.randn(8, 3)}), max_steps=1)


def test_hidden_alignment_gives_the_encoders_vector_in_training_and_validation() -> None:
    torch.manual_seed(5)
    rows = {"latents": torch.randn(8, 2, 4, 4), "images": torch.rand(8, 1, 16, 16) * 2 - 1}
    judge, calls = DigitFeatures(), []
    judge.register_forward_hook(lambda *call: calls.append(call))
    backbone = replace(ENTANGLED, variant=DiTVariant(class_token=ClassToken(32)))
    head = AlignmentHead(class_layer="")
    technique = HiddenAlignment(1, judge, r"body\.5", hidden=8, projection="conv", head=head)
    module, trainer = fit(
        backbone, loader(rows), [technique, TokenRouting(0.5, 0, 1)], max_steps=2, limit_val_batches=1
    )
    assert len(calls) == 2 + 2  # two steps, each of which asks once for both, and two validations
    assert float(trainer.callback_metrics["val/class_loss"]) > 0
    assert torch.equal(technique.class_token(module, rows), judge(rows["images"]))
    refused = DigitFeatures().body[:1]
    with pytest.raises(ConfigurationError, match=r"neither tokens with a class token nor one vector per image"):
        Teacher(refused, [], who="HiddenAlignment", class_layer="0").of_images(rows["images"])


def test_a_vision_transformers_class_token_is_its_first() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    network = transformers.ViTModel(config, add_pooling_layer=False)
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    teacher = Teacher(network, [""], who="HiddenAlignment", tokens=True, class_layer="")
    found = teacher.of_images(images)
    with torch.no_grad():
        hidden = network(images).last_hidden_state
    assert torch.equal(found[CLASS], hidden[:, 0])
    assert torch.equal(found[""], hidden[:, 1:])
