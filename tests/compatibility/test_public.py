"""A public option that changes is said in the changelog, or this fails."""

import copy
import json

import pytest

from tests.compatibility.public import FILE, Difference, differences, newest, snapshot, unsaid


def test_what_changes_is_said_in_the_changelog() -> None:
    assert unsaid() == []


def test_the_snapshot_holds_names_configs_and_commands() -> None:
    found = json.loads(FILE.read_text("utf-8"))
    assert found["names"]["EMA"]["decay"] == ["0.9999"]
    assert "trainer.callbacks+.EMA.decay" in found["configs"]["ema"]
    assert "--format" in found["commands"]["export"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda now: now["names"].pop("EMA"), "the public name EMA is gone"),
        (lambda now: now["names"]["EMA"].pop("decay"), "the public name EMA has no decay any more"),
        (lambda now: now["names"]["EMA"].update(decay=["0.5"]), "decay of EMA was 0.9999 and is 0.5"),
        (lambda now: now["names"]["EMA"].update(new=["(required)"]), "EMA cannot be made without new any more"),
        (
            lambda now: now["names"]["EMA"].update(decay=now["names"]["EMA"].pop("decay")),
            "another order, from warmup on",
        ),
        (lambda now: now["names"]["Sampler"]["name"].remove("ddim"), "name of Sampler may not be ddim any more"),
        (lambda now: now["configs"]["ema"].clear(), "the config ema has no trainer any more"),
        (lambda now: now["commands"]["export"].pop("--format"), "the command export has no --format any more"),
    ],
)
def test_a_change_is_a_sentence(change, sentence: str) -> None:
    before = snapshot()
    now = copy.deepcopy(before)
    change(now)
    assert any(sentence in one.sentence for one in differences(before, now))


def test_what_is_new_is_no_change() -> None:
    now = snapshot()
    before = copy.deepcopy(now)
    before["names"]["Sampler"]["name"].remove("ddim")
    del before["names"]["EMA"]["device"], before["names"]["LoRA"], before["commands"]["export"]["--format"]
    assert differences(before, now) == []


def test_where_a_change_is_said() -> None:
    change = Difference("EMA", "decay", "decay of EMA was 0.9 and is 0.5")
    assert change.is_said_in("- `EMA(decay=0.5)` by default")
    assert not change.is_said_in("- EMA has another decay; `EMA` and `decay`")
    assert not change.is_said_in("- `PowerEMA(decay=0.5)`, `EMA(decay_at=1)`")
    assert newest("# Changelog\n\n## Unreleased\n\n- new\n\n## 0.1.0\n\n- old\n") == "Unreleased\n\n- new\n"
