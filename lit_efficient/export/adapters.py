"""Checkpoint -> what others can load: a PEFT adapter, a merged transformers model, or plain safetensors.

Everything is written into a temporary folder beside the target and moved there when it is whole.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_efficient.application import arguments_behind
from lit_efficient.errors import CheckpointError, ConfigurationError, check_choice
from lit_efficient.files.atomic_file import check_new_folder, write_folder
from lit_efficient.files.checkpoints import read
from lit_efficient.files.tensors import save_tensors
from lit_efficient.mechanisms.adapters.diffusers_lora import write_diffusers_lora
from lit_efficient.mechanisms.adapters.int4 import shifted_zeros
from lit_efficient.mechanisms.adapters.low_rank import merged_matrix, scale_of
from lit_efficient.mechanisms.adapters.peft_format import to_peft
from lit_efficient.mechanisms.adapters.peft_vectors import fold_vectors, refuse_prefix, vectors_to_peft
from lit_efficient.mechanisms.adapters.quantized import dequantize_entry, is_code, quantize_entry
from lit_efficient.mechanisms.adapters.targets import is_tied

FORMATS = ("peft", "merged", "safetensors")


def export_checkpoint(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: str,
    base: str | os.PathLike[str] | None = None,
) -> Path:
    """Turn a checkpoint into one of three formats; return the folder.

    Args:
        path: A Lightning checkpoint.
        output: A folder that does not exist yet, or is empty.
        format: ``peft``: the adapter, for ``PeftModel.from_pretrained``; of a network of diffusers also for
            ``pipeline.load_lora_weights(folder)``, and of a UNet in kohya's form. ``merged``: a folder that
            ``AutoModelForCausalLM.from_pretrained`` loads, of a checkpoint with adapters or without; one of
            ``LanguageModeling`` brings its tokenizer. ``safetensors``: ``model.safetensors`` with the names of the
            module, adapters merged; QA-LoRA's weights stay in int4.
        base: What the adapters stand beside, where the checkpoint does not hold it (``save_base=True``): the folder of
            a transformers model (``merged``), or a checkpoint or safetensors file (``safetensors``).

    Raises:
        ConfigurationError: For an argument that does not fit the checkpoint.
        CheckpointError: If a file cannot be read safely, or tensors are missing.
    """
    check_choice("export", "format", format, FORMATS)
    check_new_folder(Path(output), "export")
    checkpoint = read(path)
    if format == "peft":
        vectors = vectors_to_peft(checkpoint)
        if vectors is not None:
            return write_folder(Path(output), lambda folder: _write_peft(folder, *vectors))
        where, arguments = _adapters(checkpoint)
        if where is None:
            raise ConfigurationError(
                f"export: format peft is for checkpoints of LoRA, IA3 and PrefixTuning, and {path} holds no adapter"
            )
        tensors, config = to_peft(checkpoint["state_dict"], where, arguments)
        return write_folder(Path(output), lambda folder: _write_peft(folder, tensors, config))
    if format == "merged":
        refuse_prefix(checkpoint)
        model = _merged_transformers(checkpoint, None if base is None else str(base))
        packed = checkpoint.get("language_modeling", {}).get("tokenizer")
        return write_folder(Path(output), lambda folder: _write_transformers(folder, model, packed))
    state = merge_state(checkpoint, None if base is None else read(base)["state_dict"])
    return write_folder(Path(output), lambda folder: save_tensors(folder / "model.safetensors", state, format="pt"))


def merge_state(
    checkpoint: Mapping[str, Any], base: Mapping[str, Tensor] | None = None, *, keep_int4: bool = True
) -> dict[str, Tensor]:
    """The weights of a checkpoint with its adapters folded in, under the names that they have without adapters.

    What the run quantised is rounded in the same way where ``base`` holds it as floats: the result computes what the
    trained module does. Weights come out dequantised, except for int4 (without an adapter, or with QA-LoRA's).

    Args:
        checkpoint: A Lightning checkpoint, with or without adapters.
        base: The frozen weights, where the checkpoint does not hold them; names as in the checkpoint.
        keep_int4: Whether int4 weights stay codes, scales and zero points where they can; else floats.

    Raises:
        CheckpointError: If the weight of an adapted layer is in neither.
    """
    where, arguments = _adapters(checkpoint)
    state = fold_vectors({**(base or {}), **checkpoint["state_dict"]}, checkpoint)
    prefix = f"{where['root']}." if where and where["root"] else ""
    kinds = {f"{prefix}{name}": kind for name, kind in where["kinds"].items()} if where else {}
    for name in kinds:
        if f"{name}.weight" not in state:
            raise CheckpointError(
                f"export: the weight '{name}.weight', which an adapter changes, is not in the checkpoint: name the "
                "base it was trained with"
            )
    how: Mapping[str, Any] = checkpoint.get("lit_efficient", {}).get("quantized", {})
    for name, one in how.items():
        if f"{name}.weight" in state and state[f"{name}.weight"].is_floating_point():
            quantize_entry(state, name, one)
    grouped = arguments.get("variant") == "qalora"
    for name in [key.removesuffix(".weight") for key in state if key.endswith(".weight") and is_code(state[key])]:
        if f"{name}.weight_zero" not in state or not (keep_int4 or name in kinds) or (name in kinds and not grouped):
            dequantize_entry(state, name, transposed=how.get(name, {}).get("transposed", False))
    for name, kind in kinds.items():
        _merge_entry(state, name, kind, arguments)
        if grouped and not keep_int4:
            dequantize_entry(state, name, transposed=kind == "conv1d")
    return state


def _merge_entry(state: dict[str, Tensor], name: str, kind: str, arguments: Mapping[str, Any]) -> None:
    key = f"{name}.weight"
    own = [k for k in state if k.rpartition(".")[0] == name and k.rpartition(".")[2].startswith("lora_")]
    added = {k.rpartition(".")[2]: state.pop(k) for k in own}
    scale = scale_of(arguments["variant"], arguments["alpha"], arguments["rank"])
    if arguments["variant"] == "qalora":
        delta = scale * (added["lora_B"] @ added["lora_A"])
        state[f"{key}_zero"] = shifted_zeros(state[f"{key}_scale"], state[f"{key}_zero"], delta)
        return
    weight = state[key]
    transposed = kind in ("conv1d", "embedding")
    merged = merged_matrix(weight.T if transposed else weight.flatten(1), added, scale)
    state[key] = (merged.T if transposed else merged).reshape(weight.shape).to(weight.dtype).contiguous()


def _merged_transformers(checkpoint: Mapping[str, Any], folder: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    where, _ = _adapters(checkpoint)
    own = "network" if "language_modeling" in checkpoint else ""
    root = where["root"] if where else checkpoint.get("lit_efficient", {}).get("ia3", {}).get("root", own)
    prefix = f"{root}." if root else ""
    described = where["config"] if where else _described(checkpoint)
    if folder is None:
        model = _from_checkpoint(checkpoint, described, prefix)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    for name in where["kinds"] if where else ():
        layer = model.get_submodule(name)
        if is_tied(model, layer):  # the adapter belongs to one use of the weight
            layer.weight = nn.Parameter(layer.weight.detach().clone())
            model.config.tie_word_embeddings = False
    base = {f"{prefix}{key}": tensor for key, tensor in model.state_dict().items()}
    merged = merge_state(checkpoint, base, keep_int4=False)
    model.load_state_dict({key.removeprefix(prefix): t for key, t in merged.items() if key in base})
    return model


def _described(checkpoint: Mapping[str, Any]) -> str | None:
    """The configuration of transformers that a checkpoint of ``LanguageModeling`` holds, as JSON."""
    return checkpoint.get("language_modeling", {}).get("model", {}).get("hugging_face")


def _from_checkpoint(checkpoint: Mapping[str, Any], described: str | None, prefix: str) -> Any:
    """The model that a checkpoint with a base describes; its weights are still random."""
    if described is None:
        raise ConfigurationError("export: format merged needs base: the folder of the transformers model")
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = json.loads(described)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries))
    lost = [name for name, _ in model.named_parameters() if f"{prefix}{name}" not in checkpoint["state_dict"]]
    if lost:
        raise ConfigurationError(
            f"export: format merged needs base: the folder of the transformers model; the checkpoint lacks {len(lost)} "
            f"of its weights, first {lost[0]!r} (LoRA(save_base=True) keeps them)"
        )
    return model


def _adapters(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    arguments = arguments_behind(checkpoint, "adapters")
    return (None, {}) if arguments is None else (checkpoint["lit_efficient"]["adapters"], arguments)


def _write_peft(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    # diffusers reads the configuration from the header, where its keys have the prefix of the tensors'.
    header = json.dumps({f"base_model.model.{key}": value for key, value in config.items()})
    save_tensors(folder / "adapter_model.safetensors", tensors, format="pt", lora_adapter_metadata=header)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_diffusers_lora(folder, tensors, config)


def _write_transformers(folder: Path, model: Any, packed: Mapping[str, Any] | None) -> None:
    from lit_efficient.data.text.tokenizer_state import save_tokenizer

    if packed is not None:
        save_tokenizer(packed, folder)
        if packed["stop"]:  # a chat ends where a turn does, which the model's configuration does not know
            model.generation_config.eos_token_id = list(packed["stop"])
    model.save_pretrained(folder)
