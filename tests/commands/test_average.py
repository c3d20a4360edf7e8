"""The mean of files: equal to the mean, in the memory of one, and refused where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.real_size import peak_of
from lit_efficient import EMA, CheckpointAverage, ConfigurationError, LitEfficientError, restore
from lit_efficient.commands.average import average_files, run
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import read
from lit_efficient.files.checkpoints import write as write_file
from tests import processes
from tests.support import Toy, assert_equal, data, trainer, weights


def write(path: Path, **state: torch.Tensor) -> Path:
    torch.save({"state_dict": state, "optimizer_states": [1], "hyper_parameters": {"width": 3}}, path)
    return path


def test_equals_the_mean_of_the_files(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(50, generator=generator) for _ in range(5)]
    files = [
        write(tmp_path / f"{i}.ckpt", w=v, half=v.bfloat16(), batches=torch.tensor(i)) for i, v in enumerate(values)
    ]
    mean = average_files(files)
    torch.testing.assert_close(mean["state_dict"]["w"], torch.stack(values).mean(0), rtol=1e-6, atol=1e-6)
    assert mean["state_dict"]["half"].dtype == torch.bfloat16
    expected = torch.stack([v.bfloat16().float() for v in values]).mean(0)
    torch.testing.assert_close(mean["state_dict"]["half"].float(), expected, rtol=2**-8, atol=1e-6)
    assert mean["state_dict"]["batches"] == 4
    assert mean["hyper_parameters"] == {"width": 3}
    assert mean["lit_efficient"]["weights"] == "average of raw"
    assert "optimizer_states" not in mean
    linear = average_files(files, [1, 2, 3, 4, 5])["state_dict"]["w"]
    torch.testing.assert_close(linear, sum((i + 1) / 15 * v for i, v in enumerate(values)))
    assert_equal(linear, average_files(files, "linear")["state_dict"]["w"])


def test_tied_weights_are_one_in_the_mean(tmp_path: Path) -> None:
    tied = torch.ones(3)
    torch.save({"state_dict": {"a": tied, "b": tied, "c": tied + 1}}, tmp_path / "x.ckpt")
    mean = average_files([tmp_path / "x.ckpt"] * 2)["state_dict"]
    assert mean["a"] is mean["b"]
    assert_equal(mean, {"a": tied, "b": tied, "c": tied + 1})


def test_zeros_keep_their_sign_and_parameters_are_averaged(tmp_path: Path) -> None:
    zeros = {"w": torch.nn.Parameter(torch.tensor([-0.0, 0.0])), "half": torch.tensor([-0.0, 0.0]).bfloat16()}
    file = write(tmp_path / "x.ckpt", **zeros)
    for count in (1, 2):
        mean = average_files([file] * count)["state_dict"]
        assert_equal({n: mean[n].signbit() for n in zeros}, dict.fromkeys(zeros, torch.tensor([True, False])))


def test_equal_codes_of_one_byte_stay(tmp_path: Path) -> None:
    codes = torch.tensor([-2.0, 0.5]).to(torch.float8_e4m3fn)
    file = write(tmp_path / "x.ckpt", a=codes, b=codes, scale=torch.ones(1))
    mean = average_files([file, write(tmp_path / "y.ckpt", a=codes, b=codes, scale=torch.ones(1))])["state_dict"]
    assert_equal({name: mean[name].view(torch.uint8) for name in "ab"}, dict.fromkeys("ab", codes.view(torch.uint8)))


def test_the_command_writes_what_the_trainer_validates(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    files, states = [], []
    for epochs in (1, 2):
        run_ = trainer(max_epochs=epochs)
        run_.fit(Toy(), data(), data())
        run_.save_checkpoint(tmp_path / f"{epochs}.ckpt", weights_only=False)
        files.append(str(tmp_path / f"{epochs}.ckpt"))
        states.append(weights(run_.lightning_module))
    assert run([*files, "--output", str(tmp_path / "mean.ckpt"), "--weights", "0.25,0.75"]) == 0
    assert "Wrote the 0.25,0.75 mean of 2 files" in (out := capsys.readouterr().out)
    assert "(raw weights)" in out
    module = Toy()
    trainer().validate(module, data(), ckpt_path=tmp_path / "mean.ckpt", verbose=False)
    expected = {name: 0.25 * states[0][name] + 0.75 * states[1][name] for name in states[0]}
    torch.testing.assert_close(weights(module), expected)
    run([*files, "--output", str(tmp_path / "mean.safetensors")])
    run([str(tmp_path / "mean.safetensors"), "--output", str(tmp_path / "same.safetensors")])
    assert_equal(load_file(tmp_path / "mean.safetensors"), load_file(tmp_path / "same.safetensors"))


@pytest.mark.parametrize(
    ("technique", "kind"), [(EMA(0.5), "ema"), (CheckpointAverage(every_n_steps=1), "average")], ids=["EMA", "average"]
)
def test_of_runs_with_an_average_it_takes_what_they_validated(
    technique: Any, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    raw, averages, module = [], [], Toy()
    for steps in (3, 6):
        run_ = trainer([technique], max_steps=steps)
        run_.fit(module, data(), data())
        run_.save_checkpoint(tmp_path / f"{steps}.ckpt", weights_only=False)
        raw.append(weights(module))
        averages.append(weights(restore(Toy(), tmp_path / f"{steps}.ckpt")))
    files = [str(tmp_path / "3.ckpt"), str(tmp_path / "6.ckpt")]
    for of, states in (("auto", averages), ("average", averages), ("raw", raw)):
        name = "raw" if of == "raw" else kind
        assert run([*files, "--output", str(tmp_path / "mean.ckpt"), "--weights-of", of]) == 0
        assert f"({name} weights)" in capsys.readouterr().out
        assert read(tmp_path / "mean.ckpt")["lit_efficient"]["weights"] == f"average of {name}"
        expected = {name: (tensor + states[1][name]) / 2 for name, tensor in states[0].items()}
        torch.testing.assert_close(weights(restore(Toy(), tmp_path / "mean.ckpt")), expected)
    plain = write(tmp_path / "plain.ckpt", **module.state_dict())
    with pytest.raises(ConfigurationError, match=rf"plain.ckpt has weights of the kind 'raw', and .* '{kind}'"):
        average_files([files[0], plain])
    with pytest.raises(LitEfficientError, match=r"plain.ckpt: the checkpoint holds no average of the weights"):
        average_files([plain], of="average")
    average_files([files[0], plain], of="raw")


def test_memory_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    save_file({f"w{i}": torch.ones(2**20) for i in range(8)}, tmp_path / "w.safetensors")  # 32 MiB
    log = tmp_path / "log"
    assert processes.run(_average_many, tmp_path / "w.safetensors", log=log) == 0, log.read_text()


def _average_many(path: Path) -> None:
    assert peak_of(lambda: average_files([str(path)] * 6)) < 3 * 32  # MiB


@pytest.mark.parametrize(
    ("states", "weights_", "message"),
    [
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], "uniform", "differ in 2 names: 'a'"),
        ([{"a": torch.ones(2)}, {"a": torch.ones(3)}], "uniform", r"'a' is \[3\] of torch.float32, and \[2\] of"),
        *(
            ([{"a": one}, {"a": other}], "uniform", f"of torch.{name}, and .* of torch.{before} in the other files")
            for one, other, before, name in [
                (torch.tensor([1, 2]), torch.ones(2), "int64", "float32"),
                (torch.ones(2), torch.ones(2) * 1j, "float32", "complex64"),
                (torch.ones(2), torch.ones(2).to(torch.float8_e4m3fn), "float32", "float8_e4m3fn"),
            ]
        ),
        (
            [{"a": torch.full([2], float(i)).to(torch.float8_e4m3fn)} for i in range(2)],
            "uniform",
            "'a' holds torch.float8_e4m3fn and differs between files: quantised weights have no mean",
        ),
        ([{"a": torch.tensor([1, 2])}, {"a": torch.tensor([1, 3])}], "uniform", "quantised weights have no mean"),
        ([{"a": torch.ones(2)}], [1.0, 2.0], r"one number a file \(1\) with a sum above 0, got \[1.0, 2.0\]"),
        ([{"a": torch.ones(2)}], [float("inf")], r"one number a file \(1\) with a sum above 0, got \[inf\]"),
        ([], "uniform", "name at least one file"),
    ],
)
def test_what_has_no_mean_is_refused(states: list, weights_: Any, message: str, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.ckpt", **state) for i, state in enumerate(states)]
    with pytest.raises(ConfigurationError, match=message):
        average_files(files, weights_)


def test_a_file_that_is_missing_broken_or_code_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "broken.ckpt").write_bytes(b"no zip")
    torch.save({"state_dict": {"w": Path("x")}}, tmp_path / "code.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    for name, message in (
        ("missing", "there is no file .*missing.ckpt"),
        ("broken", "broken.ckpt is damaged or truncated"),
        ("code", "refused to load .*code.ckpt. It holds objects of pathlib"),
        ("list", "list.ckpt holds no weights"),
    ):
        with pytest.raises(LitEfficientError, match=message):
            run([str(tmp_path / f"{name}.ckpt"), "--output", str(tmp_path / "out.ckpt")])
    assert not list(tmp_path.glob("*out*"))
    with pytest.raises(ConfigurationError, match=r"--weights must be uniform, .* got 'most'"):
        run([str(tmp_path / "list.ckpt"), "--output", str(tmp_path / "out.ckpt"), "--weights", "most"])


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_a_file_is_replaced_whole_or_not_at_all(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"weights{suffix}"
    write_file(path, {"state_dict": {"w": torch.arange(4.0)}})
    assert_equal(read(path)["state_dict"], {"w": torch.arange(4.0)})
    before = path.read_bytes()
    with pytest.raises((AttributeError, CheckpointError)):
        write_file(
            path, {"state_dict": {"w": torch.ones(4), "x": open}} if suffix == ".safetensors" else {"x": lambda: 0}
        )
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_flipped_bit_is_seen_in_every_tensor(tmp_path: Path) -> None:
    file = write(tmp_path / "a.ckpt", w=torch.arange(64.0), v=torch.ones(64))
    content = bytearray(file.read_bytes())
    for tensor in (torch.arange(64.0), torch.ones(64)):
        flipped = bytearray(content)
        flipped[content.index(tensor.numpy().tobytes()) + 9] ^= 4
        file.write_bytes(flipped)
        with pytest.raises(LitEfficientError, match=r"a.ckpt is damaged: its record .* does not match its checksum"):
            average_files([file])
