"""Mixtures of sources: shares, repetitions, resumption and the loss of each source."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_efficient import GPTConfig, LanguageModeling
from lit_efficient.callbacks.exact_resume import ExactResume
from lit_efficient.data.language_data import LanguageData, PackedDocuments
from lit_efficient.data.text.arguments import LanguageStream
from lit_efficient.data.text.mixture import LanguageMixture, MixtureSource, as_sources
from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.order.mixture_sampler import MixtureSampler
from tests.data.resumed import SaveAtSix, whole_and_resumed
from tests.data.test_language_data import answers, chat, language_data, ready, write_rows
from tests.support import trainer

SIZES = {"a": 60, "b": 12, "c": 30}


def mixture(tmp_path: Path, weights: dict[str, Any], **changes: Any) -> LanguageData:
    """Return data of sources whose rows have other words, and whose answers differ in length."""
    train = []
    for start, (name, size) in enumerate(SIZES.items()):
        path = tmp_path / f"{name}.jsonl"
        rows = [chat(1000 * start + i, words=1 + 3 * start) for i in range(size)]
        path.write_text("\n".join(map(json.dumps, rows)))
        train.append({"path": str(path), "weight": weights[name], "name": name})
    val = str(write_rows(tmp_path / "val.jsonl", 6, 900))
    settings = {"mixture": LanguageMixture(**changes.pop("mixture", {})), "val": val, "batch_size": 1}
    return ready(language_data(tmp_path, train=train, **(settings | changes)))


def seen(data: LanguageData, batches: Any) -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of documents and of tokens of each source, by the words of its rows."""
    rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    names = data.source_names("train")
    for batch in batches:
        for labels, ids, source in zip(batch["labels"], batch["input_ids"], batch["source"].tolist()):
            texts = answers(data, [{"labels": labels[None]}])
            assert {int(text.split()[0][1:]) // 1000 for text in texts} == {source}
            rows[names[source]] += len(texts)
            tokens[names[source]] += int((ids != data.pad_id).sum())
    return rows, tokens


def slow_passes(weights: list[float], sizes: list[float], temperature: float, stop: str) -> list[float]:
    """Return the passes of an epoch by placing units one by one, in small steps."""
    powers = [weight ** (1 / temperature) for weight in weights]
    used = [0.0] * len(sizes)
    step = min(sizes) / 500
    ended = any if stop == "first_exhausted" else all
    while not ended(taken >= size for taken, size in zip(used, sizes)):
        behind = min(range(len(sizes)), key=lambda i: used[i] / powers[i])
        used[behind] += step
    return [taken / size for taken, size in zip(used, sizes)]


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_passes_are_those_of_a_slow_loop(temperature: float, stop: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        sizes = rng.integers(50, 500, 4).astype(float).tolist()
        weights = rng.uniform(0.2, 1, 4).tolist()
        sources = [MixtureSource(str(i), weight) for i, weight in enumerate(weights)]
        found = LanguageMixture(temperature=temperature, stop=stop).passes(sources, sizes)
        assert found.shape == (1, 4)
        assert found[0].tolist() == pytest.approx(slow_passes(weights, sizes, temperature, stop), rel=0.02)
        assert (found.min() if stop == "all_exhausted" else found.max()) == 1
    without = [MixtureSource(str(i)) for i in range(3)]
    assert LanguageMixture(stop=stop).passes(without, [5, 7, 9]).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("by", "stop"), [("rows", "all_exhausted"), ("tokens", "all_exhausted"), ("rows", "first_exhausted")]
)
@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_has_the_shares(tmp_path: Path, by: Any, stop: Any, pack: bool) -> None:
    weights = {"a": 0.5, "b": 0.2, "c": 0.3}
    data = mixture(tmp_path, weights, mixture={"by": by, "stop": stop}, pack=pack)
    rows, tokens = seen(data, data.train_dataloader())
    counted = rows if by == "rows" else tokens
    for name, weight in weights.items():
        # A packed row is the unit of repetition.
        assert counted[name] / sum(counted.values()) == pytest.approx(weight, abs=0.06 if pack else 0.015)
    passes = {name: rows[name] / size for name, size in SIZES.items()}
    if stop == "all_exhausted":
        assert min(passes.values()) == pytest.approx(1, abs=0.01)
        assert max(passes.values()) > 1.1
    else:
        assert max(passes.values()) == pytest.approx(1, abs=0.01)


def test_without_weights_every_row_is_read_once_and_a_temperature_evens_the_shares(tmp_path: Path) -> None:
    none = dict.fromkeys(SIZES)
    rows, _ = seen(once := mixture(tmp_path, none), once.train_dataloader())
    assert rows == SIZES
    even = mixture(tmp_path, none, mixture={"temperature": 1e9}, pack=False)
    rows, _ = seen(even, even.train_dataloader())
    assert rows == {"a": 60, "b": 60, "c": 60}
    assert even._folder == once._folder  # shares do not change the cache


def test_a_source_that_is_cut_is_read_as_a_whole_over_epochs(tmp_path: Path) -> None:
    data = mixture(tmp_path, {"a": 1, "b": 1, "c": 1}, mixture={"stop": "first_exhausted"}, pack=False)
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        epochs.append([text for text in answers(data, loader) if int(text.split()[0][1:]) < 1000])
    assert [len(texts) for texts in epochs] == [12] * 5
    assert len({text for texts in epochs for text in texts}) == 60


def test_an_epoch_has_the_items_that_the_length_names() -> None:
    """Of 2.5 items, as of every half, one side must not round up where the other rounds down."""
    for size in range(1, 41, 2):
        for passes in (0.3, 0.5, 0.7, 1.1, 2.3, 7.9):
            sampler = MixtureSampler([size, 10], [passes, 1.0], num_replicas=1, rank=0)
            assert len(list(sampler)) == len(sampler)


def test_ranks_share_an_epoch() -> None:
    whole = list(MixtureSampler([10, 4], [1.0, 2.5], seed=3, num_replicas=1, rank=0))
    parts = [list(MixtureSampler([10, 4], [1.0, 2.5], 3, num_replicas=2, rank=rank)) for rank in range(2)]
    assert parts == [whole[::2], whole[1::2]]
    assert sorted(whole)[:10] == list(range(10))
    assert Counter(whole)[10] + Counter(whole)[11] + Counter(whole)[12] + Counter(whole)[13] == 10


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_a_resumed_mixture_has_the_batches_of_one_that_never_stopped(tmp_path: Path, streaming: bool, by: Any) -> None:
    stream = LanguageStream(streaming, epoch_batches=4, buffer=10)

    weights: dict[str, Any] = {"a": [1, 0], "b": 2, "c": 1}
    settings = {"by": by, "epochs": 20.0}
    whole_and_resumed(
        tmp_path,
        lambda: mixture(tmp_path, weights, mixture=settings, stream=stream, num_workers=2, batch_size=2),
    )


@pytest.mark.parametrize(
    ("by", "stop", "workers"),
    [("rows", "all_exhausted", 0), ("tokens", "all_exhausted", 2), ("rows", "first_exhausted", 2)],
)
def test_a_stream_has_the_shares_everywhere(tmp_path: Path, by: Any, stop: Any, workers: int) -> None:
    weights = {"a": 0.5, "b": 0.2, "c": 0.3}
    stream = LanguageStream(enabled=True, epoch_batches=90, buffer=20)
    data = mixture(tmp_path, weights, mixture={"by": by, "stop": stop}, stream=stream, num_workers=workers)
    batches = list(data.train_dataloader())
    for part in (batches[:45], batches[45:]):
        counted = seen(data, part)[by == "tokens"]
        for name, weight in weights.items():
            assert counted[name] / sum(counted.values()) == pytest.approx(weight, abs=0.07)
    rows, _ = seen(data, batches)
    if stop == "all_exhausted":
        assert rows["b"] > 1.4 * SIZES["b"]  # repeated, before "a" has ended


# Schedules ------------------------------------------------------------------------------------------------------------

FADE = {"a": [3, 0], "b": [0, 1], "c": 1}


def shares_of_fade(begin: float, end: float) -> list[float]:
    """Return the mean shares of ``FADE`` from one place of its schedule to another, where shares change linearly."""
    middle = (begin + end) / 2
    return [0.75 * (1 - middle), 0.5 * middle, 0.25 * (1 - middle) + 0.5 * middle]


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("epochs", [1.0, 2.0, 0.5])
def test_a_schedule_moves_the_shares_in_an_epoch_and_from_epoch_to_epoch(tmp_path: Path, epochs: float) -> None:
    data = mixture(tmp_path, FADE, mixture={"epochs": epochs}, pack=False)
    loader = data.train_dataloader()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        batches = list(loader)
        half = len(batches) // 2
        for number, part in enumerate((batches[:half], batches[half:])):
            rows, _ = seen(data, part)
            places = [min(1.0, (epoch + (number + side) / 2) / epochs) for side in (0, 1)]
            for name, share in zip(FADE, shares_of_fade(*places)):
                # Four standard errors of a draw of this size.
                error = 4 * (share * (1 - share) / half) ** 0.5
                assert rows[name] / half == pytest.approx(share, abs=error + 0.5 / half), (epoch, number, name)


def test_every_row_is_read_over_the_epochs_of_a_schedule() -> None:
    sampler = MixtureSampler([30, 12], [[2.0, 0.0], [0.0, 2.0]], seed=1, epochs=3.0)
    read: Counter[int] = Counter()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert len(order) == len(sampler) == 42
        read.update(order)
    for begin, size in ((0, 30), (30, 12)):
        counts = [read[begin + number] for number in range(size)]
        assert max(counts) - min(counts) <= 1  # the permutation goes on where the last epoch has stopped
        assert sum(counts) == pytest.approx(3 * size, rel=0.2)  # epochs have one length, sources have two


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize(("by", "workers"), [("rows", 0), ("tokens", 0), ("rows", 2)])
def test_a_schedule_moves_the_shares_of_a_stream(tmp_path: Path, by: Any, workers: int) -> None:
    stream = LanguageStream(enabled=True, epoch_batches=480, buffer=20)
    data = mixture(tmp_path, FADE, mixture={"by": by}, stream=stream, num_workers=workers, pack=False)
    batches = list(data.train_dataloader())
    for number in range(3):
        counted = seen(data, batches[160 * number : 160 * number + 160])[by == "tokens"]
        for name, share in zip(FADE, shares_of_fade(number / 3, (number + 1) / 3)):
            assert counted[name] / sum(counted.values()) == pytest.approx(share, abs=0.07), (number, name)


def test_a_short_schedule_by_tokens_makes_up_for_its_first_buffer(tmp_path: Path) -> None:
    """The tokens of the first buffer are not known when its rows are chosen, and rows of "c" have more than those of
    "a"."""
    stream = LanguageStream(enabled=True, epoch_batches=120, buffer=20)
    weights = {"a": [2, 1], "b": [1, 1], "c": [1, 2]}
    data = mixture(tmp_path, weights, mixture={"by": "tokens"}, stream=stream, pack=False)
    _, tokens = seen(data, data.train_dataloader())
    for name, share in {"a": 0.375, "b": 0.25, "c": 0.375}.items():
        assert tokens[name] / sum(tokens.values()) == pytest.approx(share, abs=0.03), name


def test_a_schedule_that_ends_within_a_buffer_says_so(tmp_path: Path) -> None:
    stream = LanguageStream(enabled=True, epoch_batches=20, buffer=100)
    data = mixture(tmp_path, FADE, stream=stream, pack=False)
    with pytest.warns(UserWarning, match=r"ends after 20 rows, and changes only every 100 rows"):
        list(data.train_dataloader())


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([[1.0], 1.0], "at least two numbers"),
        ([[0, 0], 1.0], "not all of them 0"),
        ([[1, -1], 1.0], "train.weight"),
        ([[1, 2], [1, 2, 3]], r"different lengths: \[2, 3\]"),
        ([[1, 0], [1, 0]], "all weights are 0 at number 2"),
    ],
)
def test_schedules_that_say_nothing_are_refused(weights: list[Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        as_sources("LanguageData", "train", [{"path": str(i), "weight": one} for i, one in enumerate(weights)])


class ByHand(LanguageModeling):
    """Model that keeps the losses of its batches by source, computed one by one."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sums: list[dict[int, list[float]]] = []
        self.logged: list[dict[str, float]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        output = super().training_step(batch, batch_idx)
        found: dict[int, list[float]] = {}
        for row in range(len(batch["source"])):
            with torch.no_grad():
                alone = {name: value[row : row + 1] for name, value in batch.items()}
                losses, targets, _ = self._losses(alone)
            entry = found.setdefault(int(batch["source"][row]), [0.0, 0.0])
            entry[0] += float(losses.sum())
            entry[1] += int((targets != IGNORE).sum())
        self.sums.append(found)
        return output

    def on_train_batch_end(self, *_: Any) -> None:
        held = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.logged.append({name: value for name, value in held.items() if name.startswith("train/loss/")})


def test_the_loss_of_each_source_is_logged_and_resumed(tmp_path: Path) -> None:
    config = GPTConfig(depth=1, dim=16, num_heads=2, max_length=64)

    def run(*callbacks: Any, **arguments: Any) -> ByHand:
        torch.manual_seed(0)
        data = mixture(tmp_path, {"a": 1, "b": 1, "c": 1}, batch_size=4, pack=False)
        module = ByHand(model=config)
        made = trainer([ExactResume(seed=1), *callbacks], max_steps=8, log_every_n_steps=4, default_root_dir=tmp_path)
        made.fit(module, data, **arguments)
        return module

    whole = run(SaveAtSix(tmp_path / "six.ckpt"))
    for end in (4, 8):
        for number, name in enumerate(SIZES):
            parts = [sums[number] for sums in whole.sums[end - 4 : end] if number in sums]
            assert parts
            expected = sum(part[0] for part in parts) / sum(part[1] for part in parts)
            assert whole.logged[end - 1][f"train/loss/{name}"] == pytest.approx(expected, rel=1e-4)
    resumed = run(ckpt_path=tmp_path / "six.ckpt")
    assert resumed.logged[-1] == whole.logged[-1]


def test_validation_has_the_loss_of_each_source(tmp_path: Path) -> None:
    names = {"first": write_rows(tmp_path / "one.jsonl", 5, 100), "second": write_rows(tmp_path / "two.jsonl", 7, 200)}
    val = [MixtureSource(str(path), name=name) for name, path in names.items()]
    data = mixture(tmp_path, dict.fromkeys(SIZES), val=val, val_batch_size=12)
    module = LanguageModeling(GPTConfig(depth=1, dim=16, num_heads=2, max_length=64))
    made = trainer([], max_steps=1, default_root_dir=tmp_path)
    (figures,) = made.validate(module, data)
    for number, name in enumerate(names):
        nats = tokens = 0.0
        for batch in data.val_dataloader():
            for row in torch.where(batch["source"] == number)[0].tolist():
                with torch.no_grad():
                    losses, targets, _ = module._losses({key: value[row : row + 1] for key, value in batch.items()})
                nats += float(losses.sum())
                tokens += int((targets != IGNORE).sum())
        assert figures[f"val/loss/{name}"] == pytest.approx(nats / tokens, rel=1e-5)


def test_what_is_held_out_keeps_its_source(tmp_path: Path) -> None:
    data = mixture(tmp_path, dict.fromkeys(SIZES), val=None, val_fraction=0.3)
    rows, _ = seen(data, data.val_dataloader())
    assert isinstance(data.val_rows, PackedDocuments)
    assert sorted(rows) == ["a", "b", "c"]
    assert data.val_rows.rows == [rows[name] for name in SIZES]


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ([{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl"}], "'a.jsonl' has a weight and 'b.jsonl' has none"),
        ([{"path": "x/a.jsonl"}, {"path": "y/a.jsonl"}], "two sources have the name 'a.jsonl'"),
        ([{"path": "a.jsonl", "weight": 0}], "train.weight must be above 0"),
        ([{"path": []}], "train.path must be at least one path"),
    ],
)
def test_what_is_no_mixture_is_a_sentence(train: list[Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        as_sources("LanguageData", "train", train)


def test_arguments_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mixture needs sources with names or weights"):
        language_data(tmp_path, mixture=LanguageMixture(temperature=2))
    with pytest.raises(ConfigurationError, match="val: a source has a weight"):
        language_data(tmp_path, val=[{"path": "a.jsonl", "weight": 1}])
    stream = LanguageStream(enabled=True)
    with pytest.raises(ConfigurationError, match=r"by: tokens needs a weight for each source of a stream"):
        mixture(tmp_path, dict.fromkeys(SIZES), mixture={"by": "tokens"}, stream=stream)
    (tmp_path / "empty.jsonl").write_text("")
    train = [{"path": str(tmp_path / "data.jsonl")}, {"path": str(tmp_path / "empty.jsonl")}]
    with pytest.raises(ConfigurationError, match=r"nothing is left to train on in empty\.jsonl"):
        ready(language_data(tmp_path, train=train))
