"""Check of an export: its target library loads the folder in a new process, and the result is compared.

    difference = rms(theirs - ours) / rms(ours),    for the outputs of a fixed batch, in the weights' number format

A folder without a model that can run is compared tensor by tensor, by digests. The new process is ``python -m
lit_efficient.export.check FOLDER REQUEST``, where REQUEST is a folder that :func:`check_outputs` fills.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.data.text.image_texts import ImageTexts
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.checkpoints import Fields
from lit_efficient.files.hidden_names import hidden_beside
from lit_efficient.files.tensors import bytes_of, load_tensors, save_tensors
from lit_efficient.internals.hugging_face import image_token_ids

# Above the effect of another order of summation, below the effect of one wrong weight. int8 layers round inputs, too.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.int8: 5e-2}


_SAME = 1e-4  # of updates that are computed from the same factors


@dataclass(frozen=True)
class Reference:
    """Outputs of a trained network for a fixed batch.

    Args:
        batch: Inputs of the network by name.
        outputs: Its first output, in float32.
        tolerance: Largest :func:`difference` that the number formats of the network explain.
    """

    batch: dict[str, Tensor]
    outputs: Tensor
    tolerance: float


def reference_of(network: Any, checkpoint: Fields) -> Reference | None:
    """Return the reference of a network; None if its inputs are not known.

    Args:
        network: The trained network.
        checkpoint: Its checkpoint, which may hold a processor. The batch then has an image.
    """
    packed = checkpoint.get("language_modeling", {}).get("tokenizer") or {}
    batch = ImageTexts(packed).example() if "processor" in packed else batch_for(network)
    if batch is None:
        return None
    tolerance = max(TOLERANCES.get(tensor.dtype, 0.0) for tensor in network.parameters())
    return Reference(batch, outputs_of(network, batch), tolerance)


def batch_for(network: Any) -> dict[str, Tensor] | None:
    """Return a small fixed batch for our GPT or a model of transformers; None if its inputs are not known."""
    draw = torch.Generator().manual_seed(0)
    config = network.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = getattr(network, "main_input_name", "input_ids")
    if name == "input_ids" and getattr(text, "vocab_size", None):
        longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_length", None) or 32
        ids = torch.randint(0, text.vocab_size, (2, min(32, longest)), generator=draw, device="cpu")
        if text is not config:  # a model of images and text refuses tokens of images without an image
            ids[torch.isin(ids, torch.tensor(sorted(image_token_ids(config))))] = 0
        if getattr(config, "is_encoder_decoder", False):
            return {"input_ids": ids, "decoder_input_ids": ids}
        return {"input_ids": ids}
    if name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        shape = (2, getattr(config, "num_channels", 3), *[config.image_size] * 2)
        return {name: torch.rand(shape, generator=draw, device="cpu")}
    return None


@torch.no_grad()
def outputs_of(network: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a network's first output for a batch, in float32."""
    kind = next(p.dtype for p in network.parameters() if p.is_floating_point())
    given = {name: t.to(kind) if t.is_floating_point() else t for name, t in batch.items()}
    output = network(**given)
    return (output if isinstance(output, Tensor) else output[0]).float()


def difference(ours: Tensor, theirs: Tensor, tolerance: float) -> float:
    """Return the root mean square of the difference divided by that of ``ours``.

    With a coarse tolerance the result is the median over tokens, because rounding may route some of them to other
    experts. It is infinite if the shapes differ or ``theirs`` is not finite.
    """
    if ours.shape != theirs.shape or not theirs.isfinite().all():
        return float("inf")
    dims = (-1,) if tolerance > 1e-3 else tuple(range(ours.ndim))
    size = ours.square().mean(dims).sqrt().clamp_min(1e-30)
    return float(((theirs - ours).square().mean(dims).sqrt() / size).median())


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of each tensor's bytes, number format and shape. Empty tensors are left out."""
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.numel():  # writing refuses other objects
            kind = repr(tensor.dtype).encode()[-16:]
            digest = hashlib.blake2b(bytes_of(tensor).data, person=kind).hexdigest()
            found[name] = f"{digest}{tuple(tensor.shape)}"
    return found


def check_tensors(folder: Path, library: str, expected: Mapping[str, str], part: str = "") -> str:
    """Compare the tensors of a folder with digests.

    Args:
        folder: The export.
        library: Library that loads the folder: safetensors or diffusers.
        expected: Digests by name.
        part: Component of the pipeline in the folder, for diffusers. "" if the folder is that of a model.

    Returns:
        The result of the check, as words for people.

    Raises:
        CheckpointError: If the library does not load the folder, or tensors are missing or differ.
    """
    found = _ask(folder, library, {"part": part}, lambda _: None)
    if found is None:
        return f"not checked: {library} is not installed"
    wrong = [name for name, digest in expected.items() if found["digests"].get(name) != digest]
    if wrong:
        raise CheckpointError(
            f"export: {library} loads other weights than were written: {_ending(wrong, len(expected), 'tensors')}"
        )
    return f"{library} loads the {len(expected)} tensors that were written"


def check_outputs(
    folder: Path,
    library: str,
    reference: Reference,
    request: Fields,
    base: Callable[[Path], object] | None = None,
) -> str:
    """Compare the outputs of an exported model with the outputs of the trained one.

    Args:
        folder: The export.
        library: Library that loads the folder: transformers, peft or sentence_transformers.
        reference: Inputs and outputs of the trained model.
        request: ``class``: the model's class. For peft also ``base``, the folder of the base model, ``dtype``,
            ``rows``, the number of rows of its embeddings, and for a classifier ``num_labels`` and ``pad``, the id of
            its padding.
        base: Function that writes the base model into a folder, if ``request["base"]`` is not the trained one.

    Returns:
        The result of the check, as words for people.

    Raises:
        CheckpointError: If the library does not load the folder or computes other outputs.
    """
    tolerance = reference.tolerance

    def fill(place: Path) -> None:
        save_tensors(place / "batch.safetensors", reference.batch)
        save_tensors(place / "ours.safetensors", {"ours": reference.outputs})
        if base is not None:
            base(place / "base")

    found = _ask(folder, library, {"tolerance": tolerance, **request}, fill)
    if found is None:
        return f"not checked: {library} is not installed"
    finding = f"outputs of {library} differ by {found['difference']:.1e} (tolerance {tolerance:.0e})"
    if not found["difference"] <= tolerance:
        raise CheckpointError(f"export: the exported model is not the trained one: {finding}{_way_out(library)}")
    return finding


def check_gguf(folder: Path, name: str, reference: Reference, config: Any, samples: Mapping[str, list[int]]) -> str:
    """Compare a GGUF file, as transformers reads it, with a model whose weights are rounded as in the file.

    Args:
        folder: The export.
        name: The file in it.
        reference: Inputs and outputs of the rounded model.
        config: Configuration of the model.
        samples: Token ids by text.

    Returns:
        The result of the check, as words for people.

    Raises:
        CheckpointError: If transformers does not load the file, computes other outputs or gives other ids.
    """

    def fill(place: Path) -> None:
        save_tensors(place / "batch.safetensors", reference.batch)
        save_tensors(place / "ours.safetensors", {"ours": reference.outputs})
        config.save_pretrained(place)
        (place / "samples.json").write_text(json.dumps(dict(samples)))

    found = _ask(folder, "transformers", {"gguf": name, "tolerance": reference.tolerance}, fill)
    assert found is not None  # the model is one of transformers
    if "unread" in found:
        return f"not checked: transformers does not read such files ({found['unread']})"
    if found["texts"]:
        raise CheckpointError(f"export: the tokenizer in {name} gives other ids, first for {found['texts'][0]!r}")
    finding = f"outputs of transformers differ by {found['difference']:.1e} (tolerance {reference.tolerance:.0e})"
    if not found["difference"] <= reference.tolerance:
        raise CheckpointError(f"export: the file holds another model than was trained: {finding}")
    if found["ignored"]:
        finding += f", which ignores {', '.join(found['ignored'])} of the file and needs them in its config"
    return f"{finding}, token ids of {len(samples)} texts are equal"


def check_lora(folder: Path, parts: Sequence[Fields], expected: Mapping[str, Tensor]) -> str:
    """Compare an exported adapter, as diffusers loads it, with the updates of the trained one.

    Args:
        folder: The export.
        parts: Networks with adapters, as of `peft_folder.placement`.
        expected: Result of `diffusers_lora_check.updates_of`.

    Returns:
        The result of the check, as words for people.

    Raises:
        CheckpointError: If diffusers does not load the folder, or layers are missing or differ.
    """
    ours = lambda place: save_tensors(place / "ours.safetensors", expected, format="pt")  # noqa: E731
    found = _ask(folder, "diffusers", {"lora": list(parts)}, ours)
    if found is None:
        return "not checked: diffusers is not installed"
    if found["wrong"] or not found["layers"]:
        raise CheckpointError(
            f"export: {found['loader']} loads other adapters than were trained: "
            f"{_ending(found['wrong'], len(expected), 'updates')}"
        )
    if found["wrong_kohya"]:
        raise CheckpointError(
            "export: kohya.safetensors has other adapters than were trained: "
            f"{_ending(found['wrong_kohya'], len(expected), 'updates')}"
        )
    finding = f"{found['loader']} loads the {found['layers']} adapted layers that were trained"
    return f"{finding}, and kohya.safetensors has the same updates" if found["kohya"] else finding


def check_lycoris(folder: Path, part: Fields, tensors: Mapping[str, Tensor]) -> str:
    """Compare LyCORIS's file and peft's files of a folder with each other, and peft's with the trained adapter.

    Args:
        folder: The export.
        part: The network, as of `diffusers_lora.skeleton`.
        tensors: Tensors of the trained adapter by the names of peft's file.

    Returns:
        The result of the check, as words for people.

    Raises:
        CheckpointError: If peft does not load the folder, or tensors or changes of weights differ.
    """
    found = _ask(folder, "peft", {"lycoris": part}, lambda _: None)
    assert found is not None  # the run had adapters of peft
    expected = digests(tensors)
    kept = found["digests"]
    wrong = sorted(name for name in expected.keys() | kept.keys() if expected.get(name) != kept.get(name))
    if wrong:
        raise CheckpointError(
            "export: peft's file has other adapters than were trained: "
            f"{_ending(wrong, len(expected.keys() | kept.keys()), 'tensors')}"
        )
    if found["wrong"] or not found["layers"]:
        raise CheckpointError(
            "export: lycoris.safetensors changes other weights than the trained adapter: "
            f"{_ending(found['wrong'], found['layers'], 'layers')}"
        )
    finding = f"peft loads the {found['layers']} adapted layers that were trained"
    return f"{finding}, and lycoris.safetensors has the same changes"


def _ending(wrong: Sequence[str], total: int, what: str) -> str:
    if not wrong:  # nothing was loaded and nothing was expected
        return f"no {what} were found"
    return f"{len(wrong)} of {total} {what} differ or are missing, first {wrong[0]!r}"


def _ask(folder: Path, library: str, request: Fields, fill: Callable[[Path], object]) -> Any:
    """Return the answer of a new process about a folder; None if the library is not installed."""
    if importlib.util.find_spec(library) is None:
        return None
    with hidden_beside(folder) as place:
        place.mkdir()
        fill(place)
        (place / "request.json").write_text(json.dumps({"library": library, **request}))
        # On the CPU, like the export itself, and without downloads.
        settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
        settings |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "lit_efficient.export.check", str(folder), str(place)]
        done = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, env={**os.environ, **settings}, check=False
        )
        answer = place / "answer.json"
        if done.returncode or not answer.is_file():
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CheckpointError(
                f"export: {library} does not load the exported folder: {reason[:300]}{_way_out(library)}"
            )
        return json.loads(answer.read_text())


def _way_out(library: str) -> str:
    if library == "peft":
        return ". The formats merged and safetensors do not depend on peft"
    return ""


def _answer(folder: Path, place: Path) -> dict[str, Any]:
    request = json.loads((place / "request.json").read_text())
    if request["library"] == "safetensors":
        return {"digests": digests(load_tensors(folder / "model.safetensors"))}
    if "lora" in request:
        from lit_efficient.export.diffusers_lora_check import kohya_updates, loaded_updates

        expected = load_tensors(place / "ours.safetensors")
        found, loader = loaded_updates(folder, request["lora"])
        wrong = sorted(found.keys() ^ expected.keys())
        for key in found.keys() & expected.keys():
            if not difference(expected[key], found[key], _SAME) <= _SAME:
                wrong.append(key)
        layers = sum(not key.endswith(".magnitude") for key in found)
        kohya = kohya_updates(folder, request["lora"])
        wrong_kohya = []
        for key in kohya.keys() | (expected.keys() if kohya else set()):
            wanted = expected.get(key)
            if wanted is None:  # a part of a layer that the authors stack
                fits = key in kohya and not kohya[key].any()
            else:
                fits = key in kohya and difference(wanted, kohya[key], _SAME) <= _SAME
            if not fits:
                wrong_kohya.append(key)
        answer = {"wrong": wrong, "layers": layers, "loader": loader}
        return answer | {"kohya": len(kohya), "wrong_kohya": sorted(wrong_kohya)}
    if "lycoris" in request:
        from lit_efficient.export.diffusers_lora_check import lycoris_changes

        layers = 0
        wrong = []
        for name, wanted, change in lycoris_changes(folder, request["lycoris"]):
            layers += wanted is not None
            if wanted is None or change is None or not difference(wanted, change, _SAME) <= _SAME:
                wrong.append(name)
        kept = digests(load_tensors(folder / "adapter_model.safetensors"))
        return {"layers": layers, "wrong": wrong, "digests": kept}
    if request["library"] == "diffusers":
        import diffusers

        if not request["part"]:
            name = json.loads((folder / "config.json").read_text())["_class_name"]
            model = getattr(diffusers, name).from_pretrained(folder, local_files_only=True)
            return {"digests": digests(model.state_dict())}
        index = json.loads((folder / "model_index.json").read_text())
        absent = {name: None for name, value in index.items() if value == [None, None]}
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **absent)
        return {"digests": digests(getattr(pipeline, request["part"]).state_dict())}
    if "gguf" in request:
        return _answer_gguf(folder, place, request)
    ours = load_tensors(place / "ours.safetensors")["ours"]
    batch = load_tensors(place / "batch.safetensors")
    if request["library"] == "sentence_transformers":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True).eval()
        with torch.no_grad():
            theirs = model(batch)["sentence_embedding"].float()
        return {"difference": difference(ours, theirs, request["tolerance"])}
    import transformers

    kind = getattr(transformers, request["class"])
    if request["library"] == "transformers":
        model = kind.from_pretrained(folder, dtype="auto", local_files_only=True)
    else:
        from peft import PeftModel

        from lit_efficient.models.libraries.gguf_file import read_model

        base = place / "base"
        base = base if base.is_dir() else request["base"]
        fields = {"num_labels": request["num_labels"]} if "num_labels" in request else {}
        base = read_model(kind, str(base), dtype=request["dtype"], **fields)
        rows = request["rows"]
        if rows is not None and rows > base.get_input_embeddings().weight.shape[0]:
            base.resize_token_embeddings(rows)  # as AutoPeftModel does for a tokenizer with more tokens than rows
        if "pad" in request:
            base.config.get_text_config().pad_token_id = request["pad"]
        model = PeftModel.from_pretrained(base, folder)
    theirs = outputs_of(model.eval(), batch)
    return {"difference": difference(ours, theirs, request["tolerance"])}


_IGNORED = [
    "rope_parameters",
    "head_dim",
    "attention_bias",
    "mlp_bias",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "moe_intermediate_size",
]
"""Fields of a configuration that transformers does not read from every GGUF file that has them."""


def _answer_gguf(folder: Path, place: Path, request: Fields) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from lit_efficient.models.libraries.gguf_file import read_tokenizer

    name = request["gguf"]
    samples = json.loads((place / "samples.json").read_text())
    try:
        config = AutoConfig.from_pretrained(folder, gguf_file=name)
    except ValueError as error:
        return {"unread": str(error).rstrip(".")}
    tokenizer = read_tokenizer(str(folder / name))
    texts = [text for text, ids in samples.items() if tokenizer(text)["input_ids"] != ids]
    trained = AutoConfig.from_pretrained(place)
    ignored: list[str] = []
    for field in _IGNORED:
        value = getattr(trained, field, None)
        if value is not None and getattr(config, field, None) != value:
            ignored.append(field)
            setattr(config, field, value)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, config=config, dtype=torch.float32)
    ours = load_tensors(place / "ours.safetensors")["ours"]
    off = difference(ours, outputs_of(model.eval(), load_tensors(place / "batch.safetensors")), request["tolerance"])
    return {"difference": off, "texts": texts, "ignored": ignored}


if __name__ == "__main__":
    (Path(sys.argv[2]) / "answer.json").write_text(json.dumps(_answer(Path(sys.argv[1]), Path(sys.argv[2]))))


def refuse_own_layers(network: nn.Module) -> None:
    """Raise ConfigurationError if the network has a layer that other libraries' versions of the network lack."""
    for name, part in network.named_modules():
        if hasattr(part, "only_here"):
            raise ConfigurationError(
                f"export: {name} ({type(part).__name__}) is part of the trained network, and this format cannot "
                "hold it: use --format safetensors"
            )
