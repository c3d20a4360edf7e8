"""The README's commands lead from a file of rows to a merged model and a GGUF file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient.__main__ import main
from tests.export.test_fields import base_of

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
COMMANDS = [
    shlex.split(line)[3:]
    for block in README.split("```bash\n")[1:]
    for line in block.split("```")[0].splitlines()
    if "llm/recipe" in line
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def conversation(number: int) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API has them: arguments are JSON texts."""
    call = {"name": "get_weather", "arguments": json.dumps({"city": f"Paris {number}"})}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is the weather in Paris {number}?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 21}'},
        {"role": "assistant", "content": "It is sunny, 21 degrees."},
    ]


def rows_of(kind: str, tokenizer: Any) -> list[dict[str, Any]]:
    conversations = [conversation(number) for number in range(40)]
    if kind == "tools":
        return [{"messages": messages, "tools": TOOLS} for messages in conversations]
    for messages in conversations:
        messages[2]["tool_calls"][0]["function"]["arguments"] = {"city": "Paris"}  # as the template reads them
    return [{"text": tokenizer.apply_chat_template(m, tools=TOOLS, tokenize=False)} for m in conversations]


@pytest.mark.turns(2, family="shipped configs")
@pytest.mark.parametrize("kind", ["tools", "rendered"])
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")
def test_rows_become_a_merged_model_and_a_gguf_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert [command[0] for command in COMMANDS] == ["fit", "export", "export"]
    monkeypatch.chdir(tmp_path)
    tokenizer = base_of("qwen2.5", tmp_path / "BASE")
    config = json.loads((tmp_path / "BASE" / "config.json").read_text())
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind, tokenizer)))
    fit = [*COMMANDS[0], "--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--data.num_workers", "0"]
    if kind == "rendered":
        fit += ["--data.chat.rendered", "true"]
    fit += ["--trainer.accelerator", "cpu", "--model.warmup_steps", "0", "--trainer.accumulate_grad_batches", "1"]
    fit += ["--data.max_length", "512"]  # of the tiny base
    # States in 8 bits need 4,096 weights.
    assert main([*fit, "--without", "LowBitOptimizer", "--without", "ThroughputBar"]) == 0
    assert main(COMMANDS[1]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained("BASE", dtype=torch.float32)
    rounded = {name: tensor.bfloat16().float() for name, tensor in base.state_dict().items()}  # as the recipe trains it
    moved = [name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, rounded[name])]
    assert len(moved) == 7 * config["num_hidden_layers"]
    card = Path("merged/README.md").read_text()
    assert "| Data | rows.jsonl |" in card
    assert "| `val/loss` | " in card
    assert "outputs of transformers differ by" in card
    pytest.importorskip("gguf")
    capsys.readouterr()
    assert main(COMMANDS[2]) == 0
    assert "token ids of" in capsys.readouterr().err
    again = AutoModelForCausalLM.from_pretrained("served", gguf_file="model-q8_0.gguf", dtype=torch.float32)
    ids = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = again.eval()(ids).logits
        ours = merged.eval()(ids).logits
    assert (theirs - ours).norm() < 0.02 * ours.norm()  # eight bits a weight
    served = AutoTokenizer.from_pretrained("served", gguf_file="model-q8_0.gguf")
    messages = conversation(0)
    messages[2]["tool_calls"][0]["function"]["arguments"] = {"city": "Paris"}
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert served.apply_chat_template(messages, tools=TOOLS, tokenize=False) == text
    assert served(text)["input_ids"] == tokenizer(text)["input_ids"]
