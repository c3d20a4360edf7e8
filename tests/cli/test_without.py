"""Techniques are taken out of a config by name, in an overlay or on the command line; options are spelt with - or _."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_efficient import DevicePrefetcher
from lit_efficient.__main__ import main
from tests.cli.toy_runs import ALLOW, fit, refused
from tests.cuda.fake_cuda import fake_cuda
from tests.support_cli import Parts, Recorder

HERE = Path(__file__).parents[2]
THREE = {
    "trainer": {"callbacks+": ["EMA", {"class_path": "EarlyStopping", "init_args": {"monitor": "loss", "patience": 7}}]}
}


def overlay(name: str, **trainer: object) -> list[str]:
    Path(name).write_text(yaml.safe_dump({"trainer": trainer}))
    return ["-c", name]


def names(*arguments: str) -> list[str]:
    """The callbacks of a run with these arguments that a config has given, by class."""
    Path("three.yaml").write_text(yaml.safe_dump(THREE))
    parts = Parts(args=["fit", *ALLOW, "-c", "base.yaml", "-c", "three.yaml", *arguments])
    known = ("Recorder", "EMA", "EarlyStopping", "StochasticDepth")
    kept = [callback for callback in parts.trainer.callbacks if type(callback).__name__ in known]
    assert all(callback.patience == 7 for callback in kept if type(callback).__name__ == "EarlyStopping")
    assert all(callback.tag == "base" for callback in kept if isinstance(callback, Recorder))
    return [type(callback).__name__ for callback in kept]


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", ["EMA", "lit_efficient.EMA", "lit_efficient.callbacks.ema.EMA"])
def test_a_technique_is_taken_out_by_its_short_or_full_name(name: str) -> None:
    assert names() == ["Recorder", "EMA", "EarlyStopping"]
    assert names("--without", name) == ["Recorder", "EarlyStopping"]
    assert names(*overlay("out.yaml", **{"callbacks-": [name]})) == ["Recorder", "EarlyStopping"]


def test_an_overlay_swaps_and_later_files_count() -> None:
    swap = {"callbacks-": ["EMA", "EarlyStopping"], "callbacks+": ["StochasticDepth"]}
    assert names(*overlay("swap.yaml", **swap)) == ["Recorder", "StochasticDepth"]
    assert names(*overlay("one.yaml", **{"callbacks-": "Recorder"}), "--without=EarlyStopping") == ["EMA"]
    back = overlay("back.yaml", **{"callbacks+": ["EMA"]})
    assert names(*overlay("out.yaml", **{"callbacks-": ["EMA"]}), *back) == ["Recorder", "EarlyStopping", "EMA"]
    assert names("--without", "EMA", *back) == ["Recorder", "EarlyStopping"]  # wherever it stands, it comes last
    every = ["--without", "Recorder", "--without", "EMA", "--without", "EarlyStopping"]
    assert names(*every) == []


def test_plugins_are_taken_out_likewise() -> None:
    plugin = overlay("own.yaml", plugins=[{"class_path": "tests.support_cli.OwnIO"}])
    parts = Parts(args=["fit", *ALLOW, "-c", "base.yaml", *plugin, *overlay("out.yaml", **{"plugins-": ["OwnIO"]})])
    assert type(parts.trainer.strategy.checkpoint_io).__name__ == "SafeCheckpointIO"


def test_what_is_not_there_is_an_error_that_lists_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("three.yaml").write_text(yaml.safe_dump(THREE))
    said = refused(capsys, "-c", "three.yaml", "--without", "EMMA")
    assert "there is no 'EMMA' to take out, did you mean 'EMA'?" in said
    assert "accepted: Recorder, EMA, EarlyStopping" in said
    assert "accepted: Recorder" in refused(capsys, "--without", "tests.support_cli.EMA")
    wrong = overlay("out.yaml", **{"callbacks-": ["LoRA"]})
    said = refused(capsys, *wrong)
    assert "there is no 'LoRA' to take out" in said
    assert "out.yaml" in said
    assert "every run has NonFiniteGuard" in refused(capsys, "--without", "NonFiniteGuard")
    assert "--without needs the name of a class" in refused(capsys, "--without")
    assert "callbacks- is no list of names" in refused(
        capsys, *overlay("out.yaml", **{"callbacks-": [{"class_path": "EMA"}]})
    )
    assert "there is none left" in refused(capsys, *overlay("out.yaml", **{"callbacks-": ["EMA"], "callbacks": []}))


def test_the_saved_config_is_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--without", "Recorder", "--print-config") == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"] == []


def test_a_fit_on_a_gpu_reads_ahead_unless_it_is_told_not_to() -> None:
    """And on a CPU nothing is added; what is left out of a config stays left out of the one that is saved."""
    import_module("bitsandbytes")  # before there seems to be a GPU: its import asks torch's build

    def prefetchers(*arguments: str, device: str = "gpu") -> list[Any]:
        with fake_cuda():
            more = ["--trainer.accelerator", device, *arguments]
            parts = Parts(args=["fit", *ALLOW, "-c", "base.yaml", *more])
        saved = yaml.safe_load(parts.parser.dump(parts.config, skip_none=False))["fit"]
        Path(f"saved{len(arguments)}.yaml").write_text(yaml.safe_dump(saved))
        return [one for one in parts.trainer.callbacks if isinstance(one, DevicePrefetcher)]

    assert [one.ahead for one in prefetchers()] == [True]
    assert prefetchers(device="cpu") == []
    own = overlay("own.yaml", **{"callbacks+": [{"class_path": "DevicePrefetcher", "init_args": {"ahead": False}}]})
    assert [one.ahead for one in prefetchers(*own)] == [False]
    assert prefetchers(*own, "--without", "DevicePrefetcher") == []
    assert prefetchers(*overlay("out.yaml", **{"callbacks-": ["DevicePrefetcher"]})) == []
    Path("saved2.yaml").rename(saved := "saved.yaml")
    assert prefetchers("-c", saved) == []
    assert [one.ahead for one in prefetchers("-c", saved, *own)] == [False]


def test_options_are_spelt_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    Parts(
        args=["fit", "--allow_import", "tests", "-c", "base.yaml", "--seed-everything", "7", "--trainer.max-epochs=1"]
    )
    parts = Parts(args=["fit", *ALLOW, "-c", "base.yaml", "--model.init-args.hidden", "5", "--data.batch-size=4"])
    assert (parts.model.hidden, parts.datamodule.batch_size) == (5, 4)

    class Own(Parts):
        def add_arguments_to_parser(self, parser) -> None:
            parser.add_argument("--my-flag", type=int)

    for flag in ("--my-flag", "--my_flag"):
        assert Own(args=["fit", *ALLOW, "-c", "base.yaml", flag, "3"]).config.fit.my_flag == 3
    for flag in ("--max-new-tokens", "--max_new_tokens"):
        assert main(["generate", "--ckpt", "none.ckpt", "--prompt", "a-b", f"{flag}=4"]) == 2
        assert "none.ckpt" in capsys.readouterr().err
    assert "no option 'trainer.max_epoch'" in refused(capsys, "--trainer.max-epoch", "3")


def test_a_command_declares_its_options_with_underscores() -> None:
    """The entry point writes them so: what is declared with dashes alone, nobody could give."""
    for path in (HERE / "lit_efficient" / "commands").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                given = [name.value for name in node.args if isinstance(name, ast.Constant)]
                long = [name for name in given if name.startswith("--")]
                assert not long or any("-" not in name[2:] for name in long), f"{path.name}: {long}"
