"""Row 10: put canaries in the places of secrets. The run trains with the true value and never writes it."""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.trust_rows import Piece
from tests import processes

CANARY = "Qz7-plover-marsh-4417x"
KEYS = (
    *(
        "api_key",
        "apiKey",
        "API-KEY",
        "token",
        "access_token",
        "accessToken",
        "auth_token",
        "refresh_token",
        "hf_token",
    ),
    *(
        "bearer_token",
        "session_token",
        "github_token",
        "password",
        "passwd",
        "pwd",
        "passphrase",
        "secret",
        "credential",
    ),
    *("client_secret", "secret_key", "aws_secret_access_key", "private_key", "account_key", "authorization", "jwt"),
    *("connection_string", "db_password", "x-api-key", "signing_key", "slack_bot_token"),
)
VARIABLES = (
    *(
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "GITHUB_TOKEN",
    ),
    *(
        "GITLAB_TOKEN",
        "OPENAI_API_KEY",
        "ANTHROPIC_API_KEY",
        "COMET_API_KEY",
        "NEPTUNE_API_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
    ),
    *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_CLIENT_SECRET", "PGPASSWORD", "DB_PASSWORD", "MY_SECRET", "CI_JOB_TOKEN"),
    *(
        "SLACK_BOT_TOKEN",
        "KAGGLE_API_KEY",
        "NGC_API_KEY",
        "SSH_PASSPHRASE",
        "PYPI_TOKEN",
        "DOCKER_PASSWORD",
        "SECRET_KEY",
    ),
)
URLS = {
    "s3": f"s3://user:{CANARY}@bucket/rows",
    "https": f"https://user:{CANARY}@host.example/rows.jsonl",
    "user-alone": f"https://:{CANARY}@host.example/rows",
    "query": f"https://host.example/rows?n=1&access_token={CANARY}",
    "signature": f"https://host.example/rows?X-Amz-Signature={CANARY}&n=1",
    "database": f"postgresql://user:{CANARY}@host.example:5432/base",
    "header": f"Authorization: Bearer {CANARY}",
    "key-block": f"-----BEGIN RSA PRIVATE KEY-----\n{CANARY}\n-----END RSA PRIVATE KEY-----",
    "list": f"https://user:{CANARY}@host.example/a",
}
WAYS = ("option", "option-mapping", "wrong-value", "printed", "warned", "hparams", "resumed", "number", "exception")


class Keeper(LightningModule):
    """Module whose learning rate is right only if the true secret arrives.

    Args:
        options: Anything.
        source: Where from.
        sources: Several.
        api_key: A secret.
        width: Of the layer.
        speaks: What it does with the secret: ``print``, ``warn``, ``raise``.
    """

    def __init__(
        self,
        options: dict[str, Any] | None = None,
        source: str = "",
        sources: list[str] | None = None,
        api_key: str | int = "",
        width: int = 1,
        speaks: str = "",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, width)
        self.speaks = speaks
        values = [*(options or {}).values(), source, *(sources or ()), str(api_key)]
        self.known = "".join(str(value) for value in values)
        self.known += "".join(os.environ.get(name, "") for name in VARIABLES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.speaks == "print":
            print(f"my secret is {self.known}", file=sys.stderr if batch_idx else sys.stdout)
        if self.speaks == "warn":
            import warnings

            warnings.warn(f"the server does not take {self.known}", stacklevel=1)
        if self.speaks == "raise":
            raise ValueError(f"the server does not take {self.known}")
        Path("true-value").write_text(str(zlib.crc32(self.known.encode())))
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _cases() -> tuple[str, ...]:
    names = [f"config {key}" for key in KEYS] + [f"environment {name}" for name in VARIABLES]
    return (*names, *(f"url {name}" for name in URLS), *(f"way {way}" for way in WAYS))


def trial(case: str, folder: Path) -> str:
    kind, _, name = case.partition(" ")
    arguments: dict[str, Any] = {}
    words: list[str] = []
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": "", "HOME": str(folder), "WANDB_SILENT": "true"}
    known = CANARY
    if kind == "config":
        arguments["options"] = {name: CANARY}
    elif kind == "environment":
        environment[name] = CANARY
    elif kind == "url":
        known = URLS[name]
        arguments = {"sources": [known, known]} if name == "list" else {"source": known}
        known = known * 2 if name == "list" else known
    elif name in ("option", "wrong-value"):
        words = [f"--model.api_key={CANARY}"]
    elif name == "option-mapping":
        words = ["--model.options", f"{{api_key: {CANARY}}}"]
    elif name == "number":
        arguments = {"options": {"password": 4417987612}}
        known = "4417987612"
    else:
        speaks = {"printed": "print", "warned": "warn", "exception": "raise"}.get(name, "")
        arguments = {"api_key": CANARY, "speaks": speaks}
    if name == "wrong-value":
        words += ["--model.width", f"{{api_key: {CANARY}}}"]
    trainer: dict[str, Any] = {
        "max_steps": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "log_every_n_steps": 1,
    }
    loggers = ("WandbLogger", "CSVLogger", "TensorBoardLogger")
    wanted = loggers if kind == "way" or zlib.crc32(case.encode()) % 4 == 0 else loggers[1:]  # W&B takes long
    trainer["logger"] = [{"class_path": f"lightning.pytorch.loggers.{logger}"} for logger in wanted]
    model = {"class_path": f"{__name__}.Keeper", "init_args": arguments}
    own = folder / "own"
    own.mkdir()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"model": model, "trainer": trainer}))
    log = folder / "log"
    command = ["fit", "--allow-import", "benchmarks", "-c", str(config), *words]
    code = processes.run(_run, command, str(own), log=str(log), env=environment)
    fails = name in ("wrong-value", "exception")
    if not fails and code:
        return f"it ended with {code}: {log.read_text()[-300:]!r}"
    if not fails and (own / "true-value").read_text() != str(zlib.crc32(known.encode())):
        return "it did not train with the true value"
    if name == "resumed":
        more = ["--ckpt_path", "last", "--trainer.max_steps", "2"]
        code = processes.run(_run, [*command, *more], str(own), log=str(log), env=environment)
        if code:
            return f"it did not go on: {code}: {log.read_text()[-300:]!r}"
    if not fails:
        code = processes.run(_run, ["report", "runs/config/latest"], str(own), log=str(log))
        if code:
            return f"its report ended with {code}"
    secret = known if name == "number" else CANARY
    if name == "exception":  # of a bug Python prints the traceback, with what the user's own code says
        log.unlink()
    return _found(secret, [log, *own.rglob("*")])


def _found(secret: str, files: list[Path]) -> str:
    for file in files:
        if secret in file.name:
            return f"it is in the name {file.name}"
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            if secret.encode() in content:
                at = content.index(secret.encode())
                return f"it is in {file.name}: {content[max(0, at - 60) : at + 10]!r}"
    return ""


def _run(words: list[str], folder: str) -> None:
    os.chdir(folder)
    sys.argv = ["lit_efficient", *words]  # W&B notes the command line
    from lit_efficient.__main__ import main

    code = main(words)
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()
    sys.exit(code)


PIECES = (
    Piece(
        10,
        "secrets",
        "A secret stands in a config under one of 30 kinds of keys, in a URL, on the command line or in the "
        "environment of a fit with loggers, W&B among them: it trains with the true value, and no file of it, no "
        "checkpoint, no report and nothing printed has it.",
        _cases,
        trial,
        in_ci=3,
    ),
)
