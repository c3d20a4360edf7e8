"""Write the files of this folder, as they are in the repository: at commit 1b73bea, and never again.

    git worktree add ../before 1b73bea        # the code that writes them
    cp -r tests/compatibility ../before/tests/
    cd ../before && python -m tests.compatibility.make SCRATCH    # restore comes from lit_efficient.restore there

The keys of configs in these files are today's; the commit needs those of then (``paths`` of PythonCorpus, the number of
samples of LatentDiffusion). ``SCRATCH`` is a new folder, whose name comes to stand in the checkpoint of the command
line's run. ``files`` must not be there yet. What is written down in ``expected.json`` was computed then, too: each run
is made whole and once more from its checkpoint on, and both must end alike.

A later release adds a folder of its own beside these, which stay: it is named in ``RELEASES`` of ``cases``, and written
by that release's code with ``python -m tests.compatibility.make SCRATCH NAME``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lit_efficient import CausalLMConfig, LanguageModeling
from tests.compatibility import observed
from tests.compatibility.cases import ALL, CASES, RELEASES, run
from tests.compatibility.toys import LLAMA, latents, settle

KINDS = ("resumed", "restored", "loaded", "generated", "exported")
# Data modules that a config names: by a public name and by the path of a module.
PARTS = {
    "mixed": [
        {"class_path": "lit_efficient.data.python_corpus.PythonCorpus", "init_args": {"sequence_length": 7}},
        {"class_path": "LatentDigits", "init_args": {"image_size": 16}},
    ],
}


def main(scratch: Path, release: str = "1b73bea") -> None:
    scratch.mkdir(parents=True)
    files = RELEASES[release]
    files.mkdir()
    os.chdir(files)
    torch.set_num_threads(1)
    base = LanguageModeling(CausalLMConfig(config_fields=LLAMA))
    base.configure_model()
    settle(base.network).save_pretrained("base")
    expected: dict[str, Any] = {kind: {} for kind in KINDS}
    for name, case in (CASES if release == "1b73bea" else ALL).items():
        if name == "latent_diffusion":
            data = latents()
            data.images.setup("fit")
            data.write_cache()
            Path("latents.lock").unlink()
        folder = scratch / name
        whole, notes = run(case, folder, save=Path(f"{name}.ckpt"))
        expected["resumed"][name], again = observed.resumed(name, scratch / "again" / name)
        assert again.losses == notes.losses
        assert expected["resumed"][name]["weights"] == observed.figures(whole.state_dict())
        expected["restored"][name] = observed.restored(name)
    (scratch / "power_ema" / "snapshots").rename("snapshots")
    observed.command("fit", "-c", str(observed.corpus_config(scratch)))
    (scratch / "run" / "last.ckpt").rename("fit.ckpt")
    for name, parts in PARTS.items():
        observed.command("fit", "--allow-import", "tests", "-c", str(observed.mixed_config(scratch, parts)))
        (scratch / "run" / "last.ckpt").rename(f"{name}.ckpt")
    for name in observed.PLAIN:
        expected["loaded"][name] = observed.loaded(name)
    for name in observed.WRITERS:
        expected["generated"][name] = observed.generated(f"{name}.ckpt")
    for name in observed.EXPORTS:
        expected["exported"][name] = observed.exported(name, scratch)
    expected |= {"sampled": observed.sampled(), "swept": observed.swept(scratch / "sweep")}
    for name in ("fit", "mixed"):
        (scratch / name).mkdir()
    expected["fitted"] = observed.fitted(scratch / "fit")
    expected["fitted_mixed"] = observed.fitted_mixed(scratch / "mixed")
    expected["latents"] = observed.latent_means(scratch)
    Path("expected.json").write_text(_lines(expected))


def _lines(expected: dict[str, Any]) -> str:
    """JSON of one line a run."""
    parts = []
    for kind, seen in expected.items():
        if kind in KINDS:
            runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in seen.items())
            parts.append(f"{json.dumps(kind)}: {{\n{runs}\n}}")
        else:
            parts.append(f"{json.dumps(kind)}: {json.dumps(seen)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
