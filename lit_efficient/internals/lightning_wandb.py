"""A WandbLogger whose run begins late, and which uploads each checkpoint once.

Lightning begins the run of W&B before anything is checked, so a refused run would leave an empty one. Private
attributes in use, of WandbLogger: ``_experiment``, ``_id``, ``_wandb_init``, ``_checkpoint_name``,
``_logged_model_time``, ``_scan_and_log_checkpoints``; and ``_scan_checkpoints``. Checked with lightning 2.6.6 and wandb
0.31.
"""

import functools
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.logger import _convert_params
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.utilities import _scan_checkpoints
from lightning.pytorch.utilities.rank_zero import rank_zero_only

_SHOWN = {"name", "notes", "tags", "config", "group", "job_type"}  # arguments of the run that its page shows


class LateWandbLogger(WandbLogger):
    """A WandbLogger whose run begins when it is used for more than its config and summary, or by :meth:`begin`."""

    _begun: bool
    _waiting: list[Callable[[Any], object]]  # what is done with the run as soon as it begins
    _config: dict[str, Any]
    _uploaded: set[tuple[int, int]]
    _kind: type[WandbLogger]  # its class before

    def __reduce__(self) -> Any:
        self.begin()  # processes that are spawned attach to the run, as with Lightning's own
        return _blank, (self._kind,), self.__getstate__()

    @property
    def experiment(self) -> Any:
        """The run; before it has begun, an object that begins it when it is used."""
        if self._begun or rank_zero_only.rank != 0:  # type: ignore[attr-defined]  # of a function
            return super().experiment
        return _Unbegun(self)

    @property
    def has_begun(self) -> bool:
        return self._begun

    @property
    def version(self) -> str | None:
        if self._experiment:
            return self._experiment.id
        return self._id

    def begin(self) -> Any:
        """Begin the run, if it has not begun, and return it."""
        if not self._begun:
            self._begun = True
            waiting = self._waiting
            self._waiting = []
            for act in waiting:
                act(self.experiment)
        return self.experiment

    def later(self, act: Callable[[Any], object]) -> None:
        """Call a function with the run, as soon as it has begun."""
        if self._begun:
            act(self.experiment)
        else:
            self._waiting.append(act)

    @rank_zero_only
    def log_config(self, config: dict[str, Any]) -> None:
        """Record the config of a command line. Hyper-parameters of the same names are recorded below ``hparams``."""
        self._config = config
        self.later(lambda run: run.config.update(config, allow_val_change=True))

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        given = dict(_convert_params(params))
        same = {name: given.pop(name) for name in list(given) if name in self._config}
        if same:
            given["hparams"] = same
        super().log_hyperparams(given)

    def _scan_and_log_checkpoints(self, checkpoint_callback: Any) -> None:
        """Upload new checkpoints. A file with two names, as the best and the last one, is uploaded once."""
        import wandb

        files: dict[tuple[int, int], tuple[str, Any]] = {}
        aliases: dict[tuple[int, int], list[str]] = {}
        for time, path, score, _ in _scan_checkpoints(checkpoint_callback, self._logged_model_time):
            self._logged_model_time[path] = time
            state = os.stat(path)
            key = (state.st_ino, state.st_mtime_ns)
            files[key] = (path, score)
            aliases.setdefault(key, ["latest"]).append(alias_of(path))
        best = checkpoint_callback.best_model_path
        last = checkpoint_callback.last_model_path
        for key, (path, score) in files.items():
            if key in self._uploaded:
                continue
            self._uploaded.add(key)
            name = self._checkpoint_name or f"model-{self.experiment.id}"
            metadata = {"score": float(score) if score is not None else None, "file": Path(last or path).name}
            metadata["monitor"] = checkpoint_callback.monitor
            artifact = wandb.Artifact(name=name, type="model", metadata=metadata)
            if os.path.isdir(path):
                artifact.add_dir(path, name="model.ckpt")
            else:
                artifact.add_file(path, name="model.ckpt", policy=self.add_file_policy)
            if best and os.path.exists(best) and os.path.samefile(path, best):
                aliases[key].append("best")
            self.experiment.log_artifact(artifact, aliases=list(dict.fromkeys(aliases[key])))


def alias_of(path: str | os.PathLike[str]) -> str:
    """Return an alias for the artifact of a checkpoint: the name of its file, without ``/`` and ``:``."""
    return Path(path).stem.translate(str.maketrans("/:", "__"))


class _Unbegun:
    """Stands for a run that has not begun. Updates of its config and summary wait; any other use begins it."""

    def __init__(self, logger: LateWandbLogger) -> None:
        vars(self)["logger"] = logger

    def __getattr__(self, name: str) -> Any:
        if name in ("config", "summary"):
            return _Waiting(self.logger, name)
        return getattr(self.logger.begin(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.logger.begin(), name, value)


class _Waiting:
    """Stands for the config or the summary of a run that has not begun."""

    def __init__(self, logger: LateWandbLogger, part: str) -> None:
        self.logger = logger
        self._part = part

    def update(self, values: Mapping[str, object], **options: object) -> None:
        kept = dict(values)
        self.logger.later(lambda run: getattr(run, self._part).update(kept, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.logger.begin(), self._part), name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self.logger.begin(), self._part)[name]

    def __setitem__(self, name: str, value: object) -> None:
        self.update({name: value})


@functools.cache
def _late(kind: type[WandbLogger]) -> type[LateWandbLogger]:
    """Return a subclass of ``kind`` that begins late."""
    if kind is WandbLogger:
        return LateWandbLogger
    return type(kind.__name__, (LateWandbLogger, kind), {})


def _blank(kind: type[WandbLogger]) -> LateWandbLogger:
    return object.__new__(_late(kind))


def begin_late(logger: WandbLogger, masked: Callable[[Any], Any]) -> None:
    """Let a logger begin its run late, in place, under an id that is known at once.

    A run that has begun goes on: its config and its checkpoints are recorded in the same way.

    Args:
        logger: The logger.
        masked: Function that returns a value without secrets. It is called with the arguments that the run's page
            shows.
    """
    import wandb

    if isinstance(logger, LateWandbLogger):
        return
    late: Any = logger
    late._kind = type(logger)
    late.__class__ = _late(late._kind)
    late._begun = late._experiment is not None or wandb.run is not None
    late._waiting = []
    late._config = {}
    late._uploaded = set()
    if late._begun:
        return
    if late._id is None:
        late._id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        late._wandb_init["id"] = late._id
    for name in _SHOWN & late._wandb_init.keys():
        late._wandb_init[name] = masked(late._wandb_init[name])
    if late._wandb_init.get("anonymous") is None:  # W&B warns that the argument has no effect
        late._wandb_init.pop("anonymous", None)
