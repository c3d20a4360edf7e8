"""Small tokenizers with the chat templates, control tokens and settings of well-known models.

Each has the class that transformers uses for the model, so that its settings are those of the class. Templates whose
licence does not allow a copy are re-created here with the same structure.
"""

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_efficient.data.text.chat_tokenizer import train_chat_tokenizer

TEXTS = [
    "What is the weather in Paris today? It is sunny, of course. system user assistant tool\n",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} <think> done </think>\n',
]
PUBLISHED = Path(__file__).parent / "templates"

LLAMA_3_1 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system }}"
    "{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{%- endfor %}{%- endif %}"
    "{{- '<|eot_id|>' }}{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}{%- if not message.tool_calls|length == 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set tool_call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}"
    "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}{{- tool_call.arguments | tojson }}"
    "{{- '}' }}{{- '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content }}{{- '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- if tools is not none %}{{- '[AVAILABLE_TOOLS] ' + tools|tojson + '[/AVAILABLE_TOOLS]' }}"
    "{%- endif %}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{- '[INST] ' + message['content'] + '[/INST]' }}"
    "{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}"
    "{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}"
    "{%- if not tool_call.id is defined or tool_call.id|length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{- ', \"id\": \"' + tool_call.id + '\"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}"
    "{%- endif %}{%- endfor %}{%- elif message['role'] == 'assistant' %}"
    "{{- ' ' + message['content']|trim + eos_token }}{%- elif message['role'] == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + message.content|string + '}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if message['role'] == 'assistant' %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n' + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
_TURN = "<|START_OF_TURN_TOKEN|>"
COMMAND_R = (
    "{{ bos_token }}{% if tools %}{{ '"
    + _TURN
    + "<|SYSTEM_TOKEN|>' + tools|tojson + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '" + _TURN + "<|USER_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message.tool_calls %}{{ '" + _TURN + "<|CHATBOT_TOKEN|>' + message.content + 'Action:```json\n[' }}"
    '{% for call in message.tool_calls %}{{ \'{"tool_name": "\' + call.function.name + \'", "parameters": \' }}'
    "{{ call.function.arguments|tojson }}{{ '}' }}{% endfor %}{{ ']```<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message.role == 'assistant' %}"
    "{{ '" + _TURN + "<|CHATBOT_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}{% else %}"
    "{{ '" + _TURN + "<|SYSTEM_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + _TURN + "<|CHATBOT_TOKEN|>' }}{% endif %}"
)
GRANITE = (
    "{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{%- for tool in tools %}"
    "{{- tool | tojson(indent=4) }}{%- endfor %}{{- '<|end_of_text|>\n' }}{%- endif %}{%- for message in messages %}"
    "{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + (message['content'] or '') }}"
    "{%- if message.tool_calls %}{{- '<|tool_call|>[' }}{%- for call in message.tool_calls %}"
    "{%- if call.function.arguments is string %}{{- '{\"arguments\": ' + call.function.arguments }}{%- else %}"
    "{{- '{\"arguments\": ' + call.function.arguments|tojson }}{%- endif %}"
    "{{- ', \"name\": \"' + call.function.name + '\"}' }}{%- endfor %}{{- ']' }}{%- endif %}"
    "{{- '<|end_of_text|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
OLMO_2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}{% else %}"
    "{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """Tokenizer of a model."""

    kind: str  # class in transformers
    template: str  # chat template, or the name of a published one
    tokens: dict[str, str]  # special tokens by their names in the class
    begins: bool = False  # the tokenizer writes bos_token before each text
    arguments: str | None = None  # form in which the template reads a call: "dict", "str", or None without calls
    settings: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(
        "Qwen2Tokenizer",
        "qwen2_5",
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        arguments="dict",
        settings={"padding_side": "left", "model_max_length": 131072},
    ),
    "qwen3": Family(
        "Qwen2Tokenizer",
        "qwen3",
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        arguments="dict",
        settings={"model_max_length": 40960, "truncation_side": "left"},
    ),
    "llama-3.1": Family(
        "PreTrainedTokenizerFast",
        LLAMA_3_1,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        begins=True,
        arguments="dict",
        settings={"model_max_length": 131072, "clean_up_tokenization_spaces": False},
    ),
    "mistral": Family(
        "LlamaTokenizer",
        MISTRAL,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        begins=True,
        arguments="dict",
        settings={"model_max_length": 32768, "padding_side": "left"},
    ),
    "gemma": Family(
        "GemmaTokenizer",
        GEMMA,
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        begins=True,
        settings={"padding_side": "left"},
    ),
    "phi-3": Family(
        "LlamaTokenizer",
        "phi3",
        {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": "<unk>"},
        settings={"model_max_length": 4096, "padding_side": "left"},
    ),
    "deepseek-v3": Family(
        "PreTrainedTokenizerFast",
        "deepseekv3",
        {
            "bos_token": "<｜begin▁of▁sentence｜>",
            "eos_token": "<｜end▁of▁sentence｜>",
            "pad_token": "<｜end▁of▁sentence｜>",
        },
        begins=True,
        arguments="str",
        settings={"model_max_length": 16384},
    ),
    "glm-4.5": Family(
        "PreTrainedTokenizerFast",
        "glm4moe",
        {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        arguments="dict",
        settings={"padding_side": "left"},
    ),
    "gpt-oss": Family(
        "PreTrainedTokenizerFast",
        "gptoss",
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        arguments="dict",
    ),
    "smollm2": Family(
        "GPT2Tokenizer",
        SMOLLM2,
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
        },
        settings={"model_max_length": 8192},
    ),
    "zephyr": Family(
        "LlamaTokenizer",
        ZEPHYR,
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"},
        begins=True,
        settings={"truncation_side": "left", "model_max_length": 2048},
    ),
    "command-r": Family(
        "CohereTokenizer",
        COMMAND_R,
        {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"},
        begins=True,
        arguments="dict",
    ),
    "granite": Family(
        "GPT2Tokenizer",
        GRANITE,
        {"bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"},
        arguments="dict",
        settings={"padding_side": "left", "model_max_length": 9223372036854775807},
    ),
    "olmo-2": Family(
        "GPTNeoXTokenizer",
        OLMO_2,
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
    ),
}


def template_of(name: str) -> str:
    """Return the chat template of a family."""
    given = FAMILIES[name].template
    return given if "{" in given else (PUBLISHED / f"{given}.jinja").read_text("utf-8")


def make(name: str) -> Any:
    """Return a small tokenizer of a family."""
    import transformers
    from tokenizers import AddedToken, processors

    family = FAMILIES[name]
    template = template_of(name)
    named = set(family.tokens.values())
    control = sorted(set(re.findall(r"<[|｜][\w▁]+[|｜]>|\[/?[A-Z_]{4,}\]|<(?:start|end)_of_turn>", template)) - named)
    pieces = family.kind in ("LlamaTokenizer", "GemmaTokenizer")
    model = _pieces() if pieces else _byte_level()
    options = {**family.tokens, **family.settings, "extra_special_tokens": control}
    cls = getattr(transformers, family.kind)
    if family.kind == "PreTrainedTokenizerFast":
        made = cls(tokenizer_object=train_chat_tokenizer(TEXTS, 300).backend_tokenizer, **options)
    else:
        vocab = dict(model["vocab"])
        for token in (*family.tokens.values(), "<mask>") if pieces else ():
            vocab.setdefault(token, len(vocab))
        made = cls(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]], **options)
    made.add_tokens([AddedToken("<tool>", special=False), AddedToken("<think>", special=False)])
    if family.begins:
        bos = family.tokens["bos_token"]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, made.convert_tokens_to_ids(bos))]
        )
    made.chat_template = template
    return made


@functools.cache
def _byte_level() -> dict[str, Any]:
    return dict(json.loads(train_chat_tokenizer(TEXTS, 300).backend_tokenizer.to_str())["model"])


@functools.cache
def _pieces() -> dict[str, Any]:
    """Return a vocabulary of pieces as SentencePiece writes them, with the bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return dict(json.loads(tokenizer.to_str())["model"])
