"""``python -m lit_efficient select-data``: score the training rows of a config by loss or gradient, and keep the best.

The scores are appended to ``scores.jsonl`` batch by batch, so the same command continues after an interruption. At the
end the folder holds the rows as tokens (``selected.jsonl``, ``rest.jsonl``, ``val.jsonl``), the tokenizer, and
``data.yaml``, an overlay for ``fit`` that gives each kept row the weight 1 and each other row ``--rest_weight``, by the
mixture of `LanguageData`. ``SHA256SUMS`` reveals damaged files.
"""

import argparse
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_efficient.commands.prompts import default_device

Row = tuple[Any, Any]  # ids and labels, numpy arrays [n]


def run(argv: Sequence[str]) -> int:
    """Run ``select-data``."""
    arguments, rest = _parser().parse_known_args(argv)
    from lit_efficient.cli import explained
    from lit_efficient.commands.preview import build_data
    from lit_efficient.data.language_data import LanguageData
    from lit_efficient.errors import check_number, refusal
    from lit_efficient.files.sums import sha256_of

    check_number("select-data", "--keep", arguments.keep, above=0, below=1)
    check_number("select-data", "--rest_weight", arguments.rest_weight, least=0, below=1)
    for name in ("dim", "batch_size"):
        check_number("select-data", f"--{name}", getattr(arguments, name), least=1, whole=True)
    if (arguments.reference is None) is (arguments.method == "rho"):
        raise refusal("select-data", "--reference", "given for rho, and for rho only", arguments.reference)
    with explained(rest):
        data = build_data(rest, "select-data")
        if not isinstance(data, LanguageData) or data.stream.enabled or data.processor_name is not None:
            raise refusal("select-data", "the config's data", "LanguageData without a stream or images", data)
        data.prepare_data()
        data.setup("fit")
    train = rows_of(data.train_rows)
    val = rows_of(data.val_rows)
    output = Path(arguments.output)
    settings = {name: getattr(arguments, name) for name in ("method", "ckpt", "reference", "dim", "seed", "moments")}
    settings |= {"rows": digest(train), "val_rows": digest(val) if arguments.method == "less" else None}
    for name in ("ckpt", "reference"):  # a path may get another file
        path = Path(settings[name] or "")
        settings[f"sha256 of {name}"] = sha256_of(path) if path.is_file() else None
    scores = resume(output, settings)
    tokens = sum(len(ids) for ids, _ in train)
    passes = "a forward pass of the model and of the reference" if arguments.method == "rho" else "a backward pass"
    print(
        f"select-data: {passes} for {len(train) - len(scores):,} of {len(train):,} rows ({tokens:,} tokens in all); "
        "the time is estimated after the first batch",
        file=sys.stderr,
    )
    if len(scores) < len(train):
        if arguments.method == "rho":
            score = _reducible(arguments, data.tokenizer.get_vocab())
        else:
            score = _influence(arguments, val, data.tokenizer.get_vocab())
        scores += scored(output, train, len(scores), arguments.batch_size, score)
    kept = write_selection(output, data, train, val, scores, arguments.keep, arguments.rest_weight)
    if data.mixes:
        print("select-data: the weights of the config's sources are replaced by those of the selection")
    print(f"{output / 'data.yaml'}: {kept:,} of {len(train):,} rows are kept. Next: append it to the config of fit")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lit_efficient select-data",
        description="Score the training rows of a config's LanguageData, and write the best ones and an overlay that "
        "trains on them. rho: two forward passes for each row. less: a backward pass for each row and each validation "
        "row, whose gradients are the target. The options of fit are accepted, too: -c CONFIG.yaml [-c OVERLAY.yaml "
        "...] [--data.train FILE ...]. The same command continues after an interruption.",
        allow_abbrev=False,
    )
    parser.add_argument("--method", choices=("rho", "less"), required=True, help="reducible loss, or influence (LESS)")
    parser.add_argument(
        "--ckpt", required=True, help="checkpoint of LanguageModeling; for less of a short fit with LoRA on these rows"
    )
    parser.add_argument("--reference", help="checkpoint of the reference model, for rho")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the rows that are kept, in (0, 1)")
    parser.add_argument(
        "--rest_weight", type=float, default=0.0, help="weight of each other row, at least 0 and below 1 (default: 0)"
    )
    parser.add_argument("--dim", type=int, default=512, help="numbers in a projected gradient (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the projection")
    parser.add_argument(
        "--moments",
        choices=("checkpoint", "none"),
        default="checkpoint",
        help="none: compare gradients, without the moments of the checkpoint's Adam",
    )
    parser.add_argument("--batch_size", type=int, default=16, help="rows that are scored at a time (default: 16)")
    parser.add_argument("--device", help="cpu, cuda, mps, ... (default: the accelerator)")
    return parser


def rows_of(packed: Any) -> list[Row]:
    """Return ids and labels of all documents of a split, in their order."""
    return [packed.documents.piece(packed.pieces, i)[:2] for i in range(len(packed.pieces.lengths))]


def digest(rows: Sequence[Row]) -> str:
    """Return a hash of the tokens of all rows."""
    found = hashlib.sha256()
    for ids, labels in rows:
        found.update(ids.tobytes() + labels.tobytes())
    return found.hexdigest()[:16]


def resume(output: Path, settings: dict[str, Any]) -> list[float]:
    """Write or compare the settings of a folder, and return the scores that it has.

    Raises:
        ConfigurationError: If they belong to other settings.
        CheckpointError: If a file is damaged.
    """
    from lit_efficient.errors import CheckpointError, ConfigurationError
    from lit_efficient.files.atomic_file import replacing
    from lit_efficient.files.sums import NAME, check_sums

    beside, lines = output / "settings.json", output / "scores.jsonl"
    if not beside.exists():
        output.mkdir(parents=True, exist_ok=True)
        lines.write_bytes(b"")
        (output / NAME).unlink(missing_ok=True)
        with replacing(beside) as file:
            file.write((json.dumps(settings, indent=2) + "\n").encode())
        return []
    for path in (beside, lines):
        check_sums(path)
    try:
        then = dict(json.loads(beside.read_text("utf-8")))
        content = lines.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        found = [json.loads(line) for line in whole.splitlines()]
        scores = [float(line["score"]) for line in found]
        if [line["row"] for line in found] != [*range(len(found))]:
            raise ValueError("a row is missing in scores.jsonl")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"select-data: {output} is damaged: {error}. Delete it to start again") from error
    for name, value in settings.items():
        if then.get(name) != value:
            raise ConfigurationError(
                f"select-data: {output} was started with {name} {then.get(name)!r}, and now it is {value!r}. Delete "
                "the folder to start again, or name another --output"
            )
    if len(whole) < len(content):
        lines.write_bytes(whole)
    return scores


def scored(
    output: Path, rows: Sequence[Row], start: int, batch_size: int, score: Callable[[Sequence[Row]], list[float]]
) -> list[float]:
    """Return the scores of the rows from ``start`` on, and append them to the folder's file batch by batch.

    Raises:
        ConfigurationError: If a score is not finite, as the order of such rows is of no use.
    """
    from lit_efficient.errors import ConfigurationError

    found: list[float] = []
    begun = time.monotonic()
    with (output / "scores.jsonl").open("ab", buffering=0) as file:
        for first in range(start, len(rows), batch_size):
            few = score(rows[first : first + batch_size])
            for place, one in enumerate(few):
                if not math.isfinite(one):
                    raise ConfigurationError(
                        f"select-data: the score of row {first + place} is {one}: check the weights of the checkpoints "
                        "(for less also its moments), and the row"
                    )
            found += few
            file.write(
                "".join(json.dumps({"row": first + i, "score": one}) + "\n" for i, one in enumerate(few)).encode()
            )
            if first == start:
                left = (time.monotonic() - begun) * (len(rows) - first - len(few)) / len(few)
                print(f"select-data: about {left / 60:.1f} minutes more", file=sys.stderr)
    return found


def write_selection(
    output: Path,
    data: Any,
    train: Sequence[Row],
    val: Sequence[Row],
    scores: Sequence[float],
    keep: float,
    rest_weight: float,
) -> int:
    """Write the rows, the tokenizer and the overlay, and return the number of rows that are kept."""
    import yaml

    from lit_efficient.data.text.mixture import LanguageMixture
    from lit_efficient.files.atomic_file import remove_stale, replacing
    from lit_efficient.files.sums import write_sums

    count = max(1, round(keep * len(train)))
    best = set(sorted(range(len(train)), key=lambda i: (-scores[i], i))[:count])
    parts = {
        "selected": [row for i, row in enumerate(train) if i in best],
        "rest": [row for i, row in enumerate(train) if i not in best],
        "val": list(val),
    }
    sources = []
    for name, rows in parts.items():
        with replacing(output / f"{name}.jsonl") as file:
            for ids, labels in rows:
                line = {"input_ids": ids.tolist(), "labels": labels.tolist()}
                file.write((json.dumps(line) + "\n").encode())
        weight = {"selected": 1.0, "rest": rest_weight}.get(name, 0.0)
        if weight and rows:
            path = str((output / f"{name}.jsonl").resolve())
            sources.append({"path": path, "weight": weight * len(rows), "name": name})
    data.chat_tokenizer.save_pretrained(output / "tokenizer")
    own: dict[str, Any] = {"train": sources, "tokenizer": str((output / "tokenizer").resolve())}
    if len(sources) == 1:
        own["train"] = sources[0]["path"]
    # Settings of the config's own mixture would change the weights.
    if data.mixture != LanguageMixture():
        own["mixture"] = asdict(LanguageMixture())
    if data.by_length and len(sources) > 1:
        own["by_length"] = False
    if val:
        own["val"] = str((output / "val.jsonl").resolve())
    with replacing(output / "data.yaml") as file:
        file.write(b"# Overlay: train on the rows that select-data has kept.\n")
        file.write(yaml.safe_dump({"data": {"init_args": own}}, sort_keys=False).encode())
    remove_stale(output.parent)
    write_sums(output)  # fit compares the rows and the tokenizer with them
    return count


def _batches(rows: Sequence[Row], device: Any) -> Iterator[dict[str, Any]]:
    import torch

    for ids, labels in rows:
        yield {
            "input_ids": torch.from_numpy(ids)[None].to(device),
            "labels": torch.from_numpy(labels)[None].to(device),
        }


def row_loss(model: Any, batch: dict[str, Any]) -> Any:
    """Return the mean loss of a row's tokens, a scalar."""
    from lit_efficient.losses.next_token import sample_means, targets_of, token_losses

    targets = targets_of(batch)
    return sample_means(token_losses(model(batch["input_ids"]), targets), targets)[0]


def _loaded(path: str, device: Any, vocabulary: dict[str, int]) -> tuple[Any, dict[str, Any]]:
    """Return a model and its checkpoint.

    Raises:
        ConfigurationError: If tokens of the data have other ids in the model, or none.
    """
    from lit_efficient.errors import ConfigurationError
    from lit_efficient.tasks.loading import language_model_of, read_language_model

    checkpoint = read_language_model(path)
    model, _ = language_model_of(checkpoint, path, "raw")
    if model.tokenizer_state is not None:
        theirs = model.tokenizer.get_vocab()
        unlike = [token for token, number in vocabulary.items() if theirs.get(token) != number]
        if unlike:
            raise ConfigurationError(
                f"select-data: the data has another tokenizer than {path}: {len(unlike)} of {len(vocabulary)} tokens "
                f"have another id there or none, such as {min(unlike)!r}. Set data.tokenizer to that of the model"
            )
    return model.to(device).eval(), checkpoint


def _reducible(arguments: argparse.Namespace, vocabulary: dict[str, int]) -> Callable[[Sequence[Row]], list[float]]:
    import torch

    from lit_efficient.losses.data_selection import reducible_loss

    device = arguments.device or default_device()
    models = [_loaded(path, device, vocabulary)[0] for path in (arguments.ckpt, arguments.reference)]

    @torch.no_grad()
    def score(rows: Sequence[Row]) -> list[float]:
        current, reference = (
            torch.stack([row_loss(model, batch) for batch in _batches(rows, device)]) for model in models
        )
        return reducible_loss(current, reference).tolist()

    return score


def _influence(
    arguments: argparse.Namespace, val: Sequence[Row], vocabulary: dict[str, int]
) -> Callable[[Sequence[Row]], list[float]]:
    import torch

    from lit_efficient.errors import ConfigurationError
    from lit_efficient.losses.data_selection import adam_direction, influence, project

    if not val:
        raise ConfigurationError(
            "select-data: less compares with the gradients of validation rows, and the data has none: set data.val"
        )
    device = arguments.device or default_device()
    model, checkpoint = _loaded(arguments.ckpt, device, vocabulary)
    names = [name for name, _ in model.named_parameters() if re.search(r"\.lora_[AB]\b", name)]
    trained = {name: p for name, p in model.named_parameters() if not names or name in names}
    for name, p in model.named_parameters():
        p.requires_grad_(name in trained)
    moments = None
    if arguments.moments == "checkpoint":
        mean, square = adam_moments(checkpoint, trained)
        moments = mean.to(device), square.to(device)

    def gradients(rows: Sequence[Row]) -> Any:
        found = []
        for batch in _batches(rows, device):
            parts = torch.autograd.grad(row_loss(model, batch), list(trained.values()), allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for p, g in zip(trained.values(), parts)]
            found.append(torch.cat([g.float().flatten() for g in flat]))
        return torch.stack(found)

    size = arguments.batch_size
    targets = torch.cat(
        [project(gradients(val[i : i + size]), arguments.dim, arguments.seed) for i in range(0, len(val), size)]
    )

    def score(rows: Sequence[Row]) -> list[float]:
        own = gradients(rows)
        if moments is not None:
            group = checkpoint["optimizer_states"][0]["param_groups"][0]
            own = adam_direction(own, *moments, tuple(group["betas"]))
        return influence(project(own, arguments.dim, arguments.seed), targets).tolist()

    return score


def adam_moments(checkpoint: dict[str, Any], trained: dict[str, Any]) -> tuple[Any, Any]:
    """Return Adam's means of gradients and of their squares, in the order of the parameters, [N] each.

    Raises:
        ConfigurationError: If the checkpoint has no such states of these parameters.
    """
    import torch

    from lit_efficient.errors import ConfigurationError

    states = checkpoint.get("optimizer_states") or [{}]
    groups = [group["params"] for group in states[0].get("param_groups", [])]
    found = [states[0]["state"].get(number, {}) for group in groups for number in group]
    # One group; or the matrices B (LoRA+), or what has no weight decay, in a second one. Shapes do not show the order
    # of other groups.
    for in_second in (lambda _: False, lambda name: name.endswith("lora_B"), lambda name: trained[name].ndim < 2):
        names = sorted(trained, key=in_second)
        sizes = [sum(in_second(name) is second for name in names) for second in (False, True)]
        if [len(group) for group in groups] != [size for size in sizes if size]:
            continue
        if [getattr(state.get("exp_avg"), "shape", None) for state in found] == [trained[name].shape for name in names]:
            by_name = dict(zip(names, found))
            means, squares = (
                torch.cat([by_name[name][key].float().flatten() for name in trained])
                for key in ("exp_avg", "exp_avg_sq")
            )
            return means, squares
    raise ConfigurationError(
        f"select-data: the checkpoint has no moments of Adam for its {len(trained)} trained tensors, or its "
        f"{len(groups)} parameter groups do not show which belong to which: train it with AdamW and one rate, or set "
        "--moments none"
    )
