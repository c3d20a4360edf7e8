"""Tasks of EleutherAI's lm-eval on a network in memory.

A task is a name, such as ``arc_easy``, whose data is downloaded, or a YAML file of one's own. A YAML file may name
Python functions in its folder, which are run.

Source: https://github.com/EleutherAI/lm-evaluation-harness.
"""

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_efficient.errors import ConfigurationError, check_list, check_number, listed
from lit_efficient.models.probes.modes import evaluating

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

    def run(self, owner: str, network: Any, tokenizer: Any, errors: bool = True) -> dict[str, Any]:
        """Return the results of lm-eval for a network.

        The network keeps its mode, and the random states of the process do not change.

        Args:
            owner: Class or command, for messages.
            network: Causal language model of transformers.
            tokenizer: Its tokenizer, of transformers or the tokenizers library.
            errors: Compute standard errors, too.

        Raises:
            ConfigurationError: If a task is unknown, its data cannot be read, or the network is not of transformers.
        """
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

        manager, tasks = self.prepared(owner, network)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        with evaluating(network), _random_states():
            model = HFLM(pretrained=network, tokenizer=tokenizer, batch_size=self.batch_size)
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
            except (OSError, ValueError, KeyError) as error:
                raise ConfigurationError(f"{owner}: lm-eval cannot run the tasks: {_first_line(error)}") from error
        assert found is not None  # only processes after the first get nothing, and each of ours is a first one
        return found

    def prepared(self, owner: str, network: Any) -> tuple[Any, list[str]]:
        """Return lm-eval's manager of tasks and the names of the tasks. The folder of a YAML file is searched, too.

        Raises:
            ConfigurationError: If a task is unknown, or the network is not of transformers.
        """
        from lm_eval.tasks import TaskManager
        from transformers import PreTrainedModel

        if not isinstance(network, PreTrainedModel):
            raise ConfigurationError(
                f"{owner}: lm-eval runs causal models of transformers, and this is a {type(network).__name__}"
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
