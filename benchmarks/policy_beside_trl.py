"""CPU time and memory of a step of GRPO beside TRL's GRPOTrainer: ``python -m benchmarks.policy_beside_trl FOLDER``.

FOLDER is a model of transformers with a tokenizer. Needs the package trl.

    --tiny      a Llama of 4 layers with random weights in the place of the model, all weights train
    --memory    peak of resident memory, each side in a process of its own, in the place of time

Both sides answer the same prompts with the same number of tokens: a token that no answer contains ends a text. Without
``--tiny`` adapters of rank 16 train. Runs of a few steps alternate in one process. The first step of a run is left out.
"""

import argparse
import itertools
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from benchmarks.clock import use_one_thread
from lit_efficient import (
    CausalLMConfig,
    ChunkedCrossEntropy,
    ExactResume,
    LoRA,
    PolicyLoss,
    PolicyOptimization,
    Reward,
    Rollout,
)
from lit_efficient.data.prompt_data import prompt_batch
from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer, pack_tokenizer

PROMPTS = 2
SAMPLES = 8
NEW = 16
STEPS = 3
ROUNDS = 1
RATE = 1e-5
NEVER = "<reponame>"  # a special token of SmolLM2
ROWS = [{"prompt": f"Write one short sentence about the number {i} and about what it is used for."} for i in range(32)]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def letters(prompt: str, completion: str, row: Any) -> float:
    """Return the share of the letter e."""
    return completion.count("e") / max(len(completion), 1)


def tokenizer_of(folder: str) -> Any:
    """Return the tokenizer with another end of texts."""
    tokenizer = load_chat_tokenizer(folder)
    tokenizer.eos_token = NEVER
    return tokenizer


def tiny_folder(folder: str, into: Path) -> str:
    """Write a small Llama with the tokenizer of ``folder``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = load_chat_tokenizer(folder)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(into)
    tokenizer.save_pretrained(into)
    return str(into)


class Times:
    """CPU times at the end of each step, and that of generation in each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.writing: list[float] = []

    def figures(self) -> tuple[float, float]:
        """Return the median CPU time of a step after the first one, and of generation."""
        steps = [later - earlier for earlier, later in itertools.pairwise(self.ends)]
        return statistics.median(steps), statistics.median(self.writing[1:])


class _Task(PolicyOptimization):
    times: Times

    def _write(self, *arguments: Any) -> Any:
        start = time.process_time()
        written = super()._write(*arguments)
        self.times.writing.append(time.process_time() - start)
        return written


class _Ends(L.Callback):
    def __init__(self, times: Times) -> None:
        self.times = times

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.ends.append(time.process_time())


def ours(folder: str, tiny: bool) -> Times:
    """Run a few steps of `PolicyOptimization`."""
    times = Times()
    task = _Task(
        [Reward(letters)],
        CausalLMConfig(folder),
        PolicyLoss("grpo"),
        Rollout(samples=SAMPLES, max_new_tokens=NEW),
        learning_rate=RATE,
    )
    task.times = times
    task.tokenizer_state = pack_tokenizer(tokenizer_of(folder))
    task.configure_model()
    network: Any = task.network
    network.generation_config.eos_token_id = None
    adapters = [] if tiny else [LoRA(rank=16, alpha=16, targets="all-linear")]
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[*adapters, ChunkedCrossEntropy(), ExactResume(), _Ends(times)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    rows: Any = ROWS
    trainer.fit(task, DataLoader(rows, PROMPTS, shuffle=True, drop_last=True, collate_fn=prompt_batch))
    assert trainer.callback_metrics["train/length"] == NEW
    return times


def theirs(folder: str, tiny: bool, beside: Path) -> Times:
    """Run a few steps of TRL's GRPOTrainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times = Times()

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.ends.append(time.process_time())

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            found = super()._generate_single_turn(*arguments, **named)
            times.writing.append(time.process_time() - start)
            return found

    def reward(completions: Sequence[str], **_: Any) -> list[float]:
        return [letters("", text, {}) for text in completions]

    settings = GRPOConfig(
        output_dir=str(beside),
        max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW,
        generation_kwargs={"min_new_tokens": NEW},
        learning_rate=RATE,
        loss_type="grpo",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapters = None if tiny else LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    trainer = Timed(
        network,
        reward,
        settings,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer_of(folder),
        callbacks=[Marks()],
        peft_config=adapters,
    )
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    assert lengths == [NEW] * STEPS
    return times


def compare_times(folder: str, tiny: bool, beside: Path) -> None:
    """Print the ratios of neighbouring runs."""
    ratios = []
    for _ in range(ROUNDS):
        step, writing = ours(folder, tiny).figures()
        their_step, their_writing = theirs(folder, tiny, beside).figures()
        ratios.append(step / their_step)
        print(
            f"a step: {step:.2f} CPU-seconds, {writing / step:.0%} of them generation; TRL: {their_step:.2f}, "
            f"{their_writing / their_step:.0%}; ratio {ratios[-1]:.2f}, without generation "
            f"{(step - writing) / (their_step - their_writing):.2f}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def _peak(which: str, folder: str, tiny: bool, beside: Path, pipe: Any) -> None:
    use_one_thread()
    if which == "ours":
        ours(folder, tiny)
    else:
        theirs(folder, tiny, beside)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)


def compare_memory(folder: str, tiny: bool, beside: Path) -> None:
    """Print the peaks of resident memory, each in a new process."""
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for which in ("ours", "theirs"):
        receiver, sender = context.Pipe()
        process = context.Process(target=_peak, args=(which, folder, tiny, beside, sender))
        process.start()
        sender.close()
        peaks[which] = receiver.recv()
        process.join()
    print(f"peak: {peaks['ours']:.0f} MiB, TRL: {peaks['theirs']:.0f} MiB, ratio {peaks['ours'] / peaks['theirs']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="model of transformers with the tokenizer of SmolLM2")
    parser.add_argument("--tiny", action="store_true", help="a small Llama with random weights")
    parser.add_argument("--memory", action="store_true", help="peak of memory in the place of time")
    options = parser.parse_args()
    use_one_thread()
    with tempfile.TemporaryDirectory() as made:
        folder = tiny_folder(options.folder, Path(made, "tiny")) if options.tiny else options.folder
        compare = compare_memory if options.memory else compare_times
        compare(folder, options.tiny, Path(made, "trl"))


if __name__ == "__main__":
    main()
