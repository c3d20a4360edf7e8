"""Row 13: two equal runs give the same bits. The effect of the numbers of threads and processes is bounded."""

from __future__ import annotations

import csv
import functools
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.trust_rows import Piece
from benchmarks.trust_rows.resumes import TIMED, quiet, root

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 3
_COMMAND = "python -m lit_efficient fit "  # of a header: those of several machines have none
# What needs files from the network, or steps that are long even when they are few.
LEFT_OUT = {"diffusion/imagenet_int8", "diffusion/photos_all", "diffusion/photos_autoencoder", "diffusion/digits_all"}
LEFT_OUT |= {"diffusion/images_autoencoder"}
LEFT_OUT |= {"loggers/tensorboard", "loggers/wandb"}  # rows are compared as CSV here; see resume-loggers
# What needs a GPU, several processes, DeepSpeed, a teacher from the network, or a config of the reader's own.
LEFT_OUT |= {f"techniques/{name}" for name in ("activation_offload", "block_swap", "offload_optimizer", "empty_cache")}
LEFT_OUT |= {f"techniques/{name}" for name in ("float8_precision", "latent_alignment", "hidden_alignment")}
LEFT_OUT |= {f"techniques/{name}" for name in ("fast_matmul", "exact_resume", "feature_matching")}
LEFT_OUT |= {f"techniques/{name}" for name in ("no_bias_before_norm", "replace_head")}
LEFT_OUT |= {f"scale/{path.stem}" for path in (CONFIGS / "scale").glob("zero_*.yaml")}
LEFT_OUT |= {"scale/long_rows", "scale/long_context"}
LEFT_OUT |= {"scale/expert_parallel", "techniques/experts_backend", "techniques/loss_free_balancing"}  # need experts
LEFT_OUT |= {"techniques/neftune", "techniques/prompt_tuning"}  # beside llm/lora, as above
# What starts from an export of llm/pretrain, or from a model of a hub.
_NEEDS = re.compile(r"^[^#\n]*runs/llm/base|llm/recipe|^\s+(name_or_path|path|student|teacher): [\w-]+/", re.MULTILINE)
SMALL = {"token_routing": "before=0", "apollo": "rank=2", "galore": "rank=2", "low_bit_optimizer": "min_size=64"}

SIZES = {
    "LanguageModeling": "model.dim=32 model.depth=2 model.num_heads=2 model.max_length=64",
    "PythonCorpus": "vocab_size=300 sequence_length=32 batch_size=4 val_fraction=0.2 files.paths=[source]",
    "LatentDiffusion": "backbone.width=32 backbone.depth=2 backbone.heads=2 backbone.size=4 backbone.channels=2 "
    "sampling_steps=2",
    "LatentDigits": "image_size=16 autoencoder.latent_channels=2 autoencoder.width=8 autoencoder_steps=5 judge_steps=5 "
    "batch_size=8",
    "DigitImages": "image_size=16 batch_size=8",
    "Autoencoding": "",
}
TASKS = {
    "language_model": ("LanguageModeling", "PythonCorpus"),
    "latent_diffusion": ("LatentDiffusion", "LatentDigits"),
    "autoencoder": ("Autoencoding", "DigitImages"),
}
FEW = f"--trainer.max_steps={STEPS} --trainer.limit_val_batches=1 --trainer.enable_model_summary=false "
FEW += "--trainer.accelerator=cpu --trainer.logger=CSVLogger --trainer.log_every_n_steps=1 --trainer.devices=1 "
FEW += "--trainer.val_check_interval=2 --trainer.check_val_every_n_epoch=null --trainer.default_root_dir=runs "
FEW = FEW.strip()


def _configs() -> list[str]:
    found = {str(path.relative_to(CONFIGS).with_suffix("")): path for path in sorted(CONFIGS.rglob("*.yaml"))}
    texts = {name: path.read_text("utf-8") for name, path in found.items() if name not in LEFT_OUT}
    return [name for name, text in texts.items() if _COMMAND in text and not _NEEDS.search(text)]


def words(name: str) -> list[str]:
    """Return the command for a small fit of a config, as in the header of the config."""
    text = (CONFIGS / f"{name}.yaml").read_text("utf-8")
    line = next(re.finditer(rf"{_COMMAND}(.*)", text))[1].split("  ")[0]
    given = shlex.split(line.partition(" #")[0])
    kinds = next((kinds for task, kinds in TASKS.items() if task in given), ())
    sizes = [
        f"--{'model' if i == 0 else 'data'}.{size}" for i, kind in enumerate(kinds) for size in SIZES[kind].split()
    ]
    small = SMALL.get(name.rpartition("/")[2])
    if small:
        sizes.append(f"--trainer.callbacks.{small}")
    samples = "SampleText" if "language_model" in given else "SampleImages"
    return ["fit", *given, *sizes, *FEW.split(), *(["--without", samples] if {*given} & {*TASKS} else [])]


def _main(arguments: list[str], threads: int) -> None:
    from lit_efficient.__main__ import main

    torch.set_num_threads(threads)
    with quiet():
        code = main(arguments)
    sys.exit(code)


@functools.cache
def _place() -> Path:
    """Return the folder in which fits run. It contains a corpus."""
    folder = Path(tempfile.mkdtemp(dir=root()))
    (folder / "source").mkdir()
    for i in range(40):
        text = f"def function_{i}(self):\n    return self.value_{i % 7} + {i}\n\n\n" * (3 + i % 5)
        (folder / "source" / f"file{i}.py").write_text(text)
    os.environ["LIT_EFFICIENT_CACHE"] = str(folder / "cache")
    return folder


def outcome(arguments: list[str], threads: int = 1) -> tuple[dict[str, Any], list[dict[str, str]]] | str:
    """Run a fit in a fresh process. Return its last checkpoint and rows, or its message if it failed."""
    from lit_efficient.testing import load
    from tests import processes

    place = _place()
    os.chdir(place)
    shutil.rmtree("runs", ignore_errors=True)
    log = place / "log"
    log.unlink(missing_ok=True)
    code = processes.run(_main, arguments, threads, log=log)
    if code:
        return f"code {code}: {' '.join(log.read_text().strip().splitlines()[-3:])}"[:300]
    run = Path("runs", "latest").resolve()
    content = load(run / "last.ckpt")
    for key in [key for key in content["callbacks"] if "Checkpoint" in key]:  # paths, which have the time in them
        del content["callbacks"][key]
    content["callbacks"].get("MaxBatchSize", {}).pop("budget_bytes", None)  # of the memory that is free just then
    table = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    return content, [{key: value for key, value in row.items() if key not in TIMED} for row in table]


def _try_twice(case: str, folder: Path) -> str:
    from lit_efficient.testing import assert_equal

    one = outcome(words(case))
    other = outcome(words(case))
    if isinstance(one, str) or isinstance(other, str):
        return one if isinstance(one, str) else str(other)
    try:
        assert_equal(one[0], other[0])
    except AssertionError as error:
        return str(error)[:300]
    return "" if one[1] == other[1] else "the rows differ"


# Threads -------------------------------------------------------------------------------------------------------------

# Sums are split among threads, so their last bits differ. What was measured over these steps, and twice that.
WIDE = ["--model.model.dim=256", "--data.batch_size=16", "--model.model.depth=3"]
OVERLAYS = ("-", "ema", "lora", "schedule_free", "low_bit_optimizer", "muon_adamw", "chunked_cross_entropy", "qlora")
BOUND = 2e-3


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of weights, relative to the largest weight of the tensor."""
    found = 0.0
    for name, a in one["state_dict"].items():
        if a.is_floating_point() and a.numel():
            gap = (a.double() - other["state_dict"][name].double()).abs().max()
            found = max(found, float(gap / a.double().abs().max().clamp_min(1e-12)))
    return found


def _threads() -> list[str]:
    return [f"{overlay} {kind}" for overlay in OVERLAYS for kind in ("2+2", "1+2")]


def _try_threads(case: str, folder: Path) -> str:
    overlay, kind = case.split()
    arguments = [*words("tasks/language_model"), *WIDE, *([] if overlay == "-" else ["-c", f"techniques/{overlay}"])]
    one, other = (outcome(arguments, int(threads)) for threads in kind.split("+"))
    if isinstance(one, str) or isinstance(other, str):
        return one if isinstance(one, str) else str(other)
    gap = distance(one[0], other[0])
    print(f"{case}: {gap:.2e}", flush=True)
    bound = BOUND if kind == "1+2" else 0.0
    return "" if gap <= bound else f"weights differ by {gap:.2e} of the largest, more than {bound:g}"


# Processes -----------------------------------------------------------------------------------------------------------

MADE = ("ExactResume", "EMA", "LoRA", "ScheduleFree", "StochasticDepth", "TokenWeightedAccumulation", "LowBitOptimizer")
RANKS_BOUND = 1e-4
CODES_BOUND = 2e-3  # of states of 8 bits, in which a last bit becomes another code: 9.1e-4 was measured


def _fit_ranks(name: str, ranks: int) -> None:
    import lightning.pytorch as L

    from lit_efficient.testing import data, trainer
    from tests.contract.table import case, make_all

    chosen = case(name)
    arguments = {**chosen.trainer, "max_epochs": 2, "use_distributed_sampler": False}
    if ranks > 1:
        arguments |= {"devices": ranks, "strategy": "ddp"}
    L.seed_everything(0, verbose=False)
    module = chosen.toy()
    if name == "TokenWeightedAccumulation":
        _mean_over_tokens(module)
    with quiet():
        made = trainer(make_all(name), **arguments)
        made.fit(module, _part(data(64, 8 // ranks), ranks), data())
    if made.is_global_zero:
        torch.save({"state_dict": module.state_dict()}, f"{ranks}.pt")


def _mean_over_tokens(module: Any) -> None:
    """Make the loss of the toy a mean over tokens instead of rows."""
    of_rows = module._sample_loss

    def weighed(batch: Any) -> Any:
        counts = (batch[0] > 0).sum(-1)
        return of_rows(batch) * counts / counts.float().mean()

    module._sample_loss = weighed


def _part(loader: Any, ranks: int) -> DataLoader:
    """Return a process's share of a loader's rows. In each step all processes together see the rows of one process."""
    own = DistributedSampler(loader.dataset, ranks, int(os.environ["RANK"]) if ranks > 1 else 0, shuffle=False)
    return DataLoader(loader.dataset, loader.batch_size, sampler=own)


def _try_ranks(case: str, folder: Path) -> str:
    from tests import processes

    name, kind = case.split()
    found = []
    for number, ranks in enumerate(map(int, kind.split("+"))):
        own = folder / str(number)
        own.mkdir()
        if ranks > 1:
            processes.run_ranks(_fit_ranks, own, name, ranks, processes=ranks)
        else:
            os.chdir(own)
            _fit_ranks(name, 1)
        found.append(torch.load(own / f"{ranks}.pt"))
    gap = distance(*found)
    print(f"{case}: {gap:.2e}", flush=True)
    bound = 0.0
    if kind == "1+2":
        bound = CODES_BOUND if name == "LowBitOptimizer" else RANKS_BOUND
    return "" if gap <= bound else f"weights differ by {gap:.2e} of the largest, more than {bound:g}"


PIECES = (
    Piece(
        13,
        "same-twice",
        "shipped configs and overlays that need nothing made before, small, run twice in fresh processes: all bits of "
        "the last checkpoint and all rows are the same",
        _configs,
        _try_twice,
        in_ci=0,
    ),
    Piece(
        13,
        "same-with-threads",
        "a language model with each of eight techniques: two threads give the same bits twice, and one and two differ "
        f"by {BOUND:g} of a tensor's largest weight at most",
        _threads,
        _try_threads,
        in_ci=0,
    ),
    Piece(
        13,
        "same-with-ranks",
        "the toy with each of seven techniques: two processes give the same bits twice, and one with batches of twice "
        f"the size differs by {RANKS_BOUND:g} of a tensor's largest weight at most, {CODES_BOUND:g} with 8-bit states",
        lambda: [f"{name} {kind}" for name in MADE for kind in ("2+2", "1+2")],
        _try_ranks,
        in_ci=0,
    ),
)
