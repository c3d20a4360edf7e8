"""Tests of sources of fits: a fit that is made twice is equal, and a change affects only the named settings."""

import lightning.pytorch as L
import pytest
import torch

from lit_efficient import LoRA
from lit_efficient.cli.fits import ConfigFit
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import AS_IT_IS, Change, FitSource, LiveFit, sum_of_sources
from tests.support import Toy, data, trainer, weights


class Losses(L.Callback):
    def __init__(self, into: list[float]) -> None:
        self.into = into

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.into.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def losses_of(source: FitSource, change: Change = AS_IT_IS) -> list[float]:
    found: list[float] = []
    made = Change(change.name, change.settings, change.overlays, lambda: [*change.callbacks(), Losses(found)])
    source.make(made).run()
    return found


def test_a_live_fit_can_be_run_again_and_again_and_stays_as_it_is():
    module, run = Toy(), trainer(max_steps=3, limit_val_batches=0)
    source = LiveFit(run, module, (data(shuffle=True), data()))
    before = {name: value.clone() for name, value in weights(module).items()}
    first = losses_of(source)
    assert len(first) == 3
    assert losses_of(source) == first
    longer = losses_of(source, Change(settings={"trainer.max_steps": 4}))
    assert longer[:3] == first
    assert len(longer) == 4
    adapted = source.make(Change(callbacks=lambda: [LoRA(rank=2)]))
    adapted.run()
    assert any("lora" in name for name, _ in adapted.module.named_parameters())
    assert all(torch.equal(value, weights(module)[name]) for name, value in before.items())
    assert not run.callbacks or not any(isinstance(one, LoRA) for one in run.callbacks)


@pytest.mark.parametrize("name", ["trainer.precision", "model.no_such", "data.batchsize", "other.x"])
def test_what_cannot_be_set_is_refused_by_its_name(name):
    with pytest.raises(ConfigurationError, match=name.replace(".", r"\.")):
        LiveFit(trainer(max_steps=1), Toy(), data()).make(Change(settings={name: 1}))
    with pytest.raises(ConfigurationError, match="laid over a config"):
        LiveFit(trainer(max_steps=1), Toy(), data()).make(Change(overlays=("lora",)))


def test_the_fit_of_a_config_is_made_with_what_is_laid_over_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = ConfigFit(["-c", "latent_diffusion"], tmp_path / "runs", device="meta")
    plain, changed = source.make(), source.make(Change("", {"data.batch_size": 7}, ("ema", "lora")))
    names = [{type(one).__name__ for one in fit.trainer.callbacks} for fit in (plain, changed)]
    assert names[1] - names[0] == {"EMA", "LoRA"}
    assert plain.data.batch_size != changed.data.batch_size == 7
    assert {p.device.type for p in plain.module.parameters()} <= {"meta"}
    assert not (tmp_path / "runs").exists()
    with pytest.raises(Exception, match="no_such"):
        source.make(Change(overlays=("no_such",)))


def test_another_argument_of_a_module_or_a_callback_is_another_fit():
    def identity(rate: float, weight: float) -> str:
        module, callback = Toy(), Losses([])
        module.rate, callback.settings = rate, {"weight": weight}
        return LiveFit(trainer(), module, data()).identity(Change(callbacks=lambda: [callback]))

    assert len({identity(*pair) for pair in ((0.1, 1), (0.1, 1), (0.2, 1), (0.1, 2))}) == 3


def test_other_data_and_another_dataset_are_another_fit():
    module = Toy()
    assert len({LiveFit(trainer(), module, data(rows)).identity() for rows in (8, 8, 16)}) == 2


@pytest.mark.parametrize("words", [["-c", "{}"], ["--config={}"], ["-c={}"]])
def test_a_config_is_known_by_what_stands_in_it(words, tmp_path):
    file = tmp_path / "own.yml"
    argv = [word.format(file) for word in words] + ["--trainer.default_root_dir=none.yaml"]
    identities = set()
    for text in ("seed_everything: 1", "seed_everything: 2"):
        file.write_text(text)
        identities.add(ConfigFit(argv, tmp_path).identity())
    assert len(identities) == 2


def test_code_that_was_edited_is_another_code_and_what_is_installed_is_not_read(tmp_path, monkeypatch):
    package = tmp_path / "somebodys"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "network.py").write_text("class Network:\n    width = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = [sum_of_sources({name}) for name in ("somebodys.network", "torch.nn", "json")]
    assert before[1] == before[2] != before[0]
    (package / "network.py").write_text("class Network:\n    width = 2\n")
    after = [sum_of_sources({name}) for name in ("somebodys.network", "torch.nn", "json")]
    assert after[0] != before[0]
    assert after[1:] == before[1:]
    source = LiveFit(trainer(max_steps=1), Toy(), data())
    assert Toy.__module__ in source.packages()
    assert source.code() == LiveFit(trainer(max_steps=2), Toy(), data()).code()
    assert ConfigFit(["--allow-import", "somebodys"], tmp_path).packages() == {"somebodys"}
