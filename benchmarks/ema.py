"""Compare one update of our weight average with other packages and with a plain copy of the same bytes.

    python -m benchmarks.ema [--peers FOLDER] [--parameters 12.8e6] [--layers 48] [--device cpu] [--dtype float32]

Times are medians over interleaved rounds: CPU time of this process, or the device's time on a GPU. Only the ratios are
meaningful. The other packages are Lightning's EMAWeightAveraging, ema-pytorch, timm's ModelEmaV3 and diffusers'
EMAModel. A package that is neither installed nor in --peers is skipped with a message.

With bfloat16 weights on a CPU our update takes 1.7 to 2 times the copy. An average in bfloat16, as in ema-pytorch,
takes 0.8 to 0.9 times: it moves less memory, but at decay 0.9999 it never reaches the weights. On one thread of a Xeon,
with 12.8 M and 50 M parameters, these ways to update the float32 average were not faster than one tensor at a time:

- one reused buffer (1.7 to 2.05 times the copy),
- a copy of the whole network, then one foreach lerp (1.95),
- mul_ and add_ of mixed formats, with and without foreach (2.1 to 2.4),
- pieces of 2^16 elements (1.9 to 3.0) and of 2^18 elements (1.6 to 2.75, faster on large tensors only).

torch's lerp does not accept mixed formats.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.clock import use_one_thread
from lit_efficient.mechanisms.averages.weights import averageable, update_


def network(parameters: float, layers: int) -> nn.Module:
    """Return linear layers, norms and biases as in a transformer: a few large tensors and many small ones."""
    width = int((parameters / layers) ** 0.5)
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(layers)]
    return nn.Sequential(*blocks)


def ours(net: nn.Module) -> Callable[[], None]:
    weights = list(averageable(net).values())
    averages = [w.detach().float().clone() for w in weights]
    return lambda: update_(averages, weights, 0.999)


def plain_copy(net: nn.Module) -> Callable[[], None]:
    """Return a function that copies as many bytes as the update moves: one float32 average for each weight."""
    weights = [w.detach().float().clone() for w in net.parameters()]
    copies = [torch.empty_like(w) for w in weights]
    return lambda: torch._foreach_copy_(copies, weights)


def lightning_callback(net: nn.Module) -> Callable[[], None]:
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from torch.optim.swa_utils import AveragedModel

    callback = EMAWeightAveraging(decay=0.999)
    average = AveragedModel(net, use_buffers=True, **callback._kwargs)
    return lambda: average.update_parameters(net)


def ema_pytorch(net: nn.Module) -> Callable[[], None]:
    from ema_pytorch import EMA

    ema = EMA(net, beta=0.999, update_every=1, update_after_step=0)
    return ema.update


def ema_pytorch_foreach(net: nn.Module) -> Callable[[], None]:
    from ema_pytorch import EMA

    ema = EMA(net, beta=0.999, update_every=1, update_after_step=0, use_foreach=True)
    return ema.update


def timm(net: nn.Module) -> Callable[[], None]:
    """Return timm's update. Load its source file, because the package imports torchvision."""
    package = importlib.util.find_spec("timm")
    if package is None:
        raise ImportError("No module named 'timm'")
    source = Path(package.submodule_search_locations[0]) / "utils" / "model_ema.py"
    spec = importlib.util.spec_from_file_location("model_ema", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ema = module.ModelEmaV3(net, decay=0.999, foreach=True)
    step = iter(range(1, 10**9))
    return lambda: ema.update(net, step=next(step))


def diffusers(net: nn.Module) -> Callable[[], None]:
    from diffusers.training_utils import EMAModel

    ema = EMAModel(net.parameters(), decay=0.999, foreach=True)
    return lambda: ema.step(net.parameters())


CONTENDERS: dict[str, Callable[[nn.Module], Callable[[], None]]] = {
    "plain copy of the same bytes": plain_copy,
    "lit_efficient EMA": ours,
    "Lightning EMAWeightAveraging": lightning_callback,
    "ema-pytorch": ema_pytorch,
    "ema-pytorch (foreach)": ema_pytorch_foreach,
    "timm ModelEmaV3 (foreach)": timm,
    "diffusers EMAModel (foreach)": diffusers,
}


def seconds(update: Callable[[], None], device: str) -> float:
    """Return the seconds of one update, averaged over three."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        start = time.perf_counter()
    else:
        start = time.process_time()
    for _ in range(3):
        update()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 3
    return (time.process_time() - start) / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="folder with more packages, made by: pip install --no-deps --target FOLDER ...")
    parser.add_argument("--parameters", type=float, default=12.8e6)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.peers:
        sys.path.append(options.peers)
    warnings.simplefilter("ignore")
    use_one_thread()
    net = network(options.parameters, options.layers).to(options.device, getattr(torch, options.dtype))
    updates: dict[str, Any] = {}
    for name, make in CONTENDERS.items():
        try:
            updates[name] = make(net)
        except ImportError as error:
            print(f"{name}: skipped ({error})")
    times: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(options.rounds + 3):  # interleaved: a busy machine slows all alike
        for name, update in updates.items():
            times[name].append(seconds(update, options.device))
    medians = {name: median(values[3:]) for name, values in times.items()}
    base = medians["plain copy of the same bytes"]
    count = sum(p.numel() for p in net.parameters())
    print(f"{count / 1e6:.1f} M parameters in {len(list(net.parameters()))} tensors, {options.dtype}, {options.device}")
    for name, value in medians.items():
        print(f"{name:30} {value * 1e3:9.3f} ms   {value / base:6.2f} x the copy")


if __name__ == "__main__":
    main()
