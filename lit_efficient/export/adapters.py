"""Exports of a checkpoint: an adapter for peft, a merged model for transformers or llama.cpp, or plain safetensors.

The files are written into a temporary folder beside the target, checked there, and renamed when they are complete.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_efficient.application.recorded import arguments_behind, converters
from lit_efficient.data.text.chat_tokenizer import declare_class, save_tokenizer
from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError, ConfigurationError, check_choice, check_installed, refusal
from lit_efficient.export.card import model_card
from lit_efficient.export.check import (
    Reference,
    check_gguf,
    check_lora,
    check_lycoris,
    check_outputs,
    check_tensors,
    difference,
    digests,
    outputs_of,
    reference_of,
)
from lit_efficient.export.diffusers_lora_check import updates_of
from lit_efficient.export.gguf_model import TYPES, family_of, rounded, write_model
from lit_efficient.export.gguf_tokenizer import ids_of, tokenizer_of_base, write_tokenizer
from lit_efficient.export.learned_embeddings import new_words, write_embeddings
from lit_efficient.export.padding import gives_rewards, grow_for_padding, pad_tokenizer, padding_for, set_padding
from lit_efficient.export.trained import Trained, base_state, fold, merged_model, trained
from lit_efficient.files.atomic_file import check_new_folder, write_folder
from lit_efficient.files.checkpoints import Checkpoint, Fields
from lit_efficient.files.sums import write_sums
from lit_efficient.files.tensors import save_tensors
from lit_efficient.internals.hugging_face import bars_on_terminals, generation_json, stopping_at
from lit_efficient.mechanisms.adapters.activated import ACTIVATED
from lit_efficient.mechanisms.adapters.added_rows import without_added_rows
from lit_efficient.mechanisms.adapters.diffusers_lora import (
    KOHYA_FILE,
    skeleton,
    unread_by_programs,
    write_diffusers_lora,
    write_kohya,
    write_several,
)
from lit_efficient.mechanisms.adapters.int4 import codes_on_grid, dequantize_groups, shifted_zeros
from lit_efficient.mechanisms.adapters.lora_files import places_of
from lit_efficient.mechanisms.adapters.low_rank import ON_INT4, merged_matrix, scale_of
from lit_efficient.mechanisms.adapters.lycoris import LYCORIS_FILE, write_lycoris
from lit_efficient.mechanisms.adapters.peft_format import task_of, to_peft
from lit_efficient.mechanisms.adapters.peft_saved import peft_files, write_peft_folder
from lit_efficient.mechanisms.adapters.peft_vectors import fold_vectors, refuse_prefix, scaled_names, vectors_to_peft
from lit_efficient.mechanisms.adapters.quantized import dequantize_entry, is_code, is_quantized, quantize_entry
from lit_efficient.mechanisms.adapters.trained_rows import ROWS
from lit_efficient.mechanisms.restore import Asked, Weights, wanted_weights, weights_of
from lit_efficient.models.libraries.gguf_file import is_gguf
from lit_efficient.surgery import memory_of, unmixed

FORMATS = ("peft", "merged", "gguf", "safetensors")
_STRICT = 1e-4  # of outputs that are computed from the same rounded weights
_COARSE = 1.0  # measures the median change of a token's outputs
_SIZE = re.compile(r"[1-9]\d*(KB|MB|GB|TB)")
_SHARD = "5GB"  # largest file of a merged model, so that a download can be repeated in part


def export_checkpoint(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: str,
    base: str | os.PathLike[str] | None = None,
    weights: Asked | None = "auto",
    check: bool = True,
    gguf_type: str | None = None,
    max_shard_size: str | None = None,
) -> Path:
    """Export a checkpoint in one of four formats.

    Args:
        path: A Lightning checkpoint.
        output: A new or empty folder.
        format: ``peft``: the adapter for ``PeftModel.from_pretrained``; for a network of diffusers also for
            ``pipeline.load_lora_weights(folder)``, and in kohya's format, which ComfyUI reads; new words of
            ``text_training`` for ``pipeline.load_textual_inversion``. ``merged``: a folder for
            ``AutoModelForCausalLM.from_pretrained`` (of images and text: ``AutoModelForImageTextToText``), with or
            without adapters in the checkpoint; checkpoints of ``LanguageModeling`` add their tokenizer or processor.
            ``gguf``: the merged model with its tokenizer as one file for llama.cpp. ``safetensors``:
            ``model.safetensors`` with the module's names and merged adapters; QA-LoRA's weights stay in int4.
        base: Base model below the adapters, if the checkpoint neither contains it (``save_base=True``) nor names it:
            the folder of a transformers model, a GGUF file, or (``safetensors``) a checkpoint or safetensors file.
        weights: ``average`` (or ``ema``) or ``raw``. ``auto`` or None: the weights that validation used, which are the
            average if the run kept one.
        check: Let the target library load the folder in a new process and compare it with the trained model. This
            needs memory for a second copy of the model.
        gguf_type: Number format of matrices in a GGUF file: ``f16`` (the default), ``q8_0``, ``bf16`` or ``f32``.
        max_shard_size: Largest file of a merged model, such as ``500MB`` or ``5GB`` (the default), unless one tensor is
            larger.

    Returns:
        The folder, which contains hashes of its files.

    Raises:
        ConfigurationError: If an argument does not fit the checkpoint, or the format cannot hold the model.
        CheckpointError: If a file cannot be read safely, tensors are missing, or the check finds a difference.
    """
    check_choice("export", "format", format, FORMATS)
    check_choice("export", "gguf_type", gguf_type, TYPES, null=True)
    if gguf_type is not None and format != "gguf":
        raise ConfigurationError(f"export: gguf_type belongs to format gguf, not to format {format}")
    weights = wanted_weights("export", weights)
    check_new_folder(Path(output), "export")
    checkpoint = read_checkpoint(path)
    named = None if base is None else str(base)
    if format != "safetensors":
        converters(checkpoint, format)
    if max_shard_size is not None and format != "merged":
        raise ConfigurationError(f"export: max_shard_size belongs to format merged, not to format {format}")
    if max_shard_size is not None and _SIZE.fullmatch(max_shard_size) is None:
        raise refusal("export", "max_shard_size", "a number above 0 with KB, MB, GB or TB", max_shard_size)
    as_gguf = partial(_gguf, type=gguf_type or "f16")
    merged = partial(_merged, shard=max_shard_size or _SHARD)
    makers: dict[str, Callable[[_Source, bool], _Export]] = {
        "peft": _peft,
        "merged": merged,
        "gguf": as_gguf,
        "safetensors": _safetensors,
    }
    export = makers[format](_Source(checkpoint, str(path), weights, named), check)

    def fill(folder: Path) -> None:
        export.write(folder)
        finding = export.compare(folder) if check else "not checked"
        finding += export.remark
        said = f"The {export.held} weights of {Path(path).name}, exported by lit_efficient as {format}; {finding}."
        card = model_card(checkpoint, Path(path), format, export.base or named, said)
        (folder / "README.md").write_text(card, "utf-8")
        write_sums(folder)
        print(f"{export.held} weights; {finding}", file=sys.stderr)

    return write_folder(Path(output), fill, sums=False)  # fill writes the hashes before the check


@dataclass(frozen=True)
class _Source:
    """A checkpoint and the arguments with which it is exported."""

    checkpoint: Checkpoint
    path: str
    weights: Weights
    base: str | None

    @property
    def ours(self) -> Fields:
        """Entries of this package in the checkpoint."""
        return self.checkpoint.get("lit_efficient", {})

    def trained(self) -> Trained:
        run = trained(self.checkpoint, self.path, self.weights, self.base)
        set_padding(run.network, self.checkpoint)
        return run


@dataclass(frozen=True)
class _Export:
    """An export that is ready to be written.

    Args:
        held: Kind of the weights: "raw" or the name of an average.
        write: Function that writes the files into a folder.
        compare: Function that checks the folder and returns its finding.
        remark: Further words for people.
        base: Name, folder or file of the base model, if it is known.
    """

    held: str
    write: Callable[[Path], object]
    compare: Callable[[Path], str]
    remark: str = ""
    base: str | None = None


@dataclass(frozen=True)
class _Whole:
    """A merged model of transformers.

    Args:
        models: List with the only reference to the model, so that it can be freed before a check loads its own copy.
        kind: Name of its class.
        reference: Outputs before merging; None without a check, or if no batch is known.
        held: Kind of the weights.
        base: Name or folder of its base.
        said: Words of :func:`merged_model`.
        omitted: Words about tensors outside of the model.
        rewards: Whether it is a reward model.
        further: Texts of further files by their names.
        embedded: Embeddings before merging, for sentence-transformers.
    """

    models: list[Any]
    kind: str
    reference: Reference | None
    held: str
    base: str
    said: str
    omitted: str
    rewards: bool
    further: dict[str, str]
    embedded: Reference | None


def _whole(source: _Source, check: bool, format: str) -> _Whole:
    checkpoint = source.checkpoint
    refuse_prefix(checkpoint)
    run = source.trained()
    if not hasattr(run.network, "save_pretrained"):
        raise ConfigurationError(f"export: format {format} is for models of transformers: use format safetensors")
    outside = run.trained_outside()
    if outside:
        raise ConfigurationError(
            f"export: format {format} holds only {run.root!r}, and {len(outside)} parameters outside of it trained, "
            f"first {outside[0]!r}: use format safetensors"
        )
    if format == "gguf":
        _refuse_for_gguf(run.network)
    reference = reference_of(run.network, checkpoint) if check else None
    root = run.root
    held = run.held
    base = run.network.config.name_or_path
    rewards = gives_rewards(run.network, checkpoint)
    further: dict[str, str] = getattr(run.module, "exported_files", dict)()
    embedded = _embedding_reference(run, reference) if reference is not None and further else None
    model, said = merged_model(run)
    if rewards:
        grow_for_padding(model)
    left = [name for name in checkpoint["state_dict"] if root and not name.startswith(f"{root}.")]
    omitted = f"; {len(left)} tensors outside of {root!r} are left out, first {left[0]!r}" if left else ""
    return _Whole([model], type(model).__name__, reference, held, base, said, omitted, rewards, further, embedded)


def _merged(source: _Source, check: bool, shard: str) -> _Export:
    checkpoint = source.checkpoint
    whole = _whole(source, check, "merged")

    def write(folder: Path) -> None:
        model = whole.models.pop()
        stop = _save_tokenizer(checkpoint, folder)
        if not whole.rewards:
            # The base may stop at further tokens, such as tool calls.
            if model.generation_config is not None:
                model.generation_config = stopping_at(model.generation_config, stop)
        elif stop:
            pad_tokenizer(folder, model.config.get_text_config().pad_token_id)
        _save_model(model, folder, shard)
        _declare_class(folder, whole.base)
        for name, text in whole.further.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, "utf-8")

    def compare(folder: Path) -> str:
        if whole.reference is None:
            return f"not checked: no batch is known for {whole.kind}{whole.omitted}"
        finding = check_outputs(folder, "transformers", whole.reference, {"class": whole.kind})
        if whole.embedded is not None:
            finding += "; " + check_outputs(folder, "sentence_transformers", whole.embedded, {"class": whole.kind})
        return finding + whole.omitted

    return _Export(whole.held, write, compare, whole.said, whole.base or None)


def _refuse_for_gguf(network: Any) -> None:
    check_installed("export: format gguf", "gguf", "accelerate")
    if not unmixed(network).__name__.endswith("ForCausalLM"):
        raise ConfigurationError(
            f"export: format gguf is for causal language models, and this is a {unmixed(network).__name__}"
        )
    family_of(network.config)


def _gguf(source: _Source, check: bool, type: str) -> _Export:
    checkpoint = source.checkpoint
    whole = _whole(source, check, "gguf")
    name = f"model-{type}.gguf"
    samples: dict[str, list[int]] = {}

    def write(folder: Path) -> None:
        (model,) = whole.models
        with tempfile.TemporaryDirectory() as place:
            stop = _save_tokenizer(checkpoint, Path(place))
            if not any(Path(place).iterdir()):
                tokenizer_of_base(whole.base, Path(place))
            model.config.save_pretrained(place)
            samples.update(ids_of(Path(place), model.config.vocab_size))
            tokenizer = partial(write_tokenizer, folder=Path(place), rows=model.config.vocab_size, stop=stop)
            title = f"{Path(whole.base or source.path).stem} fine-tuned"
            write_model(model, folder / name, type, family_of(model.config), title, tokenizer)

    def compare(folder: Path) -> str:
        assert whole.reference is not None
        model = whole.models.pop()
        rounded_model = rounded(model, type)
        del model
        outputs = outputs_of(rounded_model, whole.reference.batch)
        config = rounded_model.config
        del rounded_model
        off = difference(whole.reference.outputs, outputs, _COARSE)
        finding = check_gguf(folder, name, Reference(whole.reference.batch, outputs, _STRICT), config, samples)
        return f"{type} changes outputs by {off:.1e}; {finding}{whole.omitted}"

    return _Export(whole.held, write, compare, whole.said, whole.base or None)


def _peft(source: _Source, check: bool) -> _Export:
    checkpoint = source.checkpoint
    state, held = weights_of(checkpoint, source.weights)
    vectors = vectors_to_peft({**checkpoint, "state_dict": state})
    where, arguments = _adapters(checkpoint)
    own = source.ours.get("peft")  # adapters that are peft's own layers
    words = new_words(checkpoint)
    if words is not None and where is None:
        return _embeddings(state, held, words)
    if words is not None:
        embeddings = partial(write_embeddings, state=state, described=words)
        state = without_added_rows(state)
    if vectors is None and where is None and own is None:
        raise ConfigurationError(
            "export: format peft is for checkpoints of LoRA, IA3, PrefixTuning and PeftAdapter, and "
            f"{source.path} has no adapter"
        )
    where = where or source.ours.get("ia3") or source.ours.get("prefix") or own or {}
    parts = _pipeline_parts(where)
    write_one: Callable[..., object] = partial(_write_peft, parts=parts)
    if own is None:
        adapters = {"default": vectors or to_peft(state, where, arguments)}
    else:
        adapters = peft_files(own, state)
        write_one = write_peft_folder
    named, about = _base_of(source, where)
    pad = None
    remark = ""
    if checkpoint.get("language_modeling", {}).get("task") == "RewardModeling" and about.get("task_type") == "SEQ_CLS":
        from transformers import AutoConfig

        pad = padding_for(AutoConfig.for_model(**json.loads(where["config"])), checkpoint)
        remark = f"; load the base with num_labels=1, and set its config.pad_token_id to {pad}"
    elif about.get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
        config = json.loads(where["config"])
        count = len(config.get("id2label") or "ab")  # transformers writes the labels unless there are two
        remark = f"; load the base with num_labels={count}, and set its config.pad_token_id to {config['pad_token_id']}"
    if unread_by_programs(parts):
        remark = f"; without {KOHYA_FILE}, which no program reads for {unread_by_programs(parts)}"

    def write(folder: Path) -> None:
        for name, (tensors, config) in adapters.items():
            place = folder
            if len(adapters) > 1 and name != "default":  # the folders that peft uses
                place = folder / name
                place.mkdir(exist_ok=True)
            write_one(place, tensors, config | about)
            if own is not None and "diffusers" in own:
                write_lycoris(place, tensors, config, skeleton({"library": "diffusers", **own["diffusers"]}))
        if words is not None:
            embeddings(folder)
        stop = _save_tokenizer(checkpoint, folder)
        if stop and pad is not None:
            pad_tokenizer(folder, pad)
        _declare_class(folder, about.get("base_model_name_or_path"))

    def compare(folder: Path) -> str:
        if len(adapters) > 1:
            return f"not checked: the checkpoint has {len(adapters)} adapters, {', '.join(adapters)}"
        if parts:
            return check_lora(folder, parts, updates_of(state, where, arguments))
        if (folder / LYCORIS_FILE).is_file():
            ((tensors, _),) = adapters.values()
            return check_lycoris(folder, {"library": "diffusers", **where["diffusers"]}, tensors)
        return _compare_with_peft(folder, source, where, named)

    return _Export(held, write, compare, remark, about.get("base_model_name_or_path"))


def _embeddings(state: Mapping[str, Tensor], held: str, words: Fields) -> _Export:
    """Return the export of new words alone."""

    def write(folder: Path) -> None:
        write_embeddings(folder, state, words)

    def compare(folder: Path) -> str:
        return "not checked: load_textual_inversion needs the pipeline"

    return _Export(held, write, compare)


def _embedding_reference(run: Trained, reference: Reference) -> Reference:
    """Return the embeddings of the batch of a reference, in which one text becomes shorter than the other."""
    mask = torch.ones_like(reference.batch["input_ids"])
    mask[1, mask.shape[1] // 2 :] = 0
    batch = {**reference.batch, "attention_mask": mask}
    with torch.no_grad():
        return Reference(batch, run.module(**batch).float(), reference.tolerance)


def _base_of(source: _Source, where: Fields) -> tuple[str | None, dict[str, str]]:
    """Return the base that a checkpoint names, and the fields about task and base for an adapter's configuration."""
    hyper: Fields = {}
    if "language_modeling" in source.checkpoint:
        hyper = source.checkpoint.get("hyper_parameters", {})
    spec: Fields = hyper.get("model", {})
    if "latent_diffusion" in source.checkpoint:
        spec = source.checkpoint["hyper_parameters"].get("backbone", {})
    named = where.get("base") or spec.get("name_or_path")
    if hyper.get("start_from"):  # the base is another checkpoint's network, which has no name
        named = None
    about = {"task_type": task_of(where), "base_model_name_or_path": named, "revision": spec.get("revision")}
    if source.base is not None and (is_gguf(source.base) or not Path(source.base).is_file()):
        about |= {"base_model_name_or_path": source.base, "revision": None}
    return named, {key: value for key, value in about.items() if value is not None}


def _compare_with_peft(folder: Path, source: _Source, where: Fields, named: str | None) -> str:
    run, note = _on_base(source, named)
    reference = None
    if run is not None:
        set_padding(run.network, source.checkpoint)
    if run is not None and hasattr(run.network, "save_pretrained"):
        reference = reference_of(run.network, source.checkpoint)
    if run is None or reference is None or where.get("root", run.root) != run.root:
        return f"not checked: peft needs the class of the module {where.get('root') or 'that trained'!r}"
    rounded = any(map(is_quantized, run.network.modules()))
    if rounded:
        note += ", compared on the base as the run quantised it: another base gives other outputs"
    dtype = str(run.network.dtype).removeprefix("torch.")
    rows = None
    if run.network.get_input_embeddings() is not None:
        rows = run.network.get_input_embeddings().weight.shape[0]
    kind = unmixed(run.network).__name__
    request: dict[str, Any] = {"class": kind, "base": run.base, "dtype": dtype, "rows": rows}
    if kind.endswith("Classification"):
        request["num_labels"] = run.network.config.num_labels
        request["pad"] = run.network.config.get_text_config().pad_token_id
    write_base = None
    if named is None or run.base != named or rounded:
        write_base = partial(_write_base, run)
    return check_outputs(folder, "peft", reference, request, write_base) + note


def _on_base(source: _Source, named: str | None) -> tuple[Trained | None, str]:
    """Return the trained network and a note. If the base is missing, its weights are random and the note says so."""
    try:
        return source.trained(), ""
    except (ConfigurationError, CheckpointError) as error:
        if source.base is not None or (named is not None and isinstance(error, CheckpointError)):
            raise
    alone = {key: value for key, value in source.checkpoint.items() if key != "language_modeling"}
    alone["lit_efficient"] = {**source.ours, "base": {}}
    try:
        run = trained(alone, source.path, source.weights, None, random=True)
    except ConfigurationError:
        return None, ""
    return run, ", compared on random weights because the base is missing"


def _safetensors(source: _Source, check: bool) -> _Export:
    checkpoint = source.checkpoint
    finding = ""
    said = ""
    if "language_modeling" in checkpoint and "prefix" not in source.ours:
        run = source.trained()
        reference = reference_of(run.network, checkpoint) if check else None
        held = run.held
        before: Mapping[str, Tensor] = run.module.state_dict()
        said = fold(run, keep_int4=True)
        state: dict[str, Tensor] = run.module.state_dict()
        _check_tied(before, state)
        for kind in converters(checkpoint):
            kind.convert_export(state, checkpoint, run.module)
        if reference is not None:
            off = difference(reference.outputs, outputs_of(run.network, reference.batch), reference.tolerance)
            finding = f", merged outputs differ by {off:.1e} (tolerance {reference.tolerance:.0e})"
            if not off <= reference.tolerance:
                raise CheckpointError(f"export: the exported model is not the trained one{finding}")
    elif "peft" in source.ours:
        raise ConfigurationError(
            "export: format safetensors must merge peft's layers in the module, whose class is not known: save "
            f"merge_adapters(restore(MyModule(), {source.path!r})).state_dict(), or use format peft, or merged for a "
            "model of transformers"
        )
    else:
        state, held = weights_of(checkpoint, source.weights)
        frozen = {} if source.base is None else read_checkpoint(source.base)["state_dict"]
        before = {**frozen, **state}
        state = merge_state({**checkpoint, "state_dict": state}, frozen)
        _check_tied(before, state, (source.ours.get("adapters") or {}).get("tied", ()))
        for kind in converters(checkpoint):
            kind.convert_export(state, checkpoint)
    expected = digests(state) if check else {}

    def write(folder: Path) -> None:
        save_tensors(folder / "model.safetensors", state, format="pt", weights=held)

    return _Export(held, write, lambda folder: check_tensors(folder, "safetensors", expected) + finding, said)


def _check_tied(
    before: Mapping[str, Tensor], merged: Mapping[str, Tensor], known: Iterable[Sequence[str]] = ()
) -> None:
    """Raise an error if adapters changed only one use of a tied weight.

    Args:
        before: Tensors before merging, which show the ties.
        merged: Tensors after merging.
        known: Further pairs of tied names.
    """
    tied: dict[object, str] = {}
    pairs = [(tied.setdefault(memory_of(tensor), name), name) for name, tensor in before.items()]
    pairs = [(first, name) for first, name in pairs if first in merged and name in merged]
    for first, name in [*pairs, *known]:
        if first not in merged or name not in merged or memory_of(merged[first]) != memory_of(merged[name]):
            raise ConfigurationError(
                f"export: an adapter changes only one use of {first!r}, which is tied to {name!r}: a module that loads "
                "format safetensors would use one weight for both. Use format peft, or merged for a model of "
                "transformers, or lit_efficient.restore"
            )


def _write_base(run: Trained, place: Path) -> None:
    state, config = base_state(run)
    config.save_pretrained(place)
    save_tensors(place / "model.safetensors", state, format="pt")


def _save_tokenizer(checkpoint: Checkpoint, folder: Path) -> list[int]:
    """Write the tokenizer of a ``LanguageModeling`` checkpoint, if it has one; return the token ids that end a turn."""
    packed = checkpoint.get("language_modeling", {}).get("tokenizer")
    if packed is None:
        return []
    save_tokenizer(packed, folder)
    return list(packed["stop"])


def _declare_class(folder: Path, base: str | None) -> None:
    if base and (folder / "tokenizer_config.json").is_file():
        declare_class(folder, base)


def _save_model(model: Any, folder: Path, shard: str) -> None:
    """Write a model as ``save_pretrained`` does, with the settings of ``generate`` as they are.

    transformers loads settings of older bases that it refuses to save.
    """
    settings = generation_json(model) if model.can_generate() else None
    if settings is not None:
        model.generation_config = type(model.generation_config)()
    with bars_on_terminals():
        model.save_pretrained(folder, max_shard_size=shard)
    if settings is not None:
        (folder / "generation_config.json").write_text(settings, "utf-8")


def merge_state(
    checkpoint: Checkpoint, base: Mapping[str, Tensor] | None = None, *, keep_int4: bool = True
) -> dict[str, Tensor]:
    """Return the weights of a checkpoint with merged adapters, under the names of the module without adapters.

    Args:
        checkpoint: The checkpoint.
        base: Frozen weights that the checkpoint does not contain. Layers that the run quantised are rounded in the
            same way, so that the result computes the trained function.
        keep_int4: Keep int4 weights without an adapter or with QA-LoRA's in int4. All other weights are dequantised.

    Raises:
        CheckpointError: If the weight of an adapted layer is missing.
    """
    where, arguments = _adapters(checkpoint)
    if arguments.get("variant") == ACTIVATED:
        raise ConfigurationError(f"export: variant {ACTIVATED} acts on a part of the tokens: use format peft")
    state = {**(base or {}), **checkpoint["state_dict"]}
    kinds: dict[str, str] = {}
    alphas: dict[str, float] = {}
    experts: dict[str, list[str]] = {}
    transposed: set[str] = set()
    if where:
        prefix = f"{where['root']}." if where["root"] else ""
        kinds = {f"{prefix}{name}": kind for name, kind in where["kinds"].items()}
        alphas = {f"{prefix}{name}": alpha for name, alpha in where.get("alphas", {}).items()}
        experts = {f"{prefix}{name}": keys for name, keys in where.get("experts", {}).items()}
        transposed = {f"{prefix}{name}" for name in where.get("transposed", ())}
    for name in kinds:
        if f"{name}.weight" not in state:
            raise CheckpointError(
                f"export: the weight '{name}.weight', which an adapter changes, is not in the checkpoint: name the "
                "base by --base"
            )
    how: Fields = checkpoint.get("lit_efficient", {}).get("quantized", {})
    for name, one in how.items():
        weight = state.get(name if "stack" in one else f"{name}.weight")
        if weight is not None and weight.is_floating_point():
            quantize_entry(state, name, one)
    grouped = arguments.get("variant") in ON_INT4
    folded = {*kinds, *scaled_names(checkpoint)}
    for name in [key.removesuffix(".weight") for key in state if key.endswith(".weight") and is_code(state[key])]:
        if f"{name}.weight_zero" not in state or not (keep_int4 or name in folded) or (name in folded and not grouped):
            one = how.get(name, {})
            dequantize_entry(state, name, transposed=one.get("transposed", False), stack=one.get("stack"))
    fold_vectors(state, checkpoint)  # after rounding, because the factors were trained on rounded weights
    for name, keys in experts.items():
        _merge_experts(state, name, keys, name in transposed, arguments)
    if where:
        _merge_rows(state, where)
    for name, kind in kinds.items():
        _merge_entry(state, name, kind, {**arguments, "alpha": alphas.get(name, arguments["alpha"])})
        if grouped and not keep_int4:
            dequantize_entry(state, name, transposed=kind == "conv1d")
    return state


def _merge_rows(state: dict[str, Tensor], where: Fields) -> None:
    """Write trained rows into the weights. Tied weights stay tied."""
    prefix = f"{where['root']}." if where["root"] else ""
    ids = where["rows"] | {name: where["rows"][first] for name, first in where["row_ties"].items()}
    merged: dict[object, Tensor] = {}
    for name, own in ids.items():
        key = f"{prefix}{name}.weight"
        rows = state.pop(f"{prefix}{name}.{ROWS}")
        if key not in state:
            raise CheckpointError(f"export: the weight '{key}' is not in the checkpoint: name the base by --base")
        weight = state[key]
        place = memory_of(weight)
        if place not in merged:
            merged[place] = weight.index_copy(0, torch.tensor(own), rows.to(weight.dtype))
        state[key] = merged[place]


def _merge_experts(state: dict[str, Tensor], name: str, keys: list[str], transposed: bool, arguments: Fields) -> None:
    scale = scale_of(arguments["variant"], arguments["alpha"], arguments["rank"])
    for key in keys:
        a = state.pop(f"{name}.lora_A_{key}")
        b = state.pop(f"{name}.lora_B_{key}")
        weight = state.get(f"{name}.{key}")
        if weight is None:
            raise CheckpointError(
                f"export: the weight '{name}.{key}' is not in the checkpoint: name the base by --base"
            )
        delta = scale * (b @ a)
        if transposed:
            delta = delta.mT
        state[f"{name}.{key}"] = weight + delta.to(weight.dtype)


def _merge_entry(state: dict[str, Tensor], name: str, kind: str, arguments: Fields) -> None:
    key = f"{name}.weight"
    own = [k for k in state if k.rpartition(".")[0] == name and k.rpartition(".")[2].startswith("lora_")]
    added = {k.rpartition(".")[2]: state.pop(k) for k in own}
    scale = scale_of(arguments["variant"], arguments["alpha"], len(added["lora_A"]))
    if arguments["variant"] == "qalora":
        delta = scale * (added["lora_B"] @ added["lora_A"])
        state[f"{key}_zero"] = shifted_zeros(state[f"{key}_scale"], state[f"{key}_zero"], delta)
        return
    if arguments["variant"] == "rounded":
        constants = (state[f"{key}_scale"], state[f"{key}_zero"])
        floats = dequantize_groups(state[key], *constants)
        state[key] = codes_on_grid(merged_matrix(floats, added, scale), *constants)
        return
    weight = state[key]
    if kind in ("conv1d", "embedding"):  # stored as [in, out]
        merged = merged_matrix(weight.T, added, scale).T
    else:
        merged = merged_matrix(weight.flatten(1), added, scale)
    state[key] = merged.reshape(weight.shape).to(weight.dtype).contiguous()


def _adapters(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    arguments = arguments_behind(checkpoint, "adapters")
    if arguments is None:
        return None, {}
    where = checkpoint["lit_efficient"]["adapters"]
    if where.get("mix") is not None:
        raise ConfigurationError(
            f"export: the checkpoint was validated with the mixture {where['mix']} of adapters, and an export would "
            "contain only the trained one: call mix_adapters(module, ['default']) before saving, or restore and "
            "merge_adapters"
        )
    return where, arguments


def _pipeline_parts(where: Fields) -> list[Fields]:
    """Return the networks with LoRA, if one of them is of diffusers.

    Raises:
        ConfigurationError: If no pipeline of diffusers can have these networks.
    """
    parts: list[Fields] = where.get("networks", [])
    if not any(part["library"] == "diffusers" for part in parts):
        return []
    places_of(parts)
    return parts


def _write_peft(folder: Path, tensors: Mapping[str, Tensor], config: Fields, parts: Sequence[Fields] = ()) -> None:
    # diffusers reads the configuration from the file's header, with the prefix of the tensors' names.
    header = json.dumps({f"base_model.model.{key}": value for key, value in config.items()})
    save_tensors(folder / "adapter_model.safetensors", tensors, format="pt", lora_adapter_metadata=header)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(parts) > 1:
        write_several(folder, tensors, config, parts)
    else:
        write_diffusers_lora(folder, tensors, config)
    if parts:
        write_kohya(folder, tensors, config, parts)
