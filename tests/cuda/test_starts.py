"""Every technique on the GPU that is not there: it starts, ends as on the CPU, and leaves the GPU's own draws alone."""

from __future__ import annotations

import ast
import unittest.mock
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import lit_efficient
from lit_efficient import ChunkedCrossEntropy, ConfigurationError, GPTConfig, LanguageModeling
from lit_efficient.losses.chunked_cross_entropy import TokenLoss
from lit_efficient.models.generation.sampling import sample_token
from lit_efficient.models.libraries.teachers import find_teacher
from lit_efficient.testing import Run, data, trainer
from tests.contract.table import NAMES, case
from tests.cuda.fake_cuda import DEVICE, fake_cuda, on_cuda

DRAWS = {"rand", "randn", "randint", "randperm", "normal"}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Before there seems to be a GPU: its import asks torch's build."""
    import_module("bitsandbytes")


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    """As ``Trainer(deterministic=True)``, which ExactResume asks for on a GPU."""
    torch.use_deterministic_algorithms(True)


def fit(name: str, accelerator: str, techniques: bool = True) -> Run:
    """A run of a technique's toy, without it where that is what is asked for."""
    about = case(name)
    run = Run(None, about.toy())
    run.trainer = trainer(about.make() if techniques else [], accelerator=accelerator, **about.trainer)
    torch.manual_seed(0)
    run.trainer.fit(run.module, data(about.rows), data())
    return run


_DRAWN: dict[str, Tensor] = {}  # by the toy's network


def drawn_without(name: str) -> Tensor:
    """The GPU's global generator after a run of the same toy without the technique."""
    kind = case(name).network.__name__
    if kind not in _DRAWN:
        with fake_cuda():
            fit(name, "gpu", techniques=False)
            _DRAWN[kind] = torch.cuda.get_rng_state()
    return _DRAWN[kind]


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", NAMES)
def test_it_starts_on_a_gpu_and_ends_as_on_the_cpu(name: str) -> None:
    with fake_cuda():
        there = fit(name, "gpu")
        drawn = torch.cuda.get_rng_state()
    if name != "ExactResume":  # its draws follow the batch
        assert torch.equal(drawn, drawn_without(name)), "it changes what the run draws on the GPU"
    assert on_cuda(there.module.seen["sample_loss"])
    here = fit(name, "cpu").state()["weights"]
    for key, tensor in there.state()["weights"].items():
        torch.testing.assert_close(tensor, here[key])


def test_prompts_do_not_go_through_the_head() -> None:
    """The host counts what is learned before a batch is on the GPU, unless a hook has a hand in its transfer."""

    class Moves(LanguageModeling):
        def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
            return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}  # now all are learned

    rows, seen = [], []
    for number in range(8):
        ids = torch.randint(0, 40, (12,), generator=torch.Generator().manual_seed(number))
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(12) < 4 + number, -100, ids)})
    consume = TokenLoss.consume

    def counted(self: TokenLoss, logits: Tensor, *rest: Any) -> Tensor:
        seen.append(len(logits))
        return consume(self, logits, *rest)

    def trained(kind: type[LanguageModeling], accelerator: str) -> list[Tensor]:
        seen.clear()
        torch.manual_seed(0)
        task = kind(GPTConfig(vocab_size=40, dim=16, depth=1, num_heads=2, max_length=12))
        run = trainer([ChunkedCrossEntropy()], accelerator=accelerator, max_steps=2, limit_val_batches=0)
        with unittest.mock.patch.object(TokenLoss, "consume", counted):
            run.fit(task, *(DataLoader(rows, batch_size=4) for _ in range(2)))
        return [p.detach().cpu() for p in task.parameters()]

    for kind, expected in ((LanguageModeling, [26, 10]), (Moves, [44, 44])):
        with fake_cuda():
            there, rows_there = trained(kind, "gpu"), list(seen)
        here = trained(kind, "cpu")
        assert seen == expected
        assert rows_there == (expected if kind is LanguageModeling else [48, 48])
        torch.testing.assert_close(there, here)


def test_what_has_a_generator_of_its_own_is_drawn_where_that_is() -> None:
    """Within ``configure_model`` the default device is the run's: a CPU's generator gives no numbers there."""
    lacking = []
    for path in Path(lit_efficient.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in {f"torch.{name}" for name in DRAWS}:
                given = {keyword.arg for keyword in call.keywords}
                if "generator" in given and "device" not in given:
                    lacking.append(f"{path.name}:{call.lineno}")
    assert not lacking


def test_the_stand_in_refuses_what_a_gpu_refuses() -> None:
    x = torch.ones(2, requires_grad=True)
    with fake_cuda():
        y = x.cuda()
        (y * torch.arange(2.0, device="cuda")).sum().backward()
        assert on_cuda(y)
        assert not on_cuda(x.grad)
        with pytest.raises(RuntimeError, match="same device"):
            y + torch.ones(2)
        with pytest.raises(RuntimeError, match="same device"):
            torch.nn.Linear(2, 2).cuda()(torch.ones(2))
        with pytest.raises(RuntimeError, match="generator"), DEVICE:
            torch.rand(2, generator=torch.Generator())
        with pytest.raises(TypeError, match="numpy"):
            y.detach().numpy()
        with pytest.raises(RuntimeError, match="deterministic"):
            y.cumsum(0)


def test_sampling_and_gradients_of_resized_images_are_deterministic() -> None:
    """On CUDA, sums of floats along a row and the gradient of an interpolation are not, and are refused."""
    logits = torch.randn(3, 50)
    images = torch.rand(2, 3, 12, 10, requires_grad=True)
    expected = F.interpolate(images, (7, 7), mode="bicubic", align_corners=False, antialias=True)
    (slope,) = torch.autograd.grad(expected.square().sum(), images)
    token = sample_token(logits, 1.0, 0.7, torch.Generator().manual_seed(0))
    with fake_cuda():
        there = torch.Generator("cuda").manual_seed(0)
        assert torch.equal(sample_token(logits.cuda(), 1.0, 0.7, there).cpu(), token)
        teacher = find_teacher(torch.nn.Identity().cuda(), [""], who="test", image_size=7)
        resized = teacher.of_images(images.cuda(), gradients=True)[""]
        (found,) = torch.autograd.grad(resized.square().sum(), images)
    torch.testing.assert_close(resized.cpu(), expected)
    torch.testing.assert_close(found, slope)


@pytest.mark.parametrize("layer", ["0", "3"])
def test_a_network_without_a_deterministic_gradient_is_refused_with_the_way_out(layer: str) -> None:
    """As a perceptual term's, where torch would say so in the run's backward pass; layers before it go on."""
    torch.manual_seed(0)
    pooled = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(16, 2)
    )
    images = torch.rand(2, 3, 8, 8, requires_grad=True)
    with fake_cuda():
        teacher = find_teacher(pooled.cuda(), [layer], who="Autoencoding: perceptual")
        if layer == "0":
            teacher.of_images(images.cuda(), gradients=True)["0"].sum().backward()
            assert bool(images.grad.any())
            return
        reason = "on cuda the gradient of Sequential has no deterministic kernel .*name layers before.*to warn"
        with pytest.raises(ConfigurationError, match=reason):
            teacher.of_images(images.cuda(), gradients=True)
