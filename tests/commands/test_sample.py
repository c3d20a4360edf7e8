"""``sample``: its images are those of the task for the same seed, and each has its place and name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from lit_efficient import ConfigurationError, DiffusersModelConfig, DiTConfig, LatentDiffusion, Samples
from lit_efficient.__main__ import main
from lit_efficient.files.checkpoints import write
from lit_efficient.files.pictures import draw_grid
from lit_efficient.files.runs import point_latest, write_record
from lit_efficient.tasks.latent_generator import to_uint8
from tests.tasks.captioned_latents import codec, text_encoder

SHAPE = DiTConfig(channels=4, size=8, patch_size=2, width=32, depth=1, heads=2, num_classes=3)
SHAPES = {
    "classes": SHAPE,
    "both": replace(SHAPE, context_width=16),
    "texts": replace(SHAPE, context_width=16, num_classes=0),
    "nothing": replace(SHAPE, num_classes=0),
}


def _task(kind: str) -> LatentDiffusion:
    torch.manual_seed(0)
    alone = {"guidance_scale": 1.0} if kind == "nothing" else {}
    prompts = ["a cat", "two dogs"] if SHAPES[kind].context_width else None
    module = LatentDiffusion(SHAPES[kind], sampling_steps=3, samples=Samples(0, prompts=prompts), **alone)
    module.configure_model()
    for parameter in module.parameters():  # those of a new network give zero
        torch.nn.init.normal_(parameter, std=0.2)
    module.codec, module.latent_size = codec(), (8, 8)
    module.text_encoder = text_encoder() if prompts else None
    return module.eval()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A task of each kind; its checkpoint is the last of a run."""
    folder, found = tmp_path_factory.mktemp("sample"), {}
    for kind in SHAPES:
        module = found[kind] = _task(kind)
        checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
        module.on_save_checkpoint(checkpoint)
        write(folder / kind / "time" / "last.ckpt", checkpoint)
        write_record(folder / kind / "time", {})
        point_latest(folder / kind / "time")
    return {"folder": folder, **found}


def _sample(tasks: dict[str, Any], kind: str, output: Path, *more: str) -> int:
    given = ["--ckpt", str(tasks["folder"] / kind), "--output", str(output), "--device", "cpu"]
    return main(["sample", *given, *more])


def _of_the_task(module: LatentDiffusion, seed: int, **asked: Any) -> Any:
    latents = module.sample(generator=torch.Generator().manual_seed(seed), **asked)
    return to_uint8(module.codec.decode(latents))[0, 0].numpy()


def _pixels(path: Path) -> Any:
    return np.asarray(Image.open(path))


def test_images_are_those_of_the_task_for_the_seed_in_any_batch(
    tasks: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, state = tasks["classes"], torch.get_rng_state()
    for size in (1, 4, 16):
        asked = ["--classes", "2,0-1", "--seeds", "7,9", "--batch_size", str(size), "--guidance", "3"]
        assert _sample(tasks, "classes", tmp_path / str(size), *asked) == 0
    assert capsys.readouterr().out.endswith(f"Wrote {tmp_path / '16' / 'grid.png'} and 6 images in the same folder\n")
    assert len(list((tmp_path / "16").iterdir())) == 7
    assert torch.equal(state, torch.get_rng_state())
    seen = set()
    for label in (0, 1, 2):
        for seed in (7, 9):
            name = f"class_{label}_seed_{seed}.png"
            expected = _of_the_task(module, seed, labels=torch.tensor([label]), guidance_scale=3.0)
            assert np.array_equal(_pixels(tmp_path / "1" / name), expected)
            for size in ("4", "16"):  # a batch has other kernels, which round otherwise
                difference = _pixels(tmp_path / size / name).astype(int) - expected
                assert abs(difference).max() <= 1
            seen.add(expected.tobytes())
    assert len(seen) == 6
    assert np.array_equal(
        module.sample_images(1, 4)[0, 0].numpy(), module.draw_images([4], [0])[0, 0].numpy()
    )  # what the pictures of a run show first
    text = Image.open(tmp_path / "1" / "class_2_seed_7.png").text  # type: ignore[attr-defined]
    assert {"class": "2", "seed": "7", "guidance": "3.0", "steps": "3", "sampler": "builtin"}.items() <= text.items()


def test_the_grid_holds_the_images_in_rows_of_classes_and_columns_of_seeds(
    tasks: dict[str, Any], tmp_path: Path
) -> None:
    assert _sample(tasks, "classes", tmp_path / "all", "--classes", "1,2", "--seeds", "0-2") == 0
    assert _sample(tasks, "classes", tmp_path / "only.png", "--classes", "1,2", "--seeds", "0-2") == 0
    grid = _pixels(tmp_path / "only.png")
    assert np.array_equal(grid, _pixels(tmp_path / "all" / "grid.png"))
    for row, label in enumerate((1, 2)):
        for column, seed in enumerate((0, 1, 2)):
            image = _pixels(tmp_path / "all" / f"class_{label}_seed_{seed}.png").repeat(3, 0).repeat(3, 1)
            bottom, right = grid.shape[0] - 6 - (1 - row) * 102, grid.shape[1] - 6 - (2 - column) * 102
            assert np.array_equal(grid[bottom - 96 : bottom, right - 96 : right], image)
    margins = grid[: -2 * 102], grid[:, : -3 * 102]  # with the seeds, and with the classes
    assert all((margin < 100).sum() > 20 for margin in margins)
    assert all((edge == 255).all() for edge in (grid[:3], grid[-6:], grid[:, :3], grid[:, -6:]))  # nothing is cut


@pytest.mark.parametrize(
    ("kind", "more", "files"),
    [
        (
            "texts",
            [],
            {"prompt_0_seed_5.png": {"captions": ["a cat"]}, "prompt_1_seed_5.png": {"captions": ["two dogs"]}},
        ),
        ("texts", ["--prompts", "猫\né"], {"prompt_0_seed_5.png": {"captions": ["猫\né"]}}),
        (
            "both",
            ["--prompts", "x", "--classes", "1,2"],
            {f"class_{i}_prompt_0_seed_5.png": {"captions": ["x"], "labels": torch.tensor([i])} for i in (1, 2)},
        ),
        ("both", ["--prompts", "x"], {"prompt_0_seed_5.png": {"captions": ["x"], "labels": torch.tensor([3])}}),
        ("nothing", ["--steps", "2"], {"image_seed_5.png": {"count": 1, "steps": 2}}),
    ],
)
def test_each_kind_of_model_draws_what_it_is_asked_for(
    tasks: dict[str, Any], tmp_path: Path, kind: str, more: list[str], files: dict[str, Any]
) -> None:
    assert _sample(tasks, kind, tmp_path, "--seeds", "5", "--batch_size", "1", *more) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"grid.png", *files}
    for name, asked in files.items():
        assert np.array_equal(_pixels(tmp_path / name), _of_the_task(tasks[kind], 5, **asked))


def test_prompts_come_from_a_file_and_the_sampler_is_one_of_diffusers(tasks: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n\na dog\n")
    more = ["--prompts", str(tmp_path / "prompts.txt"), "--seeds", "3", "--sampler", "euler", "--batch_size", "1"]
    assert _sample(tasks, "texts", tmp_path / "out", *more) == 0
    module = _task("texts")
    module.sampler = replace(module.sampler, name="euler")
    for i, caption in enumerate(("a cat", "a dog")):
        expected = _of_the_task(module, 3, captions=[caption])
        assert np.array_equal(_pixels(tmp_path / "out" / f"prompt_{i}_seed_3.png"), expected)


def test_negative_prompts_and_scheduler_classes_are_those_of_the_task(tasks: dict[str, Any], tmp_path: Path) -> None:
    more = ["--prompts", "a cat", "--seeds", "3", "--batch_size", "1", "--guidance", "4", "--negative", "blurry"]
    more += ["--sampler", "UniPCMultistepScheduler", "--sampler_options", "solver_order=1", "final_sigmas_type=zero"]
    assert _sample(tasks, "texts", tmp_path, *more) == 0
    module = _task("texts")
    options = {"solver_order": 1, "final_sigmas_type": "zero"}
    module.sampler = replace(module.sampler, name="UniPCMultistepScheduler", options=options)
    asked = {"captions": ["a cat"], "guidance_scale": 4.0}
    file = tmp_path / "prompt_0_seed_3.png"
    assert np.array_equal(_pixels(file), _of_the_task(module, 3, negative="blurry", **asked))
    assert not np.array_equal(_pixels(file), _of_the_task(module, 3, **asked))
    assert Image.open(file).text["negative"] == "blurry"  # type: ignore[attr-defined]
    given = LatentDiffusion(
        SHAPES["texts"], sampler=module.sampler, sampling_steps=3, samples=Samples(0, negative="blurry")
    )
    given.network, given.codec, given.text_encoder = module.network, module.codec, module.text_encoder
    assert np.array_equal(_of_the_task(given.eval(), 3, **asked), _pixels(file))


def test_checkpoints_are_columns_of_one_grid_beside_the_pretrained_network(tmp_path: Path) -> None:
    fields = {"_class_name": "DiTTransformer2DModel", "sample_size": 8, "num_layers": 1, "num_attention_heads": 2}
    fields |= {"attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_embeds_ada_norm": 3}
    torch.manual_seed(0)
    pretrained = diffusers.DiTTransformer2DModel(**{name: value for name, value in fields.items() if name[0] != "_"})
    for parameter in pretrained.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    pretrained.save_pretrained(tmp_path / "base")
    module = LatentDiffusion(DiffusersModelConfig(str(tmp_path / "base")), sampling_steps=2, samples=Samples(0))
    module.configure_model()
    module.codec, module.latent_size = codec(), (8, 8)
    module.eval()
    expected = {"before": _of_the_task(module, 5, labels=torch.tensor([1]))}
    for name in ("first", "second"):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.02)
        checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
        module.on_save_checkpoint(checkpoint)
        write(tmp_path / f"{name}.ckpt", checkpoint)
        expected[name] = _of_the_task(module, 5, labels=torch.tensor([1]))
    given = ["--ckpt", str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt"), "--before", "--device", "cpu"]
    out = tmp_path / "out"
    assert main(["sample", *given, "--classes", "1", "--seeds", "5,6", "--output", str(out)]) == 0
    assert len(list(out.iterdir())) == 7
    for name, image in expected.items():
        assert abs(_pixels(out / f"class_1_seed_5_{name}.png").astype(int) - image).max() <= 1
    columns = [(name, seed) for seed in (5, 6) for name in expected]
    drawn = torch.stack([torch.tensor(_pixels(out / f"class_1_seed_{s}_{name}.png"))[None] for name, s in columns])
    heads = [f"{name}, seed {seed}" for name, seed in columns]
    assert np.array_equal(_pixels(out / "grid.png"), np.asarray(draw_grid(drawn, 6, 3, rows=["class 1"], heads=heads)))
    assert len({image.tobytes() for image in expected.values()}) == 3
    with pytest.raises(ConfigurationError, match="backbone names no pretrained model and there are no adapters"):
        _task("classes").check_before_training()


def test_checkpoints_with_images_of_other_sizes_share_no_grid(
    tasks: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = LatentDiffusion(replace(SHAPE, size=4), sampling_steps=1, samples=Samples(0))
    module.configure_model()
    module.codec, module.latent_size = codec(), (4, 4)
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    write(tmp_path / "small.ckpt", checkpoint)
    given = ["--ckpt", str(tasks["folder"] / "classes"), str(tmp_path / "small.ckpt"), "--device", "cpu"]
    assert main(["sample", *given, "--classes", "1", "--seeds", "5", "--output", str(tmp_path / "out")]) == 2
    assert "--ckpt must be checkpoints whose images have one size ([1, 32, 32] as those of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("classes", ["--classes", "3"], "sample: --classes must be in 0 to 2, got 3"),
        (
            "classes",
            ["--classes", "0,x"],
            "--classes must be numbers and ranges such as 0,3,7 or 0-9, at most 100,000, got '0,x'",
        ),
        ("classes", ["--seeds", "9-3"], "--seeds must be numbers and ranges"),
        ("classes", ["--seeds", "0-99999999999"], "--seeds must be numbers and ranges"),
        ("classes", ["--prompts", "a"], "--prompts must be left out for DiT, which takes no text, got ['a']"),
        ("texts", ["--classes", "0"], "--classes must be left out for DiT, which takes no classes, got [0]"),
        ("nothing", ["--guidance", "2"], "--guidance must be 1 for DiT, which takes no conditions, got 2.0"),
        ("classes", ["--guidance", "-1"], "--guidance must be at least 0, got -1.0"),
        ("classes", ["--steps", "0"], "--steps must be a whole number of at least 1, got 0"),
        ("classes", ["--batch_size", "0"], "--batch_size must be a whole number of at least 1, got 0"),
        ("classes", ["--sampler", "magic"], "--sampler must be one of builtin"),
        (
            "classes",
            ["--sampler", "MagicScheduler"],
            "ddim, euler, heun, dpmsolver++ or a scheduler class",
        ),
        (
            "classes",
            ["--sampler_options", "a=1"],
            "--sampler_options must be left out unless",
        ),
        ("classes", ["--sampler_options", "a"], "--sampler_options must be NAME=VALUE"),
        ("classes", ["--negative", "blurry"], "--negative must be left out for a network without text"),
        (
            "texts",
            ["--negative", "x", "--guidance", "1"],
            "without text, and without guidance",
        ),
        ("classes", ["--before"], "there is nothing to compare with"),
        ("classes", ["--output", "x.jpg"], "--output must be a file that ends in .png, or a folder, got 'x.jpg'"),
        ("classes", ["--ckpt", "nowhere.ckpt"], "there is no file nowhere.ckpt"),
        ("classes", ["--weights", "average"], "the checkpoint holds no average of the weights"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    tasks: dict[str, Any],
    tmp_path: Path,
    kind: str,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _sample(tasks, kind, tmp_path / "out", *more) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) <= 2
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint_and_one_of_another_task_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, {})
    given = ["--output", str(tmp_path / "x.png")]
    assert main(["sample", "--ckpt", str(tmp_path), *given]) == 2
    assert f"there is no checkpoint in {tmp_path}" in capsys.readouterr().err
    write(tmp_path / "other.ckpt", {"state_dict": {"a": torch.zeros(1)}})
    assert main(["sample", "--ckpt", str(tmp_path), *given]) == 2
    assert "other.ckpt is not a checkpoint of LatentDiffusion" in capsys.readouterr().err
