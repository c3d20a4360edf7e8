"""Typical faults in the parts of a training. `verify` must find each of them.

Each is a subclass or a wrapper of a real part: a network, a step, a loader, an optimizer, a callback, a strategy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Sampler

import lit_efficient as le
from lit_efficient.losses.next_token import IGNORE, targets_of
from tests.evidence import setups
from tests.evidence.setups import LENGTH, RESNET, VOCABULARY, ResNet, Setup, Stranger
from tests.support import Toy, data

DDP = (("devices", 2), ("strategy", "ddp"))


@dataclass(frozen=True)
class Fault:
    """A training with a fault.

    Args:
        setup: The training.
        claim: The claim that must fail.
        where: Text that the verdict's ``where`` must contain.
    """

    setup: Setup
    claim: str
    where: str = ""


# Language models that somebody wrote ---------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention within documents, which also sees ``ahead`` later tokens."""

    def __init__(self, width: int, ahead: int = 0, apart: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.ahead, self.apart = nn.Linear(width, 3 * width), nn.Linear(width, width), ahead, apart

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        index = torch.arange(x.shape[1])
        seen = (index[None, :] <= index[:, None] + self.ahead)[None]
        if self.apart:
            seen = seen & (documents[:, :, None] == documents[:, None, :])
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """A small decoder with learned positions and dropout."""

    def __init__(self, ahead: int = 0, apart: bool = True, restart: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.attentions = nn.ModuleList(Attention(16, ahead, apart) for _ in range(2))
        self.mlps = nn.ModuleList(MLP(16) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCABULARY)
        self.drop, self.restart = nn.Dropout(dropout), restart

    def block(self, i: int, x: Tensor, documents: Tensor) -> Tensor:
        x = x + self.drop(self.attentions[i](x, documents))
        return x + self.drop(self.mlps[i](x))

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        documents = (positions == 0).cumsum(1)
        places = positions if self.restart else torch.arange(ids.shape[1]).expand_as(ids)
        x = self.tokens(ids) + self.places(places)
        for i in range(2):
            x = self.block(i, x, documents)
        return self.norm(x)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.hidden(ids, positions))


class Redrawn(Decoder):
    """Decoder that recomputes its blocks without restoring their random state."""

    def block(self, i: int, x: Tensor, documents: Tensor) -> Tensor:
        block = partial(Decoder.block, self, i)
        return checkpoint(block, x, documents, use_reentrant=False, preserve_rng_state=False)


class Unreached(Decoder):
    """Decoder with reentrant recomputation after a frozen embedding, so that no gradient reaches its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)
        self.places.requires_grad_(False)

    def block(self, i: int, x: Tensor, documents: Tensor) -> Tensor:
        return checkpoint(partial(Decoder.block, self, i), x, documents, use_reentrant=True)


class Reader(L.LightningModule):
    """Training of a language model without this package."""

    def __init__(self, network: Callable[[], nn.Module] = Decoder) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network: Any = network()

    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        return targets_of(batch)

    def positions(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        return batch["position_ids"] if "position_ids" in batch else torch.arange(ids.shape[1]).expand_as(ids)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.network(batch["input_ids"], self.positions(batch))
        return F.cross_entropy(logits.flatten(0, 1), self.targets(batch).flatten(), ignore_index=IGNORE)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class ShiftsAgain(Reader):
    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        return F.pad(super().targets(batch)[:, 1:], (0, 1), value=IGNORE)


class ShiftsNever(Reader):
    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"]


class TrainsMasked(Reader):
    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        return targets_of({"labels": batch["input_ids"]})


class LosesLabels(le.LanguageModeling):
    def __init__(self) -> None:
        super().__init__(setups.gpt(), learning_rate=1e-2, warmup_steps=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch["labels"].clone()
        labels[:, ::5] = IGNORE
        return super().training_step({**batch, "labels": labels}, batch_idx)


class MeansOfChunks(Reader):
    """Loss in chunks that averages the means of chunks with different numbers of labels."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.network.hidden(batch["input_ids"], self.positions(batch))
        pieces = zip(hidden.split(7, 1), self.targets(batch).split(7, 1))
        losses = [
            F.cross_entropy(self.network.head(h).flatten(0, 1), y.flatten(), ignore_index=IGNORE) for h, y in pieces
        ]
        return torch.stack(losses).mean()


class WrongValue(torch.autograd.Function):
    """Loss whose value does not belong to its gradient, like a chunked loss that drops the value of a chunk."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss * 0.9

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class SaysAnother(Reader):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return WrongValue.apply(super().training_step(batch, batch_idx))


class MixesLogits(Reader):
    """Network that smooths its logits over time, after the last layer."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.network(batch["input_ids"], self.positions(batch))
        logits = 0.8 * logits + 0.2 * logits.roll(-1, 1)
        return F.cross_entropy(logits.flatten(0, 1), self.targets(batch).flatten(), ignore_index=IGNORE)


class TransformersReader(Reader):
    """Model of transformers that is called as in its tutorial, with packed rows."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape: dict[str, Any] = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        super().__init__(lambda: LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **shape)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def goes_on(rows: list[Any]) -> dict[str, Tensor]:
    batch = setups.packed(rows)
    return {**batch, "position_ids": torch.arange(LENGTH).expand_as(batch["input_ids"]).clone()}


def reads(module: Callable[[], Any], collate: Any = setups.packed, **how: Any) -> Setup:
    return Setup(module, lambda: setups.token_data(collate, **how))


# What mixes rows -----------------------------------------------------------------------------------------------------


class Centred(ResNet):
    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(self.stem(x)).mean((2, 3))
        return self.fc(self.drop(features - features.mean()))


class OverTheBatch(nn.Module):
    """Attention of torch that receives the batch in the dimension of time."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attention = nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.attention(self.stem(x[:, 0])).mean(1))


class Resting(Stranger):
    """Module that stays in evaluation mode after an evaluation before the training."""

    def on_train_start(self) -> None:
        self.network.eval()


class NeverTraining(Stranger):
    """Module that is passed to the trainer in evaluation mode."""

    def on_train_start(self) -> None:
        self.eval()


class Samples(L.Callback):
    """Callback that draws samples after a batch, and leaves the network in evaluation mode."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.network.eval()


def learns_filling(rows: list[Any]) -> dict[str, Tensor]:
    batch = setups.padded(rows)
    return {**batch, "labels": batch["input_ids"].clone()}


# Optimizers and what trains ------------------------------------------------------------------------------------------


class NewOptimizer(L.Callback):
    """Module that replaces its optimizer after building the schedule."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        (old,) = trainer.strategy.optimizers
        trainer.strategy.optimizers = [torch.optim.SGD(old.param_groups, lr=0.1)]


class FreezesAdapter(Toy):
    """Callback that freezes an adapter together with the backbone."""

    def configure_optimizers(self) -> Any:
        for name, parameter in self.named_parameters():
            if "blocks.1.up" in name:
                parameter.requires_grad_(False)
        return super().configure_optimizers()


class ThawsBase(L.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.head.weight.requires_grad_()


class ByName(Toy):
    """Module that selects trainable parameters by name, and misses the head."""

    def configure_optimizers(self) -> Any:
        chosen = [p for name, p in self.named_parameters() if "stem" in name or "blocks" in name]
        return torch.optim.AdamW(chosen, lr=1e-2)


class Loud(L.Callback):
    """Callback that doubles the output of an adapter in training, which merging ignores."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.blocks[1].up.register_forward_hook(_louder)


def _louder(layer: Any, args: Any, output: Tensor) -> Tensor:
    return 2 * output - F.linear(args[0], layer.weight, layer.bias) if hasattr(layer, "lora_A") else output


class Untied(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.net.head.weight = self.net.stem.weight

    def on_fit_start(self) -> None:
        self.net.head.weight = nn.Parameter(self.net.stem.weight.detach().clone())


class Cut(Toy):
    """Module that detaches the output of its first layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.head(self.net.blocks[1](self.net.stem(batch[0]).detach())).square().mean()


class TwoOptimizers(L.LightningModule):
    """Module that gives a shared layer to both of its optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.one, self.other = (nn.Linear(8, 8) for _ in range(3))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, head in zip(self.optimizers(), (self.one, self.other)):
            optimizer.zero_grad()
            self.manual_backward(head(self.shared(batch[0])).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD([*self.shared.parameters(), *head.parameters()], 0.1) for head in (self.one, self.other)
        ]


# Noise and conditions ------------------------------------------------------------------------------------------------


class Diffuser(L.LightningModule):
    """Diffusion model that draws one noise level for a whole batch, or hides the labels of all samples or of none."""

    def __init__(self, one_level: bool = False, all_hidden: bool = False) -> None:
        super().__init__()
        self.one_level, self.all_hidden = one_level, all_hidden
        self.net, self.labels = nn.Linear(128, 128), nn.Embedding(4, 128)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        clean, count = batch["latents"].flatten(1), len(batch["labels"])
        t, hidden = torch.rand(count), torch.rand(count) < 0.3
        t = t[:1].expand(count) if self.one_level else t
        hidden = hidden[:1].expand(count) if self.all_hidden else hidden
        noise, labels = torch.randn_like(clean), torch.where(hidden, 3, batch["labels"])
        seen = (1 - t[:, None]) * clean + t[:, None] * noise
        sample_loss = (self.net(seen) + self.labels(labels) - noise).square().mean(1)
        return {"loss": sample_loss.mean(), "sample_loss": sample_loss, "timesteps": t}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def diffuses(**how: bool) -> Setup:
    return Setup(lambda: Diffuser(**how), lambda: DataLoader(setups.Latents(), 8, shuffle=True))


# Averages and checkpoints --------------------------------------------------------------------------------------------


class SavesRaw(le.EMA):
    """Average that is validated but not saved."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class OneLate(le.EMA):
    """Average without the first step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step > 1:
            super().on_train_batch_end(trainer, *args)


class OneAhead(le.EMA):
    """Average with the decay of the next step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.start_step -= 1
        super().on_train_batch_end(trainer, *args)
        self.start_step += 1


class Amnesic(torch.optim.AdamW):
    """Optimizer whose state is not saved in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


class WithAmnesic(Toy):
    def configure_optimizers(self) -> Any:
        return Amnesic(self.parameters(), lr=1e-2)


class FromTheStart(le.ExactResume):
    """Loader that resumes with the first batch of the epoch."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint["loops"]["fit_loop"].pop("state_dict", None)
        checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"] = {}
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] = 0


class OwnDraws(Toy):
    """Module that draws from a generator that no checkpoint contains."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = iter(partial(random.Random(0).random), None)

    def __deepcopy__(self, memo: Any) -> OwnDraws:
        made = OwnDraws()
        made.load_state_dict(self.state_dict())
        return made

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._sample_loss(batch).mean() * (1 + next(self.draws))


# Order and processes -------------------------------------------------------------------------------------------------


class Unseeded(Sampler):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Any:
        return iter(random.SystemRandom().sample(range(self.rows), self.rows))


def unseeded_data() -> DataLoader:
    rows = setups.images()
    return DataLoader(rows, 4, sampler=Unseeded(len(rows)))


class Hooked(DDPStrategy):
    """Strategy with a communication hook."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.hook = hook

    def configure_ddp(self) -> None:
        super().configure_ddp()
        model: Any = self.model
        model.register_comm_hook(None, self.hook)


def sums(state, bucket):
    """Hook that sums the gradients of processes without dividing."""
    done = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


def own_alone(state, bucket):
    """Hook that does not reduce gradients."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def wrong_backend(graph: Any, inputs: Any) -> Any:
    """Compiler with another approximation of GELU."""
    for node in graph.graph.nodes:
        if "gelu" in str(node.target):
            node.kwargs = {**node.kwargs, "approximate": "tanh"}
    graph.recompile()
    return graph.forward


class Miscompiled(Reader):
    def configure_model(self) -> None:
        for mlp in self.network.mlps:
            mlp.compile(backend=wrong_backend)


def toy(module: Callable[[], Any] = Toy, *callbacks: Callable[[], Any], **how: Any) -> Setup:
    made = tuple({"limit_val_batches": 1, **how}.items())
    return Setup(module, lambda: (data(16, shuffle=True), data()), lambda: [make() for make in callbacks], made)


adapters = partial(le.LoRA, rank=2)
FAULTS: dict[str, Fault] = {
    # rows, tokens and documents
    "documents see each other": Fault(reads(lambda: Reader(lambda: Decoder(apart=False))), "packed", "attentions.0"),
    "positions are the row's, not the document's": Fault(
        reads(lambda: Reader(lambda: Decoder(restart=False))), "packed", "places"
    ),
    "the batch's positions do not begin again": Fault(reads(Reader, goes_on), "packed", "position_ids"),
    "packed rows go to a model that is told of none": Fault(reads(TransformersReader), "packed", "network.model."),
    "a mask that is off by one": Fault(reads(lambda: Reader(lambda: Decoder(ahead=1))), "causal", "attentions.0"),
    "features are centred over the batch": Fault(Setup(lambda: Stranger(Centred()), setups.image_data), "rows", "drop"),
    "attention over the batch for the time": Fault(
        Setup(lambda: Stranger(OverTheBatch()), setups.image_data), "rows", "attention"
    ),
    "labels are shifted twice": Fault(reads(ShiftsAgain), "labels", "head"),
    "labels are not shifted": Fault(reads(ShiftsNever), "labels", "head"),
    "labels are lost, and samples weighed": Fault(
        setups.GPT.but(module=LosesLabels, callbacks=lambda: [le.LossCurriculum(0.5, 500)]), "labels", "head"
    ),
    "filling is learned": Fault(reads(Reader, learns_filling), "labels", "the batch: labels"),
    "masked turns train": Fault(reads(TrainsMasked, prompt=4), "labels", "head"),
    "the mean of the means of chunks": Fault(reads(MeansOfChunks), "chunked", "head"),
    "a loss that says another number than the one it descends": Fault(reads(SaysAnother), "chunked", "head"),
    "logits that are mixed behind the head": Fault(reads(MixesLogits), "logits", "head"),
    "one noise level for a batch": Fault(diffuses(one_level=True), "noise", "timesteps"),
    "labels that are hidden batch by batch": Fault(diffuses(all_hidden=True), "conditions", "training step"),
    # how a step is computed
    "recomputation draws another dropout": Fault(
        reads(lambda: Reader(lambda: Redrawn(dropout=0.2))), "recomputed", "network."
    ),
    "recomputation loses the gradients": Fault(reads(lambda: Reader(Unreached)), "recomputed", "attentions.0"),
    "a compiler that computes something else": Fault(reads(Miscompiled), "compiled", "network."),
    "a batch norm in evaluation mode": Fault(Setup(lambda: Resting(ResNet()), setups.image_data), "modes", "bn1"),
    "dropout in evaluation mode": Fault(
        Setup(lambda: Resting(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 3))),
              setups.image_data), "modes", "Dropout"
    ),
    "the whole module in evaluation mode": Fault(
        Setup(lambda: NeverTraining(ResNet()), setups.image_data), "modes", "bn1"
    ),
    "a callback that leaves the network in evaluation mode": Fault(
        Setup(lambda: Stranger(ResNet(0.3)), setups.image_data, lambda: [Samples()]), "modes", "bn1"
    ),
    "an unseeded order of rows": Fault(RESNET.but(data=unseeded_data), "determinism", "batch 0"),
    "a mean of means over micro-batches": Fault(
        Setup(Reader, lambda: setups.token_data(setups.padded), trainer=(("accumulate_grad_batches", 2),)),
        "accumulation", "network.",
    ),
    # processes
    "gradients are summed over processes": Fault(
        Setup(Toy, data, trainer=(("devices", 2), ("strategy", lambda: Hooked(sums)))),
        "sharded", "net.stem",
    ),
    "processes keep their own gradients": Fault(
        Setup(Toy, data, trainer=(("devices", 2), ("strategy", lambda: Hooked(own_alone)))),
        "sharded", "net.stem",
    ),
    "all processes see the same rows": Fault(
        Setup(Toy, data, trainer=(*DDP, ("use_distributed_sampler", False))), "sharded", "the data"
    ),
    "a mean of means over processes": Fault(
        Setup(Reader, lambda: setups.token_data(setups.padded, prompt=3), trainer=DDP), "sharded", "network."
    ),
    # optimizers and what trains
    "a schedule that moves an optimizer which is gone": Fault(
        toy(lambda: Toy(scheduler="lambda"), NewOptimizer), "schedule", "LambdaLR"
    ),
    "an adapter that is frozen": Fault(toy(FreezesAdapter, adapters), "runs", "blocks.1.up.lora_"),
    "a head that no optimizer holds": Fault(toy(ByName), "trains", "net.head"),
    "a layer that two optimizers step": Fault(
        Setup(TwoOptimizers, setups._numbers), "trains", "shared.weight: several optimizers"
    ),
    "layers that no gradient reaches": Fault(toy(Cut), "trains", "net.stem"),
    "a base that trains beside its adapters": Fault(toy(Toy, adapters, ThawsBase), "frozen", "net.head.weight"),
    "tied weights that come apart": Fault(toy(Untied), "frozen", "no longer tied"),
    # averages and files
    "an adapter that merges with another scale": Fault(toy(Toy, adapters, Loud), "merge", "blocks.1.up"),
    "weights are exported where the average was validated": Fault(
        toy(Toy, partial(SavesRaw, decay=0.9)), "export", "net."
    ),
    "an average that misses the first step": Fault(toy(Toy, partial(OneLate, decay=0.9)), "average", "net."),
    "an average with the decay of the next step": Fault(toy(Toy, partial(OneAhead, decay=0.9)), "average", "net."),
    "a checkpoint without the optimizer's state": Fault(toy(WithAmnesic, le.ExactResume), "resume"),
    "a checkpoint without the data's place": Fault(toy(Toy, FromTheStart), "resume"),
    "draws that no checkpoint holds": Fault(toy(OwnDraws, le.ExactResume), "resume", "loss"),
}  # fmt: skip
