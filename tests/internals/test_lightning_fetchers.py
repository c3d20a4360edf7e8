import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lit_efficient.internals.lightning_fetchers import pass_through, put_states, read_ahead
from lit_efficient.testing import Toy, trainer
from tests.internals.leaning import leans_on


@leans_on("lightning", "fit_loop._data_fetcher, _combined_loader._state_dicts", "lightning_fetchers")
def test_a_fetcher_reads_ahead_and_its_loop_does_not_see_it():
    said = []

    class Ahead(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            said.append("epoch")
            assert pass_through(trainer.fit_loop, lambda: None, self.read, self.got)

        def read(self, batch):
            said.append("read")
            return batch

        def got(self, batch):
            said.append("got")
            return batch

        def on_after_backward(self, trainer, pl_module):
            done = trainer.fit_loop._data_fetcher.done
            said.append(read_ahead(trainer))
            assert trainer.fit_loop._data_fetcher.done == done

    loader = DataLoader([[row] for row in torch.randn(3, 16)], 1)
    trainer([Ahead()], max_epochs=2, max_steps=-1, limit_val_batches=0).fit(Toy(), loader, loader)
    assert said == ["epoch", "read", "got", "read", [], "got", "read", [], "got", None] * 2
    checkpoint = {"loops": {"fit_loop": {"state_dict": {"combined_loader": [1]}}}}
    put_states(checkpoint, [0])
    assert checkpoint["loops"]["fit_loop"]["state_dict"] == {"combined_loader": [0]}
