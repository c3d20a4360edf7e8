import socket

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lit_efficient.callbacks.ema import EMA
from lit_efficient.callbacks.exact_resume import ExactResume
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler, keyed_loader
from lit_efficient.mechanisms.order.resumable_loader import ResumableLoader
from lit_efficient.mechanisms.order.resumable_sampler import ResumableSampler
from tests import processes
from tests.callbacks.resume_kit import Augmented, SaveEveryBatch, Tiny, count_exact, equal, final_state, fit, trainer


@pytest.mark.turns(3, always=["plain"])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ({}, {"max_epochs": 2}),  # of 8 batches, an optimizer step every 2
        ({}, {"limit_train_batches": 5, "max_epochs": 2, "val_check_interval": 3}),
        ({"ask_length": True}, {"max_epochs": 2, "limit_train_batches": 4}),
        ({}, {"max_epochs": -1, "max_steps": 7, "accumulate_grad_batches": 1}),
        (
            {},
            {
                "max_epochs": 2,
                "limit_train_batches": 5,
                "accumulate_grad_batches": 3,
                "reload_dataloaders_every_n_epochs": 1,
            },
        ),
        ({"num_workers": 2, "persistent_workers": True}, {"max_epochs": 2, "limit_train_batches": 3}),
    ],
    ids=["plain", "validation", "schedule that asks for the length", "by steps", "short epochs", "workers"],
)
def test_interrupted_after_any_batch_and_resumed_equals_uninterrupted(tmp_path, module, arguments):
    number, wrong = count_exact(tmp_path, lambda: Tiny(**module), **arguments)
    assert number >= 6
    assert wrong == []


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_stock_lightning_does_not(tmp_path):
    number, wrong = count_exact(tmp_path, Tiny, callback=None, max_epochs=1)
    assert len(wrong) == number - 1  # all but the checkpoint after the last batch


def in_a_fresh_process(checkpoint, result):
    torch.set_num_threads(1)
    torch.save(final_state(fit(Tiny(), [ExactResume()], checkpoint, seed=77, max_epochs=2))[:2], result)


def test_a_fresh_process_goes_on_exactly(tmp_path):
    expected = final_state(fit(Tiny(), [ExactResume(), SaveEveryBatch(tmp_path)], max_epochs=2))
    assert processes.run(in_a_fresh_process, tmp_path / "004.ckpt", tmp_path / "result.pt", log=tmp_path / "log") == 0
    assert equal(expected[:2], torch.load(tmp_path / "result.pt", weights_only=True))


def one_of_two(rank, port, folder, checkpoint):
    torch.set_num_threads(1)
    arguments = {
        "devices": 2,
        "strategy": "ddp",
        "max_epochs": 2,
        "limit_train_batches": 3,
        "use_distributed_sampler": True,
    }
    callbacks = [ExactResume(), *([] if checkpoint else [SaveEveryBatch(folder)])]
    # A window of one: gradients gathered so far belong to one process each and are in no checkpoint.
    module = Tiny()
    run = fit(module, callbacks, checkpoint, seed=5, accumulate_grad_batches=1, **arguments)
    name = "resumed" if checkpoint else "whole"
    torch.save([final_state(run)[:2], module.seen], folder / f"{name}{rank}.pt")


def both_ranks(folder, checkpoint=None):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    started = [
        processes.start(
            one_of_two, rank, port, folder, checkpoint, log=folder / f"log{rank}", env=env | {"LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0, 0], (folder / "log0").read_text()


@pytest.mark.turns(6, family="ranks")
def test_two_processes(tmp_path):
    both_ranks(tmp_path)
    both_ranks(tmp_path, tmp_path / "001.ckpt")
    seen = []
    for rank in range(2):
        whole, resumed = (torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for name in ("whole", "resumed"))
        assert equal(whole[0], resumed[0])
        assert whole[1][2:] == resumed[1]
        seen.append(whole[1])
    assert seen[0] != seen[1]  # each rank has data and draws of its own


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but")
@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
def test_loaders_may_come_from_anywhere_and_fit_may_be_called_again(tmp_path):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader()

    def loader():
        return DataLoader(Augmented(), batch_size=3, shuffle=True)

    def seen_by(callback, **given):
        module = Tiny()
        fit(module, [callback], max_epochs=1, **given)
        return module.seen

    callback, passed = ExactResume(), loader()
    runs = [seen_by(callback), seen_by(callback, loaders=passed), seen_by(callback, datamodule=Data())]
    runs.append(seen_by(ExactResume(), loaders=passed))
    assert all(run == runs[0] for run in runs)
    assert type(passed) is DataLoader  # the user's object is not touched


def test_several_loaders_at_once(tmp_path):
    class Two(Tiny):
        def train_dataloader(self):
            return {"a": super().train_dataloader(), "b": DataLoader(Augmented(5), batch_size=3, shuffle=True)}

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return torch.cat([batch["a"], batch["b"]]) if isinstance(batch, dict) else batch

    number, wrong = count_exact(tmp_path, Two, max_epochs=2)
    assert number == 16
    assert wrong == []


class Watch(pl.Callback):
    def __init__(self, fails=False):
        self.fails = fails

    def on_train_batch_start(self, trainer, *args):
        self.loader, self.validation = trainer.train_dataloader, trainer.val_dataloaders
        self.patched = "process_dataloader" in vars(trainer.strategy)
        self.order = [type(callback).__name__ for callback in trainer.callbacks]
        if self.fails:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("patched_before", [False, True])
def test_the_strategy_is_left_as_it_was(fails, patched_before):
    watch, calls = Watch(fails), []
    run = trainer([watch, ExactResume()], max_epochs=1)
    original = run.strategy.process_dataloader
    if patched_before:
        run.strategy.process_dataloader = earlier = lambda loader: calls.append(loader) or original(loader)
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            run.fit(Tiny())
    else:
        run.fit(Tiny())
    assert watch.patched
    assert isinstance(watch.loader, ResumableLoader)
    assert isinstance(watch.loader.sampler, ResumableSampler)
    assert type(watch.validation) is DataLoader  # only training is changed
    assert watch.order[0] == "ExactResume"  # whatever the list's order
    assert vars(run.strategy).get("process_dataloader") is (earlier if patched_before else None)
    assert (watch.loader in calls) is patched_before


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Augmented(6).x)


class Own(Sampler):
    def __iter__(self):
        return iter(range(6))

    def __len__(self):
        return 6


class Batches:
    def __iter__(self):
        return iter([torch.ones(3, 4)])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream(), batch_size=3), "the iterable dataset Stream starts again"),
        (DataLoader(Augmented(), sampler=Own()), "the order of Own is not replaced, only fast-forwarded"),
        (Batches(), "a Batches without state_dict"),
    ],
)
def test_it_says_what_it_cannot_cover(loader, message):
    with pytest.warns(UserWarning, match=f"resuming will not be bit-exact: {message}"):
        fit(Tiny(), [ExactResume()], max_epochs=1, loaders=loader, reload_dataloaders_every_n_epochs=1)


class Carrying(Tiny):
    """Goes on with a state that the batch before has left, as recurrent networks trained on a stream do."""

    def __init__(self):
        super().__init__()
        self.state, self.kept = (torch.zeros(2), 0), None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.kept = self.state[0]  # alive while the two are compared
        self.state = (0.5 * self.state[0] + loss.detach().expand(2), self.state[1] + 1)
        return loss + self.state[0].mean()


class Saving(Carrying):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["state"] = self.state


def test_it_says_what_a_module_carries_in_no_checkpoint():
    with pytest.warns(UserWarning, match="resuming may not be bit-exact: Carrying changes state, kept from batch"):
        fit(Carrying(), [ExactResume(), EMA()], max_epochs=1)
    fit(Saving(), [ExactResume(), EMA()], max_epochs=1)  # a warning would be an error
    fit(Saving(), [ExactResume()], max_epochs=1)


def test_it_says_where_a_resumed_run_differs(tmp_path):
    fit(Tiny(), [ExactResume(3), SaveEveryBatch(tmp_path)], max_epochs=1)
    with pytest.warns(UserWarning, match="seed=4, but the checkpoint's run used 3"):
        fit(Tiny(), [ExactResume(4)], tmp_path / "002.ckpt", max_epochs=1)
    fit(Tiny(), [SaveEveryBatch(tmp_path)], max_epochs=1)
    with pytest.warns(UserWarning, match="written without ExactResume"):
        fit(Tiny(), [ExactResume()], tmp_path / "007.ckpt", max_epochs=1)
    state = torch.load(tmp_path / "002.ckpt", weights_only=True)["callbacks"]
    assert "ExactResume" not in state


def test_its_state_is_small_and_has_gradients_only_inside_a_window(tmp_path):
    fit(Tiny(), [ExactResume(3), SaveEveryBatch(tmp_path)], max_epochs=1)
    inside, boundary = (
        torch.load(tmp_path / f"{n:03d}.ckpt", weights_only=True)["callbacks"]["ExactResume"] for n in (2, 3)
    )
    assert boundary.pop("data") == [[22, "", 8]]
    assert boundary == {"seed": 3, "world_size": 1, "rows": 3, "reached": "batch", "metrics": {}, "results": []}
    assert set(inside["gradients"]) == {name for name, _ in Tiny().named_parameters()}


def test_validation_and_lightnings_own_checkpoints(tmp_path):
    """Checkpoints as people write them: at the end of validation runs and epochs."""

    def saver(**when):
        return ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}-{step}", **when)

    settings = {"max_epochs": 3, "val_check_interval": 4, "enable_checkpointing": True}
    expected = final_state(fit(Tiny(), [ExactResume(), saver()], **settings))
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) >= 3
    for path in paths:
        with pytest.warns(UserWarning, match="exists and is not empty"):
            run = fit(Tiny(), [ExactResume(), saver()], path, seed=8, **settings)
        assert equal(expected[:3], final_state(run)[:3]), path.name


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_longer_fit_goes_on_in_the_epoch_that_the_last_step_cut_short(tmp_path):
    """Lightning ends the epoch of a fit's last step: its own last checkpoint, and one that is saved later, say so."""
    settings = {"max_epochs": -1, "accumulate_grad_batches": 1, "val_check_interval": 4}
    whole = Tiny()
    expected = final_state(fit(whole, [ExactResume()], max_steps=12, **settings))
    for steps in (3, 4):  # without a validation, and with one
        saver = ModelCheckpoint(tmp_path / str(steps), save_last=True, save_on_train_epoch_end=True)
        run = fit(Tiny(), [ExactResume(), saver], max_steps=steps, enable_checkpointing=True, **settings)
        run.save_checkpoint(tmp_path / str(steps) / "later.ckpt")
        for name in ("last.ckpt", "later.ckpt"):
            resumed = Tiny()
            result = final_state(
                fit(resumed, [ExactResume()], tmp_path / str(steps) / name, seed=9, max_steps=12, **settings)
            )
            assert resumed.seen == whole.seen[steps:], (steps, name)
            assert equal(expected, result), (steps, name)


class Numbered(Tiny):
    """Of 24 rows, each a number, which the loss does not weigh; nothing is drawn."""

    def __init__(self, batch_size):
        super().__init__(torch.arange(24.0)[:, None].expand(24, 4) / 24, batch_size)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch

    def training_step(self, batch, batch_idx):
        self.seen += (batch[:, 0] * 24).round().int().tolist()
        return (self.net(batch) - batch[:, :1].square()).pow(2).mean()


@pytest.mark.filterwarnings("ignore:.*processes, but the checkpoint", "ignore:.*Numbered changes seen")
@pytest.mark.parametrize(
    ("seen", "size", "accumulate", "processes"), [(16, 2, 4, 2), (8, 2, 4, 2), (16, 8, 1, 2), (16, 8, 1, 1)]
)
def test_another_number_of_rows_goes_on_at_the_row(tmp_path, seen, size, accumulate, processes):
    """As if the checkpoint were of processes with a part of each batch; on as many rows an optimizer step."""
    whole = Numbered(4)
    expected = final_state(fit(whole, [ExactResume(), SaveEveryBatch(tmp_path)], max_epochs=2))
    path = tmp_path / f"{seen // 4 - 1:03d}.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"]["ExactResume"]["world_size"] = processes
    torch.save(checkpoint, path)
    resumed = Numbered(size)
    with pytest.warns(UserWarning, match=f"a step has {size} rows, not 4: the epoch continues at its row {seen}, 0"):
        run = fit(resumed, [ExactResume()], path, max_epochs=2, accumulate_grad_batches=accumulate)
    assert resumed.seen == whole.seen[seen:]
    assert run.global_step == expected[-1]
    torch.testing.assert_close(final_state(run)[0], expected[0])


def test_another_number_of_rows_inside_an_epoch_is_named(tmp_path):
    fit(Tiny(), [ExactResume(), SaveEveryBatch(tmp_path)], max_epochs=1)
    with pytest.warns(
        UserWarning, match="had 22 rows when the checkpoint was written, and 30 now: the epoch continues"
    ):
        fit(Tiny(Augmented(30)), [ExactResume()], tmp_path / "003.ckpt", max_epochs=1)
    run = fit(Tiny(Augmented(30)), [ExactResume()], tmp_path / "007.ckpt", max_epochs=2)  # the epoch is over
    assert run.fit_loop.total_batch_idx == 7 + 10


def test_a_checkpoint_from_before_rows_were_noted_goes_on_at_its_batch(tmp_path):
    whole = Tiny()
    expected = final_state(fit(whole, [ExactResume(), SaveEveryBatch(tmp_path)], max_epochs=1))
    checkpoint = torch.load(tmp_path / "003.ckpt", weights_only=True)
    del checkpoint["callbacks"]["ExactResume"]["rows"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    resumed = Tiny()
    assert equal(final_state(fit(resumed, [ExactResume()], tmp_path / "old.ckpt", seed=7, max_epochs=1)), expected)
    assert resumed.seen == whole.seen[4:]


@pytest.mark.filterwarnings("ignore:.*processes, but the checkpoint", "ignore:.*Numbered changes seen")
def test_rows_that_are_no_whole_batches_are_seen_again(tmp_path):
    fit(Numbered(4), [ExactResume(), SaveEveryBatch(tmp_path)], max_epochs=1)
    path = tmp_path / "001.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"]["ExactResume"]["world_size"] = 4
    torch.save(checkpoint, path)
    resumed = Numbered(3)
    with pytest.warns(UserWarning, match="a step has 3 rows, not 4: the epoch continues at its row 6, 2 rows back"):
        fit(resumed, [ExactResume()], path, max_epochs=1)
    assert len(resumed.seen) == 18


class Keyed(Numbered):
    """Whose batches are drawn whole."""

    def train_dataloader(self):
        rows = {(i, 0): torch.full((4,), i / 24) for i in range(24)}
        sampler = KeyedBatchSampler(range(24), self.arguments["batch_size"])
        return keyed_loader(rows, sampler, torch.stack)


@pytest.mark.filterwarnings("ignore:.*Keyed changes seen")
def test_batches_that_are_drawn_whole_are_others_where_they_have_another_size(tmp_path):
    fit(Keyed(4), [ExactResume(), SaveEveryBatch(tmp_path)], max_epochs=1)
    with pytest.warns(
        UserWarning, match="a step has 8 rows, not 4: the epoch continues after the same number of batches, with other"
    ):
        fit(Keyed(8), [ExactResume()], tmp_path / "001.ckpt", max_epochs=1)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "1"])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(ConfigurationError, match="seed must be a whole number of at least 0 or null, got"):
        ExactResume(seed)


def test_without_any_seed_the_run_has_torchs_in_63_bits(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    module = Tiny()
    torch.manual_seed(-2)
    trainer([technique := ExactResume()], max_epochs=1, limit_train_batches=1).fit(module)
    assert technique.state_dict()["seed"] == 2**63 - 2


def test_the_seed_of_the_run_is_kept():
    for technique, seed in ((ExactResume(), 77), (ExactResume(3), 3)):
        fit(Tiny(), [technique], seed=77, max_epochs=1, limit_train_batches=2)
        assert technique.state_dict() == {"seed": seed, "world_size": 1}
    assert ExactResume(3).state_dict() == {"seed": 3, "world_size": 1}
    assert ExactResume().state_dict() == {}


class Sometimes(Tiny):
    """Logs a step's figure in every third step: Lightning writes it again until there is another."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        if batch_idx % 3 == 0:
            self.log("train/third", loss)
        return loss


class Rows(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, {name: value for name, value in metrics.items() if name != "epoch"}))


def test_rows_have_what_an_earlier_step_logged(tmp_path):
    settings = {"max_epochs": 1, "accumulate_grad_batches": 1, "log_every_n_steps": 1}
    whole, rest = Rows(), Rows()
    fit(Sometimes(), [ExactResume(), SaveEveryBatch(tmp_path)], logger=whole, **settings)
    fit(Sometimes(), [ExactResume()], tmp_path / "005.ckpt", logger=rest, **settings)
    assert len(whole.rows) > 8
    assert rest.rows == whole.rows[-len(rest.rows) :]
    assert "train/third" in rest.rows[0][1]
