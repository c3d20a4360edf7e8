"""Tests of small versions of large networks, from settings of the config or from lists of blocks."""

from typing import Any

import pytest
from torch import nn

from lit_efficient import ExactResume, verify
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource, LiveFit
from lit_efficient.evidence.verifying import small_builds
from lit_efficient.testing import Net, Toy, data, trainer

VOCABULARY = 16  # what is no width of a block, and the data's


class Inner(Net):
    """Network with blocks of width ``inner``."""

    def __init__(self, depth: int, inner: int) -> None:
        super().__init__(VOCABULARY, depth)
        for block in self.blocks:
            block.up, block.down = nn.Linear(VOCABULARY, inner), nn.Linear(inner, VOCABULARY)


class Settings(FitSource):
    """Source of a toy with a config."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def make(self, change: Change = AS_IT_IS) -> Fit:
        given = {**self.settings, **{name.removeprefix("model."): value for name, value in change.settings.items()}}
        module = Toy("configure_model", lambda: Inner(given["depth"], given["inner"]))
        return Fit(trainer([*change.callbacks(), ExactResume()], max_epochs=4), module, (data(16), data()))

    def config(self) -> dict[str, Any]:
        return {"model": dict(self.settings)}


def blocks_of(source: FitSource) -> tuple[int, int]:
    fit = source.make()
    fit.trainer.fit_loop.max_epochs = 1
    fit.run()
    return len(fit.module.net.blocks), fit.module.net.blocks[0].up.out_features


def tried(source: FitSource) -> None:
    source.make().run()


def test_settings_that_are_a_depth_or_a_width_are_found_and_made_small(monkeypatch):
    monkeypatch.setattr(small_builds, "LARGE", 1000)
    changed, said = small_builds.small(Settings(depth=5, inner=128, epochs=5), tried)
    assert blocks_of(changed) == (2, 16)
    assert said.startswith("two narrow blocks, of one of 0 million parameters")


def test_a_network_of_a_pipeline_is_not_read_as_a_language_model():
    backbone = {"name_or_path": "tiny:sdxl", "subfolder": "", "random_weights": False}
    source = Settings(depth=2, inner=16, backbone=backbone)
    assert small_builds.small(source, tried) == (source, "")


def test_a_width_that_does_not_run_is_left(monkeypatch):
    monkeypatch.setattr(small_builds, "LARGE", 1000)

    def odd(source: FitSource) -> None:
        if blocks_of(source)[1] < 128:
            raise ValueError("the data has 128")

    changed, said = small_builds.small(Settings(depth=5, inner=128), odd)
    assert blocks_of(changed) == (2, 128)
    assert said.startswith("two blocks of full width")


def test_of_a_live_network_the_first_blocks_are_kept_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(small_builds, "LARGE", 1000)
    module = Toy()
    fit = (trainer([ExactResume()], max_epochs=4), module, (data(16), data()))
    report = verify(*fit, only=["runs", "resume", "export"])
    assert "the model: the first two blocks of each list" in report.text()
    assert [verdict.held for verdict in report.verdicts] == [True, True, True]
    assert len(module.net.blocks) == 4
    assert "first two blocks" not in verify(*fit, only=["runs"], full=True).text()
    stuck, said = small_builds.small(source := LiveFit(*fit), pytest.fail)
    assert stuck is source
    assert said.startswith("as it is, with 0 million parameters")
    monkeypatch.undo()
    assert small_builds.small(source, pytest.fail) == (source, "")
