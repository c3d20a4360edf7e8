"""Best of n: the kept answers are those of a slow loop, and training on them is training on the file."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient import (
    BestOfN,
    BestOfNData,
    CausalLMConfig,
    ConfigurationError,
    GPTConfig,
    LanguageData,
    LanguageModeling,
    Reward,
    Rollout,
)
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.models.generation.batched import generate
from lit_efficient.tasks import best_of_n_data
from lit_efficient.tasks.text_generation import as_chat
from tests import support
from tests.support import assert_equal, weights
from tests.tasks.test_text_generation import chat_writer, writer

trainer = partial(support.trainer, max_epochs=-1, max_steps=3, limit_val_batches=0)
ROLLOUT = Rollout(samples=5, max_new_tokens=12, seed=3)


def letters(prompt: str, completion: str, row: Any) -> float:
    """Share of the letters a to m, and nothing for a prompt with a 7."""
    if "7" in prompt:
        raise ValueError("a seven")
    return sum(letter in "abcdefghijklm" for letter in completion) / max(len(completion), 1)


def short(prompt: str, completion: str, row: Any) -> float:
    return -len(completion) * row["scale"]


REWARDS = [Reward(letters), Reward(short, 0.01)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("best")
    network, tokenizer = chat_writer()
    network.generation_config.eos_token_id = [*range(1, 40)]  # so that some samples end
    network.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = [{"prompt": f"the cat {number}", "scale": number % 3} for number in range(20)]
    rows[3]["prompt"] = [
        {"role": "user", "content": "on"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "and"},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _data(home: Path, cache: Path, chat: bool = True, **options: Any) -> BestOfNData:
    given: dict[str, Any] = {"prompts": str(home / "prompts.jsonl"), "model": str(home / "base"), "rewards": REWARDS}
    given["rollout"] = Rollout(samples=5, max_new_tokens=12, seed=3, chat=chat)
    return BestOfNData(answers=BestOfN(**given | options), **_shared(home, cache))


def _shared(home: Path, cache: Path) -> dict[str, Any]:
    given = {"tokenizer": str(home / "base"), "max_length": 64, "batch_size": 2, "val_fraction": 0.0}
    return {**given, "cache_dir": str(cache)}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore:BestOfN. a sample is left out")
@pytest.mark.parametrize(("chat", "keep", "least"), [(True, False, None), (False, True, 0.3)])
def test_the_kept_answers_are_those_of_a_slow_loop(
    home: Path, tmp_path: Path, chat: bool, keep: bool, least: float | None
) -> None:
    found = _rows(_data(home, tmp_path, chat, keep_truncated=keep, least_reward=least).write())
    network, tokenizer = writer()
    tokenizer = type(tokenizer).from_pretrained(home / "base")
    stop = {*range(1, 40)}
    expected = []
    truncated = 0
    for number, row in enumerate(_rows(home / "prompts.jsonl")):
        prompt = row["prompt"]
        text = as_chat(tokenizer, prompt) if chat or not isinstance(prompt, str) else prompt
        ids = tokenizer.encode(text, add_special_tokens=False)
        best: Any = None
        for sample in range(5):
            seed = mix_seed(3, number, sample)
            (one,) = generate(network, [ids], 12, sampling=ROLLOUT.sampling, seeds=[seed], stop=stop)
            truncated += one.end == "length"
            tokens = one.tokens[:-1] if one.end == "stop" else one.tokens
            answer = tokenizer.decode(tokens)
            if "7" in str(prompt) or (one.end == "length" and not keep) or not answer.strip() or min(tokens) < 2:
                continue
            asked = prompt if isinstance(prompt, str) else "and"
            reward = letters(asked, answer, row) + 0.01 * short(asked, answer, row)
            if best is None or reward > best[0]:
                best = (reward, answer)
        if best is None or (least is not None and best[0] < least):
            continue
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        kept: dict[str, Any] = {"messages": [*turns, {"role": "assistant", "content": best[1]}]}
        if isinstance(prompt, str) and not chat:
            kept = {"prompt": prompt, "completion": best[1]}
        expected.append(kept | {"reward": pytest.approx(best[0], abs=1e-6)})
    assert 0 < truncated < 100
    assert 3 < len(expected) < 19
    assert found == expected


@pytest.mark.filterwarnings("ignore:BestOfN. a sample is left out")
def test_training_is_that_on_the_file_which_datasets_reads_too(home: Path, tmp_path: Path) -> None:
    data = _data(home, tmp_path)
    model = GPTConfig(dim=16, depth=1, num_heads=2, max_length=64)
    torch.manual_seed(0)
    one = LanguageModeling(model, warmup_steps=0)
    trainer(default_root_dir=tmp_path).fit(one, datamodule=data)
    path = data.write()
    torch.manual_seed(0)
    by_hand = LanguageData(train=str(path), **_shared(home, tmp_path))
    other = LanguageModeling(model, warmup_steps=0)
    trainer(default_root_dir=tmp_path).fit(other, datamodule=by_hand)
    assert_equal(weights(one), weights(other))
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "datasets"))
    assert loaded.to_list() == _rows(path)


@pytest.mark.filterwarnings("ignore:BestOfN. a sample is left out")
def test_trl_reads_the_file_as_conversations(home: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    path = _data(home, tmp_path).write()
    loaded = _rows(path)
    assert trl.is_conversational(loaded[0])
    _, tokenizer = writer()
    tokenizer = type(tokenizer).from_pretrained(home / "base")
    rendered = trl.apply_chat_template({"messages": loaded[0]["messages"]}, tokenizer)["text"]
    assert rendered == tokenizer.apply_chat_template(_rows(path)[0]["messages"], tokenize=False)


@pytest.mark.filterwarnings("ignore:BestOfN. a sample is left out")
def test_the_file_is_written_once_and_an_interrupted_run_continues_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _data(home, tmp_path / "whole").write()
    monkeypatch.setattr(best_of_n_data, "_AT_A_TIME", 16)
    inner = best_of_n_data._best

    def stops(*arguments: Any) -> Any:
        if arguments[-1] == 16:
            raise KeyboardInterrupt
        return inner(*arguments)

    monkeypatch.setattr(best_of_n_data, "_best", stops)
    with pytest.raises(KeyboardInterrupt):
        _data(home, tmp_path / "parts").write()
    (partial_file,) = (tmp_path / "parts" / "best_of_n").glob("*.partial")
    with open(partial_file, "ab") as file:
        file.write(b'{"row": nu')  # killed while it wrote
    monkeypatch.setattr(best_of_n_data, "_best", lambda *arguments: inner(*arguments) if arguments[-1] == 16 else None)
    again = _data(home, tmp_path / "parts").write()
    assert again.read_bytes() == path.read_bytes()
    monkeypatch.setattr(best_of_n_data, "write_best", None)  # what is there is not written again
    assert _data(home, tmp_path / "parts").write() == again
    other = tmp_path / "base"
    shutil.copytree(home / "base", other)  # the same files in another folder
    assert _data(home, tmp_path / "parts", model=str(other)).write() == again


@pytest.mark.parametrize(
    "options",
    [
        {"rewards": REWARDS[:1]},
        {"rewards": [REWARDS[0], Reward(short, 0.02)]},
        {"rollout": Rollout(samples=5, max_new_tokens=12, seed=4, chat=True)},
        {"least_reward": 0.1},
        {"keep_truncated": True},
        {"model": "changed"},
        {"prompts": "changed"},
    ],
)
def test_each_setting_and_each_content_has_its_own_file(home: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    if options.get("model"):
        network, tokenizer = writer()
        network.lm_head.weight.data[0, 0] += 1e-3
        network.save_pretrained(tmp_path / "other")
        tokenizer.save_pretrained(tmp_path / "other")
        options = {"model": str(tmp_path / "other")}
    if options.get("prompts"):
        (tmp_path / "prompts.jsonl").write_text((home / "prompts.jsonl").read_text().replace("19", "20"))
        options = {"prompts": str(tmp_path / "prompts.jsonl")}
    rows = best_of_n_data.read_prompts(options.get("prompts", str(home / "prompts.jsonl")))
    base = _data(home, tmp_path).answers
    before = base.made_from(best_of_n_data.read_prompts(base.prompts))
    assert before == json.loads(json.dumps(before))
    assert _data(home, tmp_path, **options).answers.made_from(rows) != before


def test_a_changed_template_and_a_changed_module_of_a_reward_have_their_own_files(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_from(reward: Any) -> Any:
        return BestOfN(str(home / "prompts.jsonl"), str(tmp_path / "base"), [Reward(reward)]).made_from([])

    shutil.copytree(home / "base", tmp_path / "base")
    module = tmp_path / "own_rewards_of_best.py"
    module.write_text(
        "import functools\n\ndef scaled(prompt, completion, row, k=1):\n    return k * factor()\n\n"
        "def factor():\n    return 1\n\ntwice = functools.partial(scaled, k=2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own: Any = importlib.import_module("own_rewards_of_best")
    before = [made_from(own.scaled), made_from(own.twice)]
    assert before == [made_from(own.scaled), made_from(own.twice)]
    assert made_from(functools.partial(own.scaled, k=3)) != before[1]
    module.write_text(module.read_text().replace("return 1", "return -1"))
    importlib.invalidate_caches()
    assert made_from(own.scaled) != before[0]
    assert made_from(own.twice) != before[1]
    before = [made_from(letters)]
    template = tmp_path / "base" / "chat_template.jinja"
    template.write_text(template.read_text().replace("a:", "b:"))
    assert made_from(letters) != before[0]


def tenths(prompt: str, completion: str, row: Any) -> float:
    return 0.7


def test_a_reward_that_is_the_least_one_is_enough(home: Path, tmp_path: Path) -> None:
    """0.7 in float32 is below 0.7."""
    found = _rows(_data(home, tmp_path, rewards=[Reward(tenths)], least_reward=0.7, keep_truncated=True).write())
    assert {row["reward"] for row in found} == {0.7}


def test_what_cannot_be_written_is_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="BestOfN: rewards must be a list of at least one Reward"):
        _data(home, tmp_path, rewards=[])
    with pytest.raises(ConfigurationError, match="rewards must be functions or models with different names"):
        _data(home, tmp_path, rewards=[*REWARDS, REWARDS[0]])
    with pytest.raises(ConfigurationError, match="BestOfN: model must have trained weights"):
        _data(home, tmp_path, model=CausalLMConfig(config_fields={"model_type": "llama"}))
    with pytest.raises(ConfigurationError, match=r"BestOfN: model: there is no file a/b.ckpt"):
        _data(home, tmp_path, model="a/b.ckpt").write()
    said = pytest.warns(UserWarning, match=r"BestOfN: a sample is left out: letters raised ValueError: a seven \(")
    with said, pytest.raises(ConfigurationError, match=r"is kept. Of 100 samples 90 have .*least_reward \(9.0\)"):
        _data(home, tmp_path, least_reward=9.0).write()
