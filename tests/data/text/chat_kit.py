"""Tiny tokenizer, and chat templates with the peculiarities of well-known model families."""

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
# Each turn is preceded by the question, as if the answer were written with it: no span of the text is one message's.
PAIRED = (
    "{% for m in messages %}{% if m['role'] == 'user' and loop.last %}{{ m['content'] }}{% elif m['role'] == 'user' %}"
    "{{ loop.length ~ m['content'] ~ messages[loop.index]['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
# The system's words are put before the last user's, as by Mistral: no prefix of the conversation is one of the text.
LATE_SYSTEM = (
    "{% for m in messages if m['role'] != 'system' %}{% if loop.revindex <= 2 and m['role'] == 'user' %}"
    "{{ messages[0]['content'] }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
)
# Messages are named by their number, so that no loop is at one.
NUMBERED = PLAIN.replace("for m in messages %}", "for i in range(messages|length) %}{% set m = messages[i] %}")
# Of gpt-oss: an answer and its thoughts have headers of their own, and the last turn ends in another way.
CHANNELS = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}"
    "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% elif loop.last %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|return|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Of GLM: nothing ends an answer but the beginning of the next turn.
OPEN = (
    "<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' %}{{ '<think></think>\n' }}{% endif %}{{ m['content'].strip() }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Of Nemotron and Qwen3.5: the prompt begins a thought, which turns without one do not have.
ASKS_THOUGHTS = (
    "{% for m in messages %}"
    + HEADER
    + "{% if m['role'] == 'assistant' and m.thinking %}{{ '<think>\n' + m.thinking + '\n</think>\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Of DeepSeek: answers to tools continue what is written, and arguments of calls must be texts.
CONTINUES = (
    "{% set ns = namespace(tool=false) %}{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<|user|>' + m['content'] }}{% elif m['role'] == 'tool' %}{% set ns.tool = true %}"
    "{{ '<|tool|>' + m['content'] }}{% elif ns.tool %}{% set ns.tool = false %}"
    "{{ '<|out|>' + m['content'] + eos_token }}{% elif m.tool_calls %}"
    "{{ '<|assistant|>' + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments + eos_token }}{% else %}"
    "{{ '<|assistant|>' + m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if ns.tool %}<|out|>{% elif add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# Of Qwen2-VL: words of the system that nobody gave are written with the first message.
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}"
    + HEADER
    + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    + PROMPT
)
# Two marks a turn, as of a twin that TRL ships; the result of a tool, which stands between them, is not the model's.
TWO_MARKS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% if m.result %}{{ m.result }}{% endif %}"
    "{% generation %}{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    + HEADER
    + "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
UNENDED = CHATML.replace("{{ '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}")
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + HEADER + "{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}" + PROMPT
)


CONTROL = [
    f"<|{name}|>"
    for name in ["start", "channel", "message", "end", "return", "user", "assistant", "system", "tool", "out"]
]


def tokenizer(template: str | None = CHATML) -> Any:
    made = train_chat_tokenizer(TEXTS, 300)
    made.add_special_tokens({"extra_special_tokens": CONTROL}, replace_extra_special_tokens=False)
    made.chat_template = template
    return made
