"""The rules by which configs and options are merged into one tree."""

from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_efficient.__main__ import main
from lit_efficient.cli.arguments import read_command
from lit_efficient.cli.parsing import set_import_policy
from lit_efficient.cli.tree import Place, Table, flat, merge, place_of, plain_data, read_text
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.configs import known
from tests.cli.free_arguments import FreeArguments, Part

SGD = "optimizer: {class_path: SGD, init_args: {lr: 0.1, momentum: 0.9}}"


def merged(*texts: str) -> object:
    tree = Table()
    for text in texts:
        part = read_text(text)
        assert isinstance(part, Table)
        tree = merge(tree, part)
    return plain_data(tree)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a: {b: 1, c: 2}", "a: {c: 3}"], {"a": {"b": 1, "c": 3}}),
        (["a: [1, 2]", "a: [3]"], {"a": [3]}),
        (["a: [1]", "a+: 2", "a+: [3]"], {"a": [1, 2, 3]}),
        (["a+: 2"], {"a+": [2]}),
        ([SGD, "optimizer: {init_args: {lr: 1}}"], {"class_path": "SGD", "lr": 1, "momentum": 0.9}),
        # A class that replaces another one keeps the arguments that it takes, too.
        ([SGD, "optimizer: AdamW"], {"class_path": "AdamW", "lr": 0.1}),
        ([SGD, "optimizer: {class_path: Adam, init_args: {lr: 2}}"], {"class_path": "Adam", "lr": 2}),
        # Another model is described by its fields alone.
        (["m: {model_type: llama, a: 1}", "m: {a: 2}"], {"m": {"model_type": "llama", "a": 2}}),
        (["m: {model_type: llama, a: 1}", "m: {model_type: gpt2}"], {"m": {"model_type": "gpt2"}}),
        (["m: {dim: 64}", "m: {name_or_path: x}"], {"m": {"name_or_path": "x"}}),
    ],
)
def test_a_later_config_is_merged_on_top(texts: list[str], expected: dict[str, object]) -> None:
    if "class_path" in expected:
        name = expected.pop("class_path")
        expected = {"optimizer": {"class_path": f"torch.optim.{name}", "init_args": expected}}
    assert merged(*texts) == expected


def test_configs_and_options_are_merged_in_the_order_of_the_command_line() -> None:
    Path("one.yaml").write_text("trainer: {max_steps: 1, callbacks: [EMA]}")
    Path("two.yaml").write_text("trainer.max_steps: 2")
    configs = ["fit", "-c", "one.yaml", "--trainer.max-steps=3", "--trainer.callbacks.decay", "0.5", "-c", "two.yaml"]
    ema = {"class_path": "lit_efficient.EMA", "init_args": {"decay": "0.5"}}
    assert plain_data(read_command(configs).tree) == {"trainer": {"max_steps": 2, "callbacks": [ema]}}
    words = [*configs, "--trainer.max-steps=3", "--without=EMA", "--trainer.callbacks+=LoRA"]
    lora = {"class_path": "lit_efficient.LoRA"}
    assert plain_data(read_command(words).tree) == {"trainer": {"max_steps": "3", "callbacks": [lora]}}


def test_each_key_has_its_place() -> None:
    tree = merge(Table(), read_text("trainer:\n  max_steps: 1\n  devices: 1\n", "one.yaml"))
    tree = merge(tree, read_text("trainer:\n  devices: 2\n", "two.yaml"))
    assert place_of(tree, "trainer", "max_steps") == Place("one.yaml", 2)
    assert str(place_of(tree, "trainer.devices", "devices")) == "in two.yaml, line 2"
    assert place_of(tree, "trainer", "nothing") == Place("two.yaml", 1)


def test_merging_changes_neither_config() -> None:
    before = merge(Table(), read_text("trainer: {callbacks: [EMA], max_steps: 1}"))
    now = read_text("trainer: {callbacks-: [EMA], callbacks+: [LoRA], max_steps: 2}")
    texts = [str(before), str(now)]
    merge(before, now)
    assert [str(before), str(now)] == texts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-c", "/dev/zero"], "/dev/zero: it is too long"),
        (["-c", "."], "Is a directory|there is no file"),
        (["-c"], "-c needs the name of a config"),
        (["--trainer.max_steps"], "argument --trainer.max_steps: expected one argument"),
        (["--trainer.callbacks=[{class_path: EMA, class_path: LoRA}]"], "'class_path' stands twice"),
    ],
)
def test_words_that_cannot_be_read_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_command(["fit", *words])


def test_a_list_replaces_what_an_earlier_config_appends() -> None:
    assert merged("trainer: {callbacks+: [EMA]}", "trainer: {callbacks: []}") == {"trainer": {"callbacks": []}}


def test_arguments_of_a_class_may_have_the_names_of_slots() -> None:
    arguments = {"optimizer": "SGD", "callbacks": ["EMA"], "extra": {"model": "Adam", "callbacks-": ["x"]}}
    text = f"model: {{class_path: mine.Mine, init_args: {arguments}}}"
    expected = {"class_path": "mine.Mine", "init_args": arguments}
    assert merged(text) == merged(text, text) == {"model": expected}
    Path("mine.yaml").write_text("model: {class_path: mine.Mine, init_args: {optimizer: Adam}}")
    tree = read_command(["fit", "-c", "mine.yaml", "--model.optimizer", "SGD", "--model.filename={epoch}"]).tree
    given = {"optimizer": "SGD", "filename": "{epoch}"}
    assert plain_data(tree) == {"model": {"class_path": "mine.Mine", "init_args": given}}


def test_a_class_that_passes_on_keywords_keeps_no_arguments_of_another() -> None:
    before = "s: {class_path: DDPStrategy, init_args: {find_unused_parameters: true, process_group_backend: gloo}}"
    kept = {"process_group_backend": "gloo"}
    after = merged(before, "s: {class_path: FSDPStrategy}")
    assert after == {"s": {"class_path": "lightning.pytorch.strategies.FSDPStrategy", "init_args": kept}}


def test_environments_have_short_names() -> None:
    words = ["fit", "--trainer.plugins+=SLURMEnvironment"]
    path = "lightning.pytorch.plugins.environments.SLURMEnvironment"
    assert plain_data(read_command(words).tree) == {"trainer": {"plugins+": [{"class_path": path}]}}
    assert plain_data(read_command([*words, "--without=SLURMEnvironment"]).tree) == {"trainer": {"plugins+": []}}


@pytest.mark.parametrize(
    ("before", "now", "expected", "said"),
    [
        ("[EMA, LoRA]", "[EMA]", [("EMA", None), ("LoRA", None)], ["EMA"]),
        (
            "[{class_path: LoRA, init_args: {rank: 4, alpha: 8}}, EMA]",
            "[{class_path: LoRA, init_args: {rank: 2}}]",
            [("EMA", None), ("LoRA", {"rank": 2, "alpha": 8})],
            ["LoRA"],
        ),
        ("[EMA]", "[PowerEMA]", [("EMA", None), ("PowerEMA", None)], []),
        ("[LearningRateMonitor]", "[LearningRateMonitor]", [("LearningRateMonitor", None)], ["LearningRateMonitor"]),
        (  # a class of another package may be there with several settings
            "[ModelCheckpoint]",
            "[{class_path: ModelCheckpoint, init_args: {monitor: x}}]",
            [("ModelCheckpoint", None), ("ModelCheckpoint", {"monitor": "x"})],
            [],
        ),
    ],
)
def test_a_class_that_is_appended_again_is_there_once(
    before: str, now: str, expected: list[tuple[str, object]], said: list[str]
) -> None:
    Path("one.yaml").write_text(f"trainer: {{callbacks: {before}}}")
    Path("two.yaml").write_text(f"trainer: {{callbacks+: {now}}}")
    for words in (["-c", "two.yaml"], ["--trainer.callbacks+", now]):
        command = read_command(["fit", "-c", "one.yaml", *words])
        found = plain_data(command.tree)["trainer"]["callbacks"]
        names = [(str(one["class_path"]).rpartition(".")[2], one.get("init_args")) for one in found]
        assert sorted(names, key=str) == sorted(expected, key=str)
        assert command.restated == said
    more = read_command(["fit", "-c", "one.yaml", "-c", "two.yaml", "--trainer.callbacks.mine", "3"]).tree
    changed = plain_data(more)["trainer"]["callbacks"][-1]  # as everywhere, options are about what was appended last
    assert now.strip("[]{}").partition("class_path: ")[2].partition(",")[0] in str(changed)
    assert changed["init_args"]["mine"] == "3"


def test_an_overlay_that_is_appended_twice_is_the_overlay_once() -> None:
    overlays = [name for name, path in known().items() if path.parent.name in ("techniques", "loggers")]
    assert len(overlays) > 70
    for name in overlays:
        once, twice = (read_command(["fit", "-c", "language_model", *["-c", name] * count]) for count in (1, 2))
        assert flat(plain_data(once.tree)) == flat(plain_data(twice.tree)), name


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", ["--model.plugins=[{a: 1}, {b: 2}]"]),
        ("", ["--model.callbacks=[{a: 1}]"]),
        ("callbacks: [{a: 1}], plugins: [{b: 2}]", []),
        ("anything.x: 5", []),
        ("anything.x.y: 5", ["--model.switch=true"]),
        ("", ["--model.parts.width=5"]),
        ("", ["--model.parts=[]", "--model.parts.width=5", "--model.parts.name=b"]),
        ("parts: [{width: 2}, {width: 3}]", ["--model.parts.name=b"]),
        ("switch: true", ["--model.switch+=3"]),
        ("switch: [1]", ["--model.switch+=3"]),
    ],
)
def test_free_arguments_are_read_as_jsonargparse_reads_them(
    config: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    set_import_policy(["tests"])  # which an earlier test of the process may have set otherwise
    path = "tests.cli.free_arguments.FreeArguments"
    Path("one.yaml").write_text(f"model: {{class_path: {path}, init_args: {{{config}}}}}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(FreeArguments, "model")
    theirs = parser.parse_args(["--config=one.yaml", *words]).model.init_args.as_dict()
    assert main(["fit", "-c", "one.yaml", "--allow-import", "tests", *words, "--print_config"]) in (0, None)
    ours = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    ours["parts"] = [vars(Part(**part)) for part in ours["parts"]]
    assert ours == theirs


def test_a_list_of_loggers_replaces_lightnings_own() -> None:
    csv = {"class_path": "lightning.pytorch.loggers.CSVLogger"}
    assert merged("trainer: {logger: true}", "trainer: {logger+: CSVLogger}") == {"trainer": {"logger": [csv]}}


def test_arguments_of_a_class_are_no_null_below_another_argument() -> None:
    class_alone = "class_path: DiffusersModelConfig, init_args: null"
    with pytest.raises(yaml.YAMLError, match="init_args of DiffusersModelConfig in line 1 is no mapping of names"):
        read_text(f"data: {{class_path: LatentData, init_args: {{autoencoder: {{{class_alone}}}}}}}")
    assert read_text("trainer: {callbacks: [{class_path: EMA, init_args: null}]}")
