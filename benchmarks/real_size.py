"""Measure host memory at the shapes of real models, and compare it with the ideal.

    python -m benchmarks.real_size [--layers N] [--cases qlora,merge,refusal,...]

Weights in the shapes of Llama 3.2 1B are drawn from a seed in bfloat16 and written to a folder once. Each case then
runs in a separate process, whose peak of anonymous memory is measured. Pages of mapped files are not counted, because
the system can drop them at any time.

    qlora    read the folder, quantise to NF4 while reading, add adapters
    save     save a checkpoint of this network
    merge    run export --format merged on that checkpoint, without verification
    slices   load the weights of the folder into an empty network
    shards   start training in two processes under ShardedStrategy: each reads its slices of the base, in bfloat16 or in
             NF4 (each layer is quantised whole); the larger peak is compared with what the process holds
    refusal, techniques, folders, averages, checkpoints, generation, formats, sd: see the function of each; they run
    only
             when named, and need one layer (techniques: two)

All 16 layers need about 5 GiB of memory and 6 GB of disk. Fewer layers keep the shapes; 23 layers have 3 GiB of
weights.
"""

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
RANK = 16
SD_VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
    "latent_channels": 4, "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
}  # fmt: skip
SD_UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel", "cross_attention_dim": 768, "attention_head_dim": 8, "sample_size": 64,
}  # fmt: skip
SD_TEXT: dict[str, Any] = {
    "model_type": "clip_text_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 49408, "max_position_embeddings": 77,
}  # fmt: skip
Found = dict[str, list[float]]  # MiB: ideal, measured


def anonymous() -> float:
    """Return the anonymous memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def peak_of(work: Callable[[], object]) -> float:
    """Run ``work``. Return the MiB by which it raised anonymous memory at its peak."""
    before = anonymous()
    found = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            found[0] = max(found[0], anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        over.set()
        watcher.join()
    return max(found[0], anonymous()) - before


def sizes(layers: int) -> dict[str, float]:
    """Return MiB at one byte per weight: embeddings and norms, all linear layers, the largest linear layer."""
    h = SHAPE["hidden_size"]
    f = SHAPE["intermediate_size"]
    heads = h + 2 * h * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"] + h
    rest = SHAPE["vocab_size"] * h + (2 * layers + 1) * h
    return {"rest": rest / 2**20, "linear": layers * (h * heads + 3 * h * f) / 2**20, "layer": h * f / 2**20}


def write_base(folder: Path, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype="bfloat16")
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1GB")


def qlora(folder: Path, layers: int) -> Found:
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lit_efficient import CausalLMConfig, LanguageModeling, LoRA, QuantizeBase

    size = sizes(layers)
    task = LanguageModeling(CausalLMConfig(str(folder / "base"), dtype="bfloat16"))
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}]
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=1, accelerator="cpu", callbacks=[QuantizeBase(), LoRA(rank=RANK)],
                      enable_checkpointing=False, **quiet)  # fmt: skip
    loader = DataLoader(rows, batch_size=1)
    # bfloat16, and 0.52 bytes a weight; one layer on its way in bfloat16 and float32
    fit = peak_of(lambda: trainer.fit(task, loader))
    save = peak_of(lambda: trainer.save_checkpoint(folder / "run.ckpt"))
    return {"qlora": [2 * size["rest"] + 0.52 * size["linear"] + 6 * size["layer"], fit], "save": [0.0, save]}


def merge(folder: Path, layers: int) -> Found:
    from lit_efficient.export.adapters import export_checkpoint

    size = sizes(layers)
    measured = peak_of(lambda: export_checkpoint(folder / "run.ckpt", folder / "merged", "merged", check=False))
    return {"merge": [2 * (size["rest"] + size["linear"]), measured]}


def slices(folder: Path, layers: int) -> Found:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lit_efficient.distributed.weight_slices import Waiting, fill_waiting
    from lit_efficient.surgery import WAITS

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "base"), dtype=torch.bfloat16)
    size = sizes(layers)

    def load() -> None:
        model.__dict__[WAITS] = Waiting(str(folder / "base"))
        fill_waiting(model, torch.device("cpu"))

    return {"slices": [2 * (size["rest"] + size["linear"]), peak_of(load)]}


def _rank(folder: Path, case: str, rank: int, port: int, results: Any) -> None:
    """A fit of two processes to where training begins, or its first step is done, as a teacher is asked there."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lit_efficient import ShardedStrategy
    from lit_efficient.surgery import local

    task, techniques, more = SHARDED[case](folder)
    row = {"input_ids": torch.arange(4), "labels": torch.arange(4)}
    row |= {f"{side}_{name}": value for side in ("chosen", "rejected") for name, value in row.items()}
    data = more.get("data") or DataLoader([row], batch_size=1)
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=more.get("steps", 0), accelerator="cpu", devices=2, strategy=ShardedStrategy(),
                      callbacks=techniques, enable_checkpointing=False, limit_val_batches=0, **quiet)  # fmt: skip
    measured = peak_of(lambda: trainer.fit(task, data))
    beside = more.get("beside", lambda task: ())(task)
    held = sum(local(p).nbytes for p in (*task.parameters(), *beside))
    states = [part.quant_state for part in task.modules() if getattr(part, "quant_state", None) is not None]
    held += sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    results.put([held / 2**20, measured])


def _adapted(*techniques: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def made(folder: Path) -> Any:
        from lit_efficient import CausalLMConfig, LanguageModeling

        task = LanguageModeling(CausalLMConfig(str(folder / "base"), dtype="bfloat16"))
        return task, [make(folder) for make in techniques], {}

    return made


def _named(name: str, **arguments: Any) -> Callable[[Path], Any]:
    """Return a technique by name. Arguments that are paths point into the folder."""

    def made(folder: Path) -> Any:
        import lit_efficient

        given = {k: str(folder / v) if isinstance(v, Path) else v for k, v in arguments.items()}
        return getattr(lit_efficient, name)(**given)

    return made


def _preference(start: str | None = None) -> Callable[[Path], Any]:
    def made(folder: Path) -> Any:
        from lit_efficient import CausalLMConfig, Preference

        begin = None if start is None else str(folder / start)
        task = Preference(CausalLMConfig(str(folder / "base"), dtype="bfloat16"), start_from=begin)
        return task, [], {"beside": lambda task: task.reference().tensors.values()}

    return made


def _distillation(teacher: str, dtype: Any = "bfloat16") -> Callable[[Path], Any]:
    def made(folder: Path) -> Any:
        from lit_efficient import CausalLMConfig, Distillation, GPTConfig

        path = str(folder / teacher)
        named = CausalLMConfig(path, dtype=dtype) if teacher == "base" else path
        student = GPTConfig(SHAPE["vocab_size"], dim=16, depth=2, num_heads=2, max_length=64)
        return Distillation(named, student), [], {"steps": 1, "beside": lambda task: task._live.on(None).parameters()}

    return made


SHARDED: dict[str, Callable[[Path], Any]] = {
    "shards": _adapted(_named("LoRA", rank=RANK)),
    "shards of codes": _adapted(_named("QuantizeBase"), _named("LoRA", rank=RANK)),
    "PrefixTuning": _adapted(_named("PrefixTuning", init_tokens=[1, 2, 3, 4])),
    "PeftAdapter": _adapted(
        _named("PeftAdapter", config={"peft_type": "LOKR", "r": 8, "target_modules": ["q_proj", "v_proj"]})
    ),
    "DoRA of a folder": _adapted(_named("LoRA", start_from=Path("dora"))),
    "Preference": _preference(),
    "Preference of a checkpoint": _preference("plain.ckpt"),
    "teacher of a folder": _distillation("base"),
    "teacher in float32": _distillation("base", "float32"),
    "teacher of a checkpoint": _distillation("plain.ckpt"),
}


def _prepare(folder: Path) -> None:
    """Write a checkpoint of the base, and folders with adapters for it."""
    from lightning.pytorch import Trainer

    from lit_efficient import CausalLMConfig, LanguageModeling, LoRA
    from lit_efficient.export.adapters import export_checkpoint

    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for name in ("plain", "dora"):
        task = LanguageModeling(CausalLMConfig(str(folder / "base"), dtype="bfloat16"))
        techniques: list[Any] = [] if name == "plain" else [LoRA(2, targets=["q_proj", "v_proj"], variant=name)]
        trainer = Trainer(max_steps=0, accelerator="cpu", callbacks=techniques, enable_checkpointing=False, **quiet)
        trainer.fit(task, _rows())
        trainer.save_checkpoint(folder / f"{name}.ckpt", weights_only=True)
        if techniques:
            export_checkpoint(folder / f"{name}.ckpt", folder / name, "peft", check=False)


def _rows() -> Any:
    import torch
    from torch.utils.data import DataLoader

    return DataLoader([{"input_ids": torch.arange(4), "labels": torch.arange(4)}], batch_size=1)


def _save(folder: Path, rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lit_efficient import CausalLMConfig, LanguageModeling, ShardedStrategy

    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=0, accelerator="cpu", devices=2, strategy=ShardedStrategy(),
                      enable_checkpointing=False, **quiet)  # fmt: skip
    loader = DataLoader([{"input_ids": torch.arange(4), "labels": torch.arange(4)}], batch_size=1)
    trainer.fit(LanguageModeling(CausalLMConfig(str(folder / "base"), dtype="bfloat16")), loader)
    trainer.save_checkpoint(folder / "sharded.ckpt")


def folders(folder: Path, layers: int) -> Found:
    """What is made of a checkpoint in shards of two processes; one that is damaged is refused by name."""
    from lit_efficient.commands import average, convert
    from lit_efficient.errors import LitEfficientError
    from lit_efficient.export.adapters import export_checkpoint

    _together(_save, folder)
    size = 2 * sum(sizes(layers)[part] for part in ("rest", "linear"))
    sharded = folder / "sharded.ckpt"
    asked = [str(sharded), "--output"]
    found: Found = {}
    for name, work in {
        "convert": partial(convert.run, [*asked, str(folder / "one.ckpt")]),
        "average of shards": partial(average.run, [str(sharded), *asked, str(folder / "mean.ckpt")]),
        "average of files": partial(average.run, [*[str(folder / "one.ckpt")] * 2, "--output", str(folder / "b.ckpt")]),
        "export of shards": partial(export_checkpoint, sharded, folder / "whole", "merged", check=False),
    }.items():
        found[name] = [size, peak_of(work)]
    for file in ("one.ckpt", "b.ckpt"):
        found[f"written: {file}"] = [size, (folder / file).stat().st_size / 2**20]
    piece = max(sharded.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with open(piece, "r+b") as opened:
        opened.seek(piece.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))
    for damage in (None, piece.unlink):
        if damage is not None:
            damage()
        for work in (partial(convert.run, [*asked, str(folder / "no.ckpt")]),
                     partial(export_checkpoint, sharded, folder / "no", "merged", check=False)):  # fmt: skip
            try:
                work()
                raise AssertionError("damage was not seen")
            except LitEfficientError as error:
                print(error)
                if piece.name not in str(error):
                    raise AssertionError("damage has no name") from error
    return found


def _together(work: Callable[..., None], *given: Any, after: tuple[Any, ...] = ()) -> None:
    """Run the work in two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(*given, rank, port, *after)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()


def _of_two(folder: Path, case: str) -> list[float]:
    """Return the result of the process with the larger peak."""
    results = multiprocessing.get_context("spawn").Queue()
    _together(_rank, folder, case, after=(results,))
    found = max((results.get(timeout=10) for _ in range(2)), key=lambda one: one[1])
    print(case, *found, flush=True)
    return found


def shards(folder: Path, layers: int) -> Found:
    return {case: _of_two(folder, case) for case in ("shards", "shards of codes")}


def techniques(folder: Path, layers: int) -> Found:
    """Two processes under ShardedStrategy, with what is made of the weights or stands beside them."""
    process = multiprocessing.get_context("spawn").Process(target=_prepare, args=(folder,))
    process.start()
    process.join()
    return {case: _of_two(folder, case) for case in SHARDED if not case.startswith("shards")}


def _llama(layers: int) -> Any:
    """Return a Llama with bfloat16 weights that are not mapped from a file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype="bfloat16"))
    torch.set_default_dtype(torch.float32)
    return model


def averages(folder: Path, layers: int) -> Found:
    import torch

    from lit_efficient import EMA, CheckpointAverage, PowerEMA

    model = _llama(layers)
    weights = 2 * sum(p.numel() for p in model.parameters()) / 2**20
    trainer: Any = SimpleNamespace(global_step=0, is_global_zero=True, log_dir=None, default_root_dir=str(folder))
    trainer.strategy = SimpleNamespace(broadcast=lambda value: value)
    found: Found = {}

    def case(name: str, ideal: float, work: Callable[..., object], *given: Any) -> None:
        found[name] = [ideal, peak_of(partial(work, *given))]

    def snapshots(name: str, **arguments: Any) -> None:
        power = PowerEMA(sigma_rels=(0.1,), snapshot_every_n_steps=2, dirpath=str(folder), **arguments)
        power.on_train_start(trainer, model)
        for trainer.global_step in (1, 2):  # the second is written
            case(name, 0.0, power.on_train_batch_end, trainer, model, None, None, 0)

    snapshots("snapshot of an average")
    snapshots("snapshot in bfloat16", dtype="bfloat16")
    for technique in (EMA(), CheckpointAverage(last_k=1, every_n_steps=1)):
        name = type(technique).__name__
        kept = isinstance(technique, CheckpointAverage)
        trainer.global_step = 0
        case(f"{name}: begin", 0.0 if kept else 2 * weights, technique.on_train_start, trainer, model)
        for trainer.global_step in (1, 2):
            case(f"{name}: step", weights if kept else 0.0, technique.on_train_batch_end, trainer, model, None, None, 0)
        held: Any = {"state_dict": model.state_dict()}
        mean = 2 * weights if kept else 0.0
        case(f"{name}: weights alone", mean + weights, technique.write_checkpoint, held, model)
        held.clear()
        case(f"{name}: swap", weights, technique.swap_in, model)
        held = {"state_dict": model.state_dict()}
        case(f"{name}: weights alone, swapped", 0.0, technique.write_checkpoint, held, model)
        held = {"state_dict": model.state_dict(), "callbacks": {}}
        case(f"{name}: all, swapped", 0.0, technique.write_checkpoint, held, model)
        case(f"{name}: back", 0.0, technique.swap_out, model)
        technique.forget()
    assert torch.isfinite(model.lm_head.weight).all()
    return found


def checkpoints(folder: Path, layers: int) -> Found:
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from lit_efficient import CausalLMConfig, LanguageModeling, SafeCheckpointIO

    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}]
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saver = ModelCheckpoint(folder / "runs", "best", monitor="train/loss", save_last=True, every_n_train_steps=1)
    saver.last_model_path = str(folder / "runs" / "last.ckpt")  # as the command line has it

    def run(path: str | None) -> Any:
        task = LanguageModeling(CausalLMConfig(str(folder / "base"), dtype="bfloat16"))
        callbacks = [saver] if path is None else []
        trainer = Trainer(max_steps=2, accelerator="cpu", callbacks=callbacks, plugins=[SafeCheckpointIO()],
                          enable_checkpointing=path is None, **quiet)  # fmt: skip
        trainer.fit(task, DataLoader(rows, batch_size=1), ckpt_path=path)
        return trainer

    size = sum(sizes(layers)[part] for part in ("rest", "linear"))
    found: Found = {"fit of AdamW": [8 * size, peak_of(lambda: run(None))]}
    written = list((folder / "runs").glob("*.ckpt"))
    held = sum({file.stat().st_ino: file.stat().st_size for file in written}.values()) / 2**20
    found[f"best and last, {len(written)} names"] = [6 * size, held]
    # The second weights and states; of the first the folder's file holds the weights.
    found["resume"] = [6 * size, peak_of(lambda: run(str(folder / "runs" / "last.ckpt")))]
    return found


def generation(folder: Path, layers: int) -> Found:

    from lit_efficient.models.generation.batched import generate
    from lit_efficient.models.generation.sampling import Sampling

    model = _llama(layers)
    tokens = 2048

    def work() -> None:
        generate(model, [list(range(tokens))], 1, sampling=Sampling(0.0), seeds=[0], stop=set())

    # The gate, the other half and their product of one layer; a position's logits are nothing beside them
    return {"generation": [3 * 2 * tokens * SHAPE["intermediate_size"] / 2**20, peak_of(work)]}


def formats(folder: Path, layers: int) -> Found:
    from lit_efficient import CausalLMConfig
    from lit_efficient.models.libraries.causal_lm import build

    size = sum(sizes(layers)[part] for part in ("rest", "linear"))
    found = {}
    kinds: Any = {"auto": 2, "float32": 4}
    for dtype, width in kinds.items():
        spec = CausalLMConfig(str(folder / "base"), dtype=dtype)
        found[f"built in {dtype}"] = [width * size, peak_of(partial(build, spec))]
    return found


def refusal(folder: Path, layers: int) -> Found:
    """Run export --format merged after the base is deleted."""
    from lit_efficient.errors import LitEfficientError
    from lit_efficient.export.adapters import export_checkpoint

    gone = (folder / "base").rename(folder / "moved")

    def refused() -> None:
        try:
            export_checkpoint(folder / "run.ckpt", folder / "refused", "merged")
        except LitEfficientError as error:
            print(error)
        else:
            raise AssertionError("exported")

    try:
        return {"merge without its base": [0.0, peak_of(refused)]}
    finally:
        gone.rename(folder / "base")


def _sd(folder: Path) -> tuple[Any, Any]:
    from lit_efficient import DiffusersModelConfig, LatentData
    from lit_efficient.models.libraries.text_encoder import CaptionReading, TextEncoderConfig
    from tests.data.images.toy_images import ToyImages

    os.environ["LIT_EFFICIENT_CACHE"] = str(folder / "facts")
    words = TextEncoderConfig(str(folder / "words"), captions=CaptionReading(tokenizer="bytes"), max_length=77)
    images = ToyImages(12, size=64, captions=True, channels=3, batch_size=1, labels=False)
    images.num_classes = 0
    images.class_names = ()
    vae = DiffusersModelConfig(str(folder / "vae"))
    return words, LatentData(images, vae, words, folder=str(folder / "latents"))


def _write_sd(folder: Path) -> None:
    from lit_efficient import DiffusersModelConfig
    from lit_efficient.models.libraries.diffusers_model import build
    from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig

    build(DiffusersModelConfig(config_fields=SD_VAE)).save_pretrained(folder / "vae")
    TextEncoder.load(TextEncoderConfig(config_fields=SD_TEXT, max_length=77)).network.save_pretrained(folder / "words")
    data = _sd(folder)[1]
    data.images.setup("fit")
    data.write_cache(batch_size=1)
    data.setup("fit")  # whose text encoder keeps what stands for no caption
    data.text_encoder.encode([""])


def _train_sd(folder: Path, results: Any) -> None:
    from lightning.pytorch import Trainer

    from lit_efficient import DiffusersModelConfig, LatentDiffusion, LoRA
    from lit_efficient.tasks.latent_generator import Samples

    data = _sd(folder)[1]

    def open_cache() -> None:
        data.prepare_data()
        data.setup("fit")

    found = {"cached latents": [0.0, peak_of(open_cache)]}
    found["their checkpoint"] = [0.0, peak_of(lambda: (data.codec.state_dict(), data.text_encoder.state_dict()))]
    task = LatentDiffusion(DiffusersModelConfig(config_fields=SD_UNET, dtype="bfloat16"), samples=Samples(count=0))
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=1, limit_val_batches=0, accelerator="cpu", enable_checkpointing=False,
                      callbacks=[LoRA(rank=RANK, save_base=True)], **quiet)  # fmt: skip
    fit = peak_of(lambda: trainer.fit(task, datamodule=data))
    size = sum(p.nbytes for p in task.network.parameters()) / 2**20
    # The factors are in float32: gradients, and two moments
    found["fit of SD 1.5"] = [size + 3 * sum(p.nbytes for p in task.parameters() if p.requires_grad) / 2**20, fit]
    found["save of SD 1.5"] = [0.0, peak_of(lambda: trainer.save_checkpoint(folder / "sd.ckpt"))]
    results.put(found)


def sd(folder: Path, layers: int) -> Found:
    """Cache latents of Stable Diffusion 1.5, fit adapters on its UNet, and export."""
    from lit_efficient.export.adapters import export_checkpoint
    from lit_efficient.export.pipelines import export_pipeline

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    for work, given in ((_write_sd, (folder,)), (_train_sd, (folder, results))):
        process = context.Process(target=work, args=given)
        process.start()
        found = results.get(timeout=3000) if work is _train_sd else {}
        process.join()
    os.environ["LIT_EFFICIENT_CACHE"] = str(folder / "facts")
    unet = found["fit of SD 1.5"][0]
    exported = {
        "export of SD 1.5": partial(
            export_checkpoint, folder / "sd.ckpt", folder / "plain", "safetensors", check=False
        ),
        "pipeline of SD 1.5": partial(export_pipeline, folder / "sd.ckpt", folder / "pipeline", check=False),
    }
    return found | {name: [unet, peak_of(work)] for name, work in exported.items()}


def _case(work: Callable[[Path, int], Any], folder: Path, layers: int, results: Any) -> None:
    results.put(work(folder, layers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--cases", default="qlora,merge,slices,shards")
    asked = parser.parse_args()
    layers = asked.layers
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = context.Process(target=write_base, args=(folder / "base", layers))
        writer.start()
        writer.join()
        found: Found = {}
        for work in [
            work
            for work in (
                qlora,
                merge,
                refusal,
                slices,
                shards,
                techniques,
                folders,
                averages,
                checkpoints,
                generation,
                formats,
                sd,
            )
            if work.__name__ in asked.cases.split(",")
        ]:
            results = context.Queue()
            process = context.Process(target=_case, args=(work, folder, layers, results))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{work.__name__} ended with {process.exitcode}: nothing is measured")
            found |= results.get(timeout=1)
        print(f"{'case':<15}  ideal MiB  measured MiB")
        for case, (ideal, measured) in found.items():
            print(f"{case:<15} {ideal:>10.0f}  {measured:>12.0f}")
        print(json.dumps({"layers": layers, **found}))


if __name__ == "__main__":
    main()
