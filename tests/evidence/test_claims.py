"""Tests of claims: each fault is found by the claim that it breaks, and healthy runs fail no claim."""

import json
import os
import random
import signal
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lit_efficient import EMA, CheckpointAverage, ExactResume, LoRA, TokenWeightedAccumulation, verify
from lit_efficient.commands.verify import run as command
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.verifying.claims import Claim, Verdict
from lit_efficient.evidence.verifying.verification import CLAIMS
from lit_efficient.testing import Toy, data, trainer, weights

OURS = ("runs", "determinism", "accumulation", "trains", "frozen", "schedule", "resume", "average", "merge", "export")


def verdict_of(claim: str, module: Any, callbacks: Any = (), loader: Any = None, **arguments: Any) -> Verdict:
    made = trainer([*callbacks], **{"max_epochs": 4, **arguments})
    report = verify(made, module, (loader or data(16, shuffle=True), data()), only=[claim])
    assert report.held is (report.verdicts[0].held is not False)
    return report.verdicts[0]


def found(claim: str, module: Any, *callbacks: Any, where: str = "", **arguments: Any) -> Verdict:
    verdict = verdict_of(claim, module, callbacks, **arguments)
    assert verdict.held is False, verdict
    assert verdict.number > verdict.tolerance
    assert where in verdict.where, verdict.where
    return verdict


# Healthy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callbacks", "arguments", "idle"),
    [
        ((), {}, {"average", "merge"}),
        ((EMA(start_step=2000), LoRA(rank=2), ExactResume()), {"accumulate_grad_batches": 2}, set()),
        ((CheckpointAverage(last_k=2), ExactResume()), {"precision": "bf16-mixed"}, {"merge"}),
    ],
    ids=["plain", "adapters and average", "mixed precision"],
)
def test_nothing_is_reported_on_a_healthy_run_which_is_left_as_it_is(tmp_path, monkeypatch, callbacks, arguments, idle):
    monkeypatch.chdir(tmp_path)
    module = Toy("init" if callbacks else "configure_model")
    made, before = trainer([*callbacks], max_epochs=4, **arguments), weights(module)
    state, environment = torch.get_rng_state(), dict(os.environ)
    report = verify(made, module, (data(16, shuffle=True), data()), only=OURS)
    held = {verdict.claim: verdict.held for verdict in report.verdicts}
    assert held == {claim.name: None if claim.name in idle else True for claim in CLAIMS if claim.name in OURS}
    assert all(v.number <= v.tolerance for v in report.verdicts if v.held)
    assert report.exit_code == 0
    assert "could not be tried" not in report.text()
    assert json.loads(report.json())["held"] is True
    assert all(torch.equal(value, before[name]) for name, value in weights(module).items())
    assert torch.equal(state, torch.get_rng_state())
    assert environment == dict(os.environ)
    assert not list(tmp_path.iterdir())


# Faults --------------------------------------------------------------------------------------------------------------


class Unseeded(Toy):
    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0] + random.SystemRandom().random()], batch_idx)


def test_a_step_that_draws_from_no_seed_is_not_deterministic():
    found("determinism", Unseeded(), where="loss 0")


class TokenMean(Toy):
    """Module whose loss is a mean over some elements, as in language models."""

    def training_step(self, batch, batch_idx):
        counts = (batch[0] > 0).float()
        return ((self.net(batch[0]) - 1).square() * counts).sum() / counts.sum()


class Forgetful(L.Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        pl_module.zero_grad()


def test_means_of_unequal_means_and_lost_gradients_are_not_the_gradient_of_one_batch():
    verdict = found("accumulation", TokenMean(), accumulate_grad_batches=2, where="net.")
    assert "TokenWeightedAccumulation" in verdict.why
    weighted = verdict_of("accumulation", TokenMean(), [TokenWeightedAccumulation()], accumulate_grad_batches=2)
    assert weighted.held is True
    alone = verdict_of("accumulation", TokenMean())
    assert alone.held is None
    assert "TokenWeightedAccumulation" in alone.why
    assert found("accumulation", Toy(), Forgetful(), accumulate_grad_batches=2, where="net.stem").number > 0.1


class Noisy(Toy):
    """Module with random numbers for each row and Dropout, as in diffusion."""

    def training_step(self, batch, batch_idx):
        x = batch[0]
        t = torch.rand(len(x), 1)
        return (nn.functional.dropout(self.net(x * t + torch.randn_like(x)), 0.5) - x).square().mean()


class Stratified(Toy):
    def training_step(self, batch, batch_idx):
        return (self.net(batch[0][torch.randperm(len(batch[0]))]) - batch[0]).square().mean()


def test_what_is_drawn_for_a_row_goes_with_it_into_a_smaller_batch():
    assert verdict_of("accumulation", Noisy(), accumulate_grad_batches=2).held is True
    assert "depend on the size" in verdict_of("accumulation", Stratified(), accumulate_grad_batches=2).why


class Part(Toy):
    """Module whose optimizer lacks the head."""

    def configure_optimizers(self):
        return torch.optim.SGD([p for name, p in self.named_parameters() if "head" not in name], 0.1)


class Detached(Toy):
    def training_step(self, batch, batch_idx):
        hidden = self.net.blocks[0](self.net.stem(batch[0])).detach()
        return self.net.head(self.net.blocks[1](hidden)).square().mean()


class FrozenAdapter(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        next(p for name, p in pl_module.named_parameters() if "blocks.1.up.lora_B" in name).requires_grad_(False)


class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        kept = self.param_groups[0]["params"][0].detach().clone()
        loss = super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].copy_(kept)
        return loss


class WithStuck(Toy):
    def configure_optimizers(self):
        return Stuck(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("module", "callbacks", "where"),
    [
        (Part, (), "net.head.weight: no optimizer holds it"),
        (Detached, (), "net.stem.weight: no gradient reaches it"),
        (WithStuck, (), "net.stem.weight: it has a gradient but does not change"),
    ],
)
def test_what_should_train_and_does_not_is_named(module, callbacks, where):
    found("trains", module(), *callbacks, where=where)


class Aside(Toy):
    def __init__(self):
        super().__init__()
        self.pooler = nn.Linear(2, 2)

    def groups(self):
        return [{"params": list(self.parameters())}]


def test_a_layer_that_no_step_calls_is_named_and_no_failure():
    verdict = verdict_of("trains", Aside())
    assert verdict.held is True
    aside = "2 parameters that the training step does not use, or uses without gradients, first pooler"
    assert any(aside in one for one in verdict.uncovered)


class Nudge(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        next(p for p in pl_module.parameters() if not p.requires_grad).data += 1e-6


class Thaw(L.Callback):
    def on_train_start(self, trainer, pl_module):
        weight = pl_module.net.head.weight.requires_grad_()
        trainer.optimizers[0].param_groups[0]["params"].append(weight)


class Tied(Toy):
    def __init__(self):
        super().__init__()
        self.net.head.weight = self.net.stem.weight

    def setup(self, stage):
        self.net.head.weight = nn.Parameter(self.net.stem.weight.detach().clone())


@pytest.mark.parametrize(
    ("module", "callbacks", "where"),
    [
        (Toy, (LoRA(rank=2), Nudge()), "net.stem.weight: it is frozen but changed"),
        (Toy, (LoRA(rank=2), Thaw()), "net.head.weight: LoRA does not train it"),
        (Tied, (), "net.stem.weight: it is no longer tied to net.head.weight"),
    ],
)
def test_what_should_not_train_and_does_is_named(module, callbacks, where):
    found("frozen", module(), *callbacks, where=where)


class Dropped(Toy):
    def configure_optimizers(self):
        return super().configure_optimizers()["optimizer"]


class Stranger(L.Callback):
    """Callback that replaces the optimizer of the schedule."""

    def on_fit_start(self, trainer, pl_module):
        trainer.strategy.optimizers = [torch.optim.AdamW(pl_module.groups(), lr=1e-2)]


class Constant(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.01


class Epochs(Toy):
    def configure_optimizers(self):
        configured = super().configure_optimizers()
        return {"optimizer": configured["optimizer"], "lr_scheduler": configured["lr_scheduler"]["scheduler"]}


def test_a_schedule_that_does_not_act_is_found():
    found("schedule", Dropped(), where="LambdaLR, which was built")
    found("schedule", Toy(), Stranger(), where="LambdaLR, which changes the rates of another optimizer")
    found("schedule", Toy(), Constant(), where="step 1, group 2: 0.01, but the schedule says 0.005")
    assert verdict_of("schedule", Epochs(), loader=data(8)).held is True
    assert verdict_of("schedule", Part()).held is None


class Momentum(torch.optim.SGD):
    """Optimizer whose state is not saved in checkpoints."""

    def state_dict(self):
        return {**super().state_dict(), "state": {}}


class Restless(Toy):
    """Module that counts its steps in an attribute that no checkpoint contains."""

    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self._sample_loss(batch).mean() * self.steps

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Lossy(Restless):
    def training_step(self, batch, batch_idx):
        return self._sample_loss(batch).mean()

    def configure_optimizers(self):
        return Momentum(self.parameters(), 0.01, momentum=0.9)


class Late(Toy):
    """Module that cannot load its own checkpoint."""

    def on_load_checkpoint(self, checkpoint):
        raise KeyError("tokenizer")


def test_what_a_checkpoint_lacks_is_found():
    found("resume", Restless(), ExactResume(), where="loss 1 after it")
    found("resume", Lossy(), ExactResume(), where="loss 2 after it")
    assert "KeyError: 'tokenizer'" in found("resume", Late()).where
    plain = verdict_of("resume", Toy())
    assert plain.held is True
    assert any("ExactResume" in one for one in plain.uncovered)


class Twice(EMA):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._step -= 1
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class Other(EMA):
    """Average whose validated weights are not the saved ones."""

    def swap_in(self, module):
        super().swap_in(module)
        with torch.no_grad():
            module.net.head.weight.mul_(1.1)


class Hidden(Toy):
    """Module with a state that no file of weights contains."""

    def __init__(self):
        super().__init__()
        self.net.stem.register_buffer("seen", torch.zeros(()), persistent=False)
        self.net.stem.register_forward_hook(_louder)

    def on_train_batch_start(self, batch, batch_idx):
        self.net.stem.seen += 1


def _louder(module, args, output):
    return output * (1 + module.seen)


class WrongScale(L.Callback):
    """Lets an adapter count twice, which merging does not know."""

    def on_fit_start(self, trainer, pl_module):
        layer = pl_module.net.blocks[2].up
        layer.register_forward_hook(_twice)


def _twice(layer, args, output):
    return (
        output if not hasattr(layer, "lora_A") else 2 * output - nn.functional.linear(args[0], layer.weight, layer.bias)
    )


def test_averages_merges_and_exports_that_are_not_what_they_say_are_found():
    found("average", Toy(), Twice(decay=0.9, warmup=None), where="net.stem.weight")
    found("merge", Toy(), LoRA(rank=2), WrongScale(), where="net.blocks.2.up")
    found("export", Toy(), Other(decay=0.9), where="net.head")
    found("export", Hidden(), where="net.stem")


# The report ----------------------------------------------------------------------------------------------------------


class Interrupts(Toy):
    def training_step(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)


def test_ctrl_c_leaves_the_verdicts_that_are_there():
    before = signal.getsignal(signal.SIGINT)
    report = verify(trainer(max_epochs=1), Interrupts(), data(), only=["determinism", "average"])
    assert report.left == ("determinism", "average")
    assert report.exit_code == 130
    assert "not reached: determinism, average" in report.text()
    assert signal.getsignal(signal.SIGINT) is before


def test_names_are_checked_and_a_fit_that_fails_by_itself_is_no_verdict(capsys):
    with pytest.raises(ConfigurationError, match=r"--only.*did you mean 'determinism'.*'determinsm'"):
        verify(trainer(), Toy(), data(), only=["determinsm"])
    with pytest.raises(ZeroDivisionError):
        verify(trainer(), Toy("init", lambda: 1 / 0), data())
    assert command(["--only", "help"]) == 0
    assert capsys.readouterr().out.count("\n") == len(CLAIMS)
    assert all(isinstance(claim, Claim) and claim.sentence for claim in CLAIMS)


class Meshed(Toy):
    """Module that needs a device mesh."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        super().configure_model()


class Broken(Toy):
    def configure_model(self) -> None:
        raise AttributeError("hidden_siez")


def test_a_module_that_needs_the_mesh_of_several_processes_is_told_from_a_broken_one():
    arguments = {"strategy": ModelParallelStrategy(), "devices": 2, "accelerator": "cpu"}
    with pytest.raises(ConfigurationError, match=r"verify: one process checks .* needs the mesh of several processes:"):
        verify(trainer(**arguments), Meshed(), data())
    arguments["strategy"] = ModelParallelStrategy()
    with pytest.raises(AttributeError, match="hidden_siez"):
        verify(trainer(**arguments), Broken(), data())
