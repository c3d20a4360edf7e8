"""Chat templates as families of models have them, each beside a second description of the same: its parts, by role.

The templates are written anew, with the families' marks and quirks; the parts say what stands around a message, and so
which characters the assistant writes. What a template renders is compared with them before anything else is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Messages = Sequence[dict[str, str]]
Parts = list[tuple[str, bool]]
"""Text, and whether the assistant writes it."""


@dataclass(frozen=True)
class Family:
    """A chat format.

    Args:
        template: In Jinja.
        heads: By role, what stands before a message.
        ends: By role, what ends a message.
        after: By role, what follows that.
        begin: What begins a conversation.
        control: Tokens that stand for no text.
        system: ``turn``: of its own; ``user``: written into the first message of the user; ``""``: it knows none.
        strips: Whether the white space around messages is left out.
        write: Instead of the parts by role.
    """

    template: str
    heads: dict[str, str]
    ends: dict[str, str]
    control: tuple[str, ...]
    after: dict[str, str] = field(default_factory=dict)
    begin: str = ""
    system: str = "turn"
    strips: bool = False
    write: Callable[[Messages], Parts] | None = None

    def parts(self, messages: Messages) -> Parts:
        """The text of a conversation."""
        if self.write is not None:
            return self.write(messages)
        found: Parts = [(self.begin, False)]
        for message in messages:
            role = message["role"]
            content = message["content"]
            content = content.strip() if self.strips else content
            said = role == "assistant"
            found += [(self.heads[role], False), (content + self.ends[role], said), (self.after.get(role, ""), False)]
        return found


def _same(head: str, end: str) -> tuple[dict[str, str], dict[str, str]]:
    roles = ("system", "user", "assistant")
    return {role: head.format(role) for role in roles}, dict.fromkeys(roles, end)


def _in_brackets(messages: Messages) -> Parts:
    """Llama 2: the system's words stand inside the first turn of the user."""
    system = ""
    found = Parts()
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "system":
            system = f"<<SYS>>\n{content}\n<</SYS>>\n\n"
        elif message["role"] == "user":
            found.append((f"<s>[INST] {system}{content} [/INST]", False))
            system = ""
        else:
            found += [(f" {content} </s>", True)]
    return found


def _late_system(messages: Messages) -> Parts:
    """Mistral: the system's words stand inside the last turn of the user."""
    system = "".join(message["content"] + "\n\n" for message in messages if message["role"] == "system")
    asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
    found = [("<s>", False)]
    for i, message in enumerate(messages):
        if message["role"] == "user":
            found.append((f"[INST] {system if i == asked[-1] else ''}{message['content']}[/INST]", False))
        elif message["role"] == "assistant":
            found += [(" ", False), (f"{message['content']}</s>", True)]
    return found


def _channels(messages: Messages) -> Parts:
    """gpt-oss: the last answer ends in another way."""
    found = Parts()
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            end = "<|return|>" if i == len(messages) - 1 else "<|end|>"
            found += [("<|start|>assistant", False), (f"<|channel|>final<|message|>{message['content']}{end}", True)]
        else:
            found.append((f"<|start|>{message['role']}<|message|>{message['content']}<|end|>", False))
    return found


def _thinks_last(messages: Messages) -> Parts:
    """Qwen 3: empty thoughts in the last turn alone."""
    found = Parts()
    for i, message in enumerate(messages):
        last = i == len(messages) - 1 and message["role"] == "assistant"
        said = ("<think>\n\n</think>\n\n" if last else "") + message["content"] + "<|im_end|>"
        found += [(f"<|im_start|>{message['role']}\n", False), (said, message["role"] == "assistant"), ("\n", False)]
    return found


_EACH = "{% for m in messages %}"
_ASK = "{% if add_generation_prompt %}"
_CHATML = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"

_chatml = _same("<|im_start|>{}\n", "<|im_end|>")
_newline = dict.fromkeys(("system", "user", "assistant"), "\n")

FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        _EACH + _CHATML + "{% endfor %}" + _ASK + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        *_chatml,
        ("<|im_start|>", "<|im_end|>"),
        after=_newline,
    ),
    "marked": Family(
        _EACH + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
        "{% endfor %}" + _ASK + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        *_chatml,
        ("<|im_start|>", "<|im_end|>"),
        after=_newline,
    ),
    "qwen3": Family(
        _EACH + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        + _ASK
        + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        {},
        {},
        ("<|im_start|>", "<|im_end|>"),
        write=_thinks_last,
    ),
    "llama3": Family(
        "{{ bos_token }}"
        + _EACH
        + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        + _ASK
        + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        *_same("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        begin="<s>",
        strips=True,
    ),
    "llama2": Family(
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
        "{% set words = '<<SYS>>\n' + messages[0].content | trim + '\n<</SYS>>\n\n' %}{% else %}"
        "{% set rest = messages %}{% set words = '' %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (words if loop.first else '') + m.content | trim + ' [/INST]' }}{% else %}"
        "{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
        {},
        {},
        (),
        system="user",
        strips=True,
        write=_in_brackets,
    ),
    "mistral": Family(
        "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        + _EACH
        + "{% if m.role == 'user' %}{{ '[INST] ' }}{% if m == asked[-1] and messages[0].role == 'system' %}"
        "{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}{% elif m.role == 'assistant' %}"
        "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        {},
        {},
        ("[INST]", "[/INST]"),
        system="user",
        write=_late_system,
    ),
    "gemma": Family(
        "{{ bos_token }}" + _EACH + "{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        + _ASK
        + "{{ '<start_of_turn>model\n' }}{% endif %}",
        {"user": "<start_of_turn>user\n", "assistant": "<start_of_turn>model\n"},
        {"user": "<end_of_turn>", "assistant": "<end_of_turn>"},
        ("<start_of_turn>", "<end_of_turn>"),
        after=_newline,
        begin="<s>",
        system="",
        strips=True,
    ),
    "phi3": Family(
        _EACH
        + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        + _ASK
        + "{{ '<|assistant|>\n' }}{% endif %}",
        *_same("<|{}|>\n", "<|end|>"),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        after=_newline,
    ),
    "zephyr": Family(
        _EACH
        + "{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
        + _ASK
        + "{{ '<|assistant|>\n' }}{% endif %}",
        *_same("<|{}|>\n", "</s>"),
        (),
        after=_newline,
    ),
    "vicuna": Family(
        _EACH + "{% if m.role == 'system' %}{{ m.content + '\n\n' }}{% elif m.role == 'user' %}"
        "{{ 'USER: ' + m.content + '\n' }}{% else %}{{ 'ASSISTANT: ' + m.content + eos_token + '\n' }}{% endif %}"
        "{% endfor %}" + _ASK + "{{ 'ASSISTANT:' }}{% endif %}",
        {"system": "", "user": "USER: ", "assistant": "ASSISTANT:"},
        {"system": "\n\n", "user": "\n", "assistant": "</s>"},
        (),
        after={"assistant": "\n"},
        write=lambda messages: [
            part
            for m in messages
            for part in {
                "system": [(m["content"] + "\n\n", False)],
                "user": [("USER: " + m["content"] + "\n", False)],
                "assistant": [("ASSISTANT:", False), (" " + m["content"] + "</s>", True), ("\n", False)],
            }[m["role"]]
        ],
    ),
    "alpaca": Family(
        _EACH + "{% if m.role == 'system' %}{{ m.content + '\n\n' }}{% elif m.role == 'user' %}"
        "{{ '### Instruction:\n' + m.content + '\n\n' }}{% else %}"
        "{{ '### Response:\n' + m.content + eos_token + '\n\n' }}{% endif %}{% endfor %}"
        + _ASK
        + "{{ '### Response:\n' }}{% endif %}",
        {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"},
        {"system": "\n\n", "user": "\n\n", "assistant": "</s>"},
        (),
        after={"assistant": "\n\n"},
    ),
    "deepseek": Family(
        "{{ bos_token }}" + _EACH + "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "{{ '<|User|>' + m.content }}{% else %}{{ '<|Assistant|>' + m.content + eos_token }}{% endif %}{% endfor %}"
        + _ASK
        + "{{ '<|Assistant|>' }}{% endif %}",
        {"system": "", "user": "<|User|>", "assistant": "<|Assistant|>"},
        {"system": "", "user": "", "assistant": "</s>"},
        ("<|User|>", "<|Assistant|>"),
        begin="<s>",
    ),
    "command": Family(
        "{{ bos_token }}"
        + _EACH
        + "{% set name = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[m.role] %}"
        "{{ '<|START_OF_TURN_TOKEN|><|' + name + '_TOKEN|>' + m.content | trim + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        + _ASK
        + "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        {
            role: f"<|START_OF_TURN_TOKEN|><|{name}_TOKEN|>"
            for role, name in {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}.items()
        },
        dict.fromkeys(("system", "user", "assistant"), "<|END_OF_TURN_TOKEN|>"),
        (*(f"<|{name}_TOKEN|>" for name in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT")),),
        begin="<s>",
        strips=True,
    ),
    "granite": Family(
        _EACH
        + "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}{% endfor %}"
        + _ASK
        + "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
        *_same("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>"),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        after=_newline,
    ),
    "gpt_oss": Family(
        _EACH + "{% if m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
        "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else "
        "'<|end|>') }}{% endif %}{% endfor %}" + _ASK + "{{ '<|start|>assistant' }}{% endif %}",
        {},
        {},
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        write=_channels,
    ),
}
