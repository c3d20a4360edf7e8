"""Links, which nothing is written through and which are read; manifests and runs of somebody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.trust_rows.hostile.cases import (
    CANARY,
    PAYLOADS,
    Act,
    as_last,
    cases_of,
    checkpoint,
    data_folder,
    dotted,
    fit,
    saved,
)


@cases_of(
    "link",
    (
        "config.tmp",
        "log",
        "events",
        "config",
        "environment",
        "run",
        "last",
        "latest-partial",
        "export",
        "lock",
        "report",
        "mean",
    ),
)
def _link(name: str) -> Act:
    victim = os.path.abspath("../outside/victim")
    if name in ("log", "events", "config", "environment", "run", "last", "config.tmp", "report"):
        run = Path("runs/hostile/2026-01-01_00-00-00")
        words = as_last(saved(checkpoint(), "good.ckpt"))
        (run / "run.json").write_text('{"parent": null}')
        places = {
            "log": "log.txt",
            "events": "events.jsonl",
            "config": "config.yaml",
            "environment": "environment.json",
        }
        places |= {"run": "run.json", "last": "end.ckpt", "config.tmp": "config.tmp", "report": "report.html"}
        place = run / places[name]
        place.unlink(missing_ok=True)
        os.symlink(victim, place)
        for more in ("config.yaml.tmp", ".config.yaml.partial", "log.txt.tmp", "last.ckpt.tmp"):
            os.symlink(victim, run / more)
        if name == "run":
            return words
        saved_config = checkpoint()
        saved_config["lit_efficient"] = {"config": {}}
        return ["report", str(run)] if name == "report" else [*words, "--trainer.max_steps", "2"]
    if name == "export":
        os.symlink(os.path.dirname(victim), "out")
        return ["export", saved(checkpoint(), "good.ckpt"), "--output", "out"]
    if name == "mean":
        os.symlink(victim, "mean.ckpt")
        return ["average", saved(checkpoint(), "good.ckpt"), "--output", "mean.ckpt"]
    if name == "lock":
        prepared = dotted("lit_efficient.files.cache.prepared_folder")
        os.symlink(victim, "cache.lock")
        return lambda: prepared(Path("cache"), lambda empty: (empty / "x").touch(), lambda _: None)
    os.makedirs("runs/hostile")
    for number in range(3):
        os.symlink(victim, f"runs/hostile/.latest-{number}")
    os.symlink(victim, "runs/hostile/latest")
    return fit()


@cases_of("manifest", ("sums-climbing", "sums-absolute", "cache-climbing", "cache-absolute", "latents", "nested"))
def _manifest(name: str) -> Act:
    folder = data_folder()
    place = "../../outside/secret.txt" if name.endswith("climbing") else os.path.abspath("../outside/secret.txt")
    if name.startswith("sums"):
        (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {place}\n")
        return lambda: dotted("lit_efficient.files.sums.check_sums")(folder)
    listed = {place: [Path("../outside/secret.txt").stat().st_size, "0" * 64]}
    about = {"format": 1, "byteorder": sys.byteorder, "files": listed, "identity": {}, "count": 0, "statistics": {}}
    text = json.dumps({**about, "labels": False, "text_rows": 1})
    (folder / "manifest.json").write_text("[" * 200_000 if name == "nested" else text)
    if name.startswith("cache"):
        return lambda: print(dotted("lit_efficient.files.file_hashes.broken_seal")(folder, 1, thorough=True))
    return lambda: dotted("lit_efficient.data.latents.latent_store.LatentStore")(folder, thorough=True)


@cases_of("git", ("fsmonitor", "filter", "hooks", "pager", "include"))
def _git(name: str) -> Act:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], check=True, capture_output=True)

    git("init", "-q")
    Path("kept.txt").write_text("kept")
    git("add", "kept.txt")
    git("commit", "-q", "-m", "x")
    Path("kept.txt").write_text("new!")
    touch = f"touch {os.path.abspath(CANARY)}"
    settings = {
        "fsmonitor": ("core.fsmonitor", touch),
        "filter": ("filter.evil.clean", touch),
        "hooks": ("core.hooksPath", "."),
    }
    settings |= {"pager": ("core.pager", touch), "include": ("include.path", "../included")}
    git("config", *settings[name])
    Path(".git/included").write_text(f'[core]\n\tfsmonitor = {touch}\n[filter "evil"]\n\tprocess = {touch}\n')
    Path(".gitattributes").write_text("* filter=evil\n")
    for hook in ("post-index-change", "fsmonitor-watchman", "query-watchman"):
        Path(hook).write_text(f"#!/bin/sh\n{touch}\n")
        Path(hook).chmod(0o755)
    return fit()


@cases_of("run", ("parent", "script", "events", "samples", "loggers", "climbing-parent"))
def _run(name: str) -> Act:
    run = Path("runs/hostile/2026-01-01_00-00-00")
    words = as_last(saved(checkpoint(), "good.ckpt"))
    if name in ("parent", "climbing-parent", "loggers"):
        (run / "last.ckpt").unlink()
        saved(checkpoint(x=PAYLOADS["exec"]()), str(run.parent / "evil" / "last.ckpt"))
        parent = {"parent": "../evil/last.ckpt", "climbing-parent": "../../../../outside/secret.ckpt"}.get(name)
        (run / "run.json").write_text(json.dumps({"parent": parent, "loggers": ["../../../../outside"]}))
        return words
    lines = [{"time": 1, "step": 1, "kind": "warning", "text": "<script>alert(1)</script><img src=x onerror=alert(1)>"}]
    lines += [{"time": 1, "step": 1, "kind": "sample", "path": "../../../../outside/secret.txt"}]
    lines += [{"time": 1, "step": n, "kind": "metrics", "epoch": 0, "values": {"</script>": n}} for n in (1, 2)]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.yaml").write_text("model: !!python/object/apply:os.system ['touch CANARY']\n")

    def act() -> None:
        main = dotted("lit_efficient.__main__.main")
        assert main(["report", str(run)]) in (0, 2)
        page = run / "report.html"
        if page.exists() and ("<script>alert" in page.read_text() or "<img src=x" in page.read_text()):
            Path(CANARY).touch()

    return act
