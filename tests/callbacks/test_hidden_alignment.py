"""REPA on our diffusion transformer: where the clean image comes from, what gets gradients, what it costs."""

import copy
from dataclasses import replace
from functools import partial

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader
from transformers import ViTConfig

from lit_efficient import (
    EMA,
    ActivationCheckpointing,
    AlignmentHead,
    AutoencoderConfig,
    ConfigurationError,
    DiffusersModelConfig,
    DiffusionPreference,
    DiTConfig,
    FewStepDiffusion,
    GradientConflict,
    HiddenAlignment,
    LatentAlignment,
    LatentDiffusion,
    LatentDigits,
    Samples,
    TimestepSampling,
    TokenRouting,
    draw_tokens,
    restore,
)
from lit_efficient.data.digit_images import TensorDictDataset
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import CheckpointError
from lit_efficient.files.sums import write_sums
from lit_efficient.losses.feature_matching import gradient_cosine
from lit_efficient.mechanisms.alignment import make_head
from lit_efficient.models.judges.conv_features import DigitFeatures
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.libraries.teachers import Teacher, find_teacher
from lit_efficient.models.networks.autoencoder import Autoencoder
from lit_efficient.models.networks.class_token import ClassToken
from lit_efficient.models.networks.dit import DiTVariant
from lit_efficient.testing import Case, check_resumes
from lit_efficient.traits import Trait
from tests.support import QUIET

BACKBONE = DiTConfig(channels=2, size=4, patch_size=2, width=32, depth=3, heads=2)
IMAGES = torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


def batches(**more) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    rows = {"latents": torch.randn(8, 2, 4, 4, generator=generator), "labels": torch.arange(8), **more}
    return DataLoader(TensorDictDataset(rows), batch_size=4)


def encoder() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return DigitFeatures()


def fit(technique, loader, callbacks=(), **arguments):
    torch.manual_seed(0)
    module = LatentDiffusion(BACKBONE, timestep_sampling=arguments.pop("timestep_sampling", None), samples=Samples(0))
    module.codec = arguments.pop("codec", None)
    settings = {**QUIET, "limit_val_batches": 0, "max_epochs": 1, **arguments}
    val = None if isinstance(loader, L.LightningDataModule) else loader
    L.Trainer(callbacks=[technique, *callbacks], **settings).fit(module, loader, val)
    return module


class Gradients(Callback):
    def on_after_backward(self, trainer, pl_module) -> None:
        self.moved = {n for n, p in pl_module.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        self.value = float(trainer.callback_metrics["train/hidden_alignment"])


def test_irepa_convolves_the_tokens_and_normalises_the_encoders_over_the_image():
    class Kept(HiddenAlignment):
        def term(self, calls, output, module, batch):
            (name,) = self.names(module)
            self.kept = calls[name][0][2].detach(), batch["features"], copy.deepcopy(module.hidden_alignment_heads["0"])
            self.value = super().term(calls, output, module, batch)
            return self.value

    features = torch.randn(8, 9, 6, generator=torch.Generator().manual_seed(4)) + 3.0
    technique = Kept(2, None, projection="conv", head=AlignmentHead(widths=[32, 6], spatial_norm=0.8))
    fit(technique, batches(features=features), max_steps=2, callbacks=[])
    tokens, given, head = technique.kept
    cosines = []
    for image, wanted in zip(tokens, given, strict=True):
        around = F.pad(image.T.reshape(32, 2, 2), (1, 1, 1, 1))
        resized = F.interpolate(wanted.T.reshape(1, 6, 3, 3), (2, 2), mode="bilinear", antialias=True)[0].flatten(1)
        for place in range(4):
            row, column = divmod(place, 2)
            patch = around[:, row : row + 3, column : column + 3]
            ours = (head.weight * patch).sum((1, 2, 3)) + head.bias
            theirs = torch.stack([(f[place] - 0.8 * f.mean()) / (f.std() + 1e-6) for f in resized])
            cosines.append(F.cosine_similarity(ours, theirs, dim=0))
    torch.testing.assert_close(technique.value, -torch.stack(cosines).mean())
    with pytest.raises(ConfigurationError, match=r"tokens do not fill a square"):
        make_head("conv", 4, 4)(torch.zeros(1, 5, 4))
    with pytest.raises(ConfigurationError, match=r"head.spatial_norm must be None"):
        LatentAlignment(encoder(), head=AlignmentHead(spatial_norm=1.0))
    with pytest.raises(ConfigurationError, match=r"spatial_norm must be above 0 and at most 1 or null, got 2"):
        AlignmentHead(spatial_norm=2)


@pytest.mark.parametrize("block", [2, 3])
def test_of_a_route_those_tokens_alone_that_the_block_ran_on(block):
    class Kept(HiddenAlignment):
        def term(self, calls, output, module, batch):
            (name,) = self.names(module)
            self.value, self.kept = super().term(calls, output, module, batch), (calls[name][0][2], batch["features"])
            return self.value

    technique = Kept(block, None, projection="none", head=AlignmentHead(widths=[32, 32]))
    features = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(4))
    fit(technique, batches(features=features), [TokenRouting(0.5, 1, 1, seed=7)], max_steps=1)
    tokens, wanted = technique.kept
    drawn = draw_tokens(4, 4, 0.5, torch.Generator().manual_seed(mix_seed(7, 0, 0))) if block == 2 else [range(4)] * 4
    cosines = [
        F.cosine_similarity(tokens[row][token], wanted[row][token], dim=0) for row in range(4) for token in drawn[row]
    ]
    torch.testing.assert_close(technique.value, -torch.stack(cosines).mean())


def test_the_term_ends_when_gradients_conflict_and_a_resumed_run_knows():
    torch.manual_seed(0)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    h = x.tanh()
    one, other = (h @ w).square().sum(), h.pow(3).sum()
    wanted = F.cosine_similarity((2 * (h @ w)[:, None] * w).flatten(), (3 * h**2).flatten(), dim=0)
    torch.testing.assert_close(gradient_cosine(one, other, [h]), wanted.detach())
    assert float(gradient_cosine(one, w.square().sum() + 0 * x.sum(), [h])) == 0

    def make(below, **arguments):
        return HiddenAlignment(1, encoder(), r"body\.5", hidden=8, stop_at=GradientConflict(below, **arguments))

    technique = make(1.0, every=2, patience=2)
    assert Trait.RETAINS_GRAPH in technique.traits
    module = fit(technique, batches(images=IMAGES), max_steps=6, max_epochs=-1)
    assert not technique.active(module)
    assert technique.state_dict() == {"below": 2, "measured": 4, "last": 4}  # the first has no gradient of the task's
    never = make(-1.0, every=1, patience=1)
    assert never.active(fit(never, batches(images=IMAGES), max_steps=2))
    assert never.state_dict() == {"below": 0, "measured": 1, "last": -1}
    aligned = partial(HiddenAlignment, 2, hidden=8, source="0", stop_at=GradientConflict(1.0, 1, 3))
    teacher = nn.Linear(16, 12)
    check_resumes(Case(lambda: [aligned(copy.deepcopy(teacher))], lambda run: None))
    with pytest.raises(
        ConfigurationError, match="GradientConflict: patience must be a whole number of at least 1, got 0"
    ):
        GradientConflict(patience=0)


class Seen(nn.Module):
    """An encoder that keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 4, stride=4)
        self.images: list[torch.Tensor] = []

    def forward(self, images):
        self.images.append(images)
        return self.conv(images)


def test_gradients_end_at_the_chosen_block():
    class Silent(HiddenAlignment):
        """Only the term counts."""

        def extra_loss(self, output, module, batch):
            return super().extra_loss(output, module, batch) - output["loss"]

    seen = Gradients()
    technique = Silent(2, encoder(), r"body\.5", hidden=16)
    # the network starts as the identity on its tokens, so no block has a gradient but for its gates: train it a little
    module = fit(technique, batches(images=IMAGES), [seen], max_steps=2)
    inside = {name.split(".")[2] for name in seen.moved if name.startswith("network.blocks.")}
    assert inside == {"0", "1"}
    assert {name for name in seen.moved if name.startswith("hidden_alignment_heads.0")} == {
        f"hidden_alignment_heads.0.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")
    }
    assert not any(name.startswith(("network.patch_out", "network.modulation")) for name in seen.moved)
    assert [layer.weight.shape for layer in module.hidden_alignment_heads["0"][::2]] == [(16, 32), (16, 16), (32, 16)]


def test_the_clean_image_comes_from_the_batch_or_the_codec_or_its_features_are_cached():
    shown = Seen()
    fit(HiddenAlignment(1, shown, "conv", hidden=8), batches(images=IMAGES))
    assert torch.equal(torch.cat(shown.images), IMAGES)
    codec = LatentCodec(Autoencoder(AutoencoderConfig(latent_channels=2, width=8)), torch.zeros(2), torch.ones(2))
    shown = Seen()
    loader = batches()
    fit(HiddenAlignment(1, shown, "conv", hidden=8), loader, codec=codec)
    expected = codec.decode(torch.cat([batch["latents"] for batch in loader]))
    torch.testing.assert_close(torch.cat(shown.images), expected)

    live, cached = Gradients(), Gradients()
    teacher = encoder().eval()
    features = Teacher(teacher, [r"body\.5"], who="test").of_images(IMAGES)[r"body\.5"]
    fit(HiddenAlignment(1, teacher, r"body\.5", hidden=8), batches(images=IMAGES), [live])
    no_encoder = HiddenAlignment(1, None, head=AlignmentHead(widths=[32, 32]), hidden=8)
    fit(no_encoder, batches(features=features.flatten(2).transpose(1, 2)), [cached])
    assert live.value == pytest.approx(cached.value, abs=1e-6)
    with pytest.raises(ConfigurationError, match=r"no clean image: .* but has \['labels', 'latents'\]"):
        fit(HiddenAlignment(1, Seen(), "conv"), batches())


@pytest.mark.turns(4, family="learns")
def test_the_alignment_rises_on_digits_with_the_classifier_that_the_data_trained(tmp_path):
    values = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            values.append(-float(trainer.callback_metrics["train/hidden_alignment"]))

    autoencoder = AutoencoderConfig(latent_channels=2, width=8)
    data = LatentDigits(16, 64, autoencoder, autoencoder_steps=10, judge_steps=10, cache_dir=str(tmp_path))
    technique = HiddenAlignment(2, "data.judge", r"body\.5", hidden=32)
    module = fit(technique, data, [Watch()], max_steps=40, max_epochs=-1)
    assert sum(values[-5:]) / 5 > sum(values[:5]) / 5 + 0.2
    assert not [name for name, _ in module.named_parameters() if "judge" in name or "body" in name]


def test_transformers_encoders_get_their_size_channels_and_statistics_and_lose_their_class_token(tmp_path):
    from transformers import Dinov2Config, Dinov2Model

    shape = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    vit = ViTConfig(**shape, intermediate_size=16, image_size=16, patch_size=8)
    vit.save_pretrained(tmp_path / "vit")
    teacher = find_teacher(str(tmp_path / "vit" / "config.json"), [""], who="test")
    assert teacher.width("") == 12
    assert teacher.of_images(torch.rand(2, 1, 32, 32))[""].shape == (2, 4, 12)

    config = Dinov2Config(**shape, mlp_ratio=2, image_size=28, patch_size=14)
    Dinov2Model(config).eval().save_pretrained(tmp_path / "dino")
    (tmp_path / "dino" / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.4, 0.3], "image_std": [1, 1, 2]}'
    )
    teacher = find_teacher(str(tmp_path / "dino"), [""], who="test", image_size=42)
    images = torch.rand(2, 3, 42, 42) * 2 - 1
    mean, std = (torch.tensor(s).view(1, 3, 1, 1) for s in ([0.5, 0.4, 0.3], [1.0, 1.0, 2.0]))
    model = Dinov2Model.from_pretrained(tmp_path / "dino").eval()
    with torch.no_grad():
        expected = model((images / 2 + 0.5 - mean) / std).last_hidden_state[:, 1:]
    torch.testing.assert_close(teacher.of_images(images)[""], expected)
    seen = Gradients()
    fit(HiddenAlignment(1, str(tmp_path / "dino"), hidden=8), batches(images=IMAGES), [seen], max_steps=1)
    assert -1.0 <= seen.value <= 1.0


def test_a_damaged_teacher_is_refused_before_it_is_built(tmp_path):
    config = ViTConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"dtype": "float32", ', 1))
    write_sums(tmp_path)
    file.write_text(file.read_text().replace('"float32"', '"fl/at32"'))
    for spec in (tmp_path, file):
        with pytest.raises(CheckpointError, match=r"config\.json is missing, or not what was written"):
            find_teacher(str(spec), [""], who="test")


def test_what_cannot_work_is_refused_by_name():
    for arguments, message in (
        ({"block": 0, "teacher": "x"}, "block must be a whole number of at least 1 or a pattern, got 0"),
        ({"block": 1, "teacher": None}, "features are in the batch, .*: set head.widths"),
        ({"block": 1, "teacher": "x", "hidden": 0}, "hidden must be a whole number of at least 1"),
        ({"block": 1, "teacher": "x", "projection": "cnn"}, "projection must be one of"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            HiddenAlignment(**arguments)
    with pytest.raises(ConfigurationError, match=r"widths must be two numbers of at least 1, got \[3\]"):
        AlignmentHead(widths=[3])
    with pytest.raises(ConfigurationError, match="block must be at most 3, the number of blocks, got 4"):
        fit(HiddenAlignment(4, encoder(), r"body\.5"), batches(images=IMAGES))


def test_the_average_comes_back_without_the_heads(tmp_path):
    technique, average = HiddenAlignment(2, encoder(), r"body\.5", hidden=16), EMA(decay=0.9)
    module = fit(technique, batches(images=IMAGES), [average])
    path = tmp_path / "whole.ckpt"
    module.trainer.save_checkpoint(path)
    assert any("heads" in name for name in average.state_dict()["average"])
    restored = restore(LatentDiffusion(BACKBONE, samples=Samples(0)), path)
    expected = {name: tensor for name, tensor in average.state_dict()["average"].items() if "heads" not in name}
    found = restored.state_dict()
    assert expected
    assert not [name for name in found if "heads" in name]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Recorded(Callback):
    """The loss of a step, the outputs of the blocks, and the gradient at each of them."""

    def on_fit_start(self, trainer, pl_module):
        self.outputs = []
        for block in pl_module.network.blocks:
            block.register_forward_hook(self.keep)

    def keep(self, block, arguments, output):
        if torch.is_grad_enabled():
            output.retain_grad()
            self.outputs.append(output)


def test_layersync_aligns_with_a_later_block_as_the_authors_do():
    class Alone(HiddenAlignment):
        def term(self, calls, output, module, batch):
            found = super().term(calls, output, module, batch)
            z1 = F.normalize(watch.outputs[0], dim=-1)
            z2 = F.normalize(watch.outputs[2].clone().detach(), dim=-1)
            torch.testing.assert_close(found, -(z1 * z2).sum(dim=-1).mean())
            (self.gradient,) = torch.autograd.grad(found, [watch.outputs[0]], retain_graph=True)
            assert torch.autograd.grad(found, [watch.outputs[2]], retain_graph=True, allow_unused=True) == (None,)
            (expected,) = torch.autograd.grad(-(z1 * z2).sum(dim=-1).mean(), [watch.outputs[0]])
            torch.testing.assert_close(self.gradient, expected)
            watch.outputs.clear()
            return found

    watch = Recorded()
    technique = Alone(1, 3, projection="none", weight=0.2)
    module = fit(technique, batches(), [watch], max_steps=2)
    assert technique.gradient.abs().sum() > 0
    assert not hasattr(module, "hidden_alignment_heads")
    assert technique.arguments()["teacher"] == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"block": 2, "teacher": 2}, "a later block than block"),
        ({"block": 1, "teacher": 2, "teacher_layer": "x"}, "teacher_layer"),
        ({"block": 1, "teacher": 2, "head": AlignmentHead(class_layer="")}, "class_layer"),
    ],
)
def test_layersync_refuses(arguments, named):
    with pytest.raises(ConfigurationError, match=named):
        HiddenAlignment(**arguments)


def test_layersync_names_the_number_of_blocks():
    with pytest.raises(ConfigurationError, match="teacher must be at most 3, the number of blocks"):
        fit(HiddenAlignment(1, 9, projection="none"), batches(), max_steps=1)


TWO_TIMES = TimestepSampling("uniform", second_share=0.5)


class Shown(Callback):
    """Inputs and outputs of the network of students and teachers, and the average that the teacher had."""

    def __init__(self, average):
        self.average = average
        self.calls = []

    def on_fit_start(self, trainer, pl_module):
        pl_module.network.register_forward_pre_hook(self.keep)

    def keep(self, network, arguments):
        x, t, labels, *_ = arguments
        self.calls.append((x.detach(), t, labels, torch.is_grad_enabled()))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.calls.clear()
        self.before = copy.deepcopy(pl_module).cpu()
        average = self.average.average(pl_module)
        self.averaged = None if average is None else {name: tensor.clone() for name, tensor in average.items()}


def test_self_flow_is_the_cosine_with_the_average_on_a_cleaner_view():
    """x_tau = (1 - tau) x0 + tau eps with two times tau in each sample, and -cos(h, f) with f at the earlier one."""

    class Kept(HiddenAlignment):
        def term(self, calls, output, module, batch):
            self.value, self.batch = super().term(calls, output, module, batch), batch
            return self.value

    average = EMA(decay=0.5, warmup=None)
    shown = Shown(average)
    technique = Kept(1, "average.3", projection="mlp2", weight=0.8)
    module = fit(technique, batches(), [average, shown], timestep_sampling=TWO_TIMES, max_steps=3, max_epochs=-1)
    (x, t, labels, gradients), (cleaner, earlier, same_labels, no_gradients) = shown.calls
    assert (gradients, no_gradients) == (True, False)
    assert torch.equal(labels, same_labels)
    assert t.shape == (4, 4)
    several = [row for row in range(4) if len(t[row].unique()) == 2]
    assert several
    for row in several:
        assert earlier[row] == t[row].min()
    for row in range(4):
        x0 = technique.batch["latents"][row]
        for i, token in enumerate(t[row]):
            place = (slice(None), slice(2 * (i // 2), 2 * (i // 2) + 2), slice(2 * (i % 2), 2 * (i % 2) + 2))
            eps = (x[row][place] - (1 - token) * x0[place]) / token
            expected = (1 - earlier[row]) * x0[place] + earlier[row] * eps
            torch.testing.assert_close(cleaner[row][place], expected, rtol=1e-3, atol=1e-4)
    student, teacher = shown.before, copy.deepcopy(shown.before)
    teacher.load_state_dict(shown.averaged, strict=False)
    outputs = []
    for network, block, view in ((student.network, 0, (x, t)), (teacher.network, 2, (cleaner, earlier))):
        network.blocks[block].register_forward_hook(lambda block, arguments, output: outputs.append(output))
        network.eval()(*view, labels)
    h, f = outputs
    first, _, second = student.hidden_alignment_heads["0"]
    assert first.weight.shape == (64, 32)
    h = second(F.silu(first(h)))
    cosines = (h * f).sum(-1) / (h.norm(dim=-1) * f.norm(dim=-1))
    torch.testing.assert_close(technique.value, -cosines.mean())
    assert technique.arguments()["teacher"] == "average.3"
    assert module.training


@pytest.mark.parametrize("stops", [None, 1])
def test_self_flow_leaves_validation_as_it_is(stops):
    """Validation has one time for each sample, also while training has two."""
    values = []
    for sampling in (TimestepSampling("uniform"), TWO_TIMES):
        callbacks = [EMA(decay=0.5)]
        if sampling.second_share:
            callbacks.append(HiddenAlignment(1, "average.3", projection="mlp2", stop_at=stops))
        torch.manual_seed(0)
        module = LatentDiffusion(BACKBONE, timestep_sampling=sampling, samples=Samples(0))
        trainer = L.Trainer(callbacks=callbacks, **QUIET)
        trainer.validate(module, batches(), verbose=False)
        values.append(trainer.callback_metrics["val/loss"])
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("average.1", "a later block than block"),
        ("average.x", "a later block than block"),
        ("average.4", "at most 3, the number of blocks"),
    ],
)
def test_self_flow_refuses_other_blocks(teacher, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(HiddenAlignment(1, teacher), batches(), [EMA()], timestep_sampling=TWO_TIMES)


def test_self_flow_says_what_is_missing():
    technique = partial(HiddenAlignment, 1, "average.3", projection="none")
    with pytest.raises(ConfigurationError, match=r"add EMA\(decay=0.9999, warmup=None\)"):
        fit(technique(), batches(), timestep_sampling=TWO_TIMES)
    with pytest.raises(ConfigurationError, match=r"no function `cleaner`: set timestep_sampling\.second_share"):
        fit(technique(), batches(), [EMA()])


@pytest.mark.parametrize(
    "make",
    [
        lambda sampling: LatentDiffusion(
            replace(BACKBONE, variant=DiTVariant(class_token=ClassToken(3))), timestep_sampling=sampling
        ),
        lambda sampling: LatentDiffusion(
            DiffusersModelConfig(config_fields={"_class_name": "UNet2DModel", "sample_size": 4, "in_channels": 2}),
            timestep_sampling=sampling,
        ),
        lambda sampling: FewStepDiffusion(BACKBONE, timestep_sampling=sampling),
        lambda sampling: DiffusionPreference(BACKBONE, timestep_sampling=sampling),
    ],
)
def test_two_times_need_a_network_that_takes_a_time_for_each_token(make):
    with pytest.raises(ConfigurationError, match=r"timestep_sampling\.second_share must be 0.*, got 0\.5"):
        make(TWO_TIMES)


def test_a_teacher_cannot_replace_the_tokens_that_sprint_recomputes():
    """The teacher's pass comes after the student's, whose tokens from before the route a recomputation would need."""
    techniques = [EMA(), TokenRouting(0.5, 1, 1, mode="sprint"), ActivationCheckpointing()]
    technique = HiddenAlignment(1, "average.3", projection="none")
    with pytest.raises(ConfigurationError, match="runs the network several times"):
        fit(technique, batches(), techniques, timestep_sampling=TWO_TIMES)
    fit(technique, batches(), [*techniques[:1], TokenRouting(0.5, 1, 1)], timestep_sampling=TWO_TIMES)
