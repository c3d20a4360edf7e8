"""Modules as other people write them: lazy layers, and fitted modules that are pickled, copied and saved whole."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import lit_efficient
from lit_efficient import ActivationCheckpointing, ExactResume, LoRA, StochasticDepth, apply, verify
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import LiveFit
from tests.contract.table import CASES, make_all, network_of
from tests.support import Net, Toy, assert_equal, data, trainer, weights

# These neither read nor change the network.
IGNORE_SHAPES = {"DataLoaderTuner", "DevicePrefetcher", "ExactResume", "FastMatmul", "GradientNoiseScale"} | {
    "OptimizerSchedule"
}


@functools.cache
def _lazy(network: type[nn.Module]) -> type[nn.Module]:
    class Lazy(network):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.Sequential(nn.LazyConv1d(2, 1), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(1))

        def forward(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
            image = nn.functional.pad(x, (0, 16 - x.shape[-1]))[:, None]
            return super().forward(x + self.lazy(image), **arguments)

    return Lazy


@pytest.mark.turns(8)
@pytest.mark.parametrize("name", sorted(CASES))
def test_lazy_layers_are_refused_before_training_or_initialised_as_plain_lightning_does(
    name: str, tmp_path: Path
) -> None:
    module = Toy(network=_lazy(network_of(name)))
    run = trainer(make_all(name), max_steps=2, default_root_dir=tmp_path, **CASES[name].trainer)
    if name in IGNORE_SHAPES:
        run.fit(module, data(), data())
        assert run.global_step == 2
        assert module.net.lazy[0].weight.shape == (2, 1, 1)
        return
    with pytest.raises(ConfigurationError, match=r"(have no shape before the first batch|ChunkedCrossEntropy)"):
        run.fit(module, data(), data())
    assert run.global_step == 0


class Failing(Toy):
    """The toy, in which an error ends the run."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)


def _twins(module: nn.Module) -> list[Any]:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return [pickle.loads(pickle.dumps(module)), copy.deepcopy(module), torch.load(file, weights_only=False)]


@pytest.mark.turns(8, always=["LoRA-fit", "EMA-fails"])
@pytest.mark.parametrize("how", ["fit", "fails", "validate", "test", "predict"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_module_is_pickled_copied_and_saved_whole_after_a_run(name: str, how: str, tmp_path: Path) -> None:
    network = network_of(name)
    if "<locals>" in network.__qualname__:  # pickle needs a name under which to find the class
        network.__qualname__ = f"Local{id(network)}"
        setattr(sys.modules[network.__module__], network.__qualname__, network)
    module: Any = (Failing if how == "fails" else Toy)(network=network)
    run = trainer(make_all(name), max_steps=2, default_root_dir=tmp_path, **CASES[name].trainer)
    if how == "validate":
        run.validate(module, data(), verbose=False)
    elif how == "test":
        run.test(module, data(), verbose=False)
    elif how == "predict":
        run.predict(module, data())
    elif how == "fit":
        run.fit(module, data(), data())
    else:
        with pytest.raises(KeyError, match="own"):
            run.fit(module, data(), data())
    saved: dict[str, Any] = {"state_dict": module.state_dict(), "callbacks": {}}
    module.on_save_checkpoint(saved)
    for twin in _twins(module):
        assert_equal(weights(twin), weights(module))
        again: dict[str, Any] = {"state_dict": twin.state_dict(), "callbacks": {}}
        twin.on_save_checkpoint(again)
        records = [one.get("lit_efficient", {}).get("transforms") for one in (again, saved)]
        assert records[0] == records[1]


class Strict(torch.Tensor):
    """A tensor of a library that refuses what it does not know."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.equal, torch.Tensor.clone):
            raise TypeError("not for this class")
        return super().__torch_function__(func, types, args, kwargs or {})


class Carries(L.LightningModule):
    """A module of somebody else that carries a tensor of a subclass from batch to batch."""

    carried: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.carried = torch.zeros(2).as_subclass(Strict)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.carried = (torch.zeros(2) + batch_idx).as_subclass(Strict)
        return (self.net(batch[0]) - batch[0].flip(-1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def test_a_diagnostic_reads_tensors_of_a_subclass_and_warns_as_of_any_other() -> None:
    with pytest.warns(UserWarning, match="Carries changes carried from batch to batch"):
        trainer([ExactResume(0)], max_steps=4).fit(Carries(), data(16))


def test_an_error_in_a_diagnostic_is_a_warning_and_the_run_goes_on() -> None:
    class Number(int):
        def __ne__(self, other: object) -> bool:
            raise ZeroDivisionError("of the user")

    class Counts(Carries):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.number = Number(batch_idx)
            return super().training_step(batch, batch_idx)

    run = trainer([ExactResume(0)], max_steps=4)
    with pytest.warns(UserWarning, match="ExactResume: state that .* could not be examined: ZeroDivisionError: of the"):
        run.fit(Counts(), data(16))
    assert run.global_step == 4


@pytest.mark.parametrize("variant", ["lora", "dora", "pissa"])
def test_adapters_train_on_weights_that_torchao_has_quantised(variant: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module = Carries()
    quantize_(module.net.blocks, Int8WeightOnlyConfig())
    layer: Any = module.net.blocks[0].up
    base = layer.weight.dequantize()
    x = next(iter(data(16)))[0]
    before = module.net(x).detach()
    apply(module, LoRA(rank=2, variant=variant, targets=["up"]))
    torch.testing.assert_close(module.net(x).detach(), before)
    if variant == "dora":
        torch.testing.assert_close(layer.lora_magnitude.detach(), base.norm(dim=1))
    start = layer.lora_B.detach().clone()
    run = trainer([LoRA(rank=2, variant=variant, targets=["up"])], max_steps=3)
    run.fit(module, data(16))
    assert not torch.equal(layer.lora_B.detach(), start)
    torch.testing.assert_close(layer.weight.dequantize(), base, rtol=0, atol=0)


@pytest.mark.parametrize("technique", [StochasticDepth(0.4), ActivationCheckpointing(every=2)])
def test_a_copy_that_no_optimizer_steps_is_no_depth(technique: Any) -> None:
    class Momentum(Carries):
        def __init__(self, frozen: bool) -> None:
            super().__init__()
            self.target = copy.deepcopy(self.net).requires_grad_(not frozen)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    module = Momentum(frozen=True)
    trainer([technique], max_steps=2).fit(module, data(16))
    with pytest.raises(ConfigurationError, match=r"no optimizer steps .* 'target'.*requires_grad_\(False\)"):
        trainer([technique], max_steps=2).fit(Momentum(frozen=False), data(16))


class Hostile(dict[str, Any]):
    """A batch that answers no question of a diagnostic."""

    def values(self) -> Any:
        raise ZeroDivisionError("of the batch")

    def get(self, *_: Any) -> Any:
        raise ZeroDivisionError("of the batch")


@pytest.mark.filterwarnings("default:.*could not be examined.*")
@pytest.mark.parametrize("name", ["RunMetrics", "ThroughputMeter", "ThroughputBar", "LoRA"])
def test_a_run_with_a_diagnostic_that_fails_trains_as_without_it(name: str, tmp_path: Path) -> None:
    def fit(callbacks: list[Any]) -> Any:
        class Reads(Carries):
            def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
                return Hostile(x=batch[0])

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                self.log("loss", 0.0, batch_size=4)
                return super().training_step([batch["x"]], batch_idx)

        torch.manual_seed(0)
        module = Reads()
        shown = any(isinstance(one, ProgressBar) for one in callbacks)
        logs: Any = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "enable_progress_bar": shown}
        run = trainer(callbacks, max_steps=3, **logs)
        run.fit(module, data(16))
        assert run.global_step == 3
        return weights(module)

    diagnosed = {"LoRA": LoRA(rank=2)}
    kind: Any = getattr(lit_efficient, name)
    with pytest.warns(UserWarning, match=f"{name}: .* could not be examined: ZeroDivisionError: of the batch"):
        found = fit([diagnosed.get(name) or kind()])
    if name not in diagnosed:
        assert_equal(found, fit([]))


# Modules that write weights in hooks that run after techniques and after the restored checkpoint


class StartsAfresh(Toy):
    """The toy that initialises all matrices when training starts, as recommenders of RecTools do."""

    hook = "on_train_start"

    def on_fit_start(self) -> None:
        self._start("on_fit_start")

    def on_train_start(self) -> None:
        self._start("on_train_start")

    def _start(self, hook: str) -> None:
        if self.hook == hook:
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    nn.init.xavier_normal_(parameter.data)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_a_module_that_initialises_adapters_when_training_starts_is_refused(hook: str) -> None:
    module = StartsAfresh()
    module.hook = hook
    run = trainer([LoRA(rank=2)], max_steps=2)
    with pytest.raises(ConfigurationError, match=rf"LoRA: StartsAfresh.{hook} overwrites \d+ of the \d+ parameters"):
        run.fit(module, data(), data())
    assert run.global_step == 0


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_a_module_that_overwrites_restored_weights_says_so(hook: str, tmp_path: Path) -> None:
    module = StartsAfresh()
    module.hook = hook
    first = trainer([ExactResume()], max_steps=2)
    first.fit(module, data(), data())  # a warning would be an error
    first.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.warns(UserWarning, match=rf"StartsAfresh.{hook} overwrites \d+ of the \d+ parameters that the check"):
        trainer([ExactResume()], max_steps=4).fit(module, data(), data(), ckpt_path=tmp_path / "two.ckpt")


class ReadsAtStart(Toy):
    """The toy whose hooks write no weight."""

    def on_train_start(self) -> None:
        self.size = sum(parameter.numel() for parameter in self.parameters())


def test_hooks_that_write_no_weight_are_left_alone(tmp_path: Path) -> None:
    first = trainer([ExactResume()], max_steps=2)
    first.fit(ReadsAtStart(), data(), data())
    first.save_checkpoint(tmp_path / "two.ckpt")
    resumed = trainer([ExactResume()], max_steps=4)
    resumed.fit(ReadsAtStart(), data(), data(), ckpt_path=tmp_path / "two.ckpt")
    assert resumed.global_step == 4


@pytest.mark.parametrize("kind", ["MaxBatchSize", "LRFinder"])
def test_trial_steps_put_tensors_of_a_strict_subclass_back(kind: str) -> None:
    class Changes(Carries):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(2).as_subclass(Strict)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            with torch.DisableTorchFunctionSubclass():
                self.kept.add_(1)
            return super().training_step(batch, batch_idx)

    module = Changes()
    run = trainer(make_all(kind), max_steps=3, **CASES[kind].trainer)
    run.fit(module, data(16))
    with torch.DisableTorchFunctionSubclass():
        assert module.kept.tolist() == [run.fit_loop.total_batch_idx + 1] * 2


class WeightNormed(Net):
    """Blocks under torch's older weight norm, which keeps a weight that is computed, and that torch does not copy."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.weight_norm(block.up)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_layers_with_a_computed_weight_are_copied_where_copies_are_tried() -> None:
    module = Toy(network=WeightNormed)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(module)
    run = trainer([StochasticDepth(0.4)], max_steps=2)
    run.fit(module, data(), data())
    assert run.global_step == 2
    source = LiveFit(trainer([StochasticDepth(0.4)], max_steps=2), Toy(network=WeightNormed), (data(), data()))
    assert_equal(weights(source.make().module), weights(Toy(network=WeightNormed)))
    assert verify(source, only=["determinism"]).held
