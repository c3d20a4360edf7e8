import contextlib
import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lit_efficient.callbacks.non_finite_guard import NonFiniteGuard, largest
from lit_efficient.errors import ConfigurationError, DivergedError
from tests.callbacks.resume_kit import trainer


class Explodes(pl.LightningModule):
    """Module whose loss is NaN or infinite in some batches; it records weights and AdamW's states after each step."""

    def __init__(self, *bad, value=float("nan"), manual=False):
        super().__init__()
        torch.manual_seed(0)
        self.good, self.layer = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        self.bad, self.value, self.history = bad, value, []
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum() * (self.value if batch_idx in self.bad else 1.0) + self.good(batch).sum()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        states = [value.clone() for state in self.trainer.optimizers[0].state.values() for value in state.values()]
        self.history.append([parameter.detach().clone() for parameter in self.parameters()] + states)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(6, 1))


def fit(module, *callbacks, **arguments):
    trainer([*callbacks], max_epochs=1, accumulate_grad_batches=1, **arguments).fit(module)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("manual", "clip"), [(False, None), (False, 1.0), (True, None)])
def test_a_step_that_is_left_out_changes_nothing(value, manual, clip):
    module, guard = Explodes(2, value=value, manual=manual), NonFiniteGuard("skip")
    with pytest.warns(
        UserWarning, match="at step 2 gradients are not finite in layer.weight, layer.bias; the step is skip"
    ):
        fit(module, guard, gradient_clip_val=clip)
    before, at, after = module.history[1:4]
    assert all(map(torch.equal, before, at))
    assert not any(map(torch.equal, at, after))
    assert all(torch.isfinite(value).all() for value in after)
    assert guard.state_dict() == {"skipped": 1, "consecutive": 0}


class NormBytes(TorchDispatchMode):
    """Counts the bytes of tensors of which an operator computes norms."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "norm" in str(func):
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.bytes += sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)
        return func(*args, **(kwargs or {}))


class Wide(Explodes):
    """Module with a weight of 4,096 bytes."""

    def __init__(self, *bad, **arguments):
        super().__init__(*bad, **arguments)
        self.layer = torch.nn.Linear(1, 1024, bias=False)


class OwnHook(Wide):
    """Module with a hook of its own, which may change gradients before they are clipped."""

    def on_before_optimizer_step(self, optimizer):
        pass


@pytest.mark.parametrize(
    ("kind", "clip", "callbacks", "passes"),
    [
        (Wide, None, [], 0),
        (Wide, None, [NonFiniteGuard], 1),
        (Wide, 1.0, [], 1),
        (Wide, 1.0, [NonFiniteGuard], 1),
        (OwnHook, 1.0, [NonFiniteGuard], 2),
    ],
)
def test_no_second_norm_is_computed_where_gradients_are_clipped(kind, clip, callbacks, passes):
    module = kind()
    with NormBytes() as norms:
        fit(module, *(callback() for callback in callbacks), pl.Callback(), gradient_clip_val=clip)
    assert norms.bytes // (6 * 4096) == passes
    reference = kind()
    fit(reference, pl.Callback(), gradient_clip_val=clip)
    assert all(map(torch.equal, module.history[-1], reference.history[-1]))


def test_a_norm_that_overflows_although_no_gradient_is_too_large_skips_nothing():
    module, guard = Wide(2, value=9e15), NonFiniteGuard("skip")
    fit(module, guard, gradient_clip_val=1.0)
    assert guard.skipped == 0
    assert not torch.equal(module.history[1][0], module.history[2][0])
    with pytest.warns(UserWarning, match=r"at step 2 gradients are beyond 1e\+16 in layer.weight; the step is skipped"):
        fit(Wide(2, value=2e16), NonFiniteGuard("skip"), gradient_clip_val=1.0)


def test_after_a_run_nothing_watches_the_clipping():
    for module in (Explodes(), Explodes(2)):
        made = trainer([NonFiniteGuard()], max_epochs=1, accumulate_grad_batches=1, gradient_clip_val=1.0)
        with contextlib.suppress(DivergedError):
            made.fit(module)
        assert "clip_grad_by_norm" not in vars(made.precision_plugin)


class Unclipped(pl.Callback):
    """Ends the clipping during the run."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.gradient_clip_val = None


@pytest.mark.parametrize(("clip", "callbacks"), [(-1.0, [pl.Callback]), (1.0, [Unclipped])])
def test_steps_that_do_not_clip_are_checked(clip, callbacks):
    module = Explodes(2)
    with pytest.raises(DivergedError, match="at step 2 gradients are not finite"):
        fit(module, NonFiniteGuard(), *(callback() for callback in callbacks), gradient_clip_val=clip)
    assert not torch.isnan(module.layer.weight).any()


def test_without_it_the_weights_are_lost():
    module = Explodes(2)
    fit(module, pl.Callback())
    assert torch.isnan(module.layer.weight).all()


def test_raising_keeps_the_weights():
    module = Explodes(2)
    with pytest.raises(DivergedError, match=r"at step 2 gradients are not finite in layer\.weight, layer\.bias"):
        fit(module, NonFiniteGuard())
    assert all(map(torch.equal, module.parameters(), module.history[1][:4]))


def test_what_no_square_can_hold_is_left_out_as_well():
    """Adam's second moment would be infinite, and the weight would never change again."""
    module = Explodes(2, value=1e25)
    with pytest.warns(UserWarning, match=r"at step 2 gradients are beyond 1e\+16 in layer\.weight, layer\.bias"):
        fit(module, NonFiniteGuard("skip"))
    assert all(torch.isfinite(value).all() for value in module.history[-1])


class Squared(Explodes):
    """Module whose gradients depend on the weights."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) ** 2


class Spoils(pl.Callback):
    """Call a function with the trainer and the module at the start of a batch."""

    def __init__(self, batch, spoil):
        self.batch, self.spoil = batch, spoil

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.batch:
            self.spoil(trainer, module)


def test_what_is_finite_a_gradient_scaler_would_step_with():
    def spoil(trainer, module):
        module.layer.weight.register_hook(lambda gradient: torch.full_like(gradient, 1e25))

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    with pytest.raises(DivergedError, match=r"at step 2 gradients are beyond 1e\+16 in layer\.weight; the weights"):
        fit(Explodes(), NonFiniteGuard(), Spoils(2, spoil), plugins=[plugin])


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_rate_that_is_not_finite_stops_the_run_before_the_step(action):
    def spoil(trainer, module):
        trainer.optimizers[0].param_groups[0]["lr"] = float("nan")

    module = Explodes()
    with pytest.raises(DivergedError, match="at step 2 the learning rate is nan; the weights are those before the st"):
        fit(module, NonFiniteGuard(action), Spoils(2, spoil))
    assert all(map(torch.equal, module.parameters(), module.history[1][:4]))


@pytest.mark.parametrize(("batch", "step"), [(2, 3), (5, 6)])  # by the next step, or the run's end
def test_weights_that_are_lost_otherwise_are_named_and_no_step_is_left_out(batch, step):
    def spoil(trainer, module):
        trainer.optimizers[0].state[module.layer.bias]["exp_avg"].fill_(float("nan"))

    guard = NonFiniteGuard("skip")
    with pytest.raises(DivergedError, match=rf"at step {step} weights are not finite in layer\.bias; resume from"):
        fit(Squared(), guard, Spoils(batch, spoil))
    assert guard.skipped == 0


def test_states_that_are_lost_without_the_weights_are_named_at_the_end():
    def spoil(trainer, module):  # the weight stands still
        trainer.optimizers[0].state[module.layer.bias]["exp_avg_sq"].fill_(float("inf"))

    with pytest.raises(
        DivergedError, match=r"at step 6 states of the optimizer are not finite in layer\.bias; resume from"
    ):
        fit(Squared(), NonFiniteGuard("skip"), Spoils(2, spoil))


@pytest.mark.filterwarnings("ignore:NonFiniteGuard")
def test_too_many_in_a_row_stop_the_run():
    fit(Explodes(1, 2, 4, 5), NonFiniteGuard("skip", 2))
    with pytest.raises(DivergedError, match=r"at step 3 .* after 2 consecutive skipped steps"):
        fit(Explodes(1, 2, 3), NonFiniteGuard("skip", 2))


def test_the_count_is_resumed():
    guard = NonFiniteGuard("skip")
    assert guard.state_dict() == {}
    guard.load_state_dict({"skipped": 7, "consecutive": 3})
    assert guard.state_dict() == {"skipped": 7, "consecutive": 3}


def test_large_but_finite_gradients_pass():
    assert math.isfinite(largest([torch.full((8,), 1e30), torch.ones(2)]))
    assert math.isfinite(largest([]))
    assert not math.isfinite(largest([torch.ones(2), torch.tensor([1.0, float("nan")])]))
    assert not math.isfinite(largest([torch.tensor([float("-inf")])]))


def test_sparse_complex_and_empty_gradients_are_looked_at():
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert math.isfinite(largest([table.weight.grad, torch.ones(2), torch.zeros(0)]))
    assert not math.isfinite(largest([torch.ones(2), table.weight.grad * float("nan")]))
    assert math.isfinite(largest([torch.ones(2, dtype=torch.complex64)]))
    assert not math.isfinite(largest([torch.tensor([complex(0, float("nan"))])]))


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_beside_a_gradient_scaler_it_stops_what_no_scale_can_mend():
    """The scaler finds its scale by overflows. The steps that it skips for that do not count as divergence."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000))
    module, guard = Explodes(), NonFiniteGuard(max_consecutive=4)
    trainer([guard], max_epochs=3, accumulate_grad_batches=1, plugins=[plugin]).fit(module)
    assert guard.skipped > 0
    assert all(map(torch.isfinite, module.parameters()))
    assert not torch.equal(module.history[0][0], module.history[-1][0])
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    module = Explodes(*range(6))
    with pytest.raises(DivergedError, match="after 4 consecutive skipped steps"):
        trainer([NonFiniteGuard(max_consecutive=4)], max_epochs=3, accumulate_grad_batches=1, plugins=[plugin]).fit(
            module
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "stop"}, "action must be one of raise, skip, got 'stop'"),
        ({"max_consecutive": 0}, "max_consecutive must be a whole number of at least 1, got 0"),
        ({"max_consecutive": 1.5}, "max_consecutive must be a whole number of at least 1, got 1.5"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        NonFiniteGuard(**arguments)


def test_a_batch_that_is_not_finite_is_named_as_the_cause():
    class Named(Explodes):
        def training_step(self, batch, batch_idx):
            return self.good(batch["values"]).sum()

        def train_dataloader(self):
            return DataLoader([{"index": 0, "values": torch.tensor([value])} for value in (1.0, math.nan)])

    with pytest.raises(DivergedError, match=r"because the batch holds values that are not finite \(values\)"):
        fit(Named(), NonFiniteGuard())
    with pytest.raises(DivergedError) as error:
        fit(Explodes(1), NonFiniteGuard())
    assert "because" not in str(error.value)
