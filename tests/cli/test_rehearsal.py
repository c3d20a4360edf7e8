"""What techniques refuse of the network is said before data is prepared, and only where it is certain."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_efficient import (
    EMA,
    ChannelsLast,
    ConfigurationError,
    DigitImages,
    DiTConfig,
    GPTConfig,
    GradualUnfreezing,
    KahanSummation,
    LanguageModeling,
    LatentDiffusion,
    LatentDigits,
    LitEfficientError,
    LoRA,
    OptimizerInBackward,
    Preference,
    PrefixTuning,
    PythonCorpus,
    ReplaceHead,
    SampleImages,
    SampleText,
    SNRWeighting,
)
from lit_efficient.cli.optimizers import OptimizerPlan, arrange, attach
from lit_efficient.cli.rehearsal import rehearse
from lit_efficient.protocol import builds_no_layers
from lit_efficient.testing import trainer
from tests.cli.toy_runs import refused
from tests.contract.table import NAMES, case, make_all

WRONG = {
    "LoRA": "targets=[no_such]",
    "IA3": "targets=[no_such] --trainer.callbacks.feedforward=[no_such]",
    "ReplaceHead": "at=no_such",
    "KeepFloat32": "modules=[no_such]",
}


@pytest.mark.parametrize("name", WRONG)
def test_before_data(name, capsys):
    more = ["--trainer.callbacks.num_outputs=3"] if name == "ReplaceHead" else []
    words = [f"--trainer.callbacks+={name}", *f"--trainer.callbacks.{WRONG[name]}".split(), *more]
    assert "no_such" in refused(capsys, *words)  # which asserts that no data was touched


def test_network_of_configure_model(capsys):
    words = ["--trainer.callbacks+=LoRA", "--trainer.callbacks.targets=[no_such]"]
    assert "net.0" in refused(capsys, "--model.late=true", *words)


@pytest.mark.parametrize("name", NAMES)
def test_techniques_on_their_toys(name):
    """None is refused that a fit takes, and a fit finds everything as it was."""
    chosen = case(name)
    module, techniques = chosen.toy(), make_all(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    kinds, random, records = [type(part) for part in module.modules()], torch.get_rng_state(), techniques[0].record()
    rehearse(trainer(techniques, **chosen.trainer), module, None)
    assert [type(part) for part in module.modules()] == kinds
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert techniques[0].record() == records


MODEL = GPTConfig(vocab_size=300, dim=16, depth=2, num_heads=2, max_length=8)
SMALL = DiTConfig(width=16, depth=2, heads=2)
COSINE = "torch.optim.lr_scheduler.CosineAnnealingLR"
CYCLE = "torch.optim.lr_scheduler.OneCycleLR"


def language():
    return LanguageModeling(MODEL), PythonCorpus(sequence_length=8, vocab_size=300)


def diffusion():
    return LatentDiffusion(SMALL), LatentDigits()


def unread(parts):
    """Parts whose data must not be read."""
    module, data = parts

    def read(*_):
        raise AssertionError("the data was read")

    data.prepare_data = data.setup = read
    return module, data


def scheduled(name, **arguments):
    """The language model with a schedule of the config's."""
    module, data = language()
    adamw = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1.0}}
    attach(module, OptimizerPlan(adamw, {"class_path": name, "init_args": arguments}, arrange))
    return module, data


PARTS = {
    "groups that match nothing": (language, [GradualUnfreezing([["no_such"]], every_n_epochs=1)], {}, "no_such"),
    "no convolutions": (language, [ChannelsLast()], {}, "ChannelsLast: .* has no Conv2d"),
    "no noise levels": (language, [SNRWeighting()], {}, "SNRWeighting: .* set prediction"),
    "accumulation": (language, [OptimizerInBackward()], {"accumulate_grad_batches": 2}, "OptimizerInBackward"),
    "clipping": (language, [OptimizerInBackward()], {"gradient_clip_val": 1.0}, "gradient_clip_val"),
    "endless": (lambda: scheduled(COSINE, T_max=None), [], {"max_epochs": -1, "max_steps": -1}, "T_max is unset"),
    "too short": (lambda: scheduled(CYCLE, max_lr=0.1, total_steps=10), [], {"max_steps": 20}, "total_steps"),
    "pictures": (lambda: (language()[0], DigitImages()), [], {}, "tokens, and DigitImages gives images"),
    "no pairs": (lambda: (Preference(MODEL), language()[1]), [], {}, "pairs, and PythonCorpus gives tokens"),
    "samples of text": (language, [SampleImages()], {}, "SampleImages: LanguageModeling has no method sample_images"),
    "prefix": (language, [PrefixTuning(9, init="random")], {}, "num_virtual_tokens must be at most max_length = 8"),
    "windows": (lambda: (language()[0], PythonCorpus(sequence_length=9)), [], {}, "sequence_length must be at most"),
    "text of pictures": (diffusion, [SampleText()], {}, "SampleText: LatentDiffusion has no"),
    "text": (lambda: (diffusion()[0], language()[1]), [], {}, "latents or images, and PythonCorpus gives tokens"),
    "latents": (lambda: (diffusion()[0], LatentDigits(image_size=64)), [], {}, "latents"),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_parts_refuse_of_each_other(name):
    parts, callbacks, settings, words = PARTS[name]
    module, data = unread(parts())
    made = trainer(callbacks, **settings)
    before = list(made.callbacks)
    with pytest.raises(LitEfficientError, match=words):
        rehearse(made, module, data)
    assert made.callbacks == before


@pytest.mark.parametrize("parts", [language, diffusion])
def test_parts_that_fit(parts):
    """Nothing is refused, and what the module adds to the callbacks is not there twice."""
    module, data = unread(parts())
    callbacks = [GradualUnfreezing(every_n_epochs=1)]
    made = trainer(callbacks, max_epochs=2, accumulate_grad_batches=2)
    rehearse(made, module, data)
    assert made.callbacks == callbacks


@pytest.mark.parametrize("parts", [language, diffusion])
def test_precision_that_converts_the_network(parts):
    module, data = unread(parts())
    rehearse(trainer([KahanSummation()], precision="bf16-true"), module, data)
    with pytest.raises(LitEfficientError, match="is bfloat16"):
        rehearse(trainer([KahanSummation()]), module, data)


def test_warm_up_of_a_run_whose_length_its_data_decides():
    module, data = unread(scheduled("lit_efficient.WarmupCosine", total_steps=None, warmup=5000))
    rehearse(trainer([], max_epochs=1), module, data)


class Trains(LightningModule):
    def training_step(self, batch, batch_idx):
        raise AssertionError("nothing trains")

    def train_dataloader(self):
        raise AssertionError("no data is asked for")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SetUp(Trains):
    """Has its layers from ``setup``."""

    def setup(self, stage):
        self.net = nn.Linear(2, 2)


class Marked(Trains):
    """Has layers, and a ``setup`` that adds none."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    @builds_no_layers
    def setup(self, stage):
        raise AssertionError("it is not called")


class Inherits(Marked):
    """Has another ``setup``."""

    def setup(self, stage):
        self.more = nn.Linear(2, 2)


class WantsValues(Trains):
    """Cannot be built without weights."""

    def configure_model(self):
        if float(torch.zeros(1)):
            self.net = nn.Linear(2, 2)


@pytest.mark.parametrize("kind", [SetUp, Inherits, WantsValues])
def test_nothing_that_is_not_certain(kind):
    rehearse(trainer([LoRA(targets=["more"])]), kind(), None)


def test_marked_setup():
    with pytest.raises(ConfigurationError, match="no_such"):
        rehearse(trainer([LoRA(targets=["no_such"])]), Marked(), None)


@pytest.mark.parametrize("make", [lambda: LoRA(targets=["net"]), lambda: ReplaceHead(num_outputs=3)])
def test_that_there_are_no_weights_yet_is_no_fault(make):
    rehearse(trainer([make()]), Marked(), None)


@pytest.mark.parametrize("name", ["accumulation", "clipping", "samples of text", "text of pictures", "pictures"])
def test_trainer_without_the_command_line(name):
    """What concerns no layers is refused by a trainer with a technique alone, before it asks for data."""
    parts, callbacks, settings, words = PARTS[name]
    module, data = unread(parts())
    with pytest.raises(LitEfficientError, match=words):
        trainer(callbacks or [EMA()], **settings).fit(module, datamodule=data)
