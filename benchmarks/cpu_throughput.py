"""Compare the CPU throughput of both tasks with plain PyTorch, TRL's SFTTrainer and diffusers' training loop.

    python -m benchmarks.cpu_throughput [--rounds 3] [--steps 40] [--threads 2] [--task llm] [--cpu_time]
                                        [--out rows.json]

Each contender trains the same network (a Qwen3 of transformers with 1 million parameters; a DiTTransformer2DModel of
diffusers with 0.4 million) on the same rows with fused AdamW and gradient clipping, in a separate process. The
contenders alternate, and time is measured from step 10 to the last: elapsed time, or with ``--cpu_time`` that of the
process, which other work on the machine changes less (with ``--threads 1``; threads that wait count as well).
diffusers publishes its training loop only as scripts. Its contender therefore consists of Accelerate's `prepare`,
`accumulate`, `backward` and `clip_grad_norm_` around the model, a DDPMScheduler and a learning-rate schedule of
diffusers. Each line gives the median over rounds and the ratio to plain PyTorch. A contender whose packages are missing
is skipped with a message. The shipped configs of ``configs/llm`` train as the contender with `ChunkedCrossEntropy`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WARM_UP = 10
LENGTH = 256
ROWS = 4
IMAGES = 64
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
DIT = {
    "_class_name": "DiTTransformer2DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
    "norm_type": "ada_norm_zero",
}


class Clock:
    """Callback that records the time at the end of each step."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.marks: list[float] = []

    def tick(self, *_: Any) -> None:
        self.marks.append(self.now())

    def steps_a_second(self) -> float:
        return (len(self.marks) - 1 - WARM_UP) / (self.marks[-1] - self.marks[WARM_UP])


def corpus() -> Any:
    from lit_efficient import PythonCorpus

    data = PythonCorpus(vocab_size=QWEN3["vocab_size"], sequence_length=LENGTH, batch_size=ROWS)
    data.prepare_data()
    data.setup("fit")
    return data


def latents() -> Any:
    from lit_efficient import LatentDigits

    data = LatentDigits(image_size=32, batch_size=IMAGES)
    data.prepare_data()
    data.setup("fit")
    return data


def repeated(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def causal_lm() -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    fields = {key: value for key, value in QWEN3.items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(Qwen3Config(**fields))


def plain_llm(steps: int, clock: Clock) -> None:
    import torch

    network = causal_lm().train()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, fused=True)
    for _, batch in zip(range(steps), repeated(corpus().train_dataloader())):
        ids = batch["input_ids"]
        loss = network(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        clock.tick()


def trl_llm(steps: int, clock: Clock) -> None:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    data = corpus()
    rows = [data.train_windows[i]["input_ids"].tolist() for i in range(steps * ROWS)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=data.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_length=None,
            packing=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        dataset = Dataset.from_dict({"input_ids": rows})
        SFTTrainer(
            causal_lm(), settings, train_dataset=dataset, processing_class=tokenizer, callbacks=[Marks()]
        ).train()


def ours(module: Any, data: Any, techniques: list[Any], steps: int, clock: Clock) -> None:
    import lightning.pytorch as L
    from lightning.pytorch.callbacks import LambdaCallback

    marks = LambdaCallback(on_train_batch_end=clock.tick)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    run = L.Trainer(accelerator="cpu", max_steps=steps, gradient_clip_val=1.0, callbacks=[*techniques, marks], **quiet)
    run.fit(module, datamodule=data)


def our_llm(steps: int, clock: Clock, techniques: tuple[str, ...] = ()) -> None:
    import lit_efficient as le

    module = le.LanguageModeling(le.CausalLMConfig(config_fields=QWEN3), learning_rate=1e-3)
    ours(module, corpus(), [getattr(le, name)() for name in techniques], steps, clock)


def chunked_llm(steps: int, clock: Clock) -> None:
    our_llm(steps, clock, ("ChunkedCrossEntropy",))


def dit() -> Any:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(**{key: value for key, value in DIT.items() if key != "_class_name"})


def noised(scheduler: Any, batch: Any) -> tuple[Any, Any, Any]:
    import torch

    clean = batch["mean"] + (0.5 * batch["logvar"]).exp() * torch.randn_like(batch["mean"])
    noise = torch.randn_like(clean)
    times = torch.randint(0, scheduler.config.num_train_timesteps, (len(clean),))
    return scheduler.add_noise(clean, noise, times), noise, times


def plain_diffusion(steps: int, clock: Clock) -> None:
    import torch
    from diffusers import DDPMScheduler

    network = dit().train()
    scheduler = DDPMScheduler()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, fused=True)
    for _, batch in zip(range(steps), repeated(latents().train_dataloader())):
        noisy, noise, times = noised(scheduler, batch)
        predicted = network(noisy, timestep=times, class_labels=batch["labels"]).sample
        loss = torch.nn.functional.mse_loss(predicted, noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        clock.tick()


def diffusers_diffusion(steps: int, clock: Clock) -> None:
    import torch
    from accelerate import Accelerator
    from diffusers import DDPMScheduler
    from diffusers.optimization import get_scheduler

    accelerator = Accelerator(cpu=True)
    network = dit()
    scheduler = DDPMScheduler()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, fused=True)
    rates = get_scheduler("constant", optimizer)
    loader = latents().train_dataloader()
    network, optimizer, loader, rates = accelerator.prepare(network, optimizer, loader, rates)
    network.train()
    for _, batch in zip(range(steps), repeated(loader)):
        with accelerator.accumulate(network):
            noisy, noise, times = noised(scheduler, batch)
            predicted = network(noisy, timestep=times, class_labels=batch["labels"]).sample
            loss = torch.nn.functional.mse_loss(predicted.float(), noise.float(), reduction="mean")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        loss.detach().item()  # their progress bar shows it at each step
        clock.tick()


def our_diffusion(steps: int, clock: Clock) -> None:
    import lit_efficient as le

    backbone = le.DiffusersModelConfig(config_fields=DIT)
    module = le.LatentDiffusion(backbone, "eps", "linear", "uniform", learning_rate=1e-3)
    ours(module, latents(), [], steps, clock)


# task -> what a step holds, its unit, and the sides by name, plain PyTorch first
TASKS = {
    "llm": (
        LENGTH * ROWS,
        "tokens",
        {
            "plain PyTorch": plain_llm,
            "TRL's SFTTrainer": trl_llm,
            "LanguageModeling": our_llm,
            "LanguageModeling, ChunkedCrossEntropy": chunked_llm,
        },
    ),
    "diffusion": (
        IMAGES,
        "images",
        {
            "plain PyTorch": plain_diffusion,
            "diffusers' loop, Accelerate": diffusers_diffusion,
            "LatentDiffusion": our_diffusion,
        },
    ),
}


def one(options: argparse.Namespace) -> float:
    """Return the steps per second of one contender, measured in this process."""
    import torch

    torch.manual_seed(0)
    clock = Clock(time.process_time if options.cpu_time else time.perf_counter)
    TASKS[options.task[0]][2][options.side](options.steps, clock)
    return clock.steps_a_second()


def in_a_process(task: str, side: str, options: argparse.Namespace) -> float | None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.cpu_throughput",
        "--side",
        side,
        "--task",
        task,
        "--steps",
        str(options.steps),
        *(["--cpu_time"] if options.cpu_time else []),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return float(done.stdout.splitlines()[-1])
    print(f"{task}, {side}: {done.stderr.splitlines()[-1]}", flush=True)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--cpu_time", action="store_true", help="measure the CPU time of each process")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(one(options))
        return 0
    figures: dict[str, dict[str, float]] = {}
    for task in options.task:
        size, unit, sides = TASKS[task]
        rounds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in [side for side in sides if rounds.get(side) is not None]:
                rate = in_a_process(task, side, options)
                if rate is None:
                    del rounds[side]
                else:
                    rounds[side].append(rate * size)
        plain = rounds.get("plain PyTorch")
        if plain is None:
            return 1
        for side, rates in rounds.items():
            ratios = sorted(a / b for a, b in zip(rates, plain))
            ratio = statistics.median(ratios)
            figures[f"{task}: {side}"] = {"rate": statistics.median(rates), "ratio": ratio}
            print(
                f"{side:40} {statistics.median(rates):8.0f} {unit}/s  {ratio:5.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})"
            )
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
