"""ScheduleFree: validation and checkpoints see the average, training never does, and a resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lit_efficient import ConfigurationError, ScheduleFree, ScheduleFreeAdamW
from tests.support import Toy, assert_equal, data, trainer, weights


class Constant(Toy):
    kind: Any = torch.optim.AdamW

    def configure_optimizers(self) -> Any:
        return self.kind(self.net.parameters(), lr=1e-2)


class Watch(Callback):
    """Saves in the middle of an epoch, and notes what is seen where."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.training, self.validated, self.expected = folder, [], [], []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.training.append(pl_module.net.head.weight.detach().clone())
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.folder / "whole.ckpt", weights_only=False)
            trainer.save_checkpoint(self.folder / "thin.ckpt", weights_only=True)
            self.expected.append(trainer.optimizers[0].averages()[pl_module.net.head.weight])

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.validated.append(pl_module.net.head.weight.detach().clone())


def run(folder: Path, **arguments: Any) -> tuple[Any, Watch]:
    watch = Watch(folder)
    fitted = trainer([ScheduleFree(), watch], **{"max_epochs": 2, "num_sanity_val_steps": 1, **arguments})
    fitted.fit(Constant("configure_model"), data(), data())
    return fitted, watch


def test_checkpoints_and_validation_hold_the_average_and_training_does_not(tmp_path: Path) -> None:
    fitted, watch = run(tmp_path)
    whole, thin = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.ckpt", "thin.ckpt"))
    assert_equal(whole["state_dict"], thin["state_dict"])
    assert torch.equal(whole["state_dict"]["net.head.weight"], watch.expected[0])
    assert not torch.equal(whole["state_dict"]["net.head.weight"], watch.training[1])
    assert not torch.equal(watch.validated[1], watch.training[3])
    assert torch.equal(watch.validated[-1], fitted.lightning_module.net.head.weight)  # the fit ends on the average


def test_validating_and_saving_never_change_training(tmp_path: Path) -> None:
    _, often = run(tmp_path, val_check_interval=1)
    rare = Watch(tmp_path)
    rare.on_validation_batch_end = lambda *_: None  # type: ignore[method-assign]
    fitted = trainer([ScheduleFree(), rare], max_epochs=2, limit_val_batches=0)
    fitted.fit(Constant("configure_model"), data(), data())
    assert len(often.training) == 8
    assert_equal(often.training, rare.training)


def test_a_configured_schedule_free_optimizer_is_kept_and_switched(tmp_path: Path) -> None:
    module = Constant()
    module.kind = lambda parameters, lr: ScheduleFreeAdamW(parameters, lr, warmup_steps=3)
    fitted = trainer([ScheduleFree()])
    fitted.fit(module, data(), data())
    assert fitted.optimizers[0].param_groups[0]["warmup_steps"] == 3
    assert not {"on_save_checkpoint", "_schedule_free_inner"} & module.__dict__.keys()


def test_without_the_callback_the_first_step_says_what_to_do() -> None:
    module = Constant()
    module.kind = ScheduleFreeAdamW
    with pytest.raises(ConfigurationError, match=r"Trainer\(callbacks=\[ScheduleFree\(\)\]\)"):
        trainer().fit(module, data(), data())


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end", "on_train_end"])
def test_an_exception_leaves_the_average_and_no_hook(hook: str) -> None:
    class Bomb(Callback):
        def explode(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("bomb")

    bomb = Bomb()
    setattr(bomb, hook, bomb.explode)
    module = Constant()
    run = trainer([ScheduleFree(), bomb], max_steps=3, val_check_interval=3, limit_train_batches=3)
    with pytest.raises(RuntimeError, match="bomb"):
        run.fit(module, data(), data())
    optimizer = run.optimizers[0]
    assert torch.equal(module.net.head.weight, optimizer.averages()[module.net.head.weight])
    assert "y" in optimizer.state[module.net.head.weight]
    assert not {"on_save_checkpoint", "_schedule_free_inner"} & module.__dict__.keys()


class Adam(Constant):
    decay = 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=self.decay)


def test_adam_without_weight_decay_becomes_what_adamw_without_it_becomes() -> None:
    class AdamW(Adam):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)

    modules = [Adam(), AdamW()]
    for module in modules:
        trainer([ScheduleFree(1)], max_steps=3).fit(module, data(), data())
    assert_equal(weights(modules[0]), weights(modules[1]))
    decayed = Adam()
    decayed.decay = 0.1
    with pytest.raises(ConfigurationError, match=r"Adam\(weight_decay=0.1\) adds the decay to the gradient"):
        trainer([ScheduleFree()]).fit(decayed, data(), data())


def test_what_has_no_twin_is_refused() -> None:
    module = Constant()
    module.kind = torch.optim.SGD
    with pytest.raises(ConfigurationError, match="ScheduleFree: SGD has no schedule-free form"):
        trainer([ScheduleFree()]).fit(module, data(), data())
    with pytest.raises(ConfigurationError, match="warmup_steps must be a whole number of at least 0, got -1"):
        ScheduleFree(-1)
