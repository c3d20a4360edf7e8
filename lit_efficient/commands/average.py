"""``python -m lit_efficient average CKPT... --output X``: compute the weighted mean of checkpoints, or merge models.

With ``--method`` models that were fine-tuned from ``--base`` are merged by their differences from it. With ``--greedy``
and a config, files are validated, and a file is added to the mean, best first, if the mean gets no worse (model soups,
https://arxiv.org/abs/2203.05482).
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from lit_efficient.application.recorded import technique_of
from lit_efficient.commands.ema_sweep import loss_among
from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError, ConfigurationError, check_choice, check_number, refusal
from lit_efficient.files.checkpoints import Checkpoint, local_file, weights_alone, write
from lit_efficient.files.hidden_names import hidden_beside
from lit_efficient.files.tensors import zeros_in_file
from lit_efficient.mechanisms.adapters.base import is_added
from lit_efficient.mechanisms.averages.merging import METHODS, merged_change
from lit_efficient.mechanisms.averages.weights import add_share, position_weights, precise
from lit_efficient.mechanisms.restore import Weights, weights_of
from lit_efficient.surgery import memory_of
from lit_efficient.traits import Trait

_STATISTICS = ("running_mean", "running_var")


def average_files(
    paths: Sequence[str | Path], weights: Sequence[float] | str = "uniform", of: Weights = "auto"
) -> Checkpoint:
    """Return the weighted mean of the weights in files. One file at a time is in memory.

    Floating-point entries are added in float32 or float64 and returned in their own number format. Other entries, such
    as counters, come from the last file.

    Args:
        paths: Lightning checkpoints, ``.safetensors`` files or model folders of transformers, oldest first, at least
            one.
        weights: One number per file, normalised by their sum, or ``uniform``, ``linear`` or ``exponential`` as in
            :func:`lit_efficient.mechanisms.averages.weights.position_weights`.
        of: Kind of weights to take from each file, as for :func:`lit_efficient.restore`. ``auto``: the weights that the
            file's run validated.

    Returns:
        The last file's checkpoint with the mean in ``state_dict`` and without optimizer states.
        ``["lit_efficient"]["weights"]`` describes the mean.

    Raises:
        ConfigurationError: If the files' weights differ in kind, names or shapes or are quantised, if adapters have
            different bases or settings, or if the numbers of weights and files differ.
        CheckpointError: If a file is damaged or lacks the requested weights.
    """
    check_choice("average", "weights_of", of, get_args(Weights))
    shares = _shares(len(paths), weights)
    kinds: list[str] = []
    settings: list[tuple[object, object]] = []  # of adapters
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
        if any(map(is_added, state)):
            settings.append(_settings(checkpoint))
            _check_alike(path, paths[0], settings[-1], settings[0])
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


def merge_files(
    paths: Sequence[str | Path],
    method: str,
    base: str | Path | None = None,
    weights: Sequence[float] | None = None,
    density: float = 0.5,
    seed: int = 0,
    of: Weights = "auto",
) -> Checkpoint:
    """Return the merge of models that were fine-tuned from one base, or of LoRA adapters of one base.

    Args:
        paths: Lightning checkpoints, ``.safetensors`` files or model folders of transformers, at least one: whole
            models, or checkpoints of LoRA.
        method: One of :data:`lit_efficient.mechanisms.averages.merging.METHODS`.
        base: File of the model from which whole models were fine-tuned. ``None`` for adapters: A and B are merged, each
            with the square roots of the weights, as in peft.
        weights: Factor of each model's change; ``None`` for 1.
        density: Share of each change that TIES and DARE keep, above 0 and at most 1.
        seed: Seed of the entries that DARE keeps.
        of: Kind of weights to take from each file, as for :func:`lit_efficient.restore`.

    Returns:
        The last file's checkpoint with the merged weights and without optimizer states.

    Raises:
        ConfigurationError: For an argument out of range, and if names, shapes, bases or settings of adapters differ.
        CheckpointError: If a file is damaged or lacks the requested weights.
    """
    check_choice("average", "method", method, METHODS)
    check_number("average", "density", density, above=0, most=1)
    factors = torch.ones(len(paths), dtype=torch.float64) if weights is None else torch.tensor(weights).double()
    if not paths or len(factors) != len(paths) or not factors.isfinite().all():
        raise refusal("average", "weights", f"one number a file ({len(paths)})", weights)
    if base is None:
        if bool((factors < 0).any()):
            raise refusal("average", "weights", "numbers of at least 0 for adapters", weights)
        factors = factors.sqrt()
    checkpoints = [read_checkpoint(path) for path in paths]
    states = [_tensors(checkpoint, of) for checkpoint in checkpoints]
    if base is None:
        _check_adapters(paths, checkpoints, states)
        start = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    else:
        start = _tensors(read_checkpoint(base), of)
        _check_whole(paths, base, start, states)
    generator = torch.Generator().manual_seed(seed)
    merged: dict[str, Tensor] = {}
    tied: dict[object, str] = {}
    for name, before in start.items():
        for path, state in zip(paths, states):
            _check_like(before, state[name], name, str(path))
        last = states[-1][name]
        first = tied.setdefault(memory_of(last), name)
        if first != name and all(torch.equal(state[name], state[first]) for state in (start, *states)):
            merged[name] = merged[first]  # a weight that is tied in all files is merged once
        elif _kind(before):
            wide = precise(before.dtype)
            changes = torch.stack([state[name].to(wide) - before.to(wide) for state in states])
            change = merged_change(changes, factors, method, density, generator)
            merged[name] = (before.to(wide) + change).to(last.dtype)
        else:
            merged[name] = last
    last_one = checkpoints[-1]
    return weights_alone(last_one, {**last_one["state_dict"], **merged}, f"{method} of {len(paths)} models")


def _tensors(checkpoint: Checkpoint, of: Weights) -> dict[str, Tensor]:
    chosen, _ = weights_of(checkpoint, of)
    return {name: tensor for name, tensor in chosen.items() if isinstance(tensor, Tensor)}


def _check_whole(
    paths: Sequence[str | Path], base: str | Path, start: dict[str, Tensor], states: Sequence[dict[str, Tensor]]
) -> None:
    for path, state in zip((base, *paths), (start, *states)):
        if any(map(is_added, state)):
            raise ConfigurationError(
                f"average: {path} has adapters, whose change is a product of two matrices. Leave out --base to merge "
                "adapters, or write whole models first: export CKPT --format merged"
            )
        if different := start.keys() ^ state.keys():
            raise ConfigurationError(f"{path} and {base} differ in {len(different)} names: {min(different)!r}")


def _check_adapters(
    paths: Sequence[str | Path], checkpoints: Sequence[Checkpoint], states: Sequence[dict[str, Tensor]]
) -> None:
    """Raise ConfigurationError if files do not hold plain LoRA adapters of one base with the same settings."""
    for path, checkpoint, state in zip(paths, checkpoints, states):
        other = [name for name in state if not _is_factor(name, state)]
        if other or not state:
            raise ConfigurationError(
                f"average: {path} has {(other or ['nothing'])[0]!r}, which is no plain LoRA adapter. Whole models need "
                "--base, the file of the model from which they were fine-tuned"
            )
        _check_alike(path, paths[0], _settings(checkpoint), _settings(checkpoints[0]))
        if different := states[0].keys() ^ state.keys():
            raise ConfigurationError(f"{path} and {paths[0]} differ in {len(different)} names: {min(different)!r}")


def _is_factor(name: str, state: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor is a factor of the trained adapter of a layer, or of stacked experts."""
    layer, _, last = name.rpartition(".")
    stacked = last.startswith(("lora_A_", "lora_B_")) and f"{layer}.lora_A" not in state  # else a frozen adapter
    return stacked or last in ("lora_A", "lora_B")


def _settings(checkpoint: Checkpoint) -> tuple[object, object]:
    """Return the hashes of the base of a checkpoint's adapters, and the techniques that made them, without seeds."""
    own = checkpoint.get("lit_efficient", {})
    made = []
    for record in own.get("transforms", []):
        technique = technique_of(record)
        if technique is None or Trait.ADAPTER in technique.traits:
            made.append({**record, "arguments": {**record["arguments"], "seed": 0}})
    return own.get("base"), made


def _check_alike(
    path: str | Path, first: str | Path, settings: tuple[object, object], of_first: tuple[object, object]
) -> None:
    """Raise ConfigurationError if adapters have different bases or settings, with which their values mean others."""
    for what, own, other in zip(("bases", "settings of the adapters"), settings, of_first):
        if own != other:
            raise ConfigurationError(f"average: {path} and {first} have different {what}")


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
    if before is not None:
        _check_like(before, tensor, name, path)
    if before is not None and _kind(tensor):
        return add_share(before, tensor, share, first)
    total[name] = tensor


def _check_like(before: Tensor, tensor: Tensor, name: str, path: str) -> None:
    """Raise ConfigurationError if two tensors have different shapes, or are codes that differ."""
    if before.shape != tensor.shape or _kind(before) != _kind(tensor):
        raise ConfigurationError(
            f"{path}: {name!r} is {list(tensor.shape)} of {tensor.dtype}, and {list(before.shape)} of {before.dtype} "
            "in the other files"
        )
    if not _kind(tensor) and tensor.numel() > 1 and not bool((before == tensor).all()):
        raise ConfigurationError(
            f"{path}: {name!r} holds {tensor.dtype} and differs between files: quantised weights have no mean; "
            "dequantise them first, for example by export --format merged"
        )


def greedy_soup(
    paths: Sequence[str], scores: Mapping[str, float], score: Callable[[Sequence[str]], float], sign: float
) -> list[str]:
    """Return the files whose mean is best, chosen one after the other (a greedy model soup).

    Args:
        paths: The files.
        scores: Metric of each file alone.
        score: Function that returns the metric of the mean of some files.
        sign: 1 if a lower metric is better, -1 if a higher one is. Files whose metric is not a number are left out.

    Raises:
        ConfigurationError: If no metric is a number.
    """
    ordered = sorted((path for path in paths if not math.isnan(scores[path])), key=lambda path: sign * scores[path])
    if not ordered:
        raise ConfigurationError("average: the metric of every file is nan: choose another --metric or other files")
    chosen = ordered[:1]
    best = scores[ordered[0]]
    for path in ordered[1:]:
        value = score([*chosen, path])
        if sign * value <= sign * best:
            chosen.append(path)
            best = value
    return chosen


def run(argv: list[str]) -> int:
    """Run ``average``."""
    parser = argparse.ArgumentParser(
        "python -m lit_efficient average",
        description="Write the weighted mean of checkpoints, with one file in memory, or merge models that were "
        "fine-tuned from one base.",
        allow_abbrev=False,
        epilog="With --greedy the options of `python -m lit_efficient validate` are accepted: --data.batch_size 8, "
        "--trainer.limit_val_batches 20, --allow-import PACKAGE.",
    )
    parser.add_argument(
        "files", nargs="+", metavar="CKPT", help="checkpoints, .safetensors files or model folders, oldest first"
    )
    parser.add_argument("--output", required=True, help="file to write: .ckpt, or .safetensors for only the weights")
    parser.add_argument(
        "--weights",
        default="uniform",
        help="uniform (default), linear, exponential, or one number per file: 0.2,0.3,0.5; with --method the numbers "
        "are factors of the changes (default: 1)",
    )
    parser.add_argument(
        "--method",
        choices=("mean", *METHODS),
        default="mean",
        help="mean (default), or a merge of the changes of models since --base",
    )
    parser.add_argument("--base", help="file of the model from which whole models were fine-tuned")
    parser.add_argument("--density", type=float, default=0.5, help="share of each change that ties and dare keep")
    parser.add_argument("--seed", type=int, default=0, help="seed of the entries that dare keeps")
    parser.add_argument(
        "--greedy", action="store_true", help="average only files that improve the validation of the mean; needs -c"
    )
    parser.add_argument("-c", "--config", action="append", help="config of the runs, for --greedy")
    parser.add_argument("--metric", help="metric of --greedy (default: the validation loss)")
    parser.add_argument("--mode", choices=("min", "max"), default="min", help="best value of the metric")
    parser.add_argument(
        "--weights_of",
        "--weights-of",
        choices=get_args(Weights),
        default="auto",
        help="kind of weights; auto: the weights that validation used, which are the average if the run kept one",
    )
    options, others = parser.parse_known_args(argv)
    if others and not options.greedy:
        parser.error(f"unrecognized arguments: {' '.join(others)} (options of a validation need --greedy)")
    if options.greedy != bool(options.config):
        raise ConfigurationError("average: --greedy needs -c CONFIG, and -c is only for --greedy")
    if options.method == "mean" and options.base:
        raise ConfigurationError(f"average: --base is for --method {', '.join(METHODS)}, and the method is mean")
    if options.greedy and (options.method != "mean" or options.weights != "uniform"):
        raise ConfigurationError("average: --greedy computes uniform means: leave out --method and --weights")
    files = options.files
    if options.greedy:
        files = _choose(options, others)
    if options.method == "mean":
        checkpoint = average_files(files, _parse(options.weights), options.weights_of)
        what = f"the {options.weights} mean of {len(files)} files"
    else:
        weights = _parse(options.weights)
        if isinstance(weights, str) and weights != "uniform":
            raise refusal("average", "--weights", "one number per file, or left out, with --method", weights)
        factors = None if isinstance(weights, str) else weights
        checkpoint = merge_files(
            files, options.method, options.base, factors, options.density, options.seed, options.weights_of
        )
        what = f"{options.method} of {len(files)} files"
    write(options.output, checkpoint)
    kind = checkpoint["lit_efficient"]["weights"].removeprefix("average of ")
    print(f"Wrote {what} to {options.output} ({kind} weights).")
    if any(name.endswith(_STATISTICS) for name in checkpoint["state_dict"]):
        print("The network has BatchNorm: the averaged statistics are not those of the averaged weights.")
    return 0


def _choose(options: argparse.Namespace, others: list[str]) -> list[str]:
    """Validate the files and means of them, and return those of the greedy soup."""
    from lit_efficient.cli.evaluate import Validator

    with hidden_beside(local_file(options.output)) as scratch:
        scratch.mkdir()
        validate = Validator(options.config, [f"--trainer.default_root_dir={scratch}", *others])

        def score(files: Sequence[str]) -> float:
            mean = scratch / "mean.ckpt"
            write(mean, average_files(files, "uniform", options.weights_of))
            metrics = validate(mean)
            options.metric = options.metric or loss_among(list(metrics), "average")
            if options.metric not in metrics:
                raise refusal("average", "--metric", f"one of {', '.join(sorted(metrics))}", options.metric)
            value = metrics[options.metric]
            print(f"{options.metric} {value:.6g}: {', '.join(files)}")
            return value

        scores = {path: score([path]) for path in options.files}
        return greedy_soup(options.files, scores, score, 1.0 if options.mode == "min" else -1.0)


def _parse(weights: str) -> str | list[float]:
    if weights in ("uniform", "linear", "exponential"):
        return weights
    try:
        return [float(part) for part in weights.split(",")]
    except ValueError as error:
        raise refusal(
            "average", "--weights", "uniform, linear, exponential or numbers separated by commas", weights
        ) from error
