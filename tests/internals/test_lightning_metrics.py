import pytest
import torch
from torchmetrics import SumMetric

from lit_efficient.internals import lightning_metrics
from tests.internals.leaning import leans_on
from tests.internals.toy_fit import NAMESPACES, module, rows, trainer

LOGGED = "epoch_loop._results, _logger_connector._callback_metrics, _logger_connector._first_loop_iter"
KEPT = "_defaults, _update_count, _computed, _forward_cache"


@pytest.mark.parametrize("namespace", NAMESPACES)
@leans_on("lightning", f"{LOGGED} and, of torchmetrics, {KEPT}", "lightning_metrics")
def test_the_metrics_of_half_an_epoch_can_be_taken_to_another_fit(namespace):
    def logging():
        toy = module(namespace)
        toy.sum = SumMetric()

        def training_step(batch, batch_idx):
            toy.sum(batch[0])
            toy.log("sum", toy.sum, on_step=False, on_epoch=True)
            toy.log_dict({"mean": batch[0].sum(), "most": batch[0].sum()}, on_step=False, on_epoch=True)
            toy.log("least", batch[0].sum(), on_step=True, on_epoch=True, reduce_fx=min)
            return toy.layer(batch[0]).sum()

        toy.training_step = training_step
        return toy

    kept = []

    def keep(run, toy, outputs, batch, batch_idx):
        if batch_idx == 1:
            kept[:] = lightning_metrics.monitored(run), lightning_metrics.unfinished(run)

    def seen(run, *_):
        return {name: value.item() for name, value in run.callback_metrics.items()}

    whole, rest, start = [], [], []
    ends = {"on_train_batch_end": keep, "on_train_end": lambda run, *_: whole.append(seen(run))}
    trainer(namespace, ends).fit(logging(), rows(), rows(1))
    goes_on = {"on_train_start": lambda run, *_: (lightning_metrics.restore(run, *kept), start.append(seen(run)))}
    goes_on["on_train_end"] = lambda run, *_: rest.append(seen(run))
    second_half = torch.utils.data.Subset(rows().dataset, [2, 3])
    trainer(namespace, goes_on).fit(logging(), torch.utils.data.DataLoader(second_half), rows(1))
    assert start == [{"least_step": 1.0, "least": 1.0}]
    assert rest == whole
    assert whole[0] == {"sum": 6.0, "mean": 1.5, "most": 1.5, "least_step": 3.0, "least_epoch": 0.0, "least": 0.0}


@pytest.mark.parametrize("namespace", NAMESPACES)
@leans_on("lightning", "trainer._results", "lightning_metrics")
def test_names_that_are_logged_are_known_in_the_step(namespace):
    toy, seen = module(namespace), []
    toy.on_train_batch_start = lambda *_: toy.log("mine", 1.0)
    run = trainer(namespace, {"on_train_batch_end": lambda run, *_: seen.append(lightning_metrics.names_logged(run))})
    run.fit(toy, rows(1), rows(1))
    assert seen == [{"mine"}]
