"""Tasks of EleutherAI's lm-eval on a network in memory: a causal model of transformers or our GPT.

A task is a name, such as ``arc_easy``, whose data is downloaded, or a YAML file of one's own. A YAML file may name
Python functions in its folder, which are run.

Source: https://github.com/EleutherAI/lm-evaluation-harness.
"""

import os
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, check_list, check_number, listed
from lit_efficient.internals.hugging_face import stopping_at
from lit_efficient.models.generation.batched import generate
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.surgery import unmixed

_DRAWS = 100_000  # lm-eval's default for standard errors
_NAME = re.compile(r"^task:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)


@dataclass(frozen=True)
class Harness:
    """Tasks of lm-eval, and how they are run.

    Args:
        tasks: Names of tasks or groups, or YAML files of tasks.
        include_path: Folder with further tasks as YAML files.
        limit: Number of rows of each task; None takes all.
        num_fewshot: Number of examples before each question; None takes that of the task.
        batch_size: Number of rows in a batch.
        chat: Format questions by the tokenizer's chat template.
    """

    tasks: Sequence[str]
    include_path: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 8
    chat: bool = False

    def check(self, owner: str) -> None:
        """Raise ConfigurationError for an argument out of range. ``owner`` is the class or command that takes them."""
        check_list(owner, "tasks", self.tasks, "a list of at least one task")
        check_number(owner, "batch_size", self.batch_size, least=1, whole=True)
        for name, least in (("limit", 1), ("num_fewshot", 0)):
            if getattr(self, name) is not None:
                check_number(owner, name, getattr(self, name), least=least, whole=True)
        if self.include_path is not None and not Path(self.include_path).expanduser().is_dir():
            raise ConfigurationError(f"{owner}: include_path: there is no folder {self.include_path}")

    def run(
        self, owner: str, network: Any, tokenizer: Any, stop: Sequence[int] = (), errors: bool = True
    ) -> dict[str, Any]:
        """Return the results of lm-eval for a network.

        The network keeps its mode, and the random states of the process do not change.

        Args:
            owner: Class or command, for messages.
            network: Causal language model of transformers, or our GPT.
            tokenizer: Its tokenizer, of transformers.
            stop: Ids of tokens that end a text, besides those of the tokenizer and the network.
            errors: Compute standard errors, too.

        Raises:
            ConfigurationError: If a task is unknown, its data cannot be read, or the network is of another kind.
        """
        from lm_eval import simple_evaluate

        manager, tasks = self.prepared(owner, network)
        with evaluating(network), _random_states(), _first_process(), _lm(network, tokenizer, stop, self) as model:
            try:
                found = simple_evaluate(
                    model=model,
                    tasks=tasks,
                    num_fewshot=self.num_fewshot,
                    limit=self.limit,
                    apply_chat_template=self.chat,
                    task_manager=manager,
                    log_samples=False,
                    bootstrap_iters=_DRAWS if errors else 0,
                )
            except (OSError, ValueError, KeyError, AssertionError) as error:  # lm-eval asserts its arguments
                raise ConfigurationError(f"{owner}: lm-eval cannot run the tasks: {_first_line(error)}") from error
        assert found is not None
        return found

    def prepared(self, owner: str, network: Any) -> tuple[Any, list[str]]:
        """Return lm-eval's manager of tasks and the names of the tasks. The folder of a YAML file is searched, too.

        Raises:
            ConfigurationError: If a task is unknown, or the network does not predict tokens.
        """
        from lm_eval.tasks import TaskManager
        from transformers import PreTrainedModel

        writes = isinstance(network, PreTrainedModel) and network.can_generate()
        if not writes and not (isinstance(network, GPT) and isinstance(network.head, nn.Linear)):
            raise ConfigurationError(
                f"{owner}: lm-eval runs causal models of transformers and our GPT, and this is a "
                f"{unmixed(network).__name__}{' without a head for tokens' if isinstance(network, GPT) else ''}"
            )
        folders = [] if self.include_path is None else [str(Path(self.include_path).expanduser())]
        names: list[str] = []
        for task in self.tasks:
            if Path(task).suffix not in (".yaml", ".yml"):
                names.append(task)
                continue
            path = Path(task).expanduser()
            if not path.is_file():
                raise ConfigurationError(f"{owner}: tasks: there is no file {task}")
            named = _NAME.search(path.read_text("utf-8"))
            if named is None:
                raise ConfigurationError(f"{owner}: tasks: {task} has no line `task: NAME`")
            names.append(named[1])
            folders.append(str(path.parent))
        if folders:  # lm-eval's own thousands of files are read only if they are needed
            manager = TaskManager(include_path=folders, include_defaults=False)
            if all(manager.match_tasks([name]) for name in names):
                return manager, names
        manager = TaskManager(include_path=folders or None)
        for name in names:
            if not manager.match_tasks([name]):
                near = listed([known for known in manager.all_tasks if name.lower() in known.lower()])
                raise ConfigurationError(
                    f"{owner}: tasks: lm-eval has no task {name!r}{f'; similar: {near}' if near else ''}. "
                    "`lm-eval ls tasks` lists them, and include_path adds your own"
                )
        return manager, names


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Return the metrics in the results of lm-eval as ``TASK/METRIC``, without standard errors."""
    flat: dict[str, float] = {}
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
                flat[f"{task}/{metric}" if kind == "none" else f"{task}/{metric}_{kind}"] = float(value)
    return flat


def table(found: dict[str, Any]) -> str:
    """Return the results of lm-eval as its table."""
    from lm_eval.utils import make_table

    return str(make_table(found)).rstrip("\n")


@contextmanager
def _lm(network: Any, tokenizer: Any, stop: Sequence[int], how: Harness) -> Iterator[Any]:
    """Yield a network as a model of lm-eval, which stops at the ids ``stop``, too."""
    from lm_eval.models.huggingface import HFLM

    if isinstance(network, GPT):
        causal = _Causal(network, tokenizer, stop)
        yield HFLM(causal, tokenizer=tokenizer, batch_size=how.batch_size, max_length=network.config.max_length)
        return
    settings = network.generation_config
    network.generation_config = stopping_at(settings, stop)
    try:
        yield HFLM(network, tokenizer=tokenizer, batch_size=how.batch_size)
    finally:
        network.generation_config = settings


class _Causal(nn.Module):
    """Our GPT with the attributes and methods of a causal model of transformers that lm-eval uses."""

    def __init__(self, network: GPT, tokenizer: Any, stop: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        self.config = network.config
        self.tokenizer = tokenizer
        self.stop = {*stop, tokenizer.eos_token_id} - {None}

    @property
    def device(self) -> torch.device:
        return self.network.embedding.weight.device

    def tie_weights(self) -> None:
        """Do nothing: weights of the network are tied when it is built."""

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.network(input_ids))

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        max_length: int,
        stopping_criteria: Any,
        pad_token_id: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        use_cache: bool = True,
        **settings: Any,
    ) -> Tensor:
        """Continue prompts ``[B, T]``, padded on the left, up to an end of the text or ``max_length`` tokens."""
        unknown = settings.keys() - {"top_p", "top_k", "min_p", "repetition_penalty"}
        if unknown:
            raise ValueError(f"our GPT generates without {sorted(unknown)[0]!r} (generation_kwargs of the task)")
        rows = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask)]
        seeds = torch.randint(2**31, (len(rows),), device="cpu").tolist()
        endings = [criterion.sequence for criterion in stopping_criteria]
        samples = generate(
            self.network,
            rows,
            max_length - input_ids.shape[1],
            sampling=Sampling(**{"top_p": 1.0, **settings, "temperature": temperature if do_sample else 0.0}),
            seeds=seeds,
            stop=self.stop,
            written=lambda _, ids: any(ending in self.tokenizer.decode(ids) for ending in endings),
        )
        new = nn.utils.rnn.pad_sequence([torch.tensor(one.tokens) for one in samples], True, pad_token_id)
        return torch.cat((input_ids, new.to(input_ids)), 1)


@contextmanager
def _first_process() -> Iterator[None]:
    """Hide the number of this process, because lm-eval returns results in the first one only."""
    rank = os.environ.pop("LOCAL_RANK", None)
    try:
        yield
    finally:
        if rank is not None:
            os.environ["LOCAL_RANK"] = rank


@contextmanager
def _random_states() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch, which lm-eval seeds."""
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
