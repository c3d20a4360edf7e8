"""PowerEMA: tracked widths, snapshots, and other widths that equal averages tracked in the run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lit_efficient import EMA, ConfigurationError, LitEfficientError, PowerEMA
from lit_efficient.commands.ema_sweep import run as sweep
from lit_efficient.declaration import format_bytes
from lit_efficient.mechanisms.averages.snapshots import Snapshot, synthesize, write_snapshot
from lit_efficient.mechanisms.averages.weights import gamma_of, power_decay, synthesis_weights, update_
from tests.callbacks.test_ema import Trace
from tests.support import Toy, assert_equal, data, trainer, weights


def fit(folder: Path, epochs: int = 20, widths: tuple[float, ...] = (0.05, 0.10), **arguments: Any) -> Trace:
    torch.manual_seed(0)
    trace = Trace()
    ema = PowerEMA(widths, 4, str(folder))
    run = trainer([ema, trace], max_epochs=epochs, check_val_every_n_epoch=100)
    run.fit(Toy(), data(), data(), **arguments)
    run.save_checkpoint(folder / "last.ckpt", weights_only=False)
    return trace


def tracked(trace: Trace, width: float) -> dict[str, torch.Tensor]:
    average = {name: tensor.clone() for name, tensor in trace.steps[0].items()}
    for step, state in enumerate(trace.steps, 1):
        update_(list(average.values()), list(state.values()), power_decay(step, gamma_of(width)))
    return average


# Error of an average that is built from 20 snapshots at two widths, relative to its distance from the last weights, and
# of its profile, relative to the profile. Both are the best that these snapshots allow: see the test below.
ATTAINED = {0.05: (0, 1e-12), 0.10: (0, 1e-12), 0.075: (3e-4, 2.5e-3), 0.12: (3e-4, 2.5e-3), 0.15: (1e-3, 6e-3)}


def test_any_width_comes_out_as_if_it_had_been_tracked(tmp_path: Path) -> None:
    trace = fit(tmp_path)
    for width, built in zip(ATTAINED, synthesize(tmp_path, list(ATTAINED))):
        expected = tracked(trace, width)
        away = sum((trace.steps[-1][n] - expected[n]).double().square().sum() for n in expected).sqrt()
        error = sum((built[n] - expected[n]).double().square().sum() for n in expected).sqrt()
        assert error <= ATTAINED[width][0] * away, (width, float(error / away))


@functools.cache
def all_decays(sigma_rel: float, length: int) -> np.ndarray:
    gamma = gamma_of(sigma_rel)
    return np.array([power_decay(i, gamma) for i in range(1, length + 1)])


def profile(step: int, sigma_rel: float, length: int) -> np.ndarray:
    """Return the share of each step's weights in an average that was updated ``step`` times."""
    decays = all_decays(sigma_rel, length)[:step]
    kept = np.append(np.cumprod(decays[:0:-1])[::-1], 1.0)  # what later updates leave of a step
    return np.pad((1 - decays) * kept, (0, length - step))


@pytest.mark.parametrize("every", [20, 4])
def test_no_other_weights_of_the_snapshots_come_closer(every: int) -> None:
    """Compare the closed form in continuous time with least squares on the shares of 400 steps."""
    pairs = [(step, width) for step in range(every, 401, every) for width in (0.05, 0.10)]
    stored = np.stack([profile(step, width, 400) for step, width in pairs])
    for width, (_, attained) in ATTAINED.items():
        target = profile(400, width, 400)
        ours = np.array(synthesis_weights([p[0] for p in pairs], [p[1] for p in pairs], 400, width))
        best = np.linalg.lstsq(stored.T, target, rcond=None)[0]
        ours_error, best_error = (np.linalg.norm(c @ stored - target) / np.linalg.norm(target) for c in (ours, best))
        assert ours_error < 1.01 * best_error + 1e-12
        # Spacing is what limits it: five times as many snapshots make it 25 times smaller.
        assert ours_error < attained * (every / 20) ** 2 + 1e-12, (width, ours_error)


def test_snapshots_are_thin_and_resume_changes_none_of_them(tmp_path: Path) -> None:
    fit(tmp_path / "whole", 4)
    fit(tmp_path / "half", 2)
    fit(tmp_path / "rest", 4, ckpt_path=tmp_path / "half" / "last.ckpt")
    names = sorted(path.name for path in (tmp_path / "rest").glob("average-*"))
    assert names == [
        f"average-step={step:08d}-sigma_rel={width}.safetensors" for step in (12, 16) for width in (0.05, 0.1)
    ]
    for name in names:
        assert_equal(load_file(tmp_path / "whole" / name), load_file(tmp_path / "rest" / name))
    assert (tmp_path / "rest" / names[0]).stat().st_size < 1.1 * sum(4 * p.numel() for p in Toy().parameters()) + 4096
    with pytest.raises(ConfigurationError, match=r"tracks the widths \[0.05, 0.1\], but sigma_rels is \[0.05, 0.2\]"):
        fit(tmp_path / "other", 4, (0.05, 0.2), ckpt_path=tmp_path / "half" / "last.ckpt")


def test_the_sweep_writes_weights_and_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fit(tmp_path, 3)
    assert sweep([str(tmp_path), "--sigma_rel", "0.1", "0.15", "--checkpoint", str(tmp_path / "last.ckpt")]) == 0
    assert sweep([str(tmp_path), "--sigma_rel", "0.1", "--step", "8", "--output", str(tmp_path / "out")]) == 0
    assert "ema-sigma_rel=0.15.ckpt" in capsys.readouterr().out
    module = Toy()
    trainer().validate(module, data(), ckpt_path=tmp_path / "ema-sigma_rel=0.15.ckpt", verbose=False)
    assert_equal(weights(module), synthesize(tmp_path, [0.15])[0])
    built = load_file(tmp_path / "out" / "ema-sigma_rel=0.1.safetensors")
    stored = load_file(tmp_path / "average-step=00000008-sigma_rel=0.1.safetensors")
    torch.testing.assert_close(built, stored, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LitEfficientError, match="there are no snapshots in"):
        sweep([str(tmp_path), "--sigma_rel", "0.1"])
    fit(tmp_path, 2)
    with pytest.raises(ConfigurationError, match=r"step must be one of the 2 of the snapshots \[4, 8\], got 5"):
        sweep([str(tmp_path), "--sigma_rel", "0.1", "--step", "5"])
    with pytest.raises(ConfigurationError, match=r"sigma_rel must be above 0 and below 0.2886751346, got 0.5"):
        sweep([str(tmp_path), "--sigma_rel", "0.5"])
    torch.save({"state_dict": {"other": torch.ones(1)}}, tmp_path / "other.ckpt")
    with pytest.raises(ConfigurationError, match="is it from another run"):
        sweep([str(tmp_path), "--sigma_rel", "0.1", "--checkpoint", str(tmp_path / "other.ckpt")])


def test_switched_weights_have_no_profile() -> None:
    run = trainer([EMA(switch_every=2), PowerEMA()])
    with pytest.raises(ConfigurationError, match=r"PowerEMA cannot be combined with EMA\(switch_every=...\)"):
        run.fit(Toy(), data(), data())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sigma_rels": ()}, r"sigma_rels must be a list of widths, each once, got \(\)"),
        ({"sigma_rels": (0.1, 0.1)}, "each once"),
        ({"sigma_rels": (0.1, 0.4)}, "sigma_rels must be above 0 and below 0.2886751346, got 0.4"),
        ({"snapshot_every_n_steps": 0}, "PowerEMA: snapshot_every_n_steps must be a whole number of at least 1, got 0"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16, got 'int8'"),
    ],
)
def test_arguments_are_checked_when_it_is_built(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PowerEMA(**arguments)


def test_the_report_counts_what_is_kept(tmp_path: Path) -> None:
    technique = PowerEMA([0.05, 0.1, 0.2], dirpath=str(tmp_path))
    module = Toy("init")
    module.trainer = trainer([technique])
    count = sum(p.numel() for p in module.parameters())
    report = technique.describe(module)
    assert (report.parameters, report.details) == (count, {"average_bytes": 3 * 4 * count})
    assert f"at widths 0.05, 0.1, 0.2 ({format_bytes(3 * 4 * count)})" in report.summary


def test_one_snapshot_is_the_average_itself(tmp_path: Path) -> None:
    kept = Snapshot(4, 0.1)
    write_snapshot(tmp_path, kept, {"w": torch.arange(3.0)}, [kept])
    (built,) = synthesize(tmp_path, [0.1])
    torch.testing.assert_close(built["w"], torch.arange(3.0))
