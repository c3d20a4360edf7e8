"""``export --wandb``: the files of an export as an artifact of W&B, with the training and the checkpoint behind them.

    training run --(log_model)--> model-ID:last --> run of job type "export" --> export-FORMAT-ID

The project, the entity and the id of the training's run are read from its folder: ``config.yaml`` and ``run.json``.
Source: https://docs.wandb.ai/guides/artifacts/explore-and-traverse-an-artifact-graph.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_efficient.cli.next_steps import short
from lit_efficient.cli.preflight import go_offline_without_key
from lit_efficient.cli.secrets import hide_words, masked
from lit_efficient.cli.tree import as_list
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.runs import read_record, real
from lit_efficient.internals.lightning_wandb import alias_of


@dataclass(frozen=True)
class Training:
    """The run of W&B that recorded a training.

    Args:
        project: Its project.
        entity: Owner of the project; ``None`` for the user's own.
        id: Its id.
        checkpoint: The checkpoint that is exported.
        artifact: Name of the artifact with the checkpoint, if the run has uploaded checkpoints.
    """

    project: str
    entity: str | None
    id: str
    checkpoint: Path
    artifact: str

    @property
    def path(self) -> str:
        return "/".join(part for part in (self.entity, self.project, self.id) if part)

    @property
    def input(self) -> str:
        """Name of the artifact of the checkpoint, for any project."""
        named = f"{self.artifact}:{alias_of(self.checkpoint)}"
        return "/".join(part for part in (self.entity, self.project, named) if part)


def training_of(checkpoint: str | os.PathLike[str]) -> Training:
    """Return the run of W&B whose fit wrote a checkpoint.

    Raises:
        ConfigurationError: If the checkpoint's folder does not name one.
    """
    path = real(Path(checkpoint))
    folder = path.parent
    record = read_record(folder) or {}
    config: Any = {}
    if (folder / "config.yaml").is_file():
        config = yaml.safe_load((folder / "config.yaml").read_text("utf-8")) or {}
    loggers = (config.get("trainer") or {}).get("logger")
    names = record.get("loggers") or []
    for logger, name in zip(as_list(loggers), names):
        if isinstance(logger, Mapping) and str(logger.get("class_path")).endswith("WandbLogger") and name:
            given = {**(logger.get("init_args") or {}), **(logger.get("dict_kwargs") or {})}
            project = given.get("project") or os.environ.get("WANDB_PROJECT") or "lightning_logs"
            artifact = given.get("checkpoint_name") or f"model-{name}"
            return Training(project, given.get("entity"), str(name), path, artifact)
    raise ConfigurationError(
        f"export: wandb: {short(folder)} is not the folder of a fit that a WandbLogger recorded (config.yaml and "
        "run.json name its run): leave out --wandb, or name a checkpoint in that folder"
    )


def log_export(training: Training, folder: Path, format: str) -> str:
    """Log the files of an export as an artifact of a new run, and return a line that says where it is.

    Online, the artifact of the checkpoint is the run's input. W&B accepts no input offline, and a fit without
    ``log_model`` uploads none: the metadata of the export names the training and the checkpoint in any case.

    Raises:
        ConfigurationError: If W&B does not accept it. The export is complete.
    """
    import wandb

    go_offline_without_key({"trainer": {"logger": {"class_path": "WandbLogger"}}})
    hide_words()
    about = {"run": training.path, "checkpoint": training.checkpoint.name, "format": format}
    metadata = {**about, "input": training.input}
    artifact = wandb.Artifact(f"export-{format}-{training.id}", type="model", metadata=metadata)
    # The folder has hashes and is not changed any more: W&B needs no copy of it.
    artifact.add_dir(str(folder), policy="immutable", skip_cache=True)
    try:
        with wandb.init(
            project=training.project,
            entity=training.entity,
            id=secrets.token_hex(4),
            resume="never",
            name=f"export of {training.id}",
            job_type="export",
            config=masked(about),
            dir=str(training.checkpoint.parent.absolute()),
            settings=wandb.Settings(console="off", silent=True),
        ) as run:
            offline = run.offline
            if offline:
                place = short(Path(run.dir).parent)
            else:
                place = str(run.url)
            has_input = not offline and wandb.Api().artifact_exists(training.input, type="model")
            if has_input:
                run.use_artifact(training.input)
            logged = run.log_artifact(artifact, aliases=["latest", alias_of(training.checkpoint)])
            if not offline:
                logged.wait()
    except wandb.Error as error:
        raise ConfigurationError(f"export: wandb: {folder} is complete, but W&B did not record it: {error}") from error
    if offline:
        return f"W&B: recorded offline; upload it by\n  wandb sync {place}"
    if has_input:
        found = f"input {training.input}"
    else:
        found = f"{training.input} was not uploaded (log_model)"
    return f"W&B: {artifact.name} of {place}, {found}"
