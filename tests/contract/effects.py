"""What each technique is for, asserted of a run that it took part in: alone, and beside every other one.

So an effect names what must be true whatever else acts, and reads it where users do: in the weights, the gradients and
the checkpoints. ``step.seen["influence"]`` is the gradient of the loss for each sample's own loss.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.losses.snr import snr_weight
from lit_efficient.mechanisms.averages.snapshots import find_snapshots
from lit_efficient.mechanisms.averages.weights import decay_at, gamma_of, power_decay
from lit_efficient.optimizers.host_states import Streamed
from lit_efficient.testing import Run, Step, data

SNAPSHOTS = Path(tempfile.gettempdir()) / f"lit_efficient_snapshots_{os.getpid()}"


# What effects share --------------------------------------------------------------------------------------------------


def moved(run: Run, pattern: str) -> list[str]:
    """Names that match and whose tensors have changed since training began."""
    end = run.steps[-1].weights
    return [n for n, t in run.start.items() if re.search(pattern, n) and not torch.equal(t, end[n])]


def base_names(run: Run) -> set[str]:
    """Names of the toy without techniques."""
    toy = type(run.module)("init", run.module.network)
    return set(toy.state_dict())


def assert_base_is_frozen(run: Run, added: str) -> None:
    """Nothing but what a technique has added trains, is kept in checkpoints, and has a state in the optimizer."""
    head = base_names(run) if run.technique("ReplaceHead") is None else {n for n in base_names(run) if "head" not in n}
    trained = set(moved(run, ""))
    assert not trained & head, f"the frozen base moved: {sorted(trained & head)[:3]}"
    assert moved(run, added), f"nothing that matches {added} moved"
    assert not {n for step in run.steps for n in step.gradients} & head, "the frozen base got gradients"
    buffers = {name for name, _ in run.module.named_buffers()}  # which are no part of what is frozen
    for checkpoint in (run.checkpoint, run.exported()):
        kept = set(checkpoint["state_dict"]) - buffers
        assert any(re.search(added, name) for name in kept)
        assert not kept & head, f"the checkpoint holds the frozen base: {sorted(kept & head)[:3]}"


def in_order_of_steps(run: Run) -> list[Step]:
    """The first batch's entry after each optimizer step."""
    seen: dict[int, Step] = {}
    for step in run.steps:
        seen.setdefault(step.number, step)
    return [step for number, step in seen.items() if number]


def windows_of(run: Run) -> list[list[Step]]:
    """The batches of each optimizer step."""
    windows: dict[int, list[Step]] = {}
    for before, step in zip([None, *run.steps], run.steps, strict=False):
        windows.setdefault(before.number if before else 0, []).append(step)
    return list(windows.values())


@contextmanager
def training(run: Run) -> Iterator[Tensor]:
    """A batch, while the module is in training mode."""
    (x,) = next(iter(data()))
    run.module.train()
    try:
        yield x
    finally:
        run.module.eval()


def near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-6)


# One function a technique --------------------------------------------------------------------------------------------


def recomputes(run: Run) -> None:
    """The backward pass keeps less than with the same blocks not recomputed."""
    blocks = [part for part in run.module.modules() if getattr(part, "_recomputes", False)]

    def kept() -> int:
        sizes: list[int] = []
        torch.manual_seed(3)  # blocks that are dropped at random are dropped alike
        with training(run) as x, torch.autograd.graph.saved_tensors_hooks(_weigh(sizes), lambda t: t):
            run.module._sample_loss((x,))
        return sum(sizes)

    fewer = kept()
    for block in blocks:
        block._recomputes = False
    try:
        assert fewer < kept()
    finally:
        for block in blocks:
            block._recomputes = True
    assert not any("recompute" in name for name in run.checkpoint["state_dict"])


def _weigh(sizes: list[int]) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    return pack


def channels_are_last(run: Run) -> None:
    """Weights of convolutions, trained and exchanged, are laid out channels last; in checkpoints they are as ever."""
    convolutions = {n: m for n, m in run.module.named_modules() if isinstance(m, nn.Conv2d)}
    assert convolutions
    for name, part in convolutions.items():
        assert part.weight.is_contiguous(memory_format=torch.channels_last), name
    assert any(not part.weight.is_contiguous() for part in convolutions.values())


GRAPHS: dict[str, int] = {}  # how often a compiled graph was run, since a technique was built


def _count_graphs(name: str, inner: str) -> None:
    """Register a backend that counts how often its graphs are run."""
    from torch._dynamo import lookup_backend, register_backend

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        compiled = lookup_backend(inner)(graph, inputs, **options)

        def run(*args: Any) -> Any:
            GRAPHS[name] = GRAPHS.get(name, 0) + 1
            return compiled(*args)

        return run

    register_backend(backend, name=name)


_count_graphs("counted", "eager")
_count_graphs("aot_counted", "aot_eager")


def is_compiled(run: Run) -> None:
    """Compiled graphs took part in training; names in checkpoints are those without."""
    assert sum(GRAPHS.values()) > 0
    assert not any("_orig_mod" in name for name in run.checkpoint["state_dict"])


def draws_follow_the_batch(run: Run) -> None:
    """What a step draws is a function of seed, epoch and batch; the checkpoint holds the seed."""
    per_epoch = len(run.steps) // run.trainer.current_epoch
    for i, step in enumerate(run.steps):
        generator = torch.Generator().manual_seed(mix_seed(0, i // per_epoch, i % per_epoch, 0))
        assert torch.equal(step.seen["draw"], torch.rand((), generator=generator)), f"batch {i}"
    assert _state_of(run, "ExactResume")["seed"] == 0


def states_have_one_byte(run: Run) -> None:
    """The optimizer's moments are bytes, in the checkpoint, too."""
    for states in (run.trainer.optimizers[0].state_dict(), run.checkpoint["optimizer_states"][0]):
        moments = [state.get("__bnb_optimizer_quant_state__", state)["state1"] for state in states["state"].values()]
        assert moments
        tables = [part.weight for part in run.module.modules() if isinstance(part, nn.Embedding)]
        kept = sum(weight.requires_grad for weight in tables)  # bitsandbytes keeps those of embeddings
        assert sum(moment.dtype != torch.uint8 for moment in moments) <= kept


def rate_is_the_suggested_one(run: Run) -> None:
    """Training began at the rate that the test suggests, and the schedule in the checkpoint starts from it."""
    suggestion = run.technique("LRFinder").suggestion
    assert suggestion is not None
    assert abs(suggestion - 1e-2) > 1e-4
    base = run.checkpoint["lr_schedulers"][0]["base_lrs"][0]
    assert abs(base / suggestion - 1) < 1e-6
    for step in in_order_of_steps(run):
        assert abs(step.rates[0] * (1 + step.number) / base - 1) < 1e-6
    assert _state_of(run, "LRFinder")["suggestion"] == suggestion


def batches_are_smaller(run: Run) -> None:
    """Batches of two instead of four, accumulated to the same number of samples a step; the checkpoint has the size."""
    assert {len(step.seen["sample_loss"]) for step in run.steps} == {1 if run.technique("SelectiveBackprop") else 2}
    wanted = 4 * (2 if run.technique("TokenWeightedAccumulation") or run.technique("GradientNoiseScale") else 1)
    assert len(run.steps) * 2 == run.steps[-1].number * wanted
    assert _state_of(run, "MaxBatchSize")["size"] == 2


def states_are_streamed(run: Run) -> None:
    """The optimizer steps in pieces, its states wait in CPU memory, and the checkpoint has them all."""
    (optimizer,) = run.trainer.optimizers
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    assert isinstance(optimizer, Streamed)
    assert {t.device.type for state in optimizer.state.values() for t in state.values()} == {"cpu"}
    assert len(run.checkpoint["optimizer_states"][0]["state"]) == len(stepped) > 0


def ends_with_the_average_of_its_iterates(run: Run) -> None:
    """Every checkpoint, and the module at the end, has x = z + (y - z) / b1 of the training weights y."""
    (optimizer,) = run.trainer.optimizers
    names = {id(p): name for name, p in run.module.named_parameters()}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    checked = 0
    for p, state in ((p, state) for p, state in optimizer.state.items() if "z" in state):  # not of frozen ones
        name, y = names[id(p)], run.steps[-1].weights[names[id(p)]]
        x = state["z"] + (y - state["z"]) / groups[id(p)]["betas"][0]
        assert near(p, x), name
        for checkpoint in (run.checkpoint, run.exported()) if not checked else (run.checkpoint,):
            if name in checkpoint["state_dict"]:
                assert near(checkpoint["state_dict"][name], x), name
        checked += not near(x, y)
    assert checked, "the averages are the training weights"


def evaluates_the_mean_of_the_last_three(run: Run) -> None:
    """Weights-only checkpoints hold the mean of the last snapshots, full ones the raw weights."""
    last = [step.weights for step in in_order_of_steps(run)[-3:]]
    mean = {
        name: torch.stack([w[name].float() for w in last]).sum(0) / len(last) for name in _averaged(run, "snapshots")
    }
    _assert_exported(run, mean)


def evaluates_the_moving_average(run: Run) -> None:
    """The average is that of the weights after each step; weights-only checkpoints hold it, full ones the raw ones."""
    average: dict[str, Tensor] = {}
    for i, step in enumerate(in_order_of_steps(run)):
        decay = decay_at(i, 0.8)
        for name in _averaged(run, "average"):
            before = average.get(name, step.weights[name].float())
            average[name] = before * decay + step.weights[name].float() * (1 - decay)
    _assert_exported(run, average)


def _averaged(run: Run, key: str) -> list[str]:
    state = _state_of(run, "EMA" if key == "average" else "CheckpointAverage")[key]
    names = list(state if key == "average" else state[0])
    assert names
    if (gradual := run.technique("GradualUnfreezing")) is not None:  # averages follow what thaws from then on
        exported = run.exported()["state_dict"]
        groups = ([name for name in names if name in group] for group in gradual._names)
        names = next(group for group in groups if any(name in exported for name in group))  # heads are not exported
    return names


def _assert_exported(run: Run, average: dict[str, Tensor]) -> None:
    exported = run.exported()["state_dict"]
    raw = run.checkpoint["state_dict"]
    shared = [name for name in average if name in exported]
    assert shared
    for name in shared:
        assert near(exported[name], average[name].to(exported[name].dtype)), name
        assert torch.equal(raw[name], run.steps[-1].weights[name]), name
    assert any(not near(exported[name], raw[name]) for name in shared), "the average is the raw weights"


def averages_of_each_width(run: Run) -> None:
    """The averages have the power-function profiles of their widths, in the checkpoint and as snapshots."""
    steps, state = in_order_of_steps(run), _state_of(run, "PowerEMA")
    for sigma_rel, average in zip((0.1, 0.25), state["averages"], strict=True):
        gamma, found = gamma_of(sigma_rel), 0
        for name, tensor in average.items():
            expected = run.start[name].float()
            for i, step in enumerate(steps):
                decay = power_decay(i + 1, gamma)
                expected = expected * decay + step.weights[name].float() * (1 - decay)
            assert near(tensor, expected), name
            found += not near(tensor, steps[-1].weights[name])
        assert found, "the average is the raw weights"
    assert len(steps) in {snapshot.step for snapshot in find_snapshots(SNAPSHOTS)}


def logits_are_never_whole(run: Run) -> None:
    """No product has more than three rows of logits: the chunk's size."""
    heads = [part for name, part in run.module.named_modules() if name.endswith("head")]
    head: Any = next(head for head in heads if hasattr(head, "out_features"))
    shape = (head.in_features, head.out_features)
    rows: list[int] = []

    class Rows(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            name = function.__name__.split(".")[0]
            plain = name in ("mm", "addmm") and args[-1].shape == shape
            if plain or (name == "gemm_4bit" and out.shape[-1] == head.out_features):
                rows.append(len(out))
            return out

    torch.manual_seed(3)
    with training(run) as x, torch.compiler.set_stance("force_eager"), Rows():  # no compiler sees the mode
        run.module._sample_loss((x,))
    assert rows
    assert max(rows) <= 3


def _trains_heads(run: Run, name: str, logged: str) -> None:
    """The heads get gradients, which only the term can give; they are in full checkpoints, beside the weights."""
    gradients = [g for step in run.steps for n, g in step.gradients.items() if n.startswith(name)]
    assert any(gradient.any() for gradient in gradients), "the heads got no gradient: the term is not in the loss"
    assert moved(run, f"^{name}"), "the heads do not train"
    assert logged in run.trainer.callback_metrics
    assert not any(key.startswith(name) for key in (*run.checkpoint["state_dict"], *run.exported()["state_dict"]))
    kept = run.checkpoint["lit_efficient"]["training_only"]
    assert any(key.startswith(name) and torch.equal(t, run.steps[-1].weights[key]) for key, t in kept.items())


def matches_features_until_it_stops(run: Run) -> None:
    """The heads train while the term counts, and not from step three on, or another that it is given."""
    _trains_heads(run, "feature_matching_heads", "train/feature_matching")
    late = [step for step in in_order_of_steps(run) if step.number > run.technique("FeatureMatching").stop_at]
    assert not any(g.any() for step in late for n, g in step.gradients.items() if n.startswith("feature_matching"))


def aligns_hidden_tokens(run: Run) -> None:
    _trains_heads(run, "hidden_alignment_heads", "train/hidden_alignment")


def predicts_second_tokens(run: Run) -> None:
    _trains_heads(run, "multi_token_prediction_heads", "train/multi_token_prediction")


def aligns_latents(run: Run) -> None:
    _trains_heads(run, "latent_alignment_heads", "train/latent_alignment")


def trains_factors_alone(run: Run) -> None:
    assert_base_is_frozen(run, r"\.ia3$")


def trains_adapters_alone(run: Run) -> None:
    """Also with B at four times the rate."""
    assert_base_is_frozen(run, r"\.lora_[AB]$")
    assert moved(run, r"\.lora_B$")


def trains_the_prefix_alone(run: Run) -> None:
    assert_base_is_frozen(run, r"prefix_tuning\.")


def thaws_from_the_head_down(run: Run) -> None:
    """After step n the first n groups may have moved and the others have not; deeper ones have lower rates."""
    groups = run.technique("GradualUnfreezing")._names
    assert len(groups) > 2
    for step in in_order_of_steps(run):
        later = [name for names in groups[step.number :] for name in names]
        assert all(torch.equal(step.weights[name], run.start[name]) for name in later), f"step {step.number}"
    first, last = in_order_of_steps(run)[0], run.steps[-1]
    assert any(not torch.equal(first.weights[name], run.start[name]) for name in groups[0])
    assert any(not torch.equal(last.weights[name], run.start[name]) for name in groups[1])
    assert max(last.rates) / min(last.rates) > 2.6
    kept = run.checkpoint["state_dict"]
    frozen = [name for names in groups[last.number :] for name in names if name in kept]
    assert all(torch.equal(kept[name], run.start[name]) for name in frozen)


def starts_anew_at_the_head(run: Run) -> None:
    """The head starts from its own seed and trains; without GradualUnfreezing the rest of the base does not."""
    name = next(n for n in run.start if re.search(r"\bhead\.weight$", n))
    expected = torch.randn(run.start[name].shape, generator=torch.Generator().manual_seed(0)) * 0.02
    assert torch.equal(run.start[name], expected)
    gradual = run.technique("GradualUnfreezing")
    if gradual is None or any(name in group for group in gradual._names[: run.steps[-1].number]):
        assert moved(run, rf"^{re.escape(name)}$")
    assert name in run.checkpoint["state_dict"]
    if gradual is None:
        rest = {n for n in base_names(run) if "head" not in n}
        assert not set(moved(run, "")) & rest


def base_is_stored_in_codes(run: Run) -> None:
    """Base weights are bytes, and stay as they are; checkpoints hold the codes, or no base at all."""
    names = [n for n, t in run.start.items() if re.search(r"(up|down)(\.base_layer)?\.weight$", n)]
    assert names
    for name in names:
        assert run.start[name].dtype == torch.uint8
        assert torch.equal(run.start[name], run.steps[-1].weights[name])
        kept = run.checkpoint["state_dict"].get(name)
        assert kept is None or torch.equal(kept, run.start[name])


def samples_are_weighed(run: Run) -> None:
    """Each sample's influence on the loss is its min-SNR weight times what it would be."""
    for step in run.steps:
        weight = snr_weight(step.seen["log_snr"], "min_snr", 1.0, "eps")
        ratio = step.seen["influence"] / weight
        ratio = ratio[ratio != 0] if run.technique("LossCurriculum") else ratio  # which leaves samples out
        assert near(ratio, ratio[:1].expand_as(ratio))
    assert any(step.seen["influence"].unique().numel() > 1 for step in run.steps)


def blocks_are_skipped(run: Run) -> None:
    """In some batch a block had no part: it adds nothing to any of its gradients, while another block does."""
    owner = {n: match[0] for n in run.start if (match := re.search(r"blocks\.\d+(?!\.token_fusion)", n))}
    skipped = trained = False
    for window in windows_of(run):
        earlier: dict[str, Tensor] = {}
        for step in window:
            has_part: dict[str, bool] = {}
            for name in owner.keys() & step.gradients.keys():
                gradient = step.gradients[name]
                adds = not torch.equal(gradient, earlier.get(name, torch.zeros_like(gradient)))
                has_part[owner[name]] = has_part.get(owner[name], False) or adds
            earlier = step.gradients
            trained |= bool(has_part)
            skipped |= len(set(has_part.values())) == 2
    few = not trained or run.technique("GradualUnfreezing") is not None  # blocks that train: too few to see it
    assert skipped or (few and _skips_when_called(run)), "no block was ever skipped"


def _skips_when_called(run: Run) -> bool:
    """Whether the inside of the blocks runs in some forwards of the trained network and not in others."""
    calls: list[int] = []
    inside = [part for name, part in run.module.named_modules() if re.search(r"blocks\.\d+\.(norm|mlp_norm)$", name)]
    hooks = [part.register_forward_hook(lambda *_: calls.append(1)) for part in inside]
    torch.manual_seed(0)
    with training(run) as x:
        for _ in range(8):
            run.module._sample_loss((x,))
    for hook in hooks:
        hook.remove()
    return 0 < len(calls) < 8 * len(inside)


def micro_batches_weigh_by_their_tokens(run: Run) -> None:
    """Within the window of a step the micro-batches' influence is in proportion to their tokens."""
    windows = windows_of(run)
    assert any(len({step.seen["tokens"] for step in window}) > 1 for window in windows)
    for window in windows:
        counts = torch.tensor([float(step.seen["tokens"]) for step in window])
        influence = torch.stack([_influence(run, step) for step in window])
        assert near(influence / influence.sum(), counts / counts.sum())


def _influence(run: Run, step: Step) -> Tensor:
    """Of the mean over a micro-batch, whatever its samples weigh among each other."""
    weighs = run.technique("SNRWeighting") is not None
    weight = snr_weight(step.seen["log_snr"], "min_snr", 1.0, "eps") if weighs else 1.0
    return (step.seen["influence"] / weight).sum()


def _state_of(run: Run, name: str) -> dict[str, Any]:
    key = next(key for key in run.checkpoint["callbacks"] if key.partition("{")[0] == name)
    state: dict[str, Any] = run.checkpoint["callbacks"][key]
    return state
