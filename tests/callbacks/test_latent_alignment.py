"""The VF loss with this package's autoencoder: gradients, the adaptive weight, and its effect on the latents."""

import copy

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import (
    ActivationCheckpointing,
    AutoencoderConfig,
    Autoencoding,
    ConfigurationError,
    DiffusersModelConfig,
    DiTConfig,
    EndToEnd,
    LatentAlignment,
    VFLoss,
)
from lit_efficient.callbacks.latent_alignment import last_weight
from lit_efficient.data.digit_images import TensorDictDataset
from lit_efficient.losses.feature_matching import match_tokens, vf_loss
from lit_efficient.mechanisms.end_to_end import JointDiffusion
from tests.models.libraries.diffusers_autoencoders import KINDS
from tests.support import QUIET, assert_equal

IMAGES = torch.rand(16, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


def encoder() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv2d(1, 6, 4, stride=2, padding=1), nn.Tanh())  # a finer grid than the latents'


class Gradients(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.values: list[dict[str, float]] = []

    def on_after_backward(self, trainer, pl_module) -> None:
        self.steps.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer, *_) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(technique, module=None, **arguments):
    torch.manual_seed(0)
    module = module or Autoencoding(AutoencoderConfig(latent_channels=2, width=8), learning_rate=1e-2)
    seen = Gradients()
    loader = DataLoader(TensorDictDataset({"images": IMAGES}), batch_size=8)
    settings = {**QUIET, "limit_val_batches": 0, "max_epochs": 1, **arguments}
    run = L.Trainer(callbacks=[*([technique] if technique else []), seen], **settings)
    run.fit(module, loader, loader)
    return module, seen, run


def test_the_term_moves_the_encoder_and_the_map_and_leaves_the_decoder_alone():
    _, plain, _ = fit(None, max_steps=1)
    teacher = encoder()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    _, aligned, _ = fit(LatentAlignment(teacher, weight=1.0), max_steps=1)
    heads = "latent_alignment_heads.0.weight"
    assert aligned.steps[0][heads].shape == (6, 2)
    for name, gradient in plain.steps[0].items():
        assert torch.equal(gradient, aligned.steps[0][name]) is name.startswith("autoencoder.decoder"), name
    assert_equal(before, dict(teacher.state_dict()))


def test_the_adaptive_weight_makes_both_gradients_alike_at_the_encoders_last_layer():
    name = "autoencoder.encoder.4.weight"
    _, plain, _ = fit(None, max_steps=1)
    _, aligned, _ = fit(LatentAlignment(encoder(), weight=0.5), max_steps=1)
    main, both = plain.steps[0][name], aligned.steps[0][name]
    assert float((both - main).norm() / main.norm()) == pytest.approx(0.5, rel=1e-3)
    _, fixed, _ = fit(LatentAlignment(encoder(), weight=0.5, loss=VFLoss(adaptive=False)), max_steps=1)
    ratio = aligned.values[0]["train/latent_alignment_ratio"]
    torch.testing.assert_close(both - main, (fixed.steps[0][name] - main) * ratio, rtol=1e-3, atol=1e-6)


@pytest.mark.turns(4, family="learns")
def test_the_term_falls_while_reconstruction_goes_on_and_checkpoints_are_plain(tmp_path):
    technique = LatentAlignment(encoder(), weight=1.0, loss=VFLoss(distance_margin=0.0, cosine_margin=0.0))
    module, seen, run = fit(technique, max_epochs=20)
    first, last = seen.values[0], seen.values[-1]
    assert last["train/latent_alignment"] < 0.8 * first["train/latent_alignment"]
    assert last["train/error"] < first["train/error"]
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Autoencoding.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).eval()
    assert torch.equal(loaded(IMAGES), module.eval()(IMAGES))


def test_margins_wide_enough_leave_training_as_it_is():
    plain, _, _ = fit(None)
    wide, _, _ = fit(LatentAlignment(encoder(), loss=VFLoss(distance_margin=1.99, cosine_margin=1.99, adaptive=False)))
    state = {k: t for k, t in wide.state_dict().items() if "alignment" not in k}
    assert_equal(dict(plain.state_dict()), state)


def test_the_last_weight_is_that_of_the_encoders_last_layer():
    module = Autoencoding(AutoencoderConfig(latent_channels=2, width=8))
    module.configure_model()
    assert last_weight(module, "encoder") is module.autoencoder.encoder[4].weight
    module.requires_grad_(False)
    assert last_weight(module, "encoder") is None


class Latents(Callback):
    """Record the input of the decoder and the posterior of the encoder in each step."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, []

    def on_train_start(self, trainer, pl_module) -> None:
        entrance = pl_module.autoencoder.network.get_submodule(self.name)
        self.handle = entrance.register_forward_pre_hook(lambda _, args: self.seen.append(args[0].detach()))

    def on_train_end(self, *_) -> None:
        self.handle.remove()


@pytest.mark.parametrize(
    ("kind", "entrance"),
    [("AutoencoderKL", "post_quant_conv"), ("AutoencoderTiny", "decoder"), ("AutoencoderDC", "decoder")],
)
def test_diffusers_autoencoders_are_aligned_at_the_latents(kind, entrance):
    technique, channels = LatentAlignment(encoder(), weight=1.0), KINDS[kind]["latent_channels"]
    module = Autoencoding(DiffusersModelConfig(config_fields=KINDS[kind]), learning_rate=1e-2)
    seen, latents = Gradients(), Latents(entrance)
    torch.manual_seed(0)
    loader = DataLoader(TensorDictDataset({"images": IMAGES}), batch_size=8)
    settings = {**QUIET, "limit_val_batches": 0, "max_steps": 1}
    L.Trainer(callbacks=[technique, seen, latents], **settings).fit(module, loader, loader)
    assert technique.names(module) == [f"autoencoder.network.{entrance}"]
    assert seen.steps[0]["latent_alignment_heads.0.weight"].shape == (6, channels)
    assert latents.seen[0].shape == (8, channels, 4, 4)
    last = last_weight(module, technique.encoder)
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert names[last].startswith("autoencoder.network.encoder.")
    assert names[last] == [n for n, p in module.named_parameters() if ".encoder." in n and p.ndim > 1][-1]
    assert 0 < seen.values[0]["train/latent_alignment_ratio"] < 1e4

    ours, theirs = match_tokens(latents.seen[0], encoder()(IMAGES[:8]).detach(), "grid")
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the map as it is drawn, before its first step
        head = nn.Linear(channels, 6, bias=False)
    by_hand = vf_loss(ours, head(ours).detach(), theirs, 0.25, 0.5)
    assert seen.values[0]["train/latent_alignment"] == pytest.approx(float(by_hand), rel=1e-5)


def test_without_the_convolution_in_front_the_decoder_itself_is_listened_to():
    fields = {**KINDS["AutoencoderKL"], "use_post_quant_conv": False}
    technique = LatentAlignment(encoder())
    fit(technique, Autoencoding(DiffusersModelConfig(config_fields=fields)), max_steps=1)
    assert technique._names == ["autoencoder.network.decoder"]


def test_what_cannot_work_is_refused_by_name():
    for arguments, message in (
        ({"weight": float("inf")}, "weight must be at least 0, got inf"),
        ({"image_size": 0}, "image_size must be a whole number of at least 1"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            LatentAlignment(encoder(), **arguments)
    for name, value in (("distance_margin", -0.1), ("cosine_margin", 2.0)):
        with pytest.raises(ConfigurationError, match=f"loss.{name} must be at least 0 and below 2, got {value}"):
            VFLoss(**{name: value})
    with pytest.raises(ConfigurationError, match=r"the batch has no 'pixels'; it has \['images'\]"):
        fit(LatentAlignment(encoder(), images="pixels"))
    with pytest.raises(ConfigurationError, match="pattern 'vae' matches none"):
        fit(LatentAlignment(encoder(), encoder="vae"))


SHAPE = DiTConfig(channels=2, size=4, patch_size=2, width=16, depth=3, heads=2, num_classes=3)


def test_end_to_end_is_the_loss_of_the_authors():
    """Two passes with the same times and noise: one for the latents, and one for the transformer."""
    torch.manual_seed(0)
    joint = JointDiffusion(EndToEnd(SHAPE, block=2, weight=0.5, hidden=8, label_dropout=0.0), 6)
    for parameter in joint.parameters():
        nn.init.normal_(parameter, std=0.3)
    latents = (3.0 * torch.randn(5, 2, 4, 4) + 1.0).requires_grad_()
    features, labels = torch.randn(5, 4, 6), torch.tensor([0, 1, 2, 0, 1])
    before = copy.deepcopy(joint)

    def passed(normalised, t, eps):
        kept = []
        handle = before.network.blocks[1].register_forward_hook(lambda block, args, output: kept.append(output))
        mix = t.view(5, 1, 1, 1)
        velocity = before.network((1 - mix) * normalised + mix * eps, t, labels)
        handle.remove()
        h = F.normalize(before.head(kept[0]), dim=-1)
        cosine = (h * F.normalize(features, dim=-1)).sum(-1).mean()
        return -cosine, (velocity - (eps - normalised)).square().mean()

    for step in range(2):
        running = [before.norm.running_mean.clone(), before.norm.running_var.clone()]
        mean = latents.mean((0, 2, 3))
        if step == 0:
            running = [mean.detach(), latents.detach().transpose(0, 1).flatten(1).var(1)]
        torch.manual_seed(step)
        aligned, own = joint(latents, features, labels)
        torch.manual_seed(step)
        t, eps = torch.rand(5), torch.randn(5, 2, 4, 4)
        shape = (1, 2, 1, 1)
        expected, _ = passed((latents - running[0].view(shape)) / (running[1] + 1e-4).sqrt().view(shape), t, eps)
        torch.testing.assert_close(aligned, expected)
        for loss in (aligned, expected):
            assert torch.autograd.grad(loss, latents, retain_graph=True)[0].abs().sum() > 0
        (found,), (wanted,) = (torch.autograd.grad(loss, latents, retain_graph=True) for loss in (aligned, expected))
        torch.testing.assert_close(found, wanted)
        unused = torch.autograd.grad(aligned, list(joint.parameters()), allow_unused=True, retain_graph=True)
        assert not any(gradient is not None for gradient in unused)

        z = latents.detach()
        spread = (z - mean.view(shape)).square().mean((0, 2, 3))
        cosine, error = passed((z - mean.detach().view(shape)) / (spread + 1e-4).sqrt().view(shape), t, eps)
        torch.testing.assert_close(own, error + 0.5 * cosine)
        assert torch.autograd.grad(own, [latents], allow_unused=True, retain_graph=True) == (None,)
        names = [name for name, _ in joint.named_parameters()]
        found = torch.autograd.grad(own, list(joint.parameters()))
        wanted = torch.autograd.grad(error + 0.5 * cosine, list(before.parameters()))
        for name, ours, theirs in zip(names, found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)
        before.load_state_dict(joint.state_dict())
        torch.testing.assert_close(joint.norm.running_mean, 0.9 * running[0] + 0.1 * mean.detach())


def test_the_transformer_trains_beside_the_autoencoder_and_is_not_exported(tmp_path):
    loss = EndToEnd(DiTConfig(channels=2, size=4, width=16, depth=2, heads=2, num_classes=0), block=1, hidden=8)
    _, plain, _ = fit(None, max_steps=1)
    module, aligned, run = fit(LatentAlignment(encoder(), weight=1.5, loss=loss), max_steps=2)
    decoders = [name for name in plain.steps[0] if name.startswith("autoencoder.decoder")]
    assert decoders
    for name in decoders:
        assert torch.equal(plain.steps[0][name], aligned.steps[0][name]), name
    moved = {name for name, gradient in aligned.steps[1].items() if gradient.abs().sum() > 0}
    assert {name for name in moved if ".0.network.blocks.1" in name}  # behind the block: by the loss of diffusion
    assert {name for name in moved if ".0.head." in name}
    assert "train/latent_alignment_network" in aligned.values[0]
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Autoencoding.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).eval()
    assert torch.equal(loaded(IMAGES), module.eval()(IMAGES))


@pytest.mark.filterwarnings("ignore:FusedAdamW steps")  # 16-bit weights of the autoencoder
@pytest.mark.parametrize(("precision", "techniques"), [("bf16-true", []), ("32-true", [ActivationCheckpointing()])])
def test_the_transformer_trains_in_float32_and_beside_recomputation(precision, techniques):
    loss = EndToEnd(DiTConfig(channels=2, size=4, width=16, depth=2, heads=2, num_classes=0), block=1, hidden=8)
    values = []
    for given in ([], techniques):
        torch.manual_seed(0)
        module = Autoencoding(AutoencoderConfig(latent_channels=2, width=8), learning_rate=1e-2)
        technique = LatentAlignment(encoder(), weight=1.5, loss=loss)
        loader = DataLoader(TensorDictDataset({"images": IMAGES}), batch_size=8)
        settings = {**QUIET, "limit_val_batches": 0, "max_epochs": 2, "precision": precision}
        run = L.Trainer(callbacks=[technique, *given], **settings)
        run.fit(module, loader, loader)
        heads = module.latent_alignment_heads["0"]
        assert {tensor.dtype for tensor in (*heads.parameters(), heads.norm.running_var)} == {torch.float32}
        values.append(float(run.callback_metrics["train/latent_alignment_network"]))
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EndToEnd(SHAPE, block=4), "block must be a whole number of at least 1 and at most 3, got 4"),
        (lambda: EndToEnd(DiTConfig(context_width=8)), "backbone.context_width must be 0, got 8"),
        (lambda: LatentAlignment(encoder(), weight=0.0, loss=EndToEnd(SHAPE)), "weight must be above 0 for EndToEnd"),
        (
            lambda: fit(LatentAlignment(encoder(), loss=EndToEnd(DiTConfig(channels=4, size=4)))),
            "loss.backbone.channels must be 2, as the latents have, got 4",
        ),
        (
            lambda: fit(LatentAlignment(encoder(), loss=EndToEnd(SHAPE))),
            r"the batch has no \'labels\'|batch has no 'labels'",
        ),
    ],
)
def test_end_to_end_refuses(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
