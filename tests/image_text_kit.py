"""Tiny models of images and text with their processors, made without a download, and conversations with images."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lit_efficient.surgery import own_draws

processing = pytest.importorskip("transformers.processing_utils")
if not hasattr(processing.ProcessorMixin, "get_text_with_replacements"):
    pytest.skip("images need transformers 5.18", allow_module_level=True)

_TEXTS = ["user assistant What is in the picture? A red square. The colour is blue, and green. Two pictures?\n\n"] * 3
_PARTS = "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% else %}"
_END = "{% endif %}{% endfor %}"
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    + _PARTS
    + "<|vision_start|><|image_pad|><|vision_end|>"
    + _END
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Of SmolVLM and Idefics3.
_UTTERANCES = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}{{ ': ' }}{% endif %}"
    + _PARTS
    + "<image>"
    + _END
    + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Of Gemma 3, which trims each text.
_TURNS = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else "
    "message['role'] %}{{ '<start_of_turn>' + role + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}{% if item['type'] == 'image' %}"
    "<start_of_image>{% else %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Of LLaVA: images come before the texts.
_UPPER = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_SMALL, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 512}


def tokenizer(*special: str, **named: Any) -> Any:
    """Return a small byte-level BPE of transformers with special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    known = ["<pad>", "<eos>", *special]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=known, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(_TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", **named)


def _qwen2_5_vl() -> tuple[Any, Any, dict[str, Any], str]:
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    names = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokens = tokenizer(*names)
    ids = dict(zip(names, tokens.convert_tokens_to_ids(list(names))))
    vision = {**_SMALL, "out_hidden_size": 16, "depth": 2, "num_heads": 2, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={
            **_TEXT,
            "vocab_size": len(tokens),
            "bos_token_id": None,
            "eos_token_id": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=4 * 56 * 56)
    return config, tokens, {"image_processor": images, "class": "Qwen2_5_VLProcessor"}, _CHATML


def _idefics3(family: str = "Idefics3") -> tuple[Any, Any, dict[str, Any], str]:
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    names = ("<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", *places)
    tokens = tokenizer(*names)
    config = getattr(transformers, f"{family}Config")(
        text_config={"model_type": "llama", **_TEXT, "vocab_size": len(tokens), "pad_token_id": 0},
        vision_config={**_SMALL, "image_size": 28, "patch_size": 7},
        scale_factor=2,
        image_token_id=tokens.convert_tokens_to_ids("<image>"),
    )
    kind = {"Idefics3": Idefics3ImageProcessorPil, "SmolVLM": SmolVLMImageProcessorPil}[family]
    images = kind(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return config, tokens, {"image_processor": images, "class": f"{family}Processor", "image_seq_len": 4}, _UTTERANCES


def _gemma3() -> tuple[Any, Any, dict[str, Any], str]:
    from transformers import Gemma3Config
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
    named = {"boi_token": names[3], "eoi_token": names[4], "image_token": names[5]}
    tokens = tokenizer(*names, bos_token="<bos>", extra_special_tokens=named)
    first, last, soft = tokens.convert_tokens_to_ids(list(names[3:]))
    config = Gemma3Config(
        text_config={**_TEXT, "vocab_size": len(tokens), "sliding_window": 64},
        vision_config={**_SMALL, "image_size": 28, "patch_size": 7, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=first,
        eoi_token_index=last,
        image_token_index=soft,
    )
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return config, tokens, {"image_processor": images, "class": "Gemma3Processor", "image_seq_length": 4}, _TURNS


def _llava_next() -> tuple[Any, Any, dict[str, Any], str]:
    from transformers import LlavaNextConfig
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    tokens = tokenizer("<image>")
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = LlavaNextConfig(
        text_config={"model_type": "llama", **_TEXT, "vocab_size": len(tokens)},
        vision_config={"model_type": "clip_vision_model", **_SMALL, "image_size": 28, "patch_size": 14},
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
    )
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    images = LlavaNextImageProcessorPil(**size, image_grid_pinpoints=pinpoints)
    more = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, tokens, {"image_processor": images, "class": "LlavaNextProcessor", **more}, _UPPER


def _mllama() -> tuple[Any, Any, dict[str, Any], str]:
    """Return a model with cross-attention: an image has one token, whose id is above those of the configuration."""
    from transformers import MllamaConfig
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    tokens = tokenizer("<bos>", "<|eot|>", "<|python_tag|>", bos_token="<bos>")
    tokens.add_special_tokens({"extra_special_tokens": ["<|image|>"]})
    header = "{{ message['role'] }}\n\n"
    template = "{{ bos_token }}{% for message in messages %}" + header + _PARTS + "<|image|>" + _END
    template += "<|eot|>{% endfor %}{% if add_generation_prompt %}assistant\n\n{% endif %}"
    text = {key: value for key, value in _TEXT.items() if key != "head_dim"}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 28, "patch_size": 7, "max_num_tiles": 2, "vision_output_dim": 48}
    image = tokens.convert_tokens_to_ids("<|image|>")
    assert image == len(tokens) - 1
    ids = {"pad_token_id": 0, "bos_token_id": tokens.bos_token_id, "eos_token_id": 1}
    config = MllamaConfig(
        text_config={**text, **ids, "vocab_size": image, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        vision_config={
            **vision,
            "intermediate_layers_indices": [0, 1],
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        image_token_index=image,
    )
    images = MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=2)
    return config, tokens, {"image_processor": images, "class": "MllamaProcessor"}, template


FAMILIES: dict[str, Callable[[], tuple[Any, Any, dict[str, Any], str]]] = {
    "idefics3": _idefics3,
    "smolvlm": lambda: _idefics3("SmolVLM"),
    "qwen2_5_vl": _qwen2_5_vl,
    "gemma3": _gemma3,
    "llava_next": _llava_next,
    "mllama": _mllama,
}


def save_model(family: str, folder: Path) -> Path:
    """Save a model with random weights and its processor, as a folder of the hub holds them.

    The files of the processor are written by hand, because transformers constructs some processors with torchvision
    only.
    """
    from transformers import AutoModelForImageTextToText

    config, tokens, processor, template = FAMILIES[family]()
    with own_draws(0):
        model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():  # away from zero, so that each part has an effect
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    model.save_pretrained(folder)
    tokens.chat_template = template
    tokens.save_pretrained(folder)
    images = processor.pop("image_processor")
    kind = processor.pop("class")
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind, **processor}))
    return folder


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Return an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """Return an image as a file in memory."""
    stream = io.BytesIO()
    image.save(stream, "png")
    return stream.getvalue()


def user(*parts: str | None, image: Any = None) -> dict[str, Any]:
    """Return a turn of the user. None is an image."""
    content: list[dict[str, Any]] = []
    for part in parts:
        content.append({"type": "image"} if part is None else {"type": "text", "text": part})
    return {"role": "user", "content": content}


def answer(text: str) -> dict[str, Any]:
    """Return a turn of the assistant."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


CONVERSATIONS = [
    [user(None, "What is in the picture?"), answer("A red square."), user("The colour?"), answer("blue")],
    [user("What is"), answer("green")],
    [user(None, None, "Two pictures?"), answer("The colour is blue, and green.")],
    [user("The colour", None, "is?"), answer("red.")],
]
IMAGES = [[(0, 40, 70)], [], [(1, 50, 30), (2, 64, 64)], [(3, 33, 90)]]


def write_rows(folder: Path) -> Path:
    """Write the conversations as JSON lines, with their images as files beside them."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number, (messages, sizes) in enumerate(zip(CONVERSATIONS, IMAGES)):
        names = [f"{number}_{index}.png" for index in range(len(sizes))]
        for name, size in zip(names, sizes):
            picture(*size).save(folder / name)
        lines.append(json.dumps({"messages": messages, "images": names}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"
