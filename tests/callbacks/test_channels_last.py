"""Channels last: strides where the convolutions read, and the same numbers, names and checkpoints as without it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import EMA, ChannelsLast, ConfigurationError, ConflictError, LoRA, LowBitOptimizer
from lit_efficient.application import apply
from lit_efficient.callbacks.channels_last import lay_out
from tests.callbacks.test_activation_checkpointing import LATENTS, UNETS
from tests.support import Net, Toy, convolved, data, trainer, weights

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Images(Toy):
    """Three convolutions over images; the batch is a dict, as most are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2))
        self.head = nn.ConvTranspose2d(8, 3, 3, padding=1)
        self.seen: list[tuple[str, bool]] = []
        for layer in (self.net[0], self.net[2], self.head):
            layer.register_forward_pre_hook(self._see)

    def _see(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        stage = self.trainer.state.stage.value if self._trainer is not None else ""
        self.seen.append((stage, inputs[0].is_contiguous(memory_format=torch.channels_last)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))

    def _sample_loss(self, batch: Any) -> torch.Tensor:
        return (self(batch["images"]) - batch["images"].flip(-1)).square().mean((1, 2, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._sample_loss(batch).mean()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch["images"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def images() -> DataLoader:
    pictures = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader([{"images": picture, "label": i} for i, picture in enumerate(pictures)], batch_size=2)


def fit(*callbacks: Any, module: Any = None, ckpt_path: Any = None, **arguments: Any) -> Any:
    run = trainer(list(callbacks), **arguments)
    run.fit(module or Images(), images(), images(), ckpt_path=ckpt_path)
    return run


def strided(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=LAST[tensor.ndim])


def test_a_tensor_is_laid_out_in_place_with_its_values() -> None:
    for shape in ((2, 3, 4, 5), (2, 3, 4, 5, 6)):
        x = torch.randn(shape)
        before, held = x.clone(), {"x": x}
        lay_out(x)
        assert strided(held["x"])
        assert torch.equal(held["x"], before)
        lay_out(y := before.clone(), dimensions=(9 - len(shape),))
        assert y.is_contiguous()
    with torch.inference_mode():
        x = torch.randn(2, 3, 4, 5)
    lay_out(x)
    assert strided(x)


def test_every_convolution_reads_channels_last_in_every_stage() -> None:
    module = Images()
    run = fit(ChannelsLast(), module=module, num_sanity_val_steps=1)
    run.validate(module, images(), verbose=False)
    run.test(module, images(), verbose=False)
    run.predict(module, images())
    assert {stage for stage, _ in module.seen} == {"sanity_check", "train", "validate", "test", "predict"}
    assert all(last for _, last in module.seen)
    plain = Images()
    fit(module=plain)
    assert not any(last for _, last in plain.seen)


def test_training_is_the_same_up_to_rounding_and_checkpoints_are(tmp_path: Path) -> None:
    plain, last = fit(), fit(ChannelsLast())
    torch.testing.assert_close(weights(last.lightning_module), weights(plain.lightning_module))
    last.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert list(state) == list(plain.lightning_module.state_dict())
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert all(torch.equal(tensor, last.lightning_module.state_dict()[name]) for name, tensor in state.items())


def test_weights_and_optimizer_states_have_one_layout() -> None:
    run = fit(ChannelsLast(), EMA(decay=0.5))
    module = run.lightning_module
    four = [p for p in module.parameters() if p.ndim == 4]
    assert len(four) == 3
    for parameter in four:
        state = run.optimizers[0].state[parameter]
        assert all(strided(tensor) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]))
    assert all(strided(p) for p in copy.deepcopy(module.net).parameters() if p.ndim == 4)


@pytest.mark.parametrize("before", [[], [ChannelsLast()]])
def test_a_restored_run_has_the_layout_wherever_the_checkpoint_comes_from(before: list[Any], tmp_path: Path) -> None:
    half = fit(*before)
    half.save_checkpoint(tmp_path / "half.ckpt")
    again = fit(ChannelsLast(), max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    optimizer = again.optimizers[0]
    tensors = [t for p, state in optimizer.state.items() if p.ndim == 4 for t in (p, *state.values()) if t.ndim == 4]
    assert len(tensors) == 9
    assert all(map(strided, tensors))
    torch.testing.assert_close(weights(again.lightning_module), weights(fit(max_epochs=2).lightning_module))


def test_bitsandbytes_which_makes_weights_contiguous_does_not_undo_it() -> None:
    module = Images()
    fit(ChannelsLast(), LowBitOptimizer(min_size=0), module=module)
    assert all(last for _, last in module.seen)
    assert all(strided(p) for p in module.parameters() if p.ndim == 4)


def test_adapters_of_convolutions_are_laid_out_too() -> None:
    module = Images()
    apply(module, [LoRA(rank=2, targets=[r"net\.0"]), ChannelsLast()])
    assert sum(p.ndim == 4 for p in module.parameters()) >= 3
    assert all(strided(p) for p in module.parameters() if p.ndim == 4)


def test_a_unet_of_diffusers_gives_the_same_picture() -> None:
    family = UNETS["UNet2DModel"]
    torch.manual_seed(0)
    net = family.make().eval()
    with torch.no_grad():
        expected = family.call(net)
        apply(net, [ChannelsLast()])
        seen: list[bool] = []
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_pre_hook(lambda _, inputs: seen.append(strided(inputs[0])))
        lay_out(x := LATENTS.clone())
        torch.testing.assert_close(net(x, torch.tensor([1, 2, 3])).sample, expected)
    assert all(seen)


def test_volumes_are_laid_out_where_there_are_convolutions_over_them() -> None:
    net = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 2, 3, padding=1))
    net.register_buffer("grid", torch.randn(1, 2, 3, 4))  # of another kind than the convolutions
    x = torch.randn(2, 2, 4, 5, 6)
    expected = net(x)
    report = apply(net, [ChannelsLast()])["ChannelsLast"]
    assert all(strided(layer.weight) for layer in net)
    assert net.grid.is_contiguous()
    assert report.modules == ("0", "1")
    assert report.parameters == sum(layer.weight.numel() for layer in net)
    torch.testing.assert_close(net(x), expected)


def test_a_network_without_convolutions_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"ChannelsLast: Net has no Conv2d, Conv3d or similar layer.*LayerNorm, Linear"
    ):
        apply(Net(), [ChannelsLast()])
    with pytest.raises(ConfigurationError, match="has no Conv2d"):
        apply(nn.Sequential(nn.Conv1d(3, 3, 3)), [ChannelsLast()])


def test_an_optimizer_that_flattens_gradients_is_refused_before_the_first_step() -> None:
    class Flat(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1)

    run = trainer([ChannelsLast()])
    with pytest.raises(ConflictError, match="ChannelsLast: LBFGS flattens weights"):
        run.fit(Flat(network=convolved(Net)), data(), data())
    assert run.global_step == 0


def test_sharding_is_refused() -> None:
    run = trainer([ChannelsLast()])
    run._accelerator_connector.strategy = L.strategies.ModelParallelStrategy()
    with pytest.raises(ConflictError, match=r"cannot be combined with ModelParallelStrategy.*strategy='ddp'"):
        ChannelsLast().check(run, None)
