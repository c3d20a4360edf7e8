"""What stands beside a sharded network: references and teachers, which come in slices, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lit_efficient import (
    CausalLMConfig,
    Distillation,
    GPTConfig,
    LanguageModeling,
    LoRA,
    Preference,
    QuantizeBase,
    RewardModeling,
    ShardedStrategy,
)
from lit_efficient.distributed import weight_slices
from lit_efficient.surgery import is_sharded
from tests.support import trainer
from tests.tasks import preference_kit

STUDENT = GPTConfig(97, dim=32, depth=2, num_heads=2, max_length=64)
CASES = {
    "preference": lambda of: Preference(of("model")),
    "preference of a checkpoint": lambda of: Preference(of("model"), start_from=of("sft.ckpt")),
    "preference of adapters": lambda of: Preference(of("model"), start_from=of("lora.ckpt")),
    "preference of ours": lambda of: Preference(STUDENT, start_from=of("gpt.ckpt")),
    "reward": lambda of: RewardModeling(of("model")),
    "reward of a checkpoint": lambda of: RewardModeling(of("model"), start_from=of("sft.ckpt")),
    "preference under adapters": lambda of: Preference(of("model")),
    "preference under adapters on codes": lambda of: Preference(of("model")),
    "reward under adapters": lambda of: RewardModeling(of("model")),
    "rows of tokens": lambda of: LanguageModeling(of("model")),
    "rows of tokens of a tied model": lambda of: LanguageModeling(of("tied")),
    "adapters of a tied head": lambda of: LanguageModeling(of("tied")),
    "teacher": lambda of: Distillation(of("model"), STUDENT),
    "tied teacher": lambda of: Distillation(of("tied"), STUDENT),
    "teacher of another format": lambda of: Distillation(of("half"), STUDENT),
    "teacher of codes": lambda of: Distillation(replace(of("model"), quantize="nf4"), STUDENT),
    "teacher of a checkpoint": lambda of: Distillation(of("sft.ckpt"), STUDENT),
    "teacher of ours": lambda of: Distillation(of("gpt.ckpt"), STUDENT),
    "teacher with adapters": lambda of: Distillation(of("lora.ckpt"), STUDENT),
}
TECHNIQUES: dict[str, Any] = {
    "rows of tokens": lambda: [LoRA(rank=2, trainable_token_indices=[90, 5])],
    "adapters of a tied head": lambda: [LoRA(rank=2, variant="dora", targets=["q_proj", "lm_head"])],
    "rows of tokens of a tied model": lambda: [LoRA(rank=2, trainable_token_indices=[90, 5])],
    "preference under adapters": lambda: [LoRA(rank=2)],
    "preference under adapters on codes": lambda: [QuantizeBase(), LoRA(rank=2)],
    "reward under adapters": lambda: [LoRA(rank=2, modules_to_save=["score"])],
}
# How many of network and teacher come in slices; a checkpoint to start from is read whole.
SLICED = {name: 1 for name in CASES if name.startswith(("preference", "reward")) and "of" not in name.split()} | {
    "adapters of a tied head": 1,
    "rows of tokens": 1,
    "rows of tokens of a tied model": 1,
    "teacher": 2,
    "tied teacher": 2,
    "teacher of another format": 2,
}


def place(folder: str) -> Any:
    """By name what lies in a folder: a model, or a checkpoint."""

    def of(name: str) -> Any:
        path = str(Path(folder, name))
        return path if path.endswith(".ckpt") else CausalLMConfig(path, dtype="auto")

    return of


def fitted(
    name: str, folder: str, ckpt_path: str | None = None, save: str | None = None, **arguments: Any
) -> tuple[list[float], Any, Any]:
    """Losses, trainer and task of a few steps."""
    torch.manual_seed(0)
    task, seen = CASES[name](place(folder)), list[float]()

    class Seen(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(float(outputs["loss"].detach()))

    tokens = torch.randint(97, (8, 12), generator=torch.Generator().manual_seed(0))
    rows: Any = preference_kit.Rows(8) if "pairs" in task.trains_on else [{"input_ids": r, "labels": r} for r in tokens]
    task.learning_rate, task.warmup_steps = 1e-2, 0
    arguments |= {"use_distributed_sampler": False, "limit_val_batches": 0, "max_steps": 3, "max_epochs": -1}
    run = trainer(
        [Seen(), *TECHNIQUES.get(name, list)(), *([preference_kit.SaveAfter(2, Path(save))] if save else [])],
        **arguments,
    )
    loader = DataLoader(rows, batch_size=8)
    run.fit(task, loader, loader, ckpt_path=ckpt_path)
    return seen, run, task


def write(folder: str) -> None:
    """A model in several files, tied, and in bfloat16; checkpoints of it, of adapters beside it, and of our GPT."""
    from tests.distributed.test_weight_slices import llama, trained

    torch.manual_seed(1)
    trained(llama(tied=False)).save_pretrained(f"{folder}/model", max_shard_size="40KB")
    trained(llama(tied=True)).save_pretrained(f"{folder}/tied")
    trained(llama(tied=False)).bfloat16().save_pretrained(f"{folder}/half")
    models: dict[str, Any] = {"sft": place(folder)("model"), "lora": place(folder)("model"), "gpt": STUDENT}
    for name, model in models.items():
        task = LanguageModeling(model, learning_rate=1e-2, warmup_steps=0)
        rows: Any = [{"input_ids": torch.arange(12), "labels": torch.arange(12)}] * 4
        run = trainer([LoRA(rank=2)] if name == "lora" else [], max_steps=2, max_epochs=-1, limit_val_batches=0)
        loader = DataLoader(rows, batch_size=2)
        run.fit(task, loader, loader)
        run.save_checkpoint(f"{folder}/{name}.ckpt")


def on_two(folder: str, names: list[str]) -> None:
    """Losses straight and resumed, and whether the network, or the teacher, was ever whole."""
    dist.init_process_group("gloo")
    filled = list[bool]()
    fill = weight_slices._Reading.__init__

    def noted(self: Any, network: Any, *given: Any) -> None:
        filled.append(any(map(is_sharded, network.parameters())))
        fill(self, network, *given)

    weight_slices._Reading.__init__ = noted  # type: ignore[method-assign, assignment]
    for name in names:
        filled.clear()
        between = f"{folder}/{name}.between"
        losses, _, _ = fitted(name, folder, save=between, devices=2, strategy=ShardedStrategy())
        assert filled == [True] * SLICED.get(name, int("teacher" in name)), name
        if "rows" in name:
            torch.testing.assert_close(fitted(name, folder, devices=2, strategy="ddp")[0], losses)
        resumed, _, _ = fitted(name, folder, between, devices=2, strategy=ShardedStrategy())
        torch.save({"losses": losses, "resumed": resumed}, f"{folder}/{name}_{dist.get_rank()}.pt")
