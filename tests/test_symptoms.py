"""The commands of docs/symptoms.md end as it says, on a small task; each sentence of some pages has its test."""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, callbacks

from lit_efficient import PowerEMA
from lit_efficient.__main__ import main
from lit_efficient.errors import EXIT_CODES
from lit_efficient.files import configs
from tests.documents import GIVEN, ROOT, commands, page

COMMANDS = [*dict.fromkeys(words for words in commands(page("symptoms.md")) if words)]
# Commands for other tasks or more processes, and the test that runs such a command.
ELSEWHERE = {
    "sample": "commands/test_sample.py::test_each_kind_of_model_draws_what_it_is_asked_for",
    "cache-latents": "commands/test_cache_latents.py::test_the_config_that_fit_runs_is_encoded_once",
    "llm/lora": "configs/test_llm.py::test_configs_run_as_their_headers_say_and_so_does_what_they_print",
    "llm/qlora": "configs/test_llm.py::test_configs_run_as_their_headers_say_and_so_does_what_they_print",
    "llm/pretrain": "configs/test_llm.py::test_configs_run_as_their_headers_say_and_so_does_what_they_print",
    "peft": "export/test_adapters.py",
    "diffusers": "export/test_pipelines.py",
    "ddp": "cli/test_distributed.py::test_two_processes_train_as_one_does_on_both_batches",
    "lr_finder": "callbacks/test_lr_finder.py::test_the_suggestion_is_near_the_best_rate_of_a_grid",
    "max_batch_size": "callbacks/test_max_batch_size.py::test_finds_the_largest_that_ran_on_the_longest_batch",
    "loggers/wandb": "cli/test_wandb.py::test_a_run_without_a_key_is_recorded_offline_with_the_whole_config",
    "--model.guidance_scale": "tasks/test_latent_backbones.py::test_guidance_moves_away_from_the_empty_caption",
}
ENDS = {"gpu": 2}  # what a command with the word ends with, where it does not end with 0
CLAIMS = yaml.safe_load((ROOT / "tests/claims_of_documents.yaml").read_text("utf-8"))
HERE = [words for words in COMMANDS if not ELSEWHERE.keys() & {*words}]
BODY = "def function_{0}(self):\n    return self.value + {0}\n\n\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, a run that was cut short, and its checkpoint."""
    place = tmp_path_factory.mktemp("symptoms")
    (place / "source").mkdir()
    for index in range(30):
        (place / "source" / f"file{index}.py").write_text(BODY.format(index) * 4)
    config = yaml.safe_load(configs.known()["language_model"].read_text("utf-8"))
    config["trainer"] |= {"max_steps": 8, "val_check_interval": 4, "log_every_n_steps": 1, "accelerator": "cpu"}
    config["trainer"]["callbacks"][2]["init_args"] |= {"max_new_tokens": 4}
    config["trainer"]["callbacks"] += ["EMA"]
    config["trainer"]["default_root_dir"] = "runs/mine"
    config["model"]["init_args"]["model"] = {"dim": 16, "depth": 2, "num_heads": 2, "max_length": 64}
    files = {"vocab_size": 300, "sequence_length": 16, "batch_size": 4, "files": {"paths": [str(place / "source")]}}
    config["data"]["init_args"] = {**files, "val_fraction": 0.2, "cache_dir": str(place / "cache")}
    (place / "mine.yaml").write_text(yaml.safe_dump(config))
    config["trainer"]["callbacks"] += [{"class_path": "Compile", "init_args": {"backend": "eager"}}]
    (place / "compiled.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["fit", "-c", "mine.yaml", "--trainer.max_steps", "6"]) == 0
    return place


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a copy, so that no command finds what another one left."""
    shutil.copytree(trained, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # of Lightning, on data this small
@pytest.mark.turns(8, family="symptoms")
@pytest.mark.parametrize("words", HERE, ids=" ".join)
def test_a_command_ends_as_it_is_said_to(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "compiled.yaml" if "Compile" in words else "mine.yaml"
    latest = next((folder / "runs/mine").glob("*/last.ckpt"))
    given = {**GIVEN, "CONFIG": config, "language_model": config, "CKPT": str(latest), "RUN": "runs/mine"}
    line = [given.get(word, word) for word in words]
    if "--trainer.max_steps" in line:
        steps = line.index("--trainer.max_steps") + 1
        line[steps] = str(min(int(line[steps]), 3))
    if words[0] == "export":
        line.append("--no_check")  # in a new process, which takes seconds and has tests of its own
    expected = next((code for word, code in ENDS.items() if word in words), 0)
    assert main(line) == expected, capsys.readouterr().err


class Watch(Callback):
    """Keeps the batches and the losses of the newest run, and the number of its validation batches before a step."""

    last: Watch

    def __init__(self) -> None:
        Watch.last = self
        self.batches: list[list[int]] = []
        self.losses: list[float] = []
        self.before = 0

    def on_validation_batch_end(self, *args: object) -> None:
        self.before += not self.losses

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch["input_ids"].flatten().tolist())
        self.losses.append(float(outputs["loss"]))


WATCH = ["--allow-import", "tests", "--trainer.callbacks+", "tests.test_symptoms.Watch"]


def in_document(*beginning: str) -> list[str]:
    """A command of the document, with the word for the config replaced."""
    (words,) = (words for words in COMMANDS if {*beginning} <= {*words})
    return ["mine.yaml" if word == "CONFIG" else word for word in words]


@pytest.mark.turns(8, family="symptoms")
def test_the_whole_validation_comes_first(folder: Path) -> None:
    assert main([*in_document("--trainer.num_sanity_val_steps", "-1"), *WATCH]) == 0
    whole = Watch.last.before
    assert main(["fit", "-c", "mine.yaml", "--trainer.max_steps", "1", *WATCH]) == 0
    assert whole > Watch.last.before == 2


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.turns(8, family="symptoms")
def test_one_batch_is_learned_by_heart(folder: Path) -> None:
    words = in_document("--trainer.overfit_batches")
    assert words[-1] == "200"
    assert main([*words[:-1], "60", "--without", "SampleText", *WATCH]) == 0
    assert len(Watch.last.losses) == 60
    assert all(batch == Watch.last.batches[0] for batch in Watch.last.batches)
    assert Watch.last.losses[-1] < 0.6 * Watch.last.losses[0]


@pytest.mark.turns(8, family="symptoms")
def test_the_profiler_lists_what_a_step_waits_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = in_document("simple", "EMA")
    assert main([*words, "--trainer.max_steps", "2"]) == 0
    for name in ("train_dataloader_next", "run_training_batch", "SampleText.on_validation_end"):
        assert re.search(rf"{name}\s*\|", caplog.text), name
    assert "[Callback]EMA" not in caplog.text


def test_the_exit_codes_are_those_that_are_listed() -> None:
    (sentence,) = re.findall(r"lists the exit\s+codes: (.*?), 128 \+ n signal n", page("symptoms.md"), re.DOTALL)
    told = {int(part.split()[0]) for part in sentence.split(",")}
    assert told == {code for code in EXIT_CODES if code > 1}


def test_names_of_options_in_sentences_exist() -> None:
    (sentence,) = re.findall(r"Check (`save_top_k`.*?)\.", page("symptoms.md"), re.DOTALL)
    for name, kind in zip(
        re.findall(r"`([a-z_]+)`", sentence), (*[callbacks.ModelCheckpoint] * 2, PowerEMA), strict=True
    ):
        assert name in inspect.signature(kind).parameters, name


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page without code, headings and tables."""
    text = re.sub(r"^```.*?^```\n?", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(\||#+ ).*$", "\n", text, flags=re.MULTILINE)
    for part in re.split(r"\n\s*\n|\n(?=- )", text):
        yield from filter(None, re.split(r"(?<=[.:?]) (?=[A-Z`\[\"(])", " ".join(part.split()).removeprefix("- ")))


@pytest.mark.parametrize("name", CLAIMS)
def test_each_sentence_has_its_test(name: str) -> None:
    """A sentence that is new or has another beginning needs a row, and a test that is renamed another one."""
    quotes = [quote for quote, _ in CLAIMS[name]]
    told = [*sentences(page(name)), *(line for line in page(name).splitlines() if line.startswith("| `"))]
    if name != "migrating.md":  # whose tables have tests of their own
        rowless = [one for one in told if not one.startswith("|") and not any(map(one.startswith, quotes))]
        assert [one for one in rowless if not one.endswith(":")] == []
    assert [quote for quote in quotes if not any(one.startswith(quote) for one in told)] == []
    for quote, test in CLAIMS[name]:
        file, _, function = test.partition("::")
        if test not in ("advice", "command"):
            text = (ROOT / "tests" / file).read_text("utf-8")
            assert not function or f"def {function}(" in text, (quote, test)


@pytest.mark.parametrize("test", ELSEWHERE.values())
def test_what_runs_elsewhere_exists(test: str) -> None:
    file, _, function = test.partition("::")
    assert f"def {function}(" in (ROOT / "tests" / file).read_text("utf-8") or not function
