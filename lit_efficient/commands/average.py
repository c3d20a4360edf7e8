"""``python -m lit_efficient average CKPT... --output X``: compute the weighted mean of checkpoints."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from torch import Tensor

from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError, ConfigurationError, check_choice, refusal
from lit_efficient.files.checkpoints import Checkpoint, weights_alone, write
from lit_efficient.files.tensors import zeros_in_file
from lit_efficient.mechanisms.averages.weights import add_share, position_weights, precise
from lit_efficient.mechanisms.restore import Weights, weights_of
from lit_efficient.surgery import memory_of

_STATISTICS = ("running_mean", "running_var")


def average_files(
    paths: Sequence[str | Path], weights: Sequence[float] | str = "uniform", of: Weights = "auto"
) -> Checkpoint:
    """Return the weighted mean of the weights in files. One file at a time is in memory.

    Floating-point entries are added in float32 or float64 and returned in their own number format. Other entries, such
    as counters, come from the last file.

    Args:
        paths: Lightning checkpoints or ``.safetensors`` files, oldest first, at least one.
        weights: One number per file, normalised by their sum, or ``uniform``, ``linear`` or ``exponential`` as in
            :func:`lit_efficient.mechanisms.averages.weights.position_weights`.
        of: Kind of weights to take from each file, as for :func:`lit_efficient.restore`. ``auto``: the weights that the
            file's run validated.

    Returns:
        The last file's checkpoint with the mean in ``state_dict`` and without optimizer states.
        ``["lit_efficient"]["weights"]`` describes the mean.

    Raises:
        ConfigurationError: If the files' weights differ in kind, names or shapes or are quantised, or if the numbers
            of weights and files differ.
        CheckpointError: If a file is damaged or lacks the requested weights.
    """
    check_choice("average", "weights_of", of, get_args(Weights))
    shares = _shares(len(paths), weights)
    kinds: list[str] = []
    total: dict[str, Tensor] = {}
    checkpoint: Checkpoint = {}
    for number, (path, share) in enumerate(zip(paths, shares)):
        # The previous file's tensors must be freed before the next file is read.
        chosen = state = checkpoint = {}
        checkpoint = read_checkpoint(path)
        try:
            chosen, kind = weights_of(checkpoint, of)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        kinds.append(kind)
        if kind != kinds[0]:
            raise ConfigurationError(
                f"{path} has weights of the kind {kind!r}, and {paths[0]} of the kind {kinds[0]!r}, which cannot be "
                "averaged together: leave the files of one kind out, or add --weights-of raw"
            )
        state = {name: tensor for name, tensor in chosen.items() if isinstance(tensor, Tensor)}
        if not total:
            summed = {n: (tensor.shape, precise(tensor.dtype)) for n, tensor in state.items() if _kind(tensor)}
            total = dict(zip(summed, zeros_in_file([*summed.values()], Path(path).absolute().parent)))
        elif different := total.keys() ^ state.keys():
            raise ConfigurationError(f"{path} and {paths[0]} differ in {len(different)} names: {min(different)!r}")
        for name, tensor in state.items():
            _add(total, name, tensor, share, not number, str(path))
    mean: dict[str, Tensor] = {}
    tied: dict[object, str] = {}
    for name, summed_ in total.items():
        # Weights that were tied in the last file and are equal are one tensor again.
        first = tied.setdefault(memory_of(state[name]), name)
        same = first != name and bool((total[first] == summed_).all())
        mean[name] = mean[first] if same else summed_.to(state[name].dtype)
    return weights_alone(checkpoint, {**checkpoint["state_dict"], **mean}, f"average of {kinds[0]}")


def _shares(count: int, weights: Sequence[float] | str) -> list[float]:
    if not count:
        raise ConfigurationError("average: name at least one file")
    if isinstance(weights, str):
        return position_weights(count, weights)
    if len(weights) != count or not 0 < sum(weights) < float("inf"):
        raise refusal("average", "weights", f"one number a file ({count}) with a sum above 0", weights)
    return [weight / sum(weights) for weight in weights]


def _kind(tensor: Tensor) -> str:
    """Return "complex" or "real" for tensors that have a mean, else "": integers, and floats of one byte, are codes."""
    if tensor.is_complex():
        return "complex"
    if tensor.is_floating_point() and tensor.itemsize > 1:
        return "real"
    return ""


def _add(total: dict[str, Tensor], name: str, tensor: Tensor, share: float, first: bool, path: str) -> None:
    before = total.get(name)
    if before is not None and (before.shape != tensor.shape or _kind(before) != _kind(tensor)):
        raise ConfigurationError(
            f"{path}: {name!r} is {list(tensor.shape)} of {tensor.dtype}, and {list(before.shape)} of {before.dtype} "
            "in the other files"
        )
    if before is not None and _kind(tensor):
        return add_share(before, tensor, share, first)
    if before is not None and tensor.numel() > 1 and not bool((before == tensor).all()):
        raise ConfigurationError(
            f"{path}: {name!r} holds {tensor.dtype} and differs between files: quantised weights have no mean; "
            "dequantise them first, for example by export --format merged"
        )
    total[name] = tensor


def run(argv: list[str]) -> int:
    """Run ``average``."""
    parser = argparse.ArgumentParser(
        "python -m lit_efficient average",
        description="Write the weighted mean of checkpoints. One file at a time is in memory.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="CKPT", help="checkpoints or .safetensors files, oldest first")
    parser.add_argument("--output", required=True, help="file to write: .ckpt, or .safetensors for only the weights")
    parser.add_argument(
        "--weights",
        default="uniform",
        help="uniform (default), linear, exponential, or one number per file: 0.2,0.3,0.5",
    )
    parser.add_argument(
        "--weights_of",
        "--weights-of",
        choices=get_args(Weights),
        default="auto",
        help="kind of weights; auto: the weights that validation used, which are the average if the run kept one",
    )
    options = parser.parse_args(argv)
    checkpoint = average_files(options.files, _parse(options.weights), options.weights_of)
    write(options.output, checkpoint)
    kind = checkpoint["lit_efficient"]["weights"].removeprefix("average of ")
    print(f"Wrote the {options.weights} mean of {len(options.files)} files to {options.output} ({kind} weights).")
    if any(name.endswith(_STATISTICS) for name in checkpoint["state_dict"]):
        print("The network has BatchNorm: the averaged statistics are not those of the averaged weights.")
    return 0


def _parse(weights: str) -> str | list[float]:
    if weights in ("uniform", "linear", "exponential"):
        return weights
    try:
        return [float(part) for part in weights.split(",")]
    except ValueError as error:
        raise refusal(
            "average", "--weights", "uniform, linear, exponential or numbers separated by commas", weights
        ) from error
