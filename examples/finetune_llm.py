"""Fine-tune a language model on a folder of your conversations, with LoRA and a loss on the answers only.

    python examples/finetune_llm.py                                    # creates a small model and conversations
    python examples/finetune_llm.py my_conversations Qwen/Qwen3-0.6B   # *.jsonl, each line {"messages": [...]}

The same from YAML: configs/llm/lora.yaml. `preview` shows which tokens contribute to the loss.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from lit_efficient import (
    CausalLMConfig,
    ChunkedCrossEntropy,
    ExactResume,
    LanguageData,
    LanguageModeling,
    LoRA,
    SafeCheckpointIO,
    ThroughputBar,
)

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def write_conversations(folder: Path) -> None:
    """Questions about sums, with their answers."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "sums.jsonl", "w", encoding="utf-8") as file:
        for a in range(20):
            for b in range(20):
                question = {"role": "user", "content": f"What is {a} plus {b}?"}
                answer = {"role": "assistant", "content": f"{a} plus {b} is {a + b}."}
                file.write(json.dumps({"messages": [question, answer]}) + "\n")


def main(folder: str, model: str | None = None, max_steps: int = 100) -> L.Trainer:
    """Train adapters, and save them (a few MB) with what is needed to go on.

    Args:
        folder: Where the conversations lie.
        model: A name on the hub, or a folder; ``None`` draws a tiny one, which trains whole.
        max_steps: Optimizer steps.
    """
    L.seed_everything(0, verbose=False)
    callbacks = [ThroughputBar(), ChunkedCrossEntropy(), ExactResume()]
    if model:  # random weights are no base for adapters
        callbacks.append(LoRA(rank=16, alpha=16, variant="rslora"))
    trainer = L.Trainer(
        max_steps=max_steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=Path(folder, "run"),
        logger=False,
        callbacks=callbacks,
        plugins=[SafeCheckpointIO()],
    )
    config = CausalLMConfig(model) if model else CausalLMConfig(config_fields=TINY)
    data = LanguageData(train=folder, tokenizer=model, max_length=256, batch_size=4, val_fraction=0.1)
    trainer.fit(LanguageModeling(config, learning_rate=2e-4 if model else 4e-3, warmup_steps=10), data)
    return trainer


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    else:
        with tempfile.TemporaryDirectory() as made:
            write_conversations(Path(made))
            main(made)
