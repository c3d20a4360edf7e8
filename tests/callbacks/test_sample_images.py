from contextlib import contextmanager

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import SampleImages
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.pictures import draw_grid
from lit_efficient.files.runs import write_record


class Painter(L.LightningModule):
    """Paints image i in grey level i; trains one number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.calls = []

    def training_step(self, batch, batch_idx):
        assert self.layer.training
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def sample_images(self, num, seed):
        assert not self.layer.training
        self.calls.append((self.trainer.global_step, num, seed))
        return torch.arange(num, dtype=torch.uint8).view(-1, 1, 1, 1).expand(num, 1, 4, 4)


def fit(module, tmp_path, callback, **arguments):
    data = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
        **arguments,
    )
    trainer.fit(module, data, data)
    return trainer


def test_a_png_at_every_nth_validation_not_in_the_sanity_check(tmp_path):
    module = Painter()
    fit(module, tmp_path, SampleImages(every_n_validations=2, columns=3, rows=2, zoom=2, seed=9), logger=False)
    assert module.calls == [(4, 6, 9), (8, 6, 9)]
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == ["step_0000004.png", "step_0000008.png"]
    pixels = np.asarray(Image.open(tmp_path / "samples" / "step_0000004.png"))
    assert pixels.shape == (18, 28)
    assert pixels[::10, ::10].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.filterwarnings("ignore:Found 1 module")  # it is what the test is about
def test_every_submodule_keeps_its_mode_and_training_its_random_numbers(tmp_path):
    def run(callback, folder):
        torch.manual_seed(0)
        module = Painter()
        module.frozen_mode = nn.Dropout(0.5).eval()
        fit(module, tmp_path / folder, callback, logger=False)
        return module, torch.get_rng_state()

    module, with_samples = run(SampleImages(), "a")
    _, without = run(L.Callback(), "b")
    assert torch.equal(with_samples, without)
    assert module.layer.training
    assert not module.frozen_mode.training


def test_it_writes_under_the_loggers_folder_and_shows_the_grid_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path, name="tb", version="v"), CSVLogger(tmp_path)]
    trainer = fit(Painter(), tmp_path, SampleImages(columns=3, rows=2), logger=loggers)
    assert len(list((tmp_path / "tb" / "v" / "samples").glob("step_*.png"))) == 4
    assert not (tmp_path / "samples").exists()
    trainer.loggers[0].finalize("success")
    events = EventAccumulator(str(tmp_path / "tb" / "v"), size_guidance={"images": 0}).Reload()
    assert [event.step for event in events.Images("samples")] == [2, 4, 6, 8]


def test_the_count_of_validations_goes_on_after_a_resume():
    callback = SampleImages()
    callback.load_state_dict({"validations": 3})
    assert callback.state_dict() == {"validations": 3}


def test_a_module_that_cannot_sample_is_refused_before_training(tmp_path):
    class Mute(Painter):
        sample_images = None

    with pytest.raises(ConfigurationError, match=r"Mute has no method sample_images\(num, seed\)"):
        fit(Mute(), tmp_path, SampleImages(), logger=False)


@pytest.mark.parametrize("name", ["every_n_validations", "columns", "rows", "zoom"])
def test_arguments_are_checked_when_built(name):
    with pytest.raises(ConfigurationError, match=rf"SampleImages: {name} must be a whole number of at least 1, got 0"):
        SampleImages(**{name: 0})


def test_a_run_of_the_command_line_and_a_folder_of_choice_go_before_the_loggers(tmp_path):
    write_record(tmp_path / "run", {})
    logger = CSVLogger(tmp_path / "elsewhere")
    fit(Painter(), tmp_path / "run", SampleImages(columns=3, rows=2, every_n_validations=4), logger=logger)
    fit(Painter(), tmp_path / "run", SampleImages(columns=3, rows=2, folder=str(tmp_path / "mine")), logger=logger)
    assert [file.name for file in (tmp_path / "run" / "samples").iterdir()] == ["step_0000008.png"]
    assert len(list((tmp_path / "mine" / "samples").iterdir())) == 4
    assert not list((tmp_path / "elsewhere").rglob("*.png"))


def test_what_the_module_says_of_its_samples_is_written_on_the_grid(tmp_path):
    class Named(Painter):
        def image_captions(self, num):
            return ["left", "right"] * (num // 2)

    fit(Named(), tmp_path, SampleImages(columns=2, rows=2, every_n_validations=4), logger=False)
    images = torch.arange(4, dtype=torch.uint8).view(-1, 1, 1, 1).expand(4, 1, 4, 4)
    expected = draw_grid(images, 2, 2, heads=["left", "right"])
    assert np.array_equal(np.asarray(Image.open(tmp_path / "samples" / "step_0000008.png")), np.asarray(expected))

    class Miscounting(Painter):
        def image_captions(self, num):
            return ["one"]

    with pytest.raises(
        ConfigurationError, match=r"Miscounting.image_captions\(4\) must be 4 names, or an empty sequence"
    ):
        fit(Miscounting(), tmp_path, SampleImages(columns=2, rows=2), logger=False)


class Improver(Painter):
    """Paints image i in grey level 100 + i after training, and i before it."""

    started = 0

    def sample_images(self, num, seed):
        return super().sample_images(num, seed) + (0 if self.started else 100)

    @contextmanager
    def before_training(self):
        self.started += 1
        yield
        type(self).seen = self.started
        self.started = 0

    def image_captions(self, num):
        return [f"image {i}" for i in range(num)]


def test_each_sample_is_beside_that_of_the_network_before_training(tmp_path):
    module = Improver()
    fit(module, tmp_path, SampleImages(columns=2, rows=1, every_n_validations=2, before=True), logger=False)
    files = sorted((tmp_path / "samples").iterdir())
    assert len(files) == 2
    assert Improver.seen == 1
    # drawn once, at the first grid
    assert module.calls == [(4, 2, 0), (4, 2, 0), (8, 2, 0)]
    expected = torch.tensor([0, 100, 1, 101], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 1, 4, 4)
    names = ["before: image 0", "image 0", "before: image 1", "image 1"]
    for file in files:
        assert np.array_equal(np.asarray(Image.open(file)), np.asarray(draw_grid(expected, 4, 2, captions=names)))


def test_before_needs_a_network_before_training(tmp_path):
    with pytest.raises(ConfigurationError, match=r"SampleImages: before must be false for Painter"):
        fit(Painter(), tmp_path, SampleImages(before=True), logger=False)
