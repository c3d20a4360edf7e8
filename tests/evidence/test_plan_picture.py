"""Tests of the picture of a plan: memory, peak and limit."""

import numpy as np
import pytest

from lit_efficient.evidence.planning.plan import Moment
from lit_efficient.evidence.planning.plan_picture import draw_memory, memory_figure
from tests.evidence.known_plans import plan_of

pytest.importorskip("matplotlib")
MIB = 2**20
STEPS = [("forward", 10), ("forward", 60), ("backward", 90), ("backward", 20), ("optimizer step", 5)]
TIMELINE = tuple(Moment(name, {"weights": 40 * MIB, "activations": size * MIB}) for name, size in STEPS)
PLAN = plan_of({"weights": 40 * MIB, "activations": 90 * MIB}, timeline=TIMELINE)


def test_the_areas_are_the_kinds_and_their_top_is_the_peak():
    figure = memory_figure(PLAN, 150 * MIB)
    figure.canvas.draw()
    (axes,) = figure.axes
    tops = {area.get_label().partition(",")[0]: area.get_paths()[0].vertices for area in axes.collections}
    assert tops["weights"][:, 1].max() == 40
    assert tops["activations"][:, 1].max() == PLAN.peak / MIB == 130
    assert [float(line.get_ydata()[0]) for line in axes.lines] == [130, 150]
    assert any("peak 130.0 MiB, backward" in text.get_text() for text in axes.texts)
    assert {label.get_text() for label in axes.get_xticklabels()} == {"forward", "backward", "optimizer step"}
    assert axes.get_ylabel() == "MiB"
    (far,) = memory_figure(PLAN, 2000 * MIB).axes  # which would leave the step a line at the bottom
    assert len(far.lines) == 1


def test_the_file_is_a_picture(tmp_path):
    from PIL import Image

    draw_memory(tmp_path / "step.png", PLAN, 150 * MIB, "a title")
    pixels = np.asarray(Image.open(tmp_path / "step.png").convert("RGB")).reshape(-1, 3)
    for colour in ((0x1D, 0x4E, 0x89), (0xF2, 0xA5, 0x41)):  # weights and activations
        assert (pixels == colour).all(axis=1).mean() > 0.02
    draw_memory(tmp_path / "none.png", plan_of({}, timeline=()), None)  # nothing to draw is no error
