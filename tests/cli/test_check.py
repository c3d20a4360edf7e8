"""``check`` refuses what ``fit`` refuses before its first step, in the same words, and accepts what fit accepts."""

import json
import signal
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lit_efficient.__main__ import main
from lit_efficient.files import configs
from tests.cli.toy_runs import ALLOW, fit
from tests.ranks import zero
from tests.support_cli import ToyData, ToyModel

HERE = __name__
CYCLE = ["--lr_scheduler.max_lr=1", "--lr_scheduler.total_steps=10"]
ONE_STEP = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0"]


def check(*arguments: str) -> int:
    return main(["check", *ALLOW, "-c", "base.yaml", *arguments])


@pytest.mark.parametrize("overlay", ["initialise", "tiled_mlp", "mixture_of_experts"])
def test_techniques_that_read_weights_pass_without_any(overlay, capsys):
    """Weights of a check have no values: neither are they zero at first, nor can others be put into them."""
    assert main(["check", "-c", "language_model", "-c", overlay]) == 0, capsys.readouterr().err


class Huge(ToyModel):
    """40 GB of weights, if they were made."""

    def _build(self, hidden: int) -> None:
        self.net = nn.Sequential(nn.Linear(100_000, 100_000), nn.Linear(100_000, 1))


class Reads(ToyModel):
    """Reads values while it is built."""

    def _build(self, hidden: int) -> None:
        super()._build(hidden)
        self.rates = torch.linspace(0, 1, 3).tolist()


class OfData(ToyModel):
    """Is as wide as the data says once it is set up."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__(hidden=hidden, late=True)

    def configure_model(self) -> None:
        if self.net is None:
            self._build(self.trainer.datamodule.width)


class Late(OfData):
    """Notes what a Ctrl-C would do while it is built."""

    handler: ClassVar[object] = None

    def configure_model(self) -> None:
        Late.handler = signal.getsignal(signal.SIGINT)
        self._build(4)


class Wide(ToyData):
    prepared: ClassVar[int] = 0

    def setup(self, stage: str) -> None:
        Wide.prepared += 1
        self.width = 5


class Missing(ToyData):
    def setup(self, stage: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", "rows.jsonl")


def test_it_says_what_would_run_and_leaves_nothing_behind(capsys):
    before, touched = sorted(Path.cwd().rglob("*")), ToyData.touched
    assert check("--trainer.callbacks+=LoRA", "--trainer.callbacks+=EMA", "--optimizer=AdamW") == 0
    said = capsys.readouterr().out
    assert sorted(Path.cwd().rglob("*")) == before
    assert ToyData.touched == touched
    assert ToyModel.last.trainer.global_step == 0
    assert "model: ToyModel, 117 parameters, 96 train" in said  # of 21 as it is written
    assert "\n  LoRA: 2 layers" in said
    assert "\n  EMA: " in said
    assert "not checked:\n  the data: ToyData was not prepared" in said


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model.late=true", "--model.hidden=8"],
        ["--trainer.callbacks+=QuantizeBase", "--trainer.callbacks+=LoRA", "--model.hidden=512"],
        [
            "--optimizer=FusedAdamW",
            "--lr_scheduler=OneCycleLR",
            "--lr_scheduler.max_lr=1e-3",
        ],  # as long as the data says
        ["--optimizer=MuonAdamW", "--trainer.callbacks+=CheckpointAverage"],
        ["--optimizer=ScheduleFreeAdamW"],
        ["--trainer.callbacks+=LowBitOptimizer", "--optimizer=AdamW", "--model.hidden=2000"],
        ["--model", f"{HERE}.Reads", "--trainer.callbacks+=LoRA"],
    ],
)
def test_what_fit_accepts_it_accepts(arguments, capsys):
    assert fit(*ONE_STEP, *arguments) == 0, capsys.readouterr().err
    assert check(*ONE_STEP, *arguments) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.max_step=3"],
        ["--trainer.max_steps=many"],
        ["--trainer.accelerator=gpu"],
        ["--trainer.devices=9999"],
        ["--trainer.default_root_dir=/proc/nowhere"],
        ["--model.hidden=0"],
        ["--model.hiden=4"],
        ["--model", f"{HERE}.Nothing"],
        ["--trainer.callbacks+=EMMA"],
        ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=2"],
        ["--trainer.callbacks+=EMA", "--trainer.callbacks+=CheckpointAverage"],
        ["--trainer.callbacks+=ChannelsLast"],
        ["--trainer.callbacks+=OffloadOptimizer"],
        ["--trainer.callbacks+=LoRA", "--trainer.callbacks.targets=[nothing]"],
        ["--trainer.callbacks+=StochasticDepth"],
        ["--trainer.callbacks+=ScheduleFree", "--optimizer=Lion"],
        ["--optimizer=AdamW", "--optimizer.lr=-1"],
        ["--lr_scheduler=CosineAnnealingLR"],
        ["--optimizer=AdamW", "--lr_scheduler=CosineAnnealingLR", "--trainer.max_epochs=-1"],
        ["--ckpt_path=none.ckpt"],
        ["--without=EMA"],
        ["-c", "misssing"],
        ["--trainer.plugins+=lightning.pytorch.plugins.io.TorchCheckpointIO"],
    ],
)
def test_what_fit_refuses_it_refuses_in_the_same_words(arguments, capsys):
    assert fit(*arguments) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert check(*arguments) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")] == said
    assert len(said) == 1


def test_a_network_of_any_size_takes_no_memory(capsys):
    assert check("--model", f"{HERE}.Huge", "--trainer.callbacks+=LoRA", "--optimizer=AdamW") == 0
    said = capsys.readouterr().out
    assert "10,000,100,000 parameters" not in said  # those of the adapters are there, too
    assert "built on the meta device" in said
    quantized = ["--model", f"{HERE}.Huge", "--trainer.callbacks+=QuantizeBase", "--trainer.callbacks+=LoRA"]
    assert check(*quantized, "--trainer.callbacks+=EMA", "--optimizer=AdamW") == 0
    said = capsys.readouterr().out
    assert "2,400,008 train" in said  # the factors, beside codes that are empty
    assert all(f"\n  {name}: " in said for name in ("QuantizeBase", "LoRA", "EMA"))
    assert "need the weights" not in said
    assert check(*quantized, "--trainer.callbacks.targets=[nothing]") == 2
    assert "the pattern 'nothing' matches none of the 2 modules" in capsys.readouterr().err


@pytest.mark.parametrize("quantize", ["null", "nf4"])
def test_a_folder_of_any_size_is_not_read(tmp_path, capsys, quantize):
    wide = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 5, "vocab_size": 1000}
    fields = {**wide, "num_attention_heads": 32, "tie_word_embeddings": False}
    with torch.device("meta"):
        state = LlamaForCausalLM(LlamaConfig(**fields)).state_dict()
    ends = [*accumulate(2 * weight.numel() for weight in state.values())]
    places = {name: [end - 2 * weight.numel(), end] for (name, weight), end in zip(state.items(), ends)}
    entries = {n: {"dtype": "BF16", "shape": [*state[n].shape], "data_offsets": at} for n, at in places.items()}
    header = json.dumps(entries).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:  # 2.5 GiB, of which the disk holds a page
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    named = [f"--model.model.name_or_path={tmp_path}", f"--data.tokenizer={tmp_path}"]
    assert main(["check", "-c", "llm/lora", *named, f"--model.model.quantize={quantize}"]) == 0
    said = capsys.readouterr().out
    assert "built on the meta device" in said
    assert "LoRA: 35 layers" in said
    assert ("the quantised base: it was built in the number format of its files, not in nf4" in said) is (
        quantize == "nf4"
    )


class Greedy(ToyModel):
    """Wants more memory than any machine has, and more than an empty network."""

    def _build(self, hidden: int) -> None:
        super()._build(hidden)
        self.register_buffer("table", torch.empty(2**45, device="cpu"))


def test_want_of_memory_ends_with_3(capsys):
    assert check("--model", f"{HERE}.Greedy") == 3
    assert "error: out of memory" in capsys.readouterr().err


def test_weights_are_made_where_they_are_read_and_data_where_a_size_comes_from_it(capsys):
    assert check("--model", f"{HERE}.Reads") == 0
    assert "built on the CPU\n" in capsys.readouterr().out
    wide = ["--model", f"{HERE}.OfData", "--data", f"{HERE}.Wide"]
    assert check(*wide) == 0
    said = capsys.readouterr().out
    assert Wide.prepared == 1
    assert "ToyModel, 26 parameters" in said.replace("OfData", "ToyModel")
    assert "with its data" in said
    assert "not prepared" not in said


def test_ctrl_c_ends_a_check():
    before = signal.getsignal(signal.SIGINT)
    assert check("--model", f"{HERE}.Late") == 0
    assert Late.handler is before
    assert signal.getsignal(signal.SIGINT) is before


def test_data_is_looked_at_when_asked_for(capsys):
    missing = ["--data", f"{HERE}.Missing"]
    assert check(*missing) == 0
    assert "Missing was not prepared (use --with_data)" in capsys.readouterr().out
    assert check(*missing, "--with-data") == fit(*missing) == 2
    assert capsys.readouterr().err.count("error: rows.jsonl: No such file or directory") == 2


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ["language_model", "-c", "loggers/csv"],  # which wants a folder, and has none without a run
        ["language_model", "-c", "kahan_summation"],  # which wants weights in the precision of the run
    ],
)
def test_what_a_run_gives_to_its_parts_they_have(arguments, capsys):
    before = sorted(Path.cwd().rglob("*"))
    assert main(["check", "-c", *arguments]) == 0, capsys.readouterr().err
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["language_model", "--data.sequence_length=1024"], ["sequence_length", "max_length = 512", "1024"]),
        (
            ["latent_diffusion", "--model.backbone.size=16"],
            ["backbone.size must be 8, as the data's latents are", "16"],
        ),
        (
            ["language_model", "--optimizer=SGD", "--lr_scheduler=OneCycleLR", *CYCLE],
            ["OneCycleLR: total_steps must be at least the run's steps, 1000", "10"],
        ),
    ],
)
def test_what_data_and_model_say_of_each_other_is_compared_before_data_is_read(arguments, words, capsys, monkeypatch):
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", "/dev/null/none")  # where nothing can be kept
    assert main(["check", "-c", *arguments]) == 2
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == [], said


@pytest.mark.turns(9)
@pytest.mark.parametrize(
    "overlay", [name for name, path in configs.known().items() if path.parent.name == "techniques"]
)
def test_an_overlay_is_taken_or_refused_with_its_reason(overlay, capsys):
    code = main(["check", "-c", "language_model", "-c", overlay])
    captured = capsys.readouterr()
    assert code == 0 or "error: " in captured.err
    assert ("Everything that was checked is valid" in captured.out) is (code == 0)
    assert "Traceback" not in captured.err


class Stream(IterableDataset):
    """Rows without a split; or each process's own."""

    def __init__(self, split):
        self.split = split

    def __iter__(self):
        rank, parts = (distributed.get_rank(), distributed.get_world_size()) if self.split else (0, 1)
        return iter(torch.arange(24.0).reshape(8, 3)[rank::parts])


class Streamed(ToyData):
    """Rows of a stream.

    Args:
        split: Whether each process reads others.
    """

    def __init__(self, split: bool = False) -> None:
        super().__init__()
        self.split = split

    def _loader(self):
        return DataLoader(Stream(self.split), batch_size=1)


class EachLogs(Logger):
    """Logs from each process."""

    name, version = "each", "0"

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args, **kwargs):
        pass


MANY = ["--devices", "4", "--nodes", "2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--with_data", "--data.rows=7"], "the training data (TensorDataset) has 7 rows for 8 processes"),
        (["--with_data", f"--data={HERE}.Streamed"], "the training data (Stream) is not split: processes 0 and 1 of 8"),
        (["--with_data", "--trainer.use_distributed_sampler=false"], "leave trainer.use_distributed_sampler at true"),
        (["--trainer.logger", f"{HERE}.EachLogs"], "EachLogs: its log_metrics is not decorated with rank_zero_only"),
        (["--trainer.strategy", "ModelParallelStrategy", "-c", "gradual_unfreezing"], "GradualUnfreezing cannot be"),
        (
            ["--trainer.strategy=ShardedStrategy", "--trainer.strategy.replicas=3"],
            "a divisor of the world size (8), got 3",
        ),
        (["--trainer.strategy=ShardedStrategy"], "ShardedStrategy: found no repeated blocks"),
        (
            ["--with_data", "--trainer.strategy=ShardedStrategy", "--trainer.strategy.parallel={context: 2}"],
            "ShardedStrategy: found no repeated blocks",  # that two processes share rows is no fault of the data
        ),
        (
            ["--trainer.strategy=ReplicatedStrategy", "--model", f"{HERE}.Deep", "-c", "stochastic_depth"],
            "ReplicatedStrategy: StochasticDepth draws in each step which layers run",
        ),
        (["--devices", "0"], "--devices must be a whole number of at least 1, got 0"),
        (
            ["-c", "scale/slurm"],
            "SLURMEnvironment reads SLURM_NODEID, which srun sets for the processes that it starts",
        ),
    ],
)
def test_what_many_devices_would_refuse_is_refused_without_them(arguments, said, capsys):
    assert check(*MANY, *arguments) == 2
    assert said in capsys.readouterr().err


class Residual(torch.nn.Sequential):
    def forward(self, input):
        return input + super().forward(input)


class Deep(ToyModel):
    def _build(self, hidden: int) -> None:
        blocks = [Residual(torch.nn.Linear(hidden, hidden)) for _ in range(3)]
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, hidden), torch.nn.Sequential(*blocks), torch.nn.Linear(hidden, 1)
        )


class Meshed(ToyModel):
    """Asks for what only many processes have."""

    built: ClassVar[int] = 0

    def configure_model(self) -> None:
        Meshed.built += 1
        self._build(self.device_mesh.size())


class Unread(ToyModel):
    def configure_model(self) -> None:
        raise RuntimeError("unable to mmap 8 bytes")


def test_only_what_lacks_the_processes_is_left_out(capsys):
    many = [*MANY, "--trainer.strategy=ModelParallelStrategy"]
    assert check(*many, "--model", f"{HERE}.Meshed") == 0
    assert Meshed.built == 1
    assert "  configure_model, which needs the mesh of several processes, and" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="unable to mmap"):
        check(*MANY, "--trainer.strategy=ShardedStrategy", "--model", f"{HERE}.Unread")


def test_what_works_on_many_devices_is_said_to(capsys):
    assert check(*MANY, "--with_data", f"--data={HERE}.Streamed", "--data.split=true") == 0
    assert check(*MANY, "--with_data", "--data.rows=72", "--trainer.accumulate_grad_batches=2") == 0
    said = capsys.readouterr().out
    assert "72 rows, 5 batches an epoch for each of 8 processes" in said
    assert "the last 1 of 5 batches form a shorter window; others accumulate 2" in said
    assert "the 8 processes: the check is one process" in said


ZERO = [*MANY, "--trainer.strategy=ZeroStrategy", "--trainer.strategy.stage=3"]
UNEVEN = ["--with_data", "--data.rows=72", "--trainer.accumulate_grad_batches=2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-c", "ema"], "EMA reads weights that stage 3 has freed"),
        (["--trainer.strategy.node_size=3"], "node_size must be a divisor of the 8 processes"),
        (["--trainer.gradient_clip_val=1", "--trainer.gradient_clip_algorithm=value"], "DeepSpeed clips by norm"),
        (["--optimizer=MuonAdamW"], "ZeroStrategy: MuonAdamW needs whole matrices"),
        (UNEVEN, "the last 1 of 5 batches are not a whole window of 2"),
    ],
)
def test_what_deepspeed_would_refuse_in_each_process_is_refused_without_them(arguments, said, capsys, monkeypatch):
    zero.stand_in(monkeypatch)
    assert check(*ZERO, *arguments) == 2
    assert said in capsys.readouterr().err
    assert check(*ZERO, *UNEVEN, "--trainer.limit_train_batches=4") == 0
