"""Best of n: a model answers each prompt several times, and the best answers become training data.

    prompts -> n samples of each -> rewards -> the best sample, if it is good enough -> a file of rows -> batches

The file has one JSON object a line: ``messages``, or ``prompt`` and ``completion``, with the ``reward``. It is read by
`LanguageData`, ``datasets`` and TRL.

Saves: a loss for rewards: training on the file is ordinary fine-tuning
Costs: n generated answers to each prompt, once for each content and setting. One process of a node writes them
Source: https://arxiv.org/abs/2112.09332 (best of n), https://arxiv.org/abs/2304.06767 (training on the best)
"""

import functools
import inspect
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_efficient.data.language_data import LanguageData
from lit_efficient.data.prompt_data import has_conversations, read_prompts
from lit_efficient.data.text.arguments import LanguageChat
from lit_efficient.data.text.chat_tokenizer import of_transformers
from lit_efficient.data.text.mixture import MixtureSource
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_number, checks_types
from lit_efficient.files.cache import cache_folder, prepared_folder, read_manifest, seal
from lit_efficient.files.checkpoints import newest_in
from lit_efficient.files.file_hashes import broken_seal
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.surgery import own_draws
from lit_efficient.tasks.loading import load_hugging_face, load_language_model
from lit_efficient.tasks.reward_models import RewardModel, check_rewards, load_scorers, rewards_of
from lit_efficient.tasks.rewards import Reward
from lit_efficient.tasks.rollout import Rollout, write_answers
from lit_efficient.tasks.teacher import TeacherSource
from lit_efficient.tasks.text_generation import check_template

FORMAT = 1
FILE = "best.jsonl"
_AT_A_TIME = 16  # prompts
_SAID = 256  # prompts between two messages
_MOST_SENTENCES = 3  # warnings about rewards


@checks_types
@dataclass(frozen=True)
class BestOfN:
    """Choice of the best answers of a model by rewards.

    Empty answers, and answers with special tokens inside, are never chosen.

    Args:
        prompts: Prompts with what their rewards need, as ``train`` of `PromptData`.
        model: Model that answers: checkpoint of `LanguageModeling`, name or folder of a Hugging Face model, or a
            `CausalLMConfig`.
        rewards: Rewards, summed by their weights: functions (`Reward`) and networks (`RewardModel`).
        rollout: Generation. ``samples`` is n.
        least_reward: Reward that the best answer must have at least. Prompts without such an answer are left out. null:
            any.
        keep_truncated: Choose also answers that reach ``max_new_tokens``. They teach a model to stop anywhere.
    """

    prompts: str
    model: str | CausalLMConfig
    rewards: list[Reward | RewardModel]
    rollout: Rollout = field(default_factory=Rollout)
    least_reward: float | None = None
    keep_truncated: bool = False

    def __post_init__(self) -> None:
        check_rewards("BestOfN", self.rewards)
        check_number("BestOfN", "least_reward", self.least_reward, null=True)
        self.source()

    def source(self) -> TeacherSource:
        """Return where the model comes from."""
        return TeacherSource(self.model, "BestOfN: model")

    def made_from(self, rows: Sequence[Any]) -> dict[str, Any]:
        """Return all that the chosen answers to the prompts of ``rows`` depend on, as plain data."""
        settings = {name: getattr(self, name) for name in ("least_reward", "keep_truncated")}
        return settings | {
            "rows": json.loads(json.dumps(rows, default=str)),
            "model": self.source().digest(),
            "rewards": [_described(reward) for reward in self.rewards],
            "rollout": asdict(replace(self.rollout, stop=list(self.rollout.stop))),
        }


def _described(reward: Reward | RewardModel) -> list[Any]:
    """Return a reward as plain data: its settings, with the file of its function or the hash of its model."""
    if isinstance(reward, RewardModel):
        model = reward.model
        if isinstance(model, str) and Path(model).expanduser().exists():
            model = str(newest_in(model))
        return [TeacherSource(model).digest(), reward.weight, reward.name]
    arguments = json.loads(json.dumps(reward.arguments, default=str))
    return [reward.name, _code(reward.function), reward.weight, arguments, reward.seconds]


def _code(function: Any) -> list[str]:
    """Return the whole file of a function or an object, because it may call others there, and its own values."""
    if isinstance(function, functools.partial):
        return [*_code(function.func), repr((function.args, function.keywords))]
    found = [str(getattr(function, "__module__", "")), repr(getattr(function, "__dict__", {}))]
    places: list[Any] = [inspect.getmodule(function), function]  # the module of a notebook has no file
    for place in places:
        with suppress(OSError, TypeError):
            found.append(inspect.getsource(place))
    return found


class BestOfNData(LanguageData):
    """`LanguageData` of the best of several answers to each prompt, which a model writes before training.

    The file with the answers lies in the cache, and its path is logged. It is found by the hash of the model's weights,
    the prompts, the files of reward functions (and not of what these import), and all settings. An interrupted run
    continues it. The draws depend on ``rollout.seed``, the prompt and the sample only.

    Args:
        answers: Choice of the answers.
        tokenizer: As in `LanguageData`.
        max_length: As in `LanguageData`.
        pack: As in `LanguageData`.
        batch_size: As in `LanguageData`.
        val_batch_size: As in `LanguageData`.
        val_fraction: As in `LanguageData`.
        seed: As in `LanguageData`.
        cache_dir: Folder of the caches of answers and tokens. null: ``$LIT_EFFICIENT_CACHE``, or
            ``~/.cache/lit_efficient``.
        chat: As in `LanguageData`.
    """

    def __init__(
        self,
        *,
        answers: BestOfN,
        tokenizer: str,
        max_length: int = 1024,
        pack: bool = True,
        batch_size: int = 4,
        val_batch_size: int | None = None,
        val_fraction: float = 0.05,
        seed: int = 0,
        cache_dir: str | None = None,
        chat: LanguageChat = LanguageChat(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(
            train=FILE,  # replaced by its path before it is read
            tokenizer=tokenizer,
            max_length=max_length,
            pack=pack,
            batch_size=batch_size,
            val_batch_size=val_batch_size,
            val_fraction=val_fraction,
            seed=seed,
            cache_dir=cache_dir,
            chat=chat,
        )
        self.answers = answers

    def prepare_data(self) -> None:
        """Write the answers, unless they are in the cache, and tokenise them."""
        self.train = [MixtureSource(str(self.write()))]
        super().prepare_data()

    def setup(self, stage: str | None = None) -> None:
        if self.train[0].path == FILE:  # another process has written the file
            self.train = [MixtureSource(str(self.write()))]
        super().setup(stage)

    def write(self) -> Path:
        """Write the best answers, unless they are in the cache. Return the path of the file."""
        rows = read_prompts(self.answers.prompts)
        made_from = self.answers.made_from(rows)
        folder = cache_folder(self.cache_dir, "best_of_n", [FORMAT, made_from])
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device

        def build(empty: Path) -> None:
            partial = folder.with_name(f"{folder.name}.partial")
            write_best(self.answers, rows, partial, device)
            found = [json.loads(line) for line in partial.read_text("utf-8").splitlines()]
            figures = _figures(self.answers, found)
            kept = [json.dumps(one["row"], ensure_ascii=False) + "\n" for one in found if one["row"]]
            (empty / FILE).write_text("".join(kept), "utf-8")
            seal(empty, FORMAT, {"figures": figures})
            partial.unlink()

        prepared_folder(folder, build, lambda path: broken_seal(path, FORMAT, thorough=True))
        rank_zero_info(f"BestOfNData: {folder / FILE}: {read_manifest(folder)['figures']}")
        return folder / FILE


def write_best(spec: BestOfN, rows: Sequence[Any], file: Path, device: torch.device) -> None:
    """Append a line of JSON for each prompt that has none yet: the row that is kept or null, and rewards.

    Args:
        spec: Choice of the answers.
        rows: Rows with ``prompt``.
        file: File of the lines. After an interruption it holds those of the first prompts.
        device: Device of the models.
    """
    done = _whole_lines(file)
    if done == len(rows):
        return
    source = spec.source()
    with own_draws():
        if source.checkpoint is None:
            task = load_hugging_face(source.config)
        else:
            task, _ = load_language_model(source.checkpoint)
    task.to(device)
    in_turns = spec.rollout.chat or has_conversations(rows)
    if in_turns:
        check_template(task.tokenizer, "BestOfN: chat")
    scorers = load_scorers(spec.rewards, in_turns)
    said = 0
    with open(file, "ab") as out:
        # Batches begin at the same prompts as in an uninterrupted run, because other rows affect rounding.
        for first in range(done - done % _AT_A_TIME, len(rows), _AT_A_TIME):
            if first % _SAID == 0:
                rank_zero_info(f"BestOfN: {first:,} of {len(rows):,} prompts are answered")
            found, sentences = _best(spec, task, scorers, rows[first : first + _AT_A_TIME], first)
            for sentence in sentences[: _MOST_SENTENCES - said]:
                said += 1
                rank_zero_warn(f"BestOfN: a sample is left out: {sentence}")
            lines = [json.dumps(one) + "\n" for one in found]
            out.write("".join(lines[max(0, done - first) :]).encode())
            out.flush()
            os.fsync(out.fileno())


def _whole_lines(file: Path) -> int:
    """Return the number of lines of a file, without an incomplete last line, which is removed."""
    if not file.exists():
        return 0
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    os.truncate(file, whole)
    return content.count(b"\n")


def _best(
    spec: BestOfN, task: Any, scorers: Any, rows: Sequence[Any], first: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what is kept for some prompts, of which the first has the number ``first``, and sentences of failures."""
    how = spec.rollout
    numbers = [number for number in range(len(rows)) for _ in range(how.samples)]
    seeds = [mix_seed(how.seed, first + place, number) for place in range(len(rows)) for number in range(how.samples)]
    prompts = [rows[number]["prompt"] for number in numbers]
    written = write_answers(task, prompts, seeds, how)
    asked = [rows[number] for number in numbers]
    seed = mix_seed(how.seed, first)
    parts, sentences = rewards_of(spec.rewards, scorers, prompts, written.texts, asked, how.chat, task.device, seed)
    rewards = parts.sum(1).tolist()
    tokenizer = of_transformers(task.tokenizer)
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}
    found = []
    for number, row in enumerate(rows):
        rewarded = []
        choice = []
        for i in range(number * how.samples, (number + 1) * how.samples):
            sample = written.samples[i]
            tokens = sample.tokens[:-1] if sample.end == "stop" else sample.tokens
            if math.isfinite(rewards[i]):
                rewarded.append(rewards[i])
                ended = spec.keep_truncated or sample.end != "length"
                if ended and written.texts[i].strip() and special.isdisjoint(tokens):
                    choice.append(i)
        best = max(choice, key=lambda i: rewards[i], default=None)  # the first of equal ones
        kept = None
        if best is not None and (spec.least_reward is None or rewards[best] >= spec.least_reward):
            kept = _row(row["prompt"], written.texts[best], how.chat) | {"reward": rewards[best]}
        found.append({"row": kept, "rewards": rewarded, "choice": len(choice)})
    return found, sentences


def _row(prompt: Any, answer: str, chat: bool) -> dict[str, Any]:
    if isinstance(prompt, str) and not chat:
        return {"prompt": prompt, "completion": answer}
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"messages": [*turns, {"role": "assistant", "content": answer}]}


def _figures(spec: BestOfN, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return numbers of prompts, and mean rewards.

    Raises:
        ConfigurationError: If no answer is kept.
    """
    kept = [one["row"]["reward"] for one in found if one["row"]]
    rewards = [reward for one in found for reward in one["rewards"]]
    if not kept:
        raise ConfigurationError(
            f"BestOfN: no answer is kept. Of {len(found) * spec.rollout.samples} samples {len(rewards)} have a reward, "
            f"at most {max(rewards, default=None)}, and {sum(one['choice'] for one in found)} may be chosen. Change "
            f"least_reward ({spec.least_reward}), keep_truncated ({spec.keep_truncated}) or rollout.max_new_tokens "
            f"({spec.rollout.max_new_tokens})"
        )
    means = {"kept_reward": sum(kept) / len(kept), "reward": sum(rewards) / len(rewards)}
    return {"prompts": len(found), "kept": len(kept)} | {name: round(value, 6) for name, value in means.items()}
