import types

import pytest

from lit_efficient.internals import lightning_loops
from tests.internals.leaning import leans_on
from tests.internals.toy_fit import NAMESPACES, fit, module, rows, trainer

both = pytest.mark.parametrize("namespace", NAMESPACES)


@both
@leans_on("lightning", "trainer.fit_loop._should_accumulate", "lightning_loops")
def test_the_last_batch_of_a_window_and_of_an_epoch_steps(namespace):
    seen = []
    hooks = {"on_train_batch_end": lambda trainer, *_: seen.append(lightning_loops.accumulates(trainer))}
    fit(namespace, hooks, accumulate_grad_batches=3)
    assert seen == [True, True, False, False]


@both
@leans_on("lightning", "trainer.fit_loop.epoch_loop._should_check_val_epoch", "lightning_loops")
def test_epochs_that_validate_are_known_at_their_start(namespace):
    seen = []
    hooks = {"on_train_epoch_start": lambda trainer, *_: seen.append(lightning_loops.validates_next(trainer))}
    fit(namespace, hooks, rows(), check_val_every_n_epoch=2, max_epochs=4)
    assert seen == [False, True, False, True]


@both
@leans_on("lightning", "trainer.fit_loop._restarting", "lightning_loops")
def test_a_restart_can_be_forgotten_even_if_the_public_setter_keeps_it(namespace):
    trainer, _ = fit(namespace, val=rows(), max_steps=2, max_epochs=-1)
    loop = trainer.fit_loop
    parts = (loop, loop.epoch_loop, loop.epoch_loop.val_loop)
    for part in parts:
        part.restarting = False
    assert loop.restarting  # a fit by steps always takes itself for restarted
    lightning_loops.forget_restart(trainer)
    assert not any(part.restarting for part in parts)


@both
@leans_on("lightning", "_DataFetcher", "lightning_loops")
def test_what_hands_batches_to_a_loop_is_of_that_class(namespace):
    seen = []
    hooks = {"on_train_start": lambda trainer, *_: seen.append(trainer.fit_loop._data_fetcher)}
    fit(namespace, hooks)
    assert lightning_loops.DATA_FETCHER in [base.__name__ for base in type(seen[0]).__mro__]


@both
@leans_on("lightning", "checkpoint['loops']['fit_loop'] and epoch_loop._skip_next_val", "lightning_loops")
def test_a_checkpoint_of_an_epochs_last_batch_can_be_ended_instead_of_skipped(namespace, tmp_path):
    path, ends = tmp_path / "last.ckpt", []

    def save(trainer, module, outputs, batch, batch_idx):
        if batch_idx == 3 and trainer.current_epoch == 0:
            trainer.save_checkpoint(path)

    fit(namespace, {"on_train_batch_end": save})

    def end(self, fetcher):
        del self.advance
        lightning_loops.end_batch(self.trainer, validated=skips)

    def settle(trainer, module, checkpoint):
        lightning_loops.settle(checkpoint, epoch=False)
        trainer.fit_loop.epoch_loop.advance = types.MethodType(end, trainer.fit_loop.epoch_loop)

    hooks = {"on_load_checkpoint": settle, "on_train_epoch_end": lambda trainer, *_: ends.append(trainer.current_epoch)}
    for skips in (False, True):
        toy = module(namespace)
        trainer(namespace, hooks, max_epochs=2).fit(toy, rows(), rows(1), ckpt_path=path, weights_only=True)
        assert toy.validated == [[0.0]] * (1 if skips else 2)
    assert ends == [0, 1, 0, 1]


@both
@leans_on("lightning", "fit_loop.epoch_progress.current and reset_restart_stage", "lightning_loops")
def test_an_epoch_that_is_over_can_step_what_monitors_it(namespace):
    seen = []

    def look(trainer, *_):
        trainer.fit_loop.epoch_progress.current.completed = 3
        trainer.fit_loop.epoch_loop.update_lr_schedulers = lambda *args, **kwargs: seen.append(trainer.current_epoch)
        lightning_loops.end_epoch(trainer)
        seen.append(trainer.current_epoch)
        del trainer.fit_loop.epoch_loop.update_lr_schedulers

    fit(namespace, {"on_train_start": look}, max_epochs=1)
    assert seen == [2, 3]


@both
@leans_on("lightning", "trainer.fit_loop._can_stop_early", "lightning_loops")
def test_the_step_at_which_a_fit_ends_is_known(namespace):
    seen = []
    hooks = {"on_train_batch_end": lambda trainer, *_: seen.append(lightning_loops.stops_now(trainer))}
    fit(namespace, hooks, max_steps=3)
    assert seen == [False, False, True]
    seen.clear()
    hooks["on_train_batch_start"] = lambda trainer, *_: setattr(trainer, "should_stop", True)
    fit(namespace, hooks, max_epochs=2, min_epochs=0, min_steps=2)
    assert seen == [False, True]


@both
@leans_on("lightning", "trainer.fit_loop.epoch_loop._batches_that_stepped", "lightning_loops")
def test_the_step_under_way_has_the_number_that_loggers_file_it_under(namespace):
    seen = []
    hooks = {"on_train_batch_end": lambda trainer, *_: seen.append(lightning_loops.logged_step(trainer))}
    fit(namespace, hooks, accumulate_grad_batches=2)
    assert seen == [0, 0, 1, 1]


@both
@leans_on("lightning", "epoch_loop._on_before_fetch and _on_after_fetch", "lightning_loops")
def test_each_wait_for_a_batch_is_seen(namespace):
    seen = []

    watchers = [[lambda who=who, what=what: seen.append(who + what) for what in ("asks", "got")] for who in ("", "2")]

    def watch(trainer, module, stage):
        for watcher in watchers * 2:  # again in a second fit, once each
            lightning_loops.watch_fetching(trainer, *watcher)

    fit(namespace, {"setup": watch, "on_train_batch_start": lambda *_: seen.append("batch")}, max_steps=2)
    assert seen[:10] == ["asks", "2asks", "got", "2got", "batch"] * 2


@both
@leans_on("lightning", "module._on_before_batch_transfer", "lightning_loops")
def test_each_batch_of_training_passes_through_a_method_on_the_host(namespace):
    seen = []

    def watch(trainer, pl_module):
        inner = getattr(pl_module, lightning_loops.BEFORE_TRANSFER)

        def passes(batch, *args, **kwargs):
            seen.append(trainer.training)
            return inner(batch, *args, **kwargs)

        setattr(pl_module, lightning_loops.BEFORE_TRANSFER, passes)

    fit(namespace, {"on_train_start": watch})
    assert seen == [True] * 4 + [False]


@both
@leans_on(
    "lightning", "fit_loop._combined_loader, fit_loop._data_fetcher.length and val_check_batch", "lightning_loops"
)
def test_an_epochs_length_can_be_asked_for_again(namespace):
    class Shrinks:
        length = 4

        def __len__(self):
            return self.length

        def __iter__(self):
            yield from list(rows())[: self.length]

    loader, batches, checked = Shrinks(), [], []

    def shrink(trainer, pl_module):
        loader.length = 2
        lightning_loops.recount(trainer)

    hooks = {
        "on_train_epoch_start": shrink,
        "on_train_batch_end": lambda trainer, *_: batches.append(
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        ),
        "on_validation_start": lambda *_: checked.append(len(batches)),
    }
    run = trainer(namespace, hooks)
    run.fit(module(namespace), loader, rows())
    assert batches == [False, True]
    assert checked == [2]
    assert run.num_training_batches == 2
