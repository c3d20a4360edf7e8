"""What the command says about changed settings is done: each key is named, and the resumed run trains with it."""

from pathlib import Path

import pytest
import torch
import yaml
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, LinearLR, ReduceLROnPlateau

from lit_efficient.cli import command_line
from lit_efficient.cli.checkpoint import precision_of
from lit_efficient.cli.resumed import _alone
from tests.cli.toy_runs import STEPS, fit
from tests.support_cli import Recorder, ToyModel

SAVE = "--trainer.enable_checkpointing=true"
CKPT = "--ckpt_path=runs/base/latest/last.ckpt"


@pytest.fixture
def said(caplog, capsys):
    """What was logged and printed since the last call."""
    caplog.set_level("INFO")

    def text() -> str:
        printed = capsys.readouterr()
        found = caplog.text + printed.err
        caplog.clear()
        return found

    return text


def groups() -> list[dict]:
    return Recorder.last.trainer.optimizers[0].param_groups


def test_every_key_that_changed_is_named_and_no_other(said):
    assert fit(SAVE) == 0
    said()
    changes = {
        "seed_everything": ("0", "1"),
        "data.batch_size": ("2", "4"),
        "model.scale": ("1.0", "2.0"),
        "trainer.max_epochs": ("2", "3"),
        "trainer.precision": ("None", "'bf16-mixed'"),
        "trainer.gradient_clip_val": ("None", "0.5"),
        "trainer.callbacks.Recorder.tag": ("'base'", "'other'"),
    }
    arguments = [f"--{key}={now.strip(chr(39))}" for key, (_, now) in changes.items() if "Recorder" not in key]
    tag = "--trainer.callbacks=[{class_path: tests.support_cli.Recorder, init_args: {tag: other}}]"
    assert fit(SAVE, CKPT, *arguments, tag) == 0
    lines = [line.strip() for line in said().splitlines() if " in the checkpoint -> " in line]
    expected = {f"{key}: {then} in the checkpoint -> {now} in the config" for key, (then, now) in changes.items()}
    assert set(lines) == expected
    trainer = Recorder.last.trainer
    assert (trainer.precision, trainer.gradient_clip_val, trainer.global_step) == ("bf16-mixed", 0.5, STEPS + 2)


def test_an_automatic_precision_is_chosen_once_and_kept(said, monkeypatch):
    chosen = "bf16-mixed"
    monkeypatch.setattr(command_line, "auto_precision", lambda accelerator: chosen)
    auto = "--trainer.precision=auto"
    assert fit(SAVE, auto) == 0
    assert "trainer.precision: auto is bf16-mixed here" in said()
    assert Recorder.last.trainer.precision == "bf16-mixed"
    config = yaml.safe_load(Path("runs/base/latest/config.yaml").read_text())
    assert config["trainer"]["precision"] == "bf16-mixed"
    assert fit(SAVE, CKPT, auto, "--trainer.max_epochs=3") == 0
    assert "trainer.precision:" in said()
    chosen = "16-mixed"
    assert fit(SAVE, CKPT, auto, "--trainer.max_epochs=4") == 2
    words = " ".join(said().split())
    last = Path("runs/base/latest/last.ckpt")
    shards = Path("shards")
    shards.mkdir()
    torch.save({"lit_efficient": torch.load(last, weights_only=True)["lit_efficient"]}, shards / "meta.pt")
    assert precision_of(str(shards), {}) == precision_of(str(last), torch.load(last, weights_only=True)) == "bf16-mixed"
    assert "auto is 16-mixed on this machine" in words
    assert "last.ckpt was trained with bf16-mixed. Set the precision" in words
    assert fit(SAVE, CKPT, "--trainer.precision=bf16-mixed", "--trainer.max_epochs=4") == 0


@pytest.mark.turns(3)
@pytest.mark.parametrize(("name", "option"), [("Rprop", "lr"), ("Adagrad", "initial_accumulator_value"), ("SGD", "lr")])
def test_what_only_shapes_states_as_they_begin_is_said_to_have_no_effect(name, option, said):
    def weights(value: str, *arguments: str) -> torch.Tensor:
        assert fit(SAVE, f"--optimizer={name}", f"--optimizer.{option}={value}", *arguments) == 0
        return torch.nn.utils.parameters_to_vector(Recorder.last.trainer.lightning_module.parameters())

    weights("0.01")
    longer = weights("0.01", CKPT, "--trainer.max_epochs=3")
    weights("0.01")
    said()
    other = weights("0.02", CKPT, "--trainer.max_epochs=3")
    text = said()
    assert f"{name}, group 0: {option} 0.01 -> 0.02" in text
    assert ("without effect" in text) == torch.equal(longer, other) == (name != "SGD")


def test_rate_decay_and_betas_are_those_of_the_config(said):
    assert fit(SAVE, "--optimizer=AdamW", "--optimizer.lr=0.01") == 0
    said()
    changes = ["--optimizer.lr=0.002", "--optimizer.weight_decay=0.3", "--optimizer.betas=[0.8,0.9]"]
    assert fit(SAVE, CKPT, "--optimizer=AdamW", *changes, "--trainer.max_epochs=3") == 0
    assert Recorder.last.rates == [0.002] * 4
    assert (groups()[0]["weight_decay"], tuple(groups()[0]["betas"])) == (0.3, (0.8, 0.9))
    text = said()
    for line in ("lr 0.01 -> 0.002", "weight_decay 0.01 -> 0.3", "betas (0.9, 0.999) -> (0.8, 0.9)"):
        assert f"The config wins: AdamW, group 0: {line}" in text
    # Nothing has changed now, and nothing is set: the run goes on where it is.
    assert fit(SAVE, CKPT, "--optimizer=AdamW", *changes, "--trainer.max_epochs=4") == 0
    assert "The config wins" not in said()
    assert Recorder.last.rates == [0.002] * 4


def test_what_adamw_began_goes_on_as_fused_adamw_bit_by_bit(said):
    """Tasks took AdamW before they took FusedAdamW: their checkpoints keep its kernel, also when resumed again."""

    def weights() -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(Recorder.last.trainer.lightning_module.parameters())

    assert fit(SAVE, "--optimizer=AdamW", "--optimizer.lr=0.01", "--trainer.max_epochs=3") == 0
    whole = weights()
    assert fit(SAVE, "--optimizer=AdamW", "--optimizer.lr=0.01") == 0
    for epochs in (3, 4):
        said()
        assert fit(SAVE, CKPT, "--optimizer=FusedAdamW", "--optimizer.lr=0.01", f"--trainer.max_epochs={epochs}") == 0
        assert "The config wins" not in said()
        assert groups()[0]["fused"] is None
        assert epochs > 3 or torch.equal(whole, weights())


SCHEDULES = {
    "cosine": ["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.eta_min=0.001"],
    "steps": ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=3"],
    "one cycle": ["--lr_scheduler=OneCycleLR", "--lr_scheduler.max_lr=0.3"],
    "stable": ["--lr_scheduler=WarmupStableDecay", "--lr_scheduler.decay=3"],
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("rate", ["0.1", "0.04"])
def test_a_schedule_goes_on_as_if_the_config_had_been_so_from_the_start(schedule, rate, said):
    """Another length (a one-cycle schedule had run out of it), and another rate: as a run that was never stopped."""
    other = ["--optimizer=SGD", f"--optimizer.lr={rate}", "--trainer.max_epochs=4", *schedule]
    if "OneCycleLR" in schedule[0]:
        other.append(f"--lr_scheduler.max_lr={rate}")
    assert fit(*other) == 0
    whole = Recorder.last.rates
    assert fit(SAVE, "--optimizer=SGD", "--optimizer.lr=0.1", *schedule) == 0
    assert fit(SAVE, CKPT, *other) == 0
    assert Recorder.last.rates == pytest.approx(whole[STEPS:], rel=1e-12)


class Scheduled(ToyModel):
    """Schedules of a module's own: one that holds others, one of a function, and several for one optimizer."""

    def __init__(self, kind: str, lr: float = 0.1, warmup: int = 3) -> None:
        super().__init__()
        self.kind, self.lr, self.warmup = kind, lr, warmup

    def validation_step(self, batch, batch_idx):
        self.log("constant", 1.0)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        if self.kind == "function":
            return [optimizer], [
                {"scheduler": LambdaLR(optimizer, lambda n: 0.9 ** (n / self.warmup)), "interval": "step"}
            ]
        if self.kind == "table":
            rates = [0.9 ** (n / self.warmup) for n in range(40)]
            return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda n: rates[n]), "interval": "step"}]
        warmup, decay = LinearLR(optimizer, total_iters=self.warmup), ExponentialLR(optimizer, 0.9)
        if self.kind == "chained":
            return [optimizer], [{"scheduler": ChainedScheduler([warmup, decay]), "interval": "step"}]
        follows = ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return [optimizer], [
            {"scheduler": warmup, "interval": "step"},
            decay,
            {"scheduler": follows, "monitor": "constant"},
        ]


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", ["chained", "function", "several", "table"])
@pytest.mark.parametrize("change", ["lr=0.04", "warmup=6"])
def test_schedules_of_a_module_s_own_go_on_as_if_the_config_had_been_so(kind, change):
    model = ["--model=tests.cli.test_resumed.Scheduled", f"--model.init_args.kind={kind}"]
    other = [*model, f"--model.init_args.{change}", "--trainer.max_epochs=4"]
    assert fit(*other) == 0
    whole = Recorder.last.rates
    assert fit(SAVE, *model, "--trainer.max_epochs=3") == 0
    assert fit(SAVE, CKPT, *other) == 0
    assert Recorder.last.rates == pytest.approx(whole[12:], rel=1e-12)


def test_a_schedule_that_follows_a_metric_keeps_what_it_has_seen(said):
    plateau = ["--optimizer=SGD", "--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=val/loss"]
    plateau += ["--lr_scheduler.mode=max", "--lr_scheduler.factor=0.5"]  # losses fall: the second is one too many
    assert fit(SAVE, *plateau, "--optimizer.lr=0.04", "--lr_scheduler.patience=0") == 0
    assert groups()[0]["lr"] == 0.02
    assert fit(SAVE, CKPT, *plateau, "--optimizer.lr=0.01", "--lr_scheduler.patience=7", "--trainer.max_epochs=3") == 0
    scheduler = Recorder.last.trainer.lr_scheduler_configs[0].scheduler
    assert Recorder.last.rates == [0.005] * 4  # half of the config's, as before
    assert (scheduler.patience, scheduler.last_epoch) == (7, 3)


def test_a_schedule_that_the_config_has_no_more_leaves_the_config_s_rate():
    constant = ["--optimizer=SGD", "--optimizer.lr=0.1"]
    assert fit(SAVE, *constant, "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1") == 0
    assert fit(SAVE, CKPT, *constant, "--trainer.max_epochs=3") == 0
    assert Recorder.last.rates == [0.1] * 4
    assert (
        fit(SAVE, CKPT, *constant, "--lr_scheduler=StepLR", "--lr_scheduler.step_size=6", "--trainer.max_epochs=4") == 0
    )
    assert Recorder.last.rates == pytest.approx([0.1 * 0.1 ** (step // 6) for step in range(12, 16)])


def test_another_schedule_leaves_no_momentum_of_the_one_before(said):
    sgd = ["--optimizer=SGD", "--optimizer.lr=0.1", "--optimizer.momentum=0.95"]
    cycle = ["--lr_scheduler=OneCycleLR", "--lr_scheduler.max_lr=0.1", "--lr_scheduler.total_steps=12"]
    assert fit(SAVE, *sgd, *cycle) == 0
    first = str(Path("runs/base/latest/last.ckpt").resolve())
    assert 0.85 < groups()[0]["momentum"] < 0.94  # within the cycle
    for schedule in ([], ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=3"]):
        assert fit(SAVE, f"--ckpt_path={first}", *sgd, *schedule, "--trainer.max_epochs=3") == 0
        assert groups()[0]["momentum"] == 0.95
    # This one takes no state but its own.
    cyclic = ["--lr_scheduler=CyclicLR", "--lr_scheduler.base_lr=0.01", "--lr_scheduler.max_lr=0.2"]
    assert fit(SAVE, *sgd, *cyclic, "--trainer.max_epochs=3") == 0
    whole = Recorder.last.rates
    said()
    assert fit(SAVE, f"--ckpt_path={first}", *sgd, *cyclic, "--trainer.max_epochs=3") == 0
    assert Recorder.last.rates == pytest.approx(whole[STEPS:], rel=1e-12)


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (["--optimizer=AdamW"], ["--optimizer=SGD", "--optimizer.lr=1"], ["trained with AdamW", "SGD"]),
        (["--optimizer=AdamW", "--model.frozen=true"], ["--optimizer=AdamW"], ["[[2]]", "[[4]]", "other parameters"]),
    ],
)
def test_the_state_of_another_optimizer_is_refused_in_a_sentence(first, then, words, capsys):
    assert fit(SAVE, *first) == 0
    capsys.readouterr()
    assert fit(SAVE, CKPT, *then, "--trainer.max_epochs=3") == 2
    text = capsys.readouterr().err
    said = text[text.index("error: ") :]
    assert [word for word in words if word not in said] == []
    assert len(said.splitlines()) <= 3
    assert "Traceback" not in text


ADAM, CYCLE = ["--optimizer=AdamW"], ["--optimizer=SGD", "--optimizer.lr=0.1", "--lr_scheduler=OneCycleLR"]
CYCLE.append("--lr_scheduler.max_lr=0.1")


@pytest.mark.parametrize(
    ("first", "change", "words"),
    [
        (ADAM, "--optimizer.amsgrad=true", "no 'max_exp_avg_sq', which AdamW needs"),
        ([*CYCLE, "--lr_scheduler.total_steps=30"], "--lr_scheduler.total_steps=6", "OneCycleLR cannot get where"),
    ],
)
def test_arguments_that_the_checkpoint_cannot_go_on_with_are_refused(first, change, words, capsys):
    assert fit(SAVE, *first) == 0
    assert fit(SAVE, CKPT, *first, change, "--trainer.max_epochs=3") == 2
    assert words in capsys.readouterr().err


def test_a_place_in_the_data_that_no_loader_goes_on_from_is_refused(capsys):
    assert fit(SAVE, "--trainer.callbacks+=ExactResume", "--trainer.max_steps=3") == 0
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint need to be provided"):
        assert fit(SAVE, CKPT, "--trainer.max_steps=6") == 2
    assert "resume with the ExactResume, or the loader with a state" in capsys.readouterr().err


def test_a_momentum_that_begins_on_resume_is_set():
    sgd = ["--optimizer=SGD", "--optimizer.lr=0.1"]
    assert fit(SAVE, *sgd) == 0
    assert fit(SAVE, CKPT, *sgd, "--optimizer.momentum=0.9", "--trainer.max_epochs=3") == 0
    assert groups()[0]["momentum"] == 0.9


class Later(torch.optim.SGD):
    """Begins a state in its second step: a list, for which no number stands in."""

    def step(self, closure=None):
        loss = super().step(closure)
        for state in (self.state[p] for group in self.param_groups for p in group["params"]):
            if "seen" in state:
                state["seen"].append(1.0)
            elif state.setdefault("begun", 0):
                state["seen"] = []
            state["begun"] += 1
        return loss


def test_states_of_somebody_s_own_optimizer_are_no_reason_to_end():
    own = ["--optimizer=tests.cli.test_resumed.Later", "--optimizer.lr=0.1"]
    assert fit(SAVE, *own) == 0
    assert fit(SAVE, CKPT, *own, "--optimizer.weight_decay=0.5", "--trainer.max_epochs=3") == 0
    assert groups()[0]["weight_decay"] == 0.5


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # a saver of another kind has no state
def test_callbacks_that_load_their_arguments_get_those_of_the_config():
    def stop(patience: int) -> str:
        arguments = f"{{monitor: val/loss, patience: {patience}}}"
        return f"--trainer.callbacks+={{class_path: EarlyStopping, init_args: {arguments}}}"

    saver = "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {filename: own, every_n_epochs: %d}}"
    assert fit(SAVE, stop(7), saver % 1) == 0
    assert fit(SAVE, CKPT, stop(2), saver % 3, "--trainer.max_epochs=3") == 0
    stopping = [c for c in Recorder.last.trainer.callbacks if type(c).__name__ == "EarlyStopping"]
    assert [callback.patience for callback in stopping] == [2]
    savers = [c for c in Recorder.last.trainer.callbacks if getattr(c, "filename", "") == "own"]
    assert [callback.every_n_epochs for callback in savers] == [3]  # a property


def test_callbacks_that_make_something_else_of_an_argument_are_as_they_would_be_in_a_new_run():
    def stop(delta: float) -> str:
        return (
            f"--trainer.callbacks+={{class_path: EarlyStopping, init_args: {{monitor: val/loss, min_delta: {delta}}}}}"
        )

    assert fit(SAVE, stop(0.0)) == 0
    assert fit(SAVE, CKPT, stop(0.5), "--trainer.max_epochs=3") == 0
    stopping = [c for c in Recorder.last.trainer.callbacks if type(c).__name__ == "EarlyStopping"]
    assert [callback.min_delta for callback in stopping] == [-0.5]  # lower is better


def test_a_seed_that_exact_resume_does_not_heed_is_said_not_to_win(said):
    exact = "--trainer.callbacks+=ExactResume"
    assert fit(SAVE, exact) == 0
    assert fit(SAVE, CKPT, exact, "--seed_everything=5", "--trainer.max_epochs=3") == 0
    line = "seed_everything: 0 in the checkpoint -> 5 in the config, but ExactResume continues with"
    assert line in said()
    exact = next(c for c in Recorder.last.trainer.callbacks if type(c).__name__ == "ExactResume")
    assert exact.state_dict()["seed"] == 0


def test_of_a_checkpoint_that_does_not_say_it_nothing_is_promised(said):
    """One of an older version: its optimizer's settings go on, and that is what is said."""
    assert fit(SAVE, "--optimizer=SGD", "--optimizer.lr=0.1") == 0
    older = torch.load("runs/base/latest/last.ckpt", weights_only=True)
    del older["lit_efficient"]
    torch.save(older, "older.ckpt")
    said()
    arguments = ["--optimizer=SGD", "--optimizer.lr=0.3", "--model.scale=2", "--trainer.max_epochs=3"]
    with pytest.warns(UserWarning, match="goes on with the checkpoint's rate, decay and betas"):
        assert fit(SAVE, "--ckpt_path=older.ckpt", *arguments) == 0
    assert Recorder.last.rates == [0.1] * 4
    text = said()
    assert "model.scale: 1.0 in the checkpoint -> 2.0 in the config" in text
    assert "optimizer.lr" not in text


KINDS = {
    "Chained": lambda o: ChainedScheduler([lr_scheduler.StepLR(o, 1), ExponentialLR(o, 0.5)]),
    "ChainedOthers": lambda o: ChainedScheduler([lr_scheduler.StepLR(o, 1), LinearLR(o)]),
    "Constant": lr_scheduler.ConstantLR,
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "Cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "Exponential": lambda o: ExponentialLR(o, 0.5),
    "Lambda": lambda o: LambdaLR(o, lambda n: 1.0),
    "Linear": LinearLR,
    "MultiStep": lambda o: lr_scheduler.MultiStepLR(o, [1]),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=4),
    "Plateau": ReduceLROnPlateau,
    "Polynomial": lr_scheduler.PolynomialLR,
    "Sequential": lambda o: lr_scheduler.SequentialLR(o, [LinearLR(o), ExponentialLR(o, 0.5)], [2]),
    "SequentialOthers": lambda o: lr_scheduler.SequentialLR(o, [LinearLR(o), lr_scheduler.StepLR(o, 1)], [2]),
    "Step": lambda o: lr_scheduler.StepLR(o, 1),
}


def test_states_of_schedulers_tell_their_classes_apart_whichever_torch_wrote_them():
    made = {name: make(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)) for name, make in KINDS.items()}
    states = {name: one.state_dict() for name, one in made.items()}
    for then, state in states.items():
        older = {k: v for k, v in state.items() if k not in ("_is_initial", "_last_lr", "default_min_lr")}
        for now, scheduler in made.items():
            alone = _alone(scheduler, {**older, "verbose": False}, states[now])
            assert bool(alone) is (then != now), (then, now, alone)


def test_without_a_record_another_scheduler_is_refused_in_a_sentence(capsys):
    """Torch ends in a KeyError, or mixes the two, where a checkpoint does not say what its schedule was."""
    steps = ["--optimizer=SGD", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]
    assert fit(SAVE, *steps) == 0
    older = torch.load("runs/base/latest/last.ckpt", weights_only=True)
    del older["lit_efficient"]
    torch.save(older, "older.ckpt")
    function = ["--model=tests.cli.test_resumed.Scheduled", "--model.init_args.kind=function"]
    for other in (function, ["--optimizer=SGD", "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.5"]):
        assert fit(SAVE, "--ckpt_path=older.ckpt", *other, "--trainer.max_epochs=3") == 2
        said = capsys.readouterr().err
        assert "the checkpoint's scheduler is not a" in said
        assert "step_size" in said
        assert "Traceback" not in said
    with pytest.warns(UserWarning, match="goes on with the checkpoint's rate, decay and betas"):
        assert fit(SAVE, "--ckpt_path=older.ckpt", *steps, "--trainer.max_epochs=3") == 0
