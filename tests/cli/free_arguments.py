"""Module whose arguments have the names of the trainer's lists, and types without a class."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule


@dataclass
class Part:
    width: int = 1
    name: str = "a"


class FreeArguments(LightningModule):
    def __init__(
        self,
        plugins: list[dict[str, int]] | None = None,
        callbacks: list[dict[str, int]] | None = None,
        parts: list[Part] = [],  # noqa: B006 (never changed)
        anything: Any = None,
        switch: bool | list[int] | None = None,
    ) -> None:
        super().__init__()
