"""``python -m lit_efficient preview --config X``: show a batch of tokens or images before training.

Builds only the data of a config, without model and trainer. Shows which tokens contribute to the loss ("trained"),
which are masked or padding, where packed documents begin, what was truncated, and whether the end of a turn is trained.
The ids are shown as well, because a control token and a text that spells it look the same. Batches of images are the
subject of :mod:`lit_efficient.commands.preview_images`.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.evidence.verifying.token_batches import Kinds, kinds_of

TRAINED, MASKED, PADDED = "trained", "masked", "padded"
_STYLES = {
    TRAINED: "\033[1;32m",
    MASKED: "\033[2m",
    PADDED: "\033[33m",
    "boundary": "\033[1;36m",
    "warning": "\033[1;31m",
}
_RESET = "\033[0m"
_IDS_SHOWN = 32  # of each document
# Control characters that would move the cursor or change colours; line breaks and tabs are allowed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def figures(batch: dict[str, Tensor], kinds: Kinds, stop_ids: Sequence[int]) -> dict[str, float]:
    """Return statistics of a batch.

    Args:
        batch: The batch; ``input_ids`` is [B, T].
        kinds: Kind of each token.
        stop_ids: Tokens that end a turn.

    Returns:
        Numbers of ``tokens``, ``trained``, ``masked`` and ``padded`` tokens and of ``documents``; ``fill``, the share
        of tokens that are no padding; ``stretches``, the number of runs of trained tokens; and ``ends``, the number of
        runs that end with a stop token.
    """
    ends = torch.zeros_like(kinds.trained)
    ends[:, :-1] = kinds.trained[:, :-1] & (~kinds.trained[:, 1:] | kinds.starts[:, 1:])
    ends[:, -1] = kinds.trained[:, -1]
    stops = torch.isin(batch["input_ids"], torch.tensor(list(stop_ids)))
    tokens = kinds.trained.numel()
    trained = int(kinds.trained.sum())
    padded = int(kinds.padded.sum())
    return {
        "tokens": tokens,
        "trained": trained,
        "masked": tokens - trained - padded,
        "padded": padded,
        "documents": int(kinds.starts.sum()),
        "fill": 1 - padded / tokens,
        "stretches": int(ends.sum()),
        "ends": int((ends & stops).sum()),
    }


def rendered(batch: dict[str, Tensor], kinds: Kinds, tokenizer: Any, colour: bool, most: int) -> Iterator[str]:
    """Yield lines that show at most ``most`` tokens of each row; without colours, trained text in «»."""
    control = _control_ids(tokenizer)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        yield paint(f"=== row {row + 1} of the batch", "boundary", colour)
        line = ""
        number = 0
        shown: list[int] = []  # ids of the document
        for kind, begins, part in _runs(ids[:most], kinds, row):
            if begins:
                number += 1
                if number > 1:
                    yield line
                    yield ids_line(shown, control)
                    yield paint(f"--- document {number} of the row", "boundary", colour)
                    line = ""
                    shown = []
            if kind == PADDED:
                line += paint(f"[padded: {int(kinds.padded[row].sum())} tokens]", PADDED, colour)
                break
            shown += part
            text = tokenizer.decode(part, skip_special_tokens=False)
            text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)  # as an escape sequence
            line += paint(text, kind, colour)
        yield line
        yield ids_line(shown, control)
        if len(ids) > most:
            yield f"... {len(ids) - most} more tokens (--tokens {len(ids)} shows all)"


def ids_line(ids: Sequence[int], control: set[int]) -> str:
    """Return the first ids of a document, control tokens in brackets, and the numbers of both."""
    found = [f"[{i}]" if i in control else str(i) for i in ids]
    line = " ".join(found[:_IDS_SHOWN])
    if len(ids) > _IDS_SHOWN:
        line += " ..."
    return f"ids      {line}   ({len(ids)} ids, {sum(i in control for i in ids)} control tokens in [])"


def _control_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the special tokens of a tokenizer, of transformers or of the tokenizers library."""
    if hasattr(tokenizer, "added_tokens_decoder"):
        added = tokenizer.added_tokens_decoder
    else:
        added = tokenizer.get_added_tokens_decoder()
    return {index for index, token in added.items() if token.special}


def _runs(ids: list[int], kinds: Kinds, row: int) -> Iterator[tuple[str, bool, list[int]]]:
    """Yield runs of tokens of one kind: the kind, whether a document begins with the run, and the ids."""
    starts = kinds.starts[row].tolist()
    trained = kinds.trained[row].tolist()
    padded = kinds.padded[row].tolist()

    def kind_of(i: int) -> str:
        if padded[i]:
            return PADDED
        if trained[i]:
            return TRAINED
        return MASKED

    begin = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or kind_of(i) != kind_of(begin) or starts[i]:
            yield kind_of(begin), starts[begin], ids[begin:i]
            begin = i


def paint(text: str, style: str, colour: bool) -> str:
    """Return ``text`` in the colour of ``style``, line by line; without colours, trained text in «»."""
    if colour:
        return re.sub(r"[^\n]+", lambda line: f"{_STYLES[style]}{line[0]}{_RESET}", text)
    if style == TRAINED:
        return f"«{text}»"
    return text


def summary_lines(
    data: Any, numbers: dict[str, float], shape: tuple[int, ...], split: str, colour: bool
) -> Iterator[str]:
    """Yield lines with the statistics of the batch and of the whole split."""
    legend = " ".join(paint(kind, kind, colour) for kind in (TRAINED, MASKED, PADDED))
    yield f"legend   {legend}"
    shares = ", ".join(
        f"{numbers[k]:.0f} {k} ({numbers[k] / numbers['tokens']:.1%})" for k in (TRAINED, MASKED, PADDED)
    )
    yield f"batch    {' x '.join(map(str, shape))} tokens: {shares}"
    yield f"         {numbers['documents']:.0f} documents, fill {numbers['fill']:.2%}"
    if numbers["stretches"] and hasattr(data, "stop_ids"):
        ended = f"{numbers['ends']:.0f} of {numbers['stretches']:.0f}"
        yield f"         {ended} runs of trained tokens end with a stop token"
    report = getattr(data, "report", None)
    if not report:
        return
    counts = report["counts"][split]
    if not counts["rows"]:
        yield f"{split:<8} streamed: its content is not known before it is read"
        return
    line = f"{split:<8} {data.summary(counts)}"
    if data.pack:
        line += f"; packed into rows that are {data.fill(split):.2%} full"
    yield line
    if not counts["truncated"]:
        yield "         nothing truncated"
    yield from (f"source   {sentence}" for sentence in report["formats"])
    yield from (
        f"         malformed: {place}: {why}"
        for found in report["malformed"].values()
        for place, why in found["shown"][:5]
    )
    if counts["turns"]:
        names = {i: data.chat_tokenizer.convert_ids_to_tokens(i) for i in data.stop_ids}
        end = names.get(report["end_of_turn"])
        if end and counts["ended"] == counts["turns"]:
            yield f"stop     the end-of-turn token {end} is trained in every turn"
        else:
            text = (
                f"stop     the end-of-turn token {end or '(none)'} is trained in {counts['ended']} of {counts['turns']}"
            )
            yield paint(text + " turns: the model may never stop", "warning", colour)


def build_data(argv: Sequence[str], command: str = "preview") -> Any:
    """Return the data module of a config without building anything else.

    Raises:
        ConfigurationError: If the config has no ``data``.
    """
    from jsonargparse import Namespace
    from lightning.pytorch import LightningDataModule

    from lit_efficient.cli import LitEfficientCLI
    from lit_efficient.cli.errors import constructor_error
    from lit_efficient.cli.parsing import PARSER_MODE, Parser
    from lit_efficient.data.latent_data import LatentData

    class DataOnly(LitEfficientCLI):
        data: Any = None

        def instantiate_classes(self) -> None:
            wanted = self.part(self.config, "data")
            if not wanted:
                raise ConfigurationError(f"{command}: the config has no `data`.")
            parser = Parser(parser_mode=PARSER_MODE, exit_on_error=False)
            parser.add_subclass_arguments(LightningDataModule, "data")
            try:
                self.data = parser.instantiate_classes(Namespace(data=wanted)).data
            except ValueError as error:
                raise constructor_error(error) from error
            if isinstance(self.data, LatentData):
                self.data.backbone = _backbone(self.part(self.config, "model"))

        def after_instantiate_classes(self) -> None:
            """Do nothing: there is no trainer."""

        def run_subcommand(self, subcommand: str) -> None:
            """Do nothing."""

    return DataOnly(args=["fit", *argv]).data


def _backbone(model: Any) -> Any:
    """Return the network of diffusers that a config trains, or None."""
    from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig

    described = getattr(getattr(model, "init_args", None), "backbone", None)
    fields = getattr(described, "init_args", described)
    if getattr(fields, "name_or_path", None) is None:
        return None
    return DiffusersModelConfig(**vars(fields))


def run(argv: Sequence[str]) -> int:
    """Run ``preview``."""
    parser = argparse.ArgumentParser(
        "lit_efficient preview",
        description="Show a batch of tokens or images. The options of fit are accepted: -c CONFIG, --data.seed 1, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--split", choices=("train", "val"), default="train")
    parser.add_argument("--tokens", type=int, default=400, help="tokens to show per row (default: 400)")
    parser.add_argument("--rows", type=int, default=2, help="rows to show (default: 2)")
    parser.add_argument("--output", type=Path, default=None, help="picture of a batch of images (default: preview.png)")
    options, rest = parser.parse_known_args(argv)
    check_number("preview", "--tokens", options.tokens, least=1, whole=True)
    check_number("preview", "--rows", options.rows, least=1, whole=True)
    from lit_efficient.cli import explained
    from lit_efficient.commands.preview_images import PICTURE, draw_batch, image_lines, images_of, tokenizers_of

    with explained(rest):
        built = build_data(rest)
        data = images_of(built)
        data.prepare_data()
        data.setup("fit")
    if options.split == "train":
        loader = data.train_dataloader()
    else:
        loader = data.val_dataloader()
    batch = next(iter(loader), None)
    if batch is None:
        raise refusal("preview", "--split", "train, because this data holds nothing out", options.split)
    if isinstance(batch, dict) and {"images", "index", "variant"} <= batch.keys():
        for line in image_lines(batch, data, tokenizers_of(built), options.rows):
            print(line)
        picture = options.output or Path(PICTURE)
        draw_batch(batch, picture, options.rows)
        print(f"Wrote {picture}")
        return 0
    if not isinstance(batch, dict) or "input_ids" not in batch or not {"labels", "shift_labels"} & batch.keys():
        raise ConfigurationError(
            f"preview: the batch needs images, or input_ids and labels or shift_labels; {type(data).__name__} gives "
            f"{list(batch) if isinstance(batch, dict) else type(batch).__name__}."
        )
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    kinds = kinds_of(batch)
    tokenizer = getattr(data, "chat_tokenizer", None) or data.tokenizer
    shown = {name: values[: options.rows] for name, values in batch.items()}
    for line in rendered(shown, kinds, tokenizer, colour, options.tokens):
        print(line)
    numbers = figures(batch, kinds, getattr(data, "stop_ids", []))
    for line in summary_lines(data, numbers, tuple(batch["input_ids"].shape), options.split, colour):
        print(line)
    return 0
