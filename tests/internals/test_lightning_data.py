import copy
import importlib

import pytest
from torch.utils.data import DistributedSampler, SequentialSampler, WeightedRandomSampler

from lit_efficient.internals import lightning_data
from tests.internals.leaning import leans_on
from tests.internals.toy_fit import NAMESPACES, fit, module, rows, trainer

both = pytest.mark.parametrize("namespace", NAMESPACES)


@both
@leans_on("lightning", "trainer.fit_loop._data_source", "lightning_data")
def test_loops_know_where_their_loaders_come_from(namespace):
    passed, made = rows(), []

    def look(trainer, *_):
        made.append(lightning_data.data_source(trainer.fit_loop))
        made.append(lightning_data.data_source(trainer.fit_loop.epoch_loop.val_loop))

    fit(namespace, {"on_train_start": look}, passed)
    train, val = made
    assert val.instance is val.dataloader() is passed
    assert not train.is_module()

    toy, made[:] = module(namespace), []
    toy.train_dataloader = toy.val_dataloader = rows
    trainer(namespace, {"on_train_start": look}).fit(toy)
    assert made[0].is_module()
    assert made[0].instance is toy


@both
@leans_on("lightning", "trainer.fit_loop._combined_loader", "lightning_data")
def test_the_training_loaders_are_one_which_can_be_copied_by_public_names(namespace):
    seen = []

    def look(trainer, *_):
        combined = lightning_data.combined_loader(trainer)
        other = copy.copy(combined)
        other.flattened, other.limits = [rows(2)], None
        seen.append([len(list(part)) for part in (other, combined)])

    assert lightning_data.combined_loader(trainer(namespace)) is None
    fit(namespace, {"on_train_start": look})
    assert seen == [[2, 4]]


@both
@leans_on("lightning", "trainer.fit_loop._data_fetcher", "lightning_data")
def test_loaders_that_were_dropped_are_made_anew(namespace):
    seen = []

    def look(trainer, *_):
        fetcher, before = trainer.fit_loop._data_fetcher, lightning_data.combined_loader(trainer)
        seen.append(fetcher.iterator is None)
        lightning_data.drop_loaders(trainer.fit_loop)
        seen.append(fetcher.iterator is None)  # torn down
        trainer.fit_loop.setup_data()
        seen.append(lightning_data.combined_loader(trainer) is before)

    fit(namespace, {"on_train_start": look})
    assert seen == [False, True, False]


@both
@leans_on("lightning", "trainer.fit_loop._load_combined_loader_states", "lightning_data")
def test_loaders_that_were_made_early_get_their_states_when_asked(namespace):
    class Remembers:
        state = None

        def __iter__(self):
            return iter([])

        def load_state_dict(self, state):
            self.state = state

        def state_dict(self):
            return {}

    made, loader = trainer(namespace), Remembers()
    combined = importlib.import_module(f"{namespace}.utilities.combined_loader").CombinedLoader([loader])
    made.fit_loop.on_load_checkpoint({"combined_loader": [{"batches": 2}]})
    made.fit_loop._combined_loader = combined
    made.fit_loop.restarting = True
    made.fit_loop._restarting = True
    lightning_data.restore_loader_states(made)
    assert loader.state == {"batches": 2}


@both
@leans_on("lightning", "val_loop._max_batches and _last_val_dl_reload_epoch", "lightning_data")
def test_a_validation_runs_on_the_loaders_that_it_is_given(namespace):
    combined = importlib.import_module(f"{namespace}.utilities.combined_loader").CombinedLoader

    def look(trainer, *_):
        trainer.validating = True
        lightning_data.validate_on(trainer, combined([rows(2), rows(3)], "sequential"), [1, 2])
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True

    _, toy = fit(namespace, {"on_train_start": look}, rows(), limit_val_batches=1, check_val_every_n_epoch=2)
    assert toy.validated == [[0.0], [0.0], [1.0]]


@both
@leans_on("lightning", "val_loop.setup_data, val_loop._data_source.is_defined", "lightning_data")
def test_validation_loaders_are_made_when_they_are_asked_for(namespace):
    seen, passed = [], rows()

    def look(trainer, *_):
        seen.append(lightning_data.validation_loaders(trainer))

    fit(namespace, {"on_train_start": look}, passed, check_val_every_n_epoch=9)
    fit(namespace, {"on_train_start": look}, passed, limit_val_batches=0)
    assert [seen[0] is passed or passed in seen[0], seen[1]] == [True, None]


@both
@leans_on("lightning", "trainer._data_connector._requires_distributed_sampler", "lightning_data")
def test_loaders_are_split_between_processes_unless_they_are_split_already(namespace):
    two = trainer(namespace, strategy="ddp", devices=2)
    assert lightning_data.wants_distributed_sampler(two, rows())
    own = rows(sampler=DistributedSampler(range(4), num_replicas=2, rank=0))
    assert not lightning_data.wants_distributed_sampler(two, own)
    assert not lightning_data.wants_distributed_sampler(trainer(namespace), rows())


@leans_on("lightning", "DistributedSamplerWrapper.dataset._sampler", "lightning_data")
def test_a_wrapped_sampler_can_be_looked_into():
    for package in ("lightning.fabric", "lightning_fabric"):
        distributed = importlib.import_module(f"{package}.utilities.distributed")
        inside = WeightedRandomSampler([1.0, 2.0], 2)
        wrapper = distributed.DistributedSamplerWrapper(inside, num_replicas=2, rank=0)
        assert lightning_data.sampler_inside(wrapper) is inside
    assert lightning_data.sampler_inside(SequentialSampler([1])) is None
    assert lightning_data.sampler_inside(DistributedSampler([1], num_replicas=1, rank=0)) is None


@both
@leans_on("lightning", "trainer._data_connector._prepare_dataloader", "lightning_data")
def test_a_training_loader_gets_a_part_for_each_process(namespace):
    loader = lightning_data.prepared(trainer(namespace, strategy="ddp", devices=2), rows())
    assert isinstance(loader.sampler, DistributedSampler)
    assert loader.sampler.num_replicas == 2
