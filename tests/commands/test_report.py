"""Tests of ``report`` with runs that are complete, damaged, unfinished, resumed, diverged, old or hostile."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lit_efficient.__main__ import main
from lit_efficient.commands.report import folder_of, server
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.reporting.run_page import chart_of, facts, page
from lit_efficient.evidence.reporting.run_record import RunRecord, flattened
from lit_efficient.files.runs import point_latest, write_record
from tests.html_page import Page, alone

BAD = "</pre></style></title>--><script>alert({0})</script><img src=http://x.example/{0} onerror=alert({0})>\"'&amp;{0}"


def event(kind: str, step: int, **more: Any) -> str:
    return json.dumps({"time": 1.7e9 + step, "step": step, "kind": kind, **more}) + "\n"


def metrics(step: int, **values: Any) -> str:
    return event("metrics", step, epoch=0, values={name.replace("__", "/"): value for name, value in values.items()})


def whole(folder: Path, rate: float = 0.001, name: str = "") -> Path:
    """Write a run as ``fit`` does. ``name`` is used for every text that a user may choose."""
    (folder / "samples").mkdir(parents=True)
    write_record(folder, {})
    callback = {"class_path": "lit_efficient.LoRA", "init_args": {"rank": 4, "targets": [f"head{name}"]}}
    saver = {"class_path": "lightning.ModelCheckpoint", "init_args": {"monitor": "val/loss", "mode": "min"}}
    config = {"trainer": {"callbacks": [callback, saver], "max_steps": 40}, "optimizer": {"lr": rate}}
    (folder / "config.yaml").write_text(json.dumps(config | {f"seed{name}": name or 0}))
    (folder / "environment.json").write_text(json.dumps({"packages": {"torch": "2.13.0"}, "device": f"cpu{name}"}))
    (folder / "log.txt").write_text(f"\x1b[32mTechniques:\x1b[0m LoRA\x00\n{name}")
    (folder / "samples" / "step_0000040.txt").write_text(f"def main():{name}")
    for step in (20, 40):
        Image.new("L", (8, 8), step).save(folder / "samples" / f"step_{step:07d}.png")
    lines = [event("start", 0, parent=None, resumed=False)]
    lines += [event("techniques", 0, report=[{"name": f"LoRA{name}", "text": f"2 layers of rank 4{name}"}])]
    for step in range(10, 50, 10):
        values = {f"train__loss{name}": 4.0 - step / 20, "lr": rate, "tokens_per_second": 900.0 + step}
        lines += [metrics(step, **values, peak_memory_gib=0.5 + step / 100, data_wait=0.1)]
        lines += [metrics(step, val__loss=4.5 - step / 20)] if step % 20 == 0 else []
    lines += [event("checkpoint", 40, path=f"best{name}.ckpt", monitor="val/loss", score=2.5)]
    lines += [event("warning", 40, text=f"slow{name}")] * 3
    lines += [event("end", 40, reason=f"done{name}", next=[f"python -m lit_efficient generate {name}"])]
    (folder / "events.jsonl").write_text("".join(lines))
    return folder


def shown(*folders: Path) -> Page:
    return Page(page([RunRecord(folder) for folder in folders]))


def test_a_page_stands_alone_and_says_what_the_run_was(tmp_path: Path) -> None:
    folder = whole(tmp_path / "lora" / "2026-01-31_12-00-00")
    found = shown(folder)
    alone(found)
    pictures = [base64.b64decode(source.partition(",")[2]) for source in found.attributes("src")]
    assert pictures == [path.read_bytes() for path in sorted(folder.glob("samples/*.png"))]
    assert facts(RunRecord(folder)) == {
        "Ended": "done",
        "Best val/loss": "2.5 at step 40",
        "Speed": "930 tokens a second",
        "Waited for data": "10.0% of the time",
        "Peak memory": "0.9 GiB",
        "Trained": "40 steps in 40 s",
    }
    assert ["best.ckpt", "40", "val/loss", "2.5"] in list(found.cells())
    for text in ("done", "2.5 at step 40", "2 layers of rank 4", "def main():", "2.13.0", "Techniques:", "max_steps"):
        assert text in found.text
    assert found.attributes("aria-label") == [
        "Loss", "Learning rate", "Tokens a second", "Memory, GiB", "Share of time waiting for data",
    ]  # fmt: skip
    assert "train/loss 2" in found.text
    assert "val/loss 2.5" in found.text
    assert "not known" not in found.text.lower()
    assert ["slow", "3 times"] in list(found.cells())


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    numbers = itertools.count()

    class Bad(str):
        """Text that is different at each place where it is formatted."""

        def __format__(self, spec: str) -> str:
            return BAD.format(next(numbers))

    folder = whole(tmp_path / "<b onload=alert(1)>" / "a'\"<script>", name=Bad("x"))
    found = shown(folder, whole(tmp_path / "plain" / "run"))
    alone(found)
    told = found.text
    assert "a'\"<script>" in told
    count = next(numbers)
    assert count > 12
    kinds = [number for number in range(count) if BAD.format(number) in told or f"\\\"'&amp;{number}" in told]
    assert len(kinds) == count


def test_a_torn_a_strange_and_an_unfinished_line(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run")
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)[:-1]
    strange = ["[1, 2]\n", '"start"\n', '{"kind": "metrics", "values": 3}\n', "[" * 100_000 + "\n", '{"kind": []}\n']
    strange += ['{"kind": "metrics", "step": -1, "time": "now", "values": {"x": "y", "huge": 1' + "0" * 400 + "}}\n"]
    strange += ['{"kind": "techniques", "report": [1, {}]}\n', '{"kind": "end", "next": "x"}\n'.replace("end", "enD")]
    (folder / "events.jsonl").write_bytes("".join([*lines, *strange]).encode() + b'{"time": 17, "st\xff')
    run = RunRecord(folder)
    assert run.missing == ["4 lines of events.jsonl cannot be read"]
    assert run.metrics["val/loss"] == {20: 3.5, 40: 2.5}
    assert facts(run)["Ended"].startswith("not yet, or was killed after 20")
    alone(shown(folder))


def test_a_resumed_run_counts_what_came_later(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        file.write(event("start", 20, parent="../other/best.ckpt", resumed=True, time=1.7e9 + 5000))
        assert facts(RunRecord(folder))["Ended"] == "done"
        file.flush()
        going = RunRecord(folder)
        assert going.metrics["val/loss"] == {20: 3.5}
        assert list(going.metrics["train/loss"]) == [10, 20]
        assert not going.ended
        assert not going.next
        for loss in (9.0, 7.0):
            file.write(event("metrics", 30, values={"train/loss": loss}, time=1.7e9 + 5005))
        file.write(event("end", 30, reason="signal 15", time=1.7e9 + 5010))
    run = RunRecord(folder)
    assert run.metrics["train/loss"] == {10: 3.5, 20: 3.0, 30: 7.0}
    assert (run.starts, run.ended, run.step) == (2, "signal 15", 30)
    assert run.seconds == 40 + 10  # the pause does not count
    text = shown(folder).text
    assert "Resumed 1 time" in text
    assert "../other/best.ckpt" in text


def test_a_run_that_diverged_says_so_first(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        file.write(metrics(50, train__loss=None) + metrics(60, train__loss=None))
    found = shown(folder)
    assert found.text.index(" diverged") < found.text.index("Ended")
    assert "diverged: train/loss was not finite at step 50, and 2 times in all" in found.text.replace("\n", "")
    assert facts(RunRecord(folder))["Best val/loss"] == "2.5 at step 40"
    with (folder / "events.jsonl").open("a") as file:
        file.write(metrics(70, train__loss=1.0) + event("end", 70, reason="done"))
    text = shown(folder).text.replace("\n", "")
    assert "run diverged" not in text
    assert "train/loss was not finite at step 50" in text


@pytest.mark.parametrize("left", ["events.jsonl", "config.yaml", "environment.json", "log.txt", "samples", ""])
def test_whatever_is_missing_is_named(tmp_path: Path, left: str) -> None:
    folder = whole(tmp_path / "run")
    for name in ("events.jsonl", "config.yaml", "environment.json", "log.txt", "samples"):
        if name != left:
            shutil.rmtree(folder / name) if name == "samples" else (folder / name).unlink()
    found = shown(folder)
    alone(found)
    for name in ("events.jsonl", "config.yaml", "environment.json", "log.txt"):
        assert (f"{name} is not there" in found.text) == (name != left)
    assert ("no metrics" in found.text) == (left != "events.jsonl")


@pytest.mark.parametrize(
    "text", ["a: [", "x: !!python/object/apply:os.system [ls]", "[" * 1_000, "&a [*a]", "7", "2026-99-99"]
)
def test_a_config_that_is_none_is_shown_all_the_same(tmp_path: Path, text: str) -> None:
    folder = whole(tmp_path / "run")
    (folder / "config.yaml").write_text(text)
    (folder / "environment.json").write_text("{" * 20_000)
    run = RunRecord(folder)
    assert run.config == {}
    assert "environment.json cannot be read" in run.missing
    assert text in shown(folder).text


def test_a_config_of_aliases_does_not_grow(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run")
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    (folder / "config.yaml").write_text("\n".join(["a0: &a0 [{x: 1}]", *levels]))
    assert len(RunRecord(folder).config) <= 10_000


def test_an_older_run_has_the_table_of_its_logger(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for version, loss in ((0, 9.0), (1, 2.0)):
        place = folder / "lightning_logs" / f"version_{version}"
        place.mkdir(parents=True)
        rows = f"epoch,lr,step,train/loss,val/loss\n0,0.1,4,{loss},\n0,,9,nan,\n0,,9,,{loss + 1}\n0,0.1,14,to"
        (place / "metrics.csv").write_text(rows)
        os.utime(place / "metrics.csv", (1e9 + version, 1e9 + version))
    run = RunRecord(folder_of(str(folder)))
    assert run.metrics["val/loss"] == {9: 3.0}
    assert run.metrics["train/loss"][4] == 2.0
    assert run.metrics["lr"] == {4: 0.1, 14: 0.1}
    assert set(run.metrics) == {"lr", "train/loss", "val/loss"}
    assert facts(run)["Best val/loss"] == "3 at step 9"
    assert facts(run)["Ended"] == "not known"
    assert "train/loss was not finite at step 9" in shown(folder).text.replace("\n", "")


def test_the_best_is_the_largest_where_the_config_says_so(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("min", "max").replace("val/loss", "val/accuracy"))
    with (folder / "events.jsonl").open("a") as file:
        for step, score in ((50, 0.5), (60, 0.9), (70, 0.7), (80, None)):
            file.write(event("checkpoint", step, path="x.ckpt", monitor="val/accuracy", score=score))
    assert facts(RunRecord(folder))["Best val/accuracy"] == "0.9 at step 60"


def test_several_runs_side_by_side_with_what_differs(tmp_path: Path) -> None:
    first = whole(tmp_path / "lora" / "2026-01-31_12-00-00")
    second = whole(tmp_path / "lora" / "2026-01-31_13-00-00", rate=0.02)
    for folder in (first, second):
        config = json.loads((folder / "config.yaml").read_text())
        config["trainer"]["default_root_dir"] = f"runs/lora/{folder.name}"  # differs, and says nothing
        if folder == second:
            config["trainer"]["callbacks"].insert(0, {"class_path": "lit_efficient.EMA", "init_args": {"decay": 0.9}})
        (folder / "config.yaml").write_text(json.dumps(config))
    (second / "environment.json").write_text(json.dumps({"packages": {"torch": "2.14.0"}, "device": "cpu"}))
    found = shown(first, second)
    alone(found)
    rows = list(found.cells())
    start = rows.index(["key", "lora/2026-01-31_12-00-00", "lora/2026-01-31_13-00-00"])
    assert rows[start + 1 : start + 4] == [
        ["optimizer.lr", "0.001", "0.02"],
        ["trainer.callbacks.EMA", "–", "lit_efficient.EMA"],
        ["packages.torch", "2.13.0", "2.14.0"],
    ]
    assert len(rows[start + 4]) == 2  # of the next table
    labels = found.attributes("aria-label")
    assert labels.count("Loss") == 2  # train/loss and val/loss, each of both runs
    assert sum(attributes.get("class") == "line1" for tag, attributes in found.tags if tag == "path") == 6
    assert "The runs have the same config and environment." in shown(first, first).text


def test_many_samples_are_shown_from_the_first_to_the_last(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run")
    for step in range(100, 400):
        (folder / "samples" / f"step-{step}.txt").write_text(f"text {step}.")
    (folder / "samples" / "step_0000001.png").write_bytes(b"<svg onload='alert(1)'>")
    (folder / "samples" / "step_0000002.png").symlink_to("/etc/hostname")
    (tmp_path / "secret_1.txt").write_text("a secret")
    (folder / "samples" / "step_3.txt").symlink_to(tmp_path / "secret_1.txt")
    found = shown(folder)
    alone(found)
    assert len(re.findall(r"text \d+\.", found.text)) == 7
    assert "text 399." in found.text
    assert "8 of 301 *.txt" in found.text
    assert "step_0000001.png is no PNG" in found.text
    assert "a secret" not in found.text
    assert "step_0000002" not in found.text


def test_a_run_is_named_by_its_folder_latest_or_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = whole(Path("runs", "lora", "2026-01-31_12-00-00"))
    older = whole(Path("runs", "ema", "2026-01-30_12-00-00"))
    for run in (folder, older):
        point_latest(run)
    (folder / "best.ckpt").touch()
    (folder / "sharded.ckpt").mkdir()
    (older / "lightning_logs" / "checkpoints").mkdir(parents=True)
    (older / "lightning_logs" / "checkpoints" / "x.ckpt").touch()
    names = ["", "/", "/best.ckpt", "/sharded.ckpt"]
    assert {folder_of(f"{folder}{name}") for name in names} == {folder}
    assert folder_of("latest") == folder_of("runs/lora") == folder_of("runs/lora/latest") == folder
    assert folder_of("runs/lora/latest/best.ckpt") == folder
    assert folder_of(str(older / "lightning_logs" / "checkpoints" / "x.ckpt")) == older
    for name, said in (("runs/none", "there is no run runs/none"), ("runs", "runs is no run's folder")):
        with pytest.raises(ConfigurationError, match=said):
            folder_of(name)


def test_it_writes_over_a_report_and_over_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = whole(Path("runs", "lora", "2026-01-31_12-00-00"))
    other = whole(Path("runs", "lora", "2026-01-31_13-00-00"))
    assert [main(["report", str(folder)]) for _ in range(2)] == [0, 0]
    assert (folder / "report.html").is_file()
    said = capsys.readouterr().out
    assert "  Best val/loss     2.5 at step 40\n" in said
    assert f"Wrote {folder / 'report.html'}" in said
    assert main(["report", str(folder), str(other), str(folder)]) == 0
    assert Page(Path("report.html").read_text("utf-8")).text.count("2 layers of rank 4") == 2
    assert main(["report", str(folder), "--output", str(folder / "config.yaml")]) == 2
    assert "config.yaml exists already and is no report" in capsys.readouterr().err
    with (folder / "events.jsonl").open("a") as file:
        file.write(event("end", 40, reason="do\x1b[2J\nne\x1b]0;x\x07"))
    assert main(["report", str(folder), "--output", "deep/down/x.html"]) == 0
    said = capsys.readouterr().out
    assert "  Ended             do ne" in said
    assert "\x1b" not in said
    assert Path("deep", "down", "x.html").is_file()


def test_it_needs_no_torch(tmp_path: Path) -> None:
    whole(tmp_path / "run")
    code = "import sys; from lit_efficient.__main__ import main; main(['report', 'run']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    imported = set(re.findall(r"'([^']+)'", done.stdout))
    assert imported & {"torch", "lightning", "numpy", "matplotlib", "jsonargparse"} == set()
    assert "lit_efficient.evidence.reporting.run_page" in imported


def test_what_is_drawn_together() -> None:
    together = ["train/loss", "val/loss", "train_loss", "val_loss_epoch", "train/loss_step"]
    assert {chart_of(name) for name in together} == {"loss"}
    assert {chart_of(name) for name in ("lr", "lr/head", "lr-AdamW/pg1")} == {"lr"}
    assert chart_of("lrc") == "lrc"
    assert chart_of("val/loss_raw") == "loss_raw"


def test_two_of_a_class_are_told_apart() -> None:
    savers = [{"class_path": "x.Saver", "init_args": {"monitor": each}} for each in ("a", "b")]
    found = flattened({"callbacks": savers, "logger": {"class_path": "x.CSV"}, "none": None, "empty": []}, Path())
    assert found["callbacks.Saver#0.monitor"] == "a"
    assert found["callbacks.Saver#1.monitor"] == "b"
    assert (found["logger"], found["none"], found["empty"]) == ("x.CSV", "null", "")


@pytest.mark.browser
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run", name="<script>document.body.remove()</script>")
    (tmp_path / "x.html").write_text(page([RunRecord(folder)]), "utf-8")

    def picture(width: int, scheme: int) -> Image.Image:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--hide-scrollbars", "--enable-logging=stderr", f"--blink-settings=preferredColorScheme={scheme}"]
        command += [f"--window-size={width},1400", f"--screenshot={tmp_path / 'x.png'}", str(tmp_path / "x.html")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in done.stderr  # where a browser says what it refused
        return Image.open(tmp_path / "x.png").convert("RGB")

    light, dark = picture(1200, 1), picture(390, 0)
    first: Callable[[Image.Image], Any] = lambda image: image.getpixel((2, 2))  # noqa: E731
    assert (first(light), first(dark)) == ((247, 247, 248), (21, 23, 26))
    for image, blue in ((light, (31, 111, 208)), (dark, (105, 169, 255))):
        pixels = list(image.get_flattened_data())
        assert pixels.count(blue) > 100  # the line of the first metric
        edge = image.crop((image.width - 10, 0, image.width, 1400))
        assert set(edge.get_flattened_data()) == {first(image)}  # nothing is wider than the page


def test_a_served_page_follows_a_run_until_it_ends(tmp_path: Path) -> None:
    folder = whole(tmp_path / "lora" / "2026-01-31_12-00-00")
    events = folder / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(lines[:-1]))  # not ended

    with server([folder]) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()

        def asked(path: str = "/", host: str = "127.0.0.1") -> tuple[int, str | None, str]:
            connection = http.client.HTTPConnection("127.0.0.1", serving.server_port)
            connection.request("GET", path, headers={"Host": f"{host}:{serving.server_port}"})
            answer = connection.getresponse()
            found = answer.status, answer.headers["Refresh"], answer.read().decode()
            connection.close()
            return found

        try:
            assert serving.server_address[0] == "127.0.0.1"
            status, refresh, text = asked()
            assert (status, refresh) == (200, "5")
            assert "val/loss 2.5" in text
            events.write_text("".join([*lines[:-1], metrics(50, val__loss=1.25)]))
            assert "val/loss 1.25" in asked()[2]
            events.write_text("".join(lines))
            assert asked("/", "localhost")[:2] == (200, None)
            assert asked("/config.yaml")[0] == 404
            assert asked("/", "evil.example")[0] == 403
        finally:
            serving.shutdown()
            thread.join()


def test_serve_says_its_address_and_ends_with_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", interrupted)
    folder = str(whole(tmp_path / "run"))
    assert main(["report", "--serve", folder]) == 0
    assert re.search(r"http://127\.0\.0\.1:\d+/ shows the report until Ctrl-C", capsys.readouterr().out)
    assert not (tmp_path / "run" / "report.html").exists()
    assert main(["report", "--serve", folder, "--output", "x.html"]) == 2
    assert "leave --output out" in capsys.readouterr().err
    assert main(["report", "--serve", folder, "--port", "70000"]) == 2
    assert "--port must be" in capsys.readouterr().err


def test_the_axes_of_a_chart_have_names(tmp_path: Path) -> None:
    text = page([RunRecord(whole(tmp_path / "run"))])
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) == 5
    for chart in charts:
        title = re.search(r'aria-label="(.*?)"', chart)
        names = re.findall(r"<text[^>]*>(.*?)</text>", chart)
        assert title is not None
        assert {"step", title[1]} <= set(names)
