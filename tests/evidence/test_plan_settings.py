"""Tests of finding the settings of batch, context and rank, with plans that follow a formula."""

import pytest
from lightning.pytorch import LightningDataModule

from lit_efficient import LanguageData, LanguageModeling, LoRA
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import Change, Fit, batch_setting, give_arguments
from lit_efficient.evidence.planning.plan_search import Predictions
from lit_efficient.evidence.planning.plan_settings import batch_lever, length_lever, rank_lever
from lit_efficient.models.networks.gpt import GPTConfig
from tests.evidence.known_plans import plan_of
from tests.support import Toy, trainer


class Rows(LightningDataModule):
    """DataModule with numbers whose names do not tell their purpose."""

    def __init__(self, batch_size: int = 4, workers: int = 16, long: int = 128, classes: int = 130) -> None:
        super().__init__()
        self.batch_size, self.workers, self.long, self.classes = batch_size, workers, long, classes


class Encoded(LightningDataModule):
    """DataModule around another one, which has the batch size."""

    def __init__(self, images: LightningDataModule) -> None:
        super().__init__()
        self.images = images


def predictions(limit: int = 100_000, rows: int = 10_000) -> Predictions:
    def predict(change: Change):
        batch = min(rows, change.settings.get("data.batch_size", 4))
        length = change.settings.get("data.long", 128)
        if length > change.settings.get("model.model.max_length", 256):
            raise ConfigurationError("the rows are longer than max_length")
        return plan_of({"activations": 10 * batch * length}, batch, unit="tokens", amount=batch * length)

    return Predictions(predict, limit)


FIT = Fit(trainer(max_steps=1), LanguageModeling(GPTConfig(dim=16, num_heads=2, depth=256, max_length=256)), Rows())


def test_the_batch_is_what_changes_the_plans_batch_and_no_larger_than_the_data():
    known = predictions()
    lever = batch_lever(FIT, known, known())
    assert (lever.names, lever.now) == (("data.batch_size",), 4)
    assert lever.largest(known).value == 78
    few = predictions(rows=9)
    found = batch_lever(FIT, few, few()).largest(few)
    assert (found.value, found.above) == (9, 10)
    assert found.reason == "the data's batches have 9 samples at most"


def test_the_batch_of_a_data_module_may_be_that_of_another_one():
    def predict(change: Change):
        return plan_of({"activations": 10}, change.settings.get("data.images.batch_size", 4))

    known = Predictions(predict, 100)
    lever = batch_lever(Fit(trainer(max_steps=1), Toy(), Encoded(Rows())), known, known())
    assert (lever.names, lever.now) == (("data.images.batch_size",), 4)
    fit = Fit(trainer(max_steps=1), Toy(), Encoded(Rows()))
    fit.change({"data.images.batch_size": 9})
    assert fit.data.images.batch_size == 9


def test_the_batch_size_is_found_in_data_that_is_not_set_up():
    """A plan of few of a network's blocks sets up the data of these smaller fits only."""
    rows = LanguageData(train="rows.jsonl", tokenizer="folder", batch_size=3)
    with pytest.raises(RuntimeError, match="setup"):
        rows.tokenizer  # noqa: B018
    fit = Fit(trainer(max_steps=1), Toy(), rows)
    assert batch_setting(fit) == ("data.batch_size", 3)

    def predict(change: Change):
        length = change.settings.get("data.max_length", 1024)
        return plan_of({"activations": length}, 3, unit="tokens", amount=3 * length)

    known = Predictions(predict, 4096)
    assert length_lever(fit, known, known()).names == ("data.max_length",)


def test_a_batch_that_nothing_changes_is_no_setting():
    stuck = predictions(rows=1)
    with pytest.raises(ConfigurationError, match="no setting of Rows and LanguageModeling changes the batch of 1"):
        batch_lever(FIT, stuck, stuck())


def test_the_context_is_what_changes_the_tokens_and_takes_the_network_along():
    known = predictions()
    lever = length_lever(FIT, known, known())
    assert (lever.names, lever.step) == (("data.long", "model.model.max_length"), 64)
    assert lever.largest(known).value == 2496  # 40 * 2500 would be all, in steps of 64
    with pytest.raises(ConfigurationError, match="max_length must be asked of rows of tokens, got 'rows of samples'"):
        length_lever(FIT, known, plan_of({}))


def test_the_rank_is_that_of_the_adapters_and_its_change_is_checked():
    run = trainer(max_steps=1, callbacks=[LoRA(rank=4, alpha=3)])
    assert rank_lever(Fit(run, Toy())).set(9).settings == {"LoRA.rank": 9}
    assert give_arguments(run, {"LoRA.rank": 9, "model.lr": 1}) == {"model.lr": 1}
    (lora,) = (part for part in run.callbacks if isinstance(part, LoRA))
    assert (lora.rank, lora.alpha) == (9, 3)
    for name, says in (("LoRA.rank", "rank must be"), ("LoRA.size", "accepted: rank"), ("EMA.decay", "it has: LoRA")):
        with pytest.raises(ConfigurationError, match=says):
            give_arguments(run, {name: 0})
    with pytest.raises(ConfigurationError, match="-c lora"):
        rank_lever(FIT)
