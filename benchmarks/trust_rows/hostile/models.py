"""Folders of models and tokenizers of somebody else's."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.trust_rows.hostile.cases import (
    PAYLOADS,
    Act,
    cases_of,
    dotted,
    mark_unread,
    model_folder,
    plant,
    saved,
    try_each,
)

_MAP = dict.fromkeys(("AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"), "modeling_evil.Model")
_MODELS: dict[str, dict[str, Any]] = {
    "auto-map": {"auto_map": {**_MAP, "AutoConfig": "configuration_evil.Model"}},
    "auto-map-unknown": {"model_type": "evil", "auto_map": {**_MAP, "AutoConfig": "configuration_evil.Model"}},
    "auto-map-trust": {"trust_remote_code": True, "auto_map": {**_MAP, "AutoConfig": "configuration_evil.Model"}},
    "auto-map-repository": {"auto_map": {"AutoConfig": "someone/evil--configuration_evil.Model"}},
    "attention": {"_attn_implementation": "kernels-community/evil", "attn_implementation": "someone/evil"},
    "attention-internal": {
        "_attn_implementation_internal": "someone/evil:planted",
        "_attn_implementation": "planted.f",
    },
    "quantizer": {
        "quantization_config": {"quant_method": "evil", "modules": "planted.Model", "linear_class": "planted.Model"}
    },
    "architectures": {"architectures": ["planted.Model", "__import__('os')"]},
    "activation": {"hidden_act": "__import__('os').system('touch CANARY')"},
    "activation-path": {"hidden_act": "planted.f"},
    "torch-dtype": {"torch_dtype": "planted", "dtype": "__import__"},
    "sizes": {"vocab_size": 1 << 40},
    "layers": {"num_hidden_layers": 1 << 30},
    "custom-pipelines": {"custom_pipelines": {"text-generation": {"impl": "planted.Model"}}},
    "base": {"_name_or_path": "../outside/model", "base_model_name_or_path": "../outside/model"},
    "timm": {"model_type": "timm_wrapper", "architecture": "planted", "model_args": {"pretrained": True}},
    "backbone": {"model_type": "maskformer", "backbone": "someone/evil", "use_timm_backbone": True},
    "lightglue": {
        "model_type": "lightglue",
        "keypoint_detector_config": {"model_type": "evil", **{"auto_map": _MAP}},
        "trust_remote_code": True,
    },
}


@cases_of("model", _MODELS)
def _model(name: str) -> Act:
    folder = model_folder(**_MODELS[name])
    sys.stdin = open(os.devnull)  # noqa: SIM115

    def act() -> None:
        lm = importlib.import_module("lit_efficient.models.libraries.causal_lm")
        text = importlib.import_module("lit_efficient.models.libraries.text_encoder")
        teacher = dotted("lit_efficient.models.libraries.teachers.find_teacher")
        readers: list[Callable[[], object]] = [
            lambda: lm.build(lm.CausalLMConfig(folder)),
            lambda: teacher(folder, [""], who="FeatureMatching"),
        ]
        if name not in ("sizes", "layers"):
            readers += [
                lambda: lm.build(lm.CausalLMConfig(folder, random_weights=True)),
                lambda: text.TextEncoder.load(text.TextEncoderConfig(folder)),
                lambda: teacher(f"{folder}/config.json", [""], who="FeatureMatching"),
                lambda: dotted("lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer")(folder),
            ]
        try_each(readers)

    return act


@cases_of(
    "weights", ("bin", "bin-index", "index-climbing", "index-absolute", "adapter", "adapter-mapping", "diffusers")
)
def _weights(name: str) -> Act:
    folder = Path(model_folder())
    if name.startswith(("bin", "index")):
        (folder / "model.safetensors").unlink()
    evil = PAYLOADS["exec"]()
    if name == "bin":
        saved(evil, str(folder / "pytorch_model.bin"))
    elif name == "bin-index":
        saved(evil, str(folder / "part.bin"))
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"x": "part.bin"}})
        )
    elif name.startswith("index"):
        place = (
            "../../outside/secret.safetensors"
            if name.endswith("climbing")
            else os.path.abspath("../outside/secret.safetensors")
        )
        from safetensors.torch import save_file

        save_file({"x": dotted("torch.zeros")(1)}, "../outside/secret.safetensors")
        mark_unread(Path("../outside/secret.safetensors"))
        text = json.dumps({"metadata": {"total_size": 4}, "weight_map": {"x": place}})
        (folder / "model.safetensors.index.json").write_text(text)
    elif name.startswith("adapter"):
        mapping = {"base_model_class": "Model", "parent_library": "planted"}
        fields = {"peft_type": "LORA", "auto_mapping": mapping, "base_model_name_or_path": "model"}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        if name == "adapter":
            saved(evil, str(folder / "adapter_model.bin"))
    else:
        (folder / "model_index.json").write_text('{"_class_name": ["pipeline", "Model"], "vae": ["planted", "Model"]}')
        plant("model/pipeline")
        (folder / "config.json").write_text(
            '{"_class_name": "planted.Model", "auto_map": {"AutoModel": "planted.Model"}}'
        )
        saved(evil, str(folder / "diffusion_pytorch_model.bin"))

    def act() -> None:
        lm = importlib.import_module("lit_efficient.models.libraries.causal_lm")
        text = importlib.import_module("lit_efficient.models.libraries.text_encoder")
        images = importlib.import_module("lit_efficient.models.libraries.diffusers_model")
        try_each(
            [
                lambda: lm.build(lm.CausalLMConfig(str(folder))),
                lambda: text.TextEncoder.load(text.TextEncoderConfig(str(folder))),
                lambda: dotted("lit_efficient.models.libraries.teachers.find_teacher")(str(folder), [""], who="x"),
                lambda: images.build(images.DiffusersModelConfig(str(folder))),
                lambda: dotted("lit_efficient.models.libraries.autoencoders.build_autoencoder")(str(folder)),
            ]
        )

    return act


_TEMPLATES = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "attr-filter": "{{ ('x' | attr('__class__') | attr('__mro__')) }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format-map": "{{ '{a.__class__.__mro__}'.format_map({'a': messages}) }}",
    "namespace": "{{ namespace.__init__.__globals__ }}{{ raise_exception.__globals__ }}",
    "strftime": "{{ strftime_now.__globals__['datetime'].__class__ }}{{ tojson.__globals__ }}",
    "include": "{% include '../outside/secret.txt' %}",
    "import": "{% import '../outside/secret.txt' as x %}{{ x }}",
    "extends": "{% extends '../outside/secret.txt' %}",
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat-later": "{% set n = messages | length %}{{ 'a' * (n * 10000000000) }}",
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "loops-while-said": "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "power-later": "{% set n = messages | length %}{{ (9 + n) ** 9 ** 9 }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "recursion": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "branching": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "width": "{{ 'a'.ljust(10000000000) }}{{ '%10000000000d' % 1 }}",
    "format-width": "{{ '{:>10000000000}'.format(1) }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "mutation": "{% set x = messages.append(messages) %}{{ messages | tojson }}",
    "deep": "{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}",
}


@cases_of("template", _TEMPLATES)
def _template(name: str) -> Act:
    folder = Path(model_folder())
    (folder / "chat_template.jinja").write_text(_TEMPLATES[name])

    def act() -> None:
        tokenizer = dotted("lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer")(str(folder))
        document = dotted("lit_efficient.data.text.chat_formats.Document")
        chat = importlib.import_module("lit_efficient.data.text.turn_spans")
        spans = chat.TurnSpans(tokenizer, "assistant", [])
        chats = document((chat.ASKED, chat.ANSWERED))
        as_chat = dotted("lit_efficient.tasks.text_generation.as_chat")
        try_each([lambda: as_chat(tokenizer, "x"), lambda: spans.of(chats)])

    return act


@cases_of("tokenizer", ("class", "auto-map", "vocab-file", "python-file", "added-tokens", "regex", "json", "nested"))
def _tokenizer(name: str) -> Act:
    folder = Path(model_folder())
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    fields |= {
        "class": {"tokenizer_class": "planted.Model"},
        "auto-map": {"auto_map": {"AutoTokenizer": ["tokenization_evil.Model", "tokenization_evil.Model"]}},
        "vocab-file": {"vocab_file": "../outside/secret.txt", "tokenizer_file": "../outside/secret.json"},
        "python-file": {"custom_tokenizer": "tokenization_evil.py"},
        "added-tokens": {"added_tokens_decoder": {"1099511627776": {"content": "x"}}},
    }.get(name, {})
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    if name == "regex":
        backend = json.loads((folder / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": "(a*)*(a*)*b"}, "behavior": "Isolated", "invert": False}
        (folder / "tokenizer.json").write_text(json.dumps({**backend, "pre_tokenizer": split}))
    elif name in ("json", "nested"):
        (folder / "tokenizer.json").write_text("[" * 200_000 if name == "nested" else '{"version": "1.0", "model": {}}')

    def act() -> None:
        load = dotted("lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer")
        try_each(
            [lambda: load(str(folder)).encode("a" * 64), lambda: load(str(folder / "tokenizer.json")).encode("a" * 64)]
        )

    return act
