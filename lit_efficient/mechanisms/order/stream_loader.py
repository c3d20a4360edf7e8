"""Epochs of a given length over an endless stream, which resume after an epoch and after a crash."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lit_efficient.distributed.ranks import place_among_ranks
from lit_efficient.errors import ConfigurationError


class StreamLoader:
    """Batches of a stream, in epochs of a given length, which resume after an epoch and after a crash.

    It has a length on purpose: from a loader without length Lightning fetches one batch ahead, and a checkpoint would
    count a batch that was not trained on.

    Args:
        loader: Loader of an endless data set. Its attribute ``place``, if there is one, becomes the rank and the number
            of ranks, and its attribute ``skipped`` the number of batches that were yielded before. Without ``skipped``
            these batches are read again. ``settings`` are further numbers that the batches depend on.
        batches: Batches of an epoch.
        owner: Class that uses the loader, for errors.
        batch_size: Rows of a batch, if the loader does not know.
    """

    def __init__(self, loader: DataLoader[Any], batches: int, owner: str, batch_size: int | None = None) -> None:
        self.loader = loader
        self.batches = batches
        self.owner = owner
        self.batch_size = batch_size or loader.batch_size or 0
        self._yielded = 0
        self._stream: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches):
            if self._stream is None:
                self._stream = self._begun()
            batch = next(self._stream)
            self._yielded += 1
            yield batch

    def _begun(self) -> Iterator[Any]:
        dataset: Any = self.loader.dataset
        if hasattr(dataset, "place"):
            dataset.place = place_among_ranks()
        if hasattr(dataset, "skipped"):
            dataset.skipped = self._yielded
            return iter(self.loader)
        stream = iter(self.loader)
        # The stream is a function of the seed: reading the same number of batches restores its state.
        for _ in range(self._yielded):
            next(stream)
        return stream

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches that were yielded, and the settings that the batches depend on."""
        return {"batches": self._yielded, **self._settings()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the batches of a checkpoint.

        Raises:
            ConfigurationError: If these settings give other batches.
        """
        for name, value in self._settings().items():
            saved = state_dict.get(name)
            if saved != value:
                raise ConfigurationError(
                    f"{self.owner}: a stream is resumed with the same {name}: {saved} in the checkpoint, {value} now."
                )
        self._yielded = int(state_dict["batches"])
        self._stream = None

    def _settings(self) -> dict[str, int]:
        return {
            "processes": place_among_ranks()[1],
            "num_workers": self.loader.num_workers,
            "batch_size": int(self.batch_size),
            **getattr(self.loader.dataset, "settings", {}),
        }
