"""``python -m lit_efficient average CKPT... --output X``: the weighted mean of checkpoints, one file at a time."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError, ConfigurationError, check_choice, refusal
from lit_efficient.files.checkpoints import weights_alone, write
from lit_efficient.files.tensors import zeros_in_file
from lit_efficient.mechanisms.averages.weights import add_share, position_weights, precise
from lit_efficient.mechanisms.restore import Weights, weights_of
from lit_efficient.surgery import memory_of

_STATISTICS = ("running_mean", "running_var")


def average_files(
    paths: Sequence[str | Path], weights: Sequence[float] | str = "uniform", of: Weights = "auto"
) -> dict[str, Any]:
    """The weighted mean of the weights in files, in the memory of one of them, however many there are.

    Floating-point entries are added up in float32 at least and returned in their own format; others, such as counters,
    are those of the last file.

    Args:
        paths: Checkpoints of Lightning or ``.safetensors`` files, oldest first, at least one.
        weights: One number a file, divided by their sum, or ``uniform``, ``linear`` or ``exponential`` as in
            :func:`lit_efficient.mechanisms.averages.weights.position_weights`.
        of: Which weights of each file, as :func:`lit_efficient.restore` takes them: ``auto`` are those that its run
            validated.

    Returns:
        The last file's checkpoint with the mean in ``state_dict``, without optimizer states; ``weights`` says of what.

    Raises:
        ConfigurationError: If the files' weights differ in kind, names or shapes or are quantised, or if numbers and
            files do not match.
        CheckpointError: If a file is damaged or lacks the weights that are wanted.
    """
    check_choice("average", "weights_of", of, get_args(Weights))
    shares, kinds = _shares(len(paths), weights), list[str]()
    total: dict[str, Tensor] = {}
    checkpoint: dict[str, Any] = {}
    for number, (path, share) in enumerate(zip(paths, shares)):
        chosen, state, checkpoint = dict[str, Tensor](), dict[str, Tensor](), {}  # frees the one before
        checkpoint = read_checkpoint(path)
        try:
            chosen, kind = weights_of(checkpoint, of)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        kinds.append(kind)
        if kind != kinds[0]:
            raise ConfigurationError(
                f"{path} would give its weights {kind!r}, and {paths[0]} {kinds[0]!r}: a mean of both is neither. "
                "Leave one kind of files out, or take --weights-of raw of all"
            )
        state = {name: tensor for name, tensor in chosen.items() if isinstance(tensor, Tensor)}
        if not total:
            summed = {n: (tensor.shape, precise(tensor.dtype)) for n, tensor in state.items() if _kind(tensor)}
            total = dict(zip(summed, zeros_in_file([*summed.values()], Path(path).absolute().parent)))
        elif different := total.keys() ^ state.keys():
            raise ConfigurationError(f"{path} and {paths[0]} differ in {len(different)} names: {min(different)!r}")
        for name, tensor in state.items():
            _add(total, name, tensor, share, not number, str(path))
    mean, tied = dict[str, Tensor](), dict[object, str]()
    for name, summed_ in total.items():  # tied weights are one again
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
    """What has a mean is ``complex`` or ``real``; integers have none, nor have floats of one byte, which are codes."""
    return "complex" if tensor.is_complex() else "real" * (tensor.is_floating_point() and tensor.itemsize > 1)


def _add(total: dict[str, Tensor], name: str, tensor: Tensor, share: float, first: bool, path: str) -> None:
    before = total.get(name)
    if before is not None and (before.shape != tensor.shape or _kind(before) != _kind(tensor)):
        one, other = (f"{list(t.shape)} of {t.dtype}" for t in (tensor, before))
        raise ConfigurationError(f"{path}: {name!r} is {one}, and {other} in the others")
    if before is not None and _kind(tensor):
        return add_share(before, tensor, share, first)
    if before is not None and tensor.numel() > 1 and not bool((before == tensor).all()):
        raise ConfigurationError(
            f"{path}: {name!r} holds {tensor.dtype} and differs between files: quantised weights have no mean; "
            "dequantise them first"
        )
    total[name] = tensor


def run(argv: list[str]) -> int:
    """Answer ``average``."""
    parser = argparse.ArgumentParser("python -m lit_efficient average", description=__doc__, allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="CKPT", help="checkpoints or .safetensors files, oldest first")
    parser.add_argument("--output", required=True, help="file to write: .ckpt, or .safetensors for weights alone")
    parser.add_argument("--weights", default="uniform", help="uniform, linear, exponential, or numbers: 0.2,0.3,0.5")
    parser.add_argument(
        "--weights_of",
        "--weights-of",
        choices=get_args(Weights),
        default="auto",
        help="which of each file's weights; auto: those that validation used, the average if its run kept one",
    )
    options = parser.parse_args(argv)
    checkpoint = average_files(options.files, _parse(options.weights), options.weights_of)
    write(options.output, checkpoint)
    kind = checkpoint["lit_efficient"]["weights"].removeprefix("average of ")
    print(f"Wrote the {options.weights} mean of {len(options.files)} files to {options.output} ({kind} weights).")
    if any(name.endswith(_STATISTICS) for name in checkpoint["state_dict"]):
        print("The network has BatchNorm: its statistics were averaged, too, which is not what the mean weights have.")
    return 0


def _parse(weights: str) -> str | list[float]:
    if weights in ("uniform", "linear", "exponential"):
        return weights
    try:
        return [float(part) for part in weights.split(",")]
    except ValueError as error:
        raise refusal("average", "--weights", "uniform, linear, exponential or numbers with commas", weights) from error
