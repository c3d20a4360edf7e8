"""A reward, a reward with a state and an environment of a user's package, on the command line."""

import json
import pickletools
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from lit_efficient.__main__ import main
from lit_efficient.data.text.chat_tokenizer import CHATML
from tests.tasks.test_text_generation import writer

PACKAGE = """
from lit_efficient import Environment

def vowels(prompt: str, completion: str, row: dict, letters: str = "aeiou") -> float:
    return sum(letter in letters for letter in completion) / max(len(completion), 1)

class Length:
    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, prompt, completion, row, messages) -> float:
        assert messages[0]["content"] == row["prompt"]
        return -abs(len(completion) - self.most) / self.most

class Ask(Environment):
    turns = 2
    max_tokens = 32

    def __init__(self, question: str = "more?") -> None:
        self.question = question

    def step(self, messages):
        return [{"role": "user", "content": self.question}] if len(messages) < 3 else []

def one_argument(completion: str) -> float:
    return 1.0

def tool(a: int) -> int:
    return a
"""
MINE = {
    "trainer": {
        "max_steps": 4,
        "limit_val_batches": 0,
        "accelerator": "cpu",
        "default_root_dir": "runs/mine",
        "callbacks": [
            {"class_path": "ExactResume"},
            {
                "class_path": "ModelCheckpoint",
                "init_args": {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1},
            },
        ],
    },
    "model": {
        "init_args": {
            "model": {"name_or_path": "base"},
            "start_from": None,
            "rewards": [
                {"function": "own_kit.rewards.vowels", "arguments": {"letters": "aei"}},
                {"function": {"class_path": "own_kit.rewards.Length", "init_args": {"most": 5}}, "weight": 0.5},
            ],
            "rollout": {"samples": 2, "max_new_tokens": 8, "stop": ["a"]},
            "environment": {"class_path": "own_kit.rewards.Ask", "init_args": {"question": "again?"}},
            "warmup_steps": 0,
        }
    },
    "data": {"init_args": {"train": "rows.jsonl", "tokenizer": "base", "batch_size": 2, "val_fraction": 0.0}},
}
ALLOW = ["--allow-import", "own_kit"]


@pytest.fixture(autouse=True)
def _package(tmp_path, monkeypatch):
    (tmp_path / "own_kit").mkdir()
    (tmp_path / "own_kit" / "__init__.py").touch()
    (tmp_path / "own_kit" / "rewards.py").write_text(PACKAGE)
    (tmp_path / "own_kit" / "damaged.py").write_text("def (:\n")
    (tmp_path / "own_kit" / "unnamed.py").write_text("x = y\n")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(MINE))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the cat", "on") * 3))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_kit"]:
        del sys.modules[name]


def _fit(*words):
    return main(["fit", "-c", "llm/grpo", "-c", "mine.yaml", *words])


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_run_with_own_rewards_and_an_own_environment_resumes_from_its_folder(tmp_path):
    network, tokenizer = writer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    network.save_pretrained("base")
    tokenizer.save_pretrained("base")
    assert _fit(*ALLOW) == 0
    (run,) = Path("runs/mine").glob("2*")
    whole = torch.load(run / "last.ckpt", weights_only=True)
    half = torch.load(run / "step=2.ckpt", weights_only=True)
    assert [one["global_step"] for one in (half, whole)] == [2, 4]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    logged = [event for event in events if "train/reward" in json.dumps(event)]
    assert "train/reward/vowels" in json.dumps(logged)
    assert "train/reward/Length" in json.dumps(logged)
    # Functions are names in the config, and nothing of theirs is pickled.
    settings = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]
    assert settings["rewards"][0]["function"] == "own_kit.rewards.vowels"
    assert settings["rewards"][1]["function"] == MINE["model"]["init_args"]["rewards"][1]["function"]
    assert settings["environment"] == MINE["model"]["init_args"]["environment"]
    assert "own_kit" not in (run / "hparams.yaml").read_text()
    with zipfile.ZipFile(run / "step=2.ckpt") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        taken = [argument for code, argument, _ in pickletools.genops(archive.read(name)) if code.name == "GLOBAL"]
    assert {name.replace(".", " ").split()[0] for name in taken} <= {"torch", "collections"}
    (run / "last.ckpt").unlink()
    assert main(["fit", *ALLOW, "-c", f"{run}/config.yaml", "--ckpt_path", f"{run}/step=2.ckpt"]) == 0
    (other,) = {*Path("runs/mine").glob("2*")} - {run} or {run}
    resumed = torch.load(other / "last.ckpt", weights_only=True)
    for name, tensor in whole["state_dict"].items():
        assert torch.equal(tensor, resumed["state_dict"][name])
        assert not name.endswith("q_proj.weight") or not torch.equal(tensor, half["state_dict"][name])


REWARD = "model: {init_args: {rewards: [{%s}]}}"
ENVIRONMENT = "model: {init_args: {environment: {%s}}}"
FAULTS = {
    "not allowed": (REWARD % "function: own_kit.rewards.vowels", "--allow-import own_kit", []),
    "another package": (REWARD % "function: os.system", "importing 'os.system' is refused", ALLOW),
    "through a trusted one": (
        REWARD % "function: lit_efficient.tasks.rewards.tempfile.mkdtemp",
        "importing 'tempfile.mkdtemp' is refused",
        ALLOW,
    ),
    "a tool of another package": (
        ENVIRONMENT % "class_path: ToolEnvironment, init_args: {functions: [os.system]}",
        "importing 'os.system' is refused",
        ALLOW,
    ),
    "a misspelled function": (
        REWARD % "function: own_kit.rewards.vowel",
        "Reward.rewards.function: there is no 'vowel' in own_kit.rewards, did you mean 'vowels'?",
        ALLOW,
    ),
    "a misspelled module": (REWARD % "function: own_kit.reward.vowels", "there is no 'reward' in own_kit", ALLOW),
    "a module that is no Python": (
        REWARD % "function: own_kit.damaged.x",
        "invalid syntax (damaged.py, line 1)",
        ALLOW,
    ),
    "a module that raises": (REWARD % "function: own_kit.unnamed.x", "name 'y' is not defined", ALLOW),
    "no function": (REWARD % "function: 3", "3 is not allowed", ALLOW),
    "an argument that the function lacks": (
        REWARD % "function: own_kit.rewards.vowels, arguments: {letter: x}",
        "unexpected keyword argument 'letter'), got {'letter': 'x'}",
        ALLOW,
    ),
    "an argument of each sample": (
        REWARD % "function: own_kit.rewards.vowels, arguments: {row: x}",
        "arguments must be without 'row'",
        ALLOW,
    ),
    "a wrong signature": (
        REWARD % "function: own_kit.rewards.one_argument",
        "function must be a function of prompt, completion and row, got 'one_argument(completion: str) -> float'",
        ALLOW,
    ),
    "a class that lacks an argument": (
        REWARD % "function: own_kit.rewards.Length",
        "required and missing: most",
        ALLOW,
    ),
    "a misspelled key": (
        REWARD % "function: own_kit.rewards.vowels, wieght: 2",
        "no option 'wieght', did you mean 'weight'?",
        ALLOW,
    ),
    "a misspelled environment": (
        ENVIRONMENT % "class_path: own_kit.rewards.Asks",
        "there is no 'Asks' in own_kit.rewards, did you mean 'Ask'?",
        ALLOW,
    ),
    "no environment": (
        ENVIRONMENT % "class_path: own_kit.rewards.Length, init_args: {most: 3}",
        "own_kit.rewards.Length is not an Environment",
        ALLOW,
    ),
    "an argument that the environment lacks": (
        ENVIRONMENT % "class_path: own_kit.rewards.Ask, init_args: {questions: x}",
        "no option 'questions', did you mean 'question'?",
        ALLOW,
    ),
    "a tool without a description": (
        ENVIRONMENT % "class_path: ToolEnvironment, init_args: {functions: [own_kit.rewards.tool]}",
        "because it has no docstring!), got 'tool'",
        ALLOW,
    ),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_work_is_refused_before_any_work(fault, capsys):
    text, sentence, allowed = FAULTS[fault]
    Path("more.yaml").write_text(text)
    before = sorted(Path.cwd().rglob("*"))
    assert _fit("-c", "more.yaml", *allowed) == 2
    said = capsys.readouterr().err
    assert sentence in said[said.index("error: ") :]
    assert "Traceback" not in said
    assert [path for path in sorted(Path.cwd().rglob("*")) if "__pycache__" not in path.parts] == before
