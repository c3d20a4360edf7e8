"""A tiny tokenizer and the chat templates of well-known families, written anew with their quirks."""

from typing import Any

from lit_efficient.data.text.chat_tokenizer import CHATML, train_chat_tokenizer

TEXTS = ["What is two plus two? Four, of course. system user assistant\n<think> done </think>\n"] * 3

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Of course?"},
    {"role": "assistant", "content": "Yes, of course."},
]

HEADER = "{{ '<|im_start|>' + m['role'] + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}" + HEADER + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + PROMPT
# Thoughts are written into the last turn only, as by Qwen3.
THINKING = (
    "{% for m in messages %}"
    + HEADER
    + "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
# The system's words are put before the last user's, as by Mistral: no prefix of the conversation is one of the text.
LATE_SYSTEM = (
    "{% for m in messages if m['role'] != 'system' %}{% if loop.revindex <= 2 and m['role'] == 'user' %}"
    "{{ messages[0]['content'] }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
)
UNENDED = CHATML.replace(
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + HEADER + "{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}" + PROMPT
)


def tokenizer(template: str | None = CHATML) -> Any:
    made = train_chat_tokenizer(TEXTS, 300)
    made.chat_template = template
    return made
