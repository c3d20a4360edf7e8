"""The mean of files: equal to the mean, in the memory of one, and refused where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.real_size import peak_of
from lit_efficient import EMA, CheckpointAverage, ConfigurationError, LitEfficientError, LoRA, restore
from lit_efficient.commands.average import average_files, greedy_soup, merge_files, run
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import read
from lit_efficient.files.checkpoints import write as write_file
from lit_efficient.mechanisms.averages.merging import keep_largest, merged_change
from tests import processes
from tests.support import Toy, assert_equal, data, trainer, weights
from tests.support_cli import export


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


# Merges of fine-tuned models ------------------------------------------------------------------------------------------


def tuned(tmp_path: Path, count: int = 3) -> tuple[Path, list[Path], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Files of a base and of models that were fine-tuned from it, and their weights."""
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(6, 7, generator=generator), "b": torch.randn(5, generator=generator)}
    models = [{n: t + torch.randn(t.shape, generator=generator) for n, t in base.items()} for _ in range(count)]
    files = [write(tmp_path / f"{i}.ckpt", **model, count=torch.tensor(i)) for i, model in enumerate(models)]
    return write(tmp_path / "base.ckpt", **base, count=torch.tensor(9)), files, base, models


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
@pytest.mark.parametrize("weights_", [None, [0.5, -1.0, 2.0]])
def test_merges_are_pefts(method: str, weights_: Any, tmp_path: Path) -> None:
    from peft.utils import merge_utils

    base_file, files, base, models = tuned(tmp_path)
    merged = merge_files(files, method, base_file, weights_, density=0.4)
    for name, start in base.items():
        changes = [model[name] - start for model in models]
        given = torch.tensor(weights_ or [1.0] * 3)
        more = {} if method == "task_arithmetic" else {"density": 0.4}
        expected = start + getattr(merge_utils, method)(changes, given, **more)
        torch.testing.assert_close(merged["state_dict"][name], expected)
    assert merged["state_dict"]["count"] == 2
    assert merged["lit_efficient"]["weights"] == f"{method} of 3 models"
    assert "optimizer_states" not in merged


def test_weights_that_are_tied_in_the_last_file_alone_are_merged_apart(tmp_path: Path) -> None:
    start = torch.zeros(3)
    base = write(tmp_path / "base.ckpt", a=start, b=start)
    apart = write(tmp_path / "apart.ckpt", a=start + 1, b=start + 5)
    both = start + 3
    tied = write(tmp_path / "tied.ckpt", a=both, b=both)
    merged = merge_files([apart, tied], "task_arithmetic", base)["state_dict"]
    assert_equal(merged, {"a": start + 4, "b": start + 8})
    merged = merge_files([tied, tied], "task_arithmetic", base)["state_dict"]
    assert merged["a"] is merged["b"]


def test_ties_keeps_the_change_of_a_single_number() -> None:
    change = torch.tensor([[2.0]])
    assert merged_change(change, torch.ones(1), "ties", 0.5).tolist() == [2.0]
    assert keep_largest(torch.ones(0), 0.5).tolist() == []


def test_dare_keeps_a_share_of_the_changes_and_their_mean() -> None:
    change = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(1)
    found = merged_change(change, ones, "dare_linear", 0.25, torch.Generator().manual_seed(1))
    kept = found != 0
    torch.testing.assert_close(found[kept], 4 * change[0][kept])
    assert float(kept.float().mean()) == pytest.approx(0.25, abs=0.01)
    again = merged_change(change, ones, "dare_linear", 0.25, torch.Generator().manual_seed(1))
    assert torch.equal(found, again)
    changes = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    weights_ = torch.tensor([1.0, 2.0, 3.0])
    whole = [merged_change(changes, weights_, method, 1.0) for method in ("dare_ties", "ties")]
    torch.testing.assert_close(*whole)


def test_merged_adapters_are_pefts(tmp_path: Path) -> None:
    import peft

    files, modules = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        run_ = trainer([LoRA(rank=2, alpha=6.0, seed=seed)], max_epochs=1 + seed)
        run_.fit(module := Toy(), data(), data())
        run_.save_checkpoint(tmp_path / f"{seed}.ckpt")
        files.append(str(tmp_path / f"{seed}.ckpt"))
        modules.append(module)
        assert export([files[-1], "--format", "peft", "--output", str(tmp_path / f"peft{seed}")]) == 0
    output = tmp_path / "merged.ckpt"
    assert run([*files, "--method", "ties", "--density", "0.7", "--weights", "0.5,2", "--output", str(output)]) == 0
    restore(merged := Toy(), output)
    model = peft.PeftModel.from_pretrained(Toy().net, tmp_path / "peft0", adapter_name="a")
    model.load_adapter(tmp_path / "peft1", adapter_name="b")
    model.add_weighted_adapter(["a", "b"], [0.5, 2.0], "both", combination_type="ties", density=0.7)
    model.set_adapter("both")
    x = next(iter(data()))[0]
    torch.testing.assert_close(merged.net(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_greedy_soup_takes_what_improves_the_mean() -> None:
    values = {"a": 1.0, "b": -1.2, "c": 5.0, "d": 0.1}  # the metric is the distance of the mean from zero

    def score(files: Any) -> float:
        return abs(sum(values[file] for file in files) / len(files))

    scores = {file: score([file]) for file in values}
    assert greedy_soup([*values], scores, score, 1.0) == ["d"]
    del values["d"], scores["d"]
    assert greedy_soup([*values], scores, score, 1.0) == ["a", "b"]
    negative = {file: -value for file, value in scores.items()}
    assert greedy_soup([*values], negative, lambda files: -score(files), -1.0) == ["a", "b"]


def test_a_greedy_soup_leaves_out_files_whose_metric_is_nan() -> None:
    for order in ("abc", "bca", "cab"):
        scores = {file: {"a": float("nan"), "b": 2.0, "c": 1.0}[file] for file in order}
        assert greedy_soup([*scores], scores, lambda files: float(len(files)), 1.0) == ["c"]
    with pytest.raises(ConfigurationError, match="the metric of every file is nan"):
        greedy_soup(["a"], {"a": float("nan")}, lambda _: 0.0, 1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "ties"], "0.ckpt has 'w', which is no plain LoRA adapter. Whole models need --base"),
        (["--base", "base.ckpt"], "--base is for --method task_arithmetic, ties, dare_linear, dare_ties"),
        (["--method", "ties", "--base", "base.ckpt", "--density", "0"], "density must be above 0 and at most 1, got 0"),
        (["--method", "ties", "--base", "base.ckpt", "--weights", "1,2"], r"one number a file \(3\)"),
        (
            ["--method", "ties", "--base", "base.ckpt", "--weights", "linear"],
            "or left out, with --method, got 'linear'",
        ),
        (["--greedy"], "--greedy needs -c CONFIG"),
        (["--greedy", "-c", "x.yaml", "--weights", "1,2,3"], "leave out --method and --weights"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tuned(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        run(["0.ckpt", "1.ckpt", "2.ckpt", "--output", "out.ckpt", *words])
    assert not Path("out.ckpt").exists()


def test_sharded_model_folders_are_merged_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    states = []
    for number in range(3):
        torch.manual_seed(number)
        model = LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / f"{number}", max_shard_size="2KB")
        states.append(model.state_dict())
    output = tmp_path / "out.safetensors"
    folders = [str(tmp_path / f"{number}") for number in range(3)]
    words = ["--method", "task_arithmetic", "--weights", "1,2", "--base", folders[2], "--output", str(output)]
    assert run([*folders[:2], *words]) == 0
    found = load_file(output)
    assert found.keys() == states[0].keys() - {"lm_head.weight"}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, states[0][name] + 2 * states[1][name] - 2 * states[2][name])
    shard = next((tmp_path / "1").glob("model-00002-of-*"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        average_files(folders[:2])


def test_adapters_of_another_base_or_scale_are_neither_merged_nor_averaged(tmp_path: Path) -> None:
    for number in range(2):
        module = Toy()
        torch.nn.init.constant_(module.net.stem.weight, float(number))
        run_ = trainer([LoRA(rank=2)], max_steps=1)
        run_.fit(module, data(), data())
        run_.save_checkpoint(tmp_path / f"{number}.ckpt")
    with pytest.raises(ConfigurationError, match=r"1.ckpt and .*0.ckpt have different bases"):
        merge_files([tmp_path / "0.ckpt", tmp_path / "1.ckpt"], "ties")
    with pytest.raises(ConfigurationError, match=r"1.ckpt and .*0.ckpt have different bases"):
        average_files([tmp_path / "0.ckpt", tmp_path / "1.ckpt"])
    run_ = trainer([LoRA(rank=2, alpha=1.0, seed=1)], max_steps=1)
    run_.fit(Toy(), data(), data())
    run_.save_checkpoint(tmp_path / "scale.ckpt")
    run_ = trainer([LoRA(rank=2)], max_steps=1)
    run_.fit(Toy(), data(), data())
    run_.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(ConfigurationError, match="have different settings of the adapters"):
        average_files([tmp_path / "scale.ckpt", tmp_path / "other.ckpt"])


def test_adapters_of_stacked_experts_are_merged(tmp_path: Path) -> None:
    values = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    files = [
        write(tmp_path / f"{i}.ckpt", **{"experts.lora_A_up": v, "experts.lora_B_up": v}) for i, v in enumerate(values)
    ]
    merged = merge_files(files, "task_arithmetic", weights=[4, 1])["state_dict"]
    torch.testing.assert_close(merged["experts.lora_A_up"], 2 * values[0] + values[1])
    beside = [write(tmp_path / f"{i}.ckpt", **{"q.lora_A": v, "q.lora_A_other": v}) for i, v in enumerate(values)]
    with pytest.raises(ConfigurationError, match=r"has 'q.lora_A_other', which is no plain LoRA adapter"):
        merge_files(beside, "ties")
