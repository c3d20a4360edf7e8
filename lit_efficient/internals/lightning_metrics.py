"""Save and restore the metrics that a module has logged, which Lightning leaves out of checkpoints.

Private attributes in use: ``_logger_connector._callback_metrics`` and ``_first_loop_iter``, ``epoch_loop._results``,
and of torchmetrics ``_defaults``, ``_update_count``, ``_computed`` and ``_forward_cache``. Checked with lightning
2.6.6.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_efficient.internals.lightning_trainer import logger_connector
from lit_efficient.internals.torch_trees import tree_map_only

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LOGGED = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def monitored(trainer: Trainer) -> dict[str, Tensor]:
    """Return the current metrics that schedulers and callbacks can monitor, by name."""
    return {name: value.detach().clone() for name, value in trainer.callback_metrics.items() if torch.is_tensor(value)}


def logs_in_bar(value: Tensor) -> bool:
    """Return whether to log a training metric with ``prog_bar``: only on a CPU.

    Lightning reads such metrics in each batch, which would synchronise a GPU. `ThroughputBar` shows the loss there.
    """
    return value.device.type == "cpu"


def names_logged(trainer: Trainer) -> set[str]:
    """Return the names that ``self.log`` was called with in this epoch: ``trainer._results``."""
    return {item.meta.name for item in (trainer._results or {}).values()}


def unfinished(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the metrics of the unfinished training epoch: the arguments of ``self.log``, and the states.

    Metrics that are logged for each step are included, because Lightning repeats the previous value if a step does not
    log them.
    """
    found = []
    for item in trainer.fit_loop.epoch_loop._results.values():
        if item.has_reset:
            continue
        meta = item.meta
        reduce = meta.reduce_fx
        logged = {name: getattr(meta, name) for name in (*_LOGGED, "metric_attribute")}
        logged |= {"sync_dist": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}
        logged |= {"reduce_fx": reduce.__name__, "python": reduce is getattr(builtins, reduce.__name__, None)}
        found.append({"logged": logged, "states": [_state(part) for part in _parts(item)]})
    return found


def restore(trainer: Trainer, metrics: dict[str, Tensor], results: list[dict[str, Any]]) -> None:
    """Restore the results of `monitored` and `unfinished` before a fit begins."""
    connector = logger_connector(trainer)
    loop = trainer.fit_loop.epoch_loop
    device = trainer.strategy.root_device
    connector._callback_metrics.update({name: value.to(device) for name, value in metrics.items()})
    for result in results:
        logged = dict(result["logged"])
        if logged.pop("python"):
            logged["reduce_fx"] = getattr(builtins, logged["reduce_fx"])
        name = logged["metric_attribute"]
        value: Any = torch.zeros((), device=device)
        if name:
            value = trainer.lightning_module.get_submodule(name)
        loop._results.log(value=value, batch_size=1, sync_dist_fn=trainer.strategy.reduce, **logged)
        item = loop._results[f"{logged['fx']}.{logged['name']}"]
        for part, state in zip(_parts(item), result["states"]):
            for key, kept in tree_map_only(Tensor, lambda tensor: tensor.to(device), state).items():
                setattr(part, key, kept)
            part._computed = None
        item._forward_cache = _parts(item)[0]._forward_cache
        connector._first_loop_iter = False  # otherwise the next batch would count as the first of the epoch


def _parts(item: Any) -> list[Any]:
    metric = item if item.is_tensor else item.value
    return [part for part in metric.modules() if hasattr(part, "_defaults")]


def _state(part: Any) -> dict[str, Any]:
    names = (*part._defaults, "_update_count", "_forward_cache")
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), {name: getattr(part, name) for name in names})
