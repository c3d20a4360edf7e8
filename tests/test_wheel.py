"""What is built from the sources carries all that the package needs, and works where there is no checkout."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from lit_efficient import __version__

ROOT = Path(__file__).parent.parent
BUILD = "from setuptools.build_meta import build_{0}; build_{0}('.')"
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def build(kind: str, source: Path) -> Path:
    """A distribution of the sources in a folder, built by setuptools as it is here."""
    command = [sys.executable, "-W", "ignore", "-c", BUILD.format(kind)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = source.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return made


def sources(folder: Path, repository: str = "") -> Path:
    """What a release is made of, in a folder of its own: building leaves its traces there."""
    folder.mkdir()
    for name in ("lit_efficient", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    project = (folder / "pyproject.toml").read_text("utf-8")
    (folder / "pyproject.toml").write_text(re.sub('(?m)^repository = ".*"', f'repository = "{repository}"', project))
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made from the source distribution, as a release is."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(build("sdist", sources(folder / "sources", "https://example.org/lit"))) as archive:
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
        archive.extractall(folder, **options)
    return build("wheel", next(folder.glob("lit_efficient-*")))


def files(top: Path, *patterns: str) -> set[str]:
    return {path.relative_to(top).as_posix() for pattern in patterns for path in top.rglob(pattern)}


@pytest.mark.turns(4, family="whole programs")
def test_the_wheel_carries_the_package_and_the_configs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if not name.startswith(f"lit_efficient-{__version__}.dist-info/")}
    package = {
        f"lit_efficient/{name}"
        for name in files(ROOT / "lit_efficient", "*.py", "*.pyi", "*.css", "*.jinja", "*.json", "py.typed")
    }
    configs = {f"lit_efficient/configs/{name}" for name in files(ROOT / "configs", "*.yaml", "*.md")}
    assert {"lit_efficient/py.typed", "lit_efficient/__init__.pyi"} < package
    assert len(configs) > 40
    assert inside == package | configs | {"lit_efficient/AGENTS.md"}


def test_an_unpacked_wheel_finds_the_configs_that_it_carries(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "lit_efficient", "configs", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    told = json.loads(done.stdout)
    ours = files(tmp_path / "lit_efficient" / "configs", "*.yaml")
    assert {
        Path(each["path"]).relative_to(tmp_path / "lit_efficient" / "configs").as_posix() for each in told.values()
    } == ours
    assert "ema" in told


@pytest.mark.turns(4, family="whole programs")
def test_an_editable_install_finds_those_of_its_checkout(tmp_path: Path) -> None:
    checkout = sources(tmp_path / "checkout")
    with zipfile.ZipFile(build("editable", checkout)) as archive:
        assert not [name for name in archive.namelist() if name.startswith("lit_efficient/")]
        archive.extractall(tmp_path / "site")
    code = "import site; site.addsitedir('site'); from lit_efficient.files import configs; print(configs.find('ema'))"
    command = [sys.executable, "-I", "-S", "-c", code]  # without what is installed, which may be this very checkout
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(checkout / "configs" / "techniques" / "ema.yaml")


def test_the_published_readme_and_the_urls_lead_to_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"lit_efficient-{__version__}.dist-info/METADATA").decode())
    readme = str(metadata.get_payload())
    assert "(https://example.org/lit/raw/HEAD/docs/digits.png)" in readme
    assert "[Contributing](https://example.org/lit/blob/HEAD/CONTRIBUTING.md)" in readme
    assert {link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link} == set()
    assert "Repository, https://example.org/lit" in metadata.get_all("Project-URL")


def test_no_address_is_made_up() -> None:
    readme = SETUP["with_addresses"]((ROOT / "README.md").read_text("utf-8"), "")
    assert re.findall(r"\]\((?!https?://)[^)]*\)", readme) == []
    assert "For coding assistants | Changelog" in readme
    assert SETUP["project_urls"]("") == {}


def test_the_image_is_installed_as_ci_is() -> None:
    lines = {name: (ROOT / name).read_text("utf-8").splitlines() for name in ("Dockerfile", ".ci/environment")}
    assert ".ci/install --no-compile" in lines[".ci/environment"]
    assert "RUN .ci/install" in lines["Dockerfile"]
    assert os.access(ROOT / ".ci" / "install", os.X_OK)
    torch = [line for line in lines["Dockerfile"] if line.startswith("RUN pip install") and line.endswith(" torch")]
    assert torch == [line for line in lines["Dockerfile"] if "pip install" in line and "-c constraints.txt" in line]


def test_the_citation_is_of_this_version_and_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == project["project"]["version"] == __version__
    assert citation["license"] == project["project"]["license"]
    assert citation.get("repository-code", "") == project["tool"]["lit_efficient"]["repository"]


def released(folder: Path, heading: str) -> subprocess.CompletedProcess[str]:
    """Run ``.ci/tag`` in a repository whose changelog has this heading for the version."""
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / ".ci", folder / ".ci", dirs_exist_ok=True)
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    (folder / "CHANGELOG.md").write_text(re.sub(rf"(?m)^## {__version__} .*$", heading, text), "utf-8")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "--quiet"], ["add", "-A"], ["commit", "--quiet", "-m", "release"]):
        subprocess.run([*git, *words], cwd=folder, check=True, capture_output=True)
    names = {f"GIT_{role}_{field}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    return subprocess.run(
        [folder / ".ci" / "tag"], cwd=folder, env=os.environ | names, capture_output=True, text=True, check=False
    )


def test_a_release_is_tagged_with_its_notes(tmp_path: Path) -> None:
    done = released(tmp_path, f"## {__version__} (2026-12-01)")
    assert done.returncode == 0, done.stderr
    command = ["git", "tag", "-l", "--format=%(contents)", f"v{__version__}"]
    notes = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert notes.startswith(f"lit_efficient {__version__}\n\n")
    section = (ROOT / "CHANGELOG.md").read_text("utf-8").partition(f"## {__version__} ")[2]
    section = section.partition("\n")[2].partition("\n## ")[0]
    assert notes.strip().endswith(section.strip())
    assert "### Less memory" in notes  # a line that begins like a comment of git


def test_a_version_without_a_date_is_not_tagged(tmp_path: Path) -> None:
    done = released(tmp_path, f"## {__version__} (unreleased)")
    assert done.returncode == 1
    assert f"CHANGELOG.md has no heading '## {__version__} (YYYY-MM-DD)'" in done.stderr
    assert subprocess.run(["git", "tag"], cwd=tmp_path, check=True, capture_output=True).stdout == b""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_an_installed_wheel_trains_both_tasks_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    python = str(tmp_path / "empty" / "bin" / "python")
    here = tmp_path / "elsewhere"
    here.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run(sys.executable, "-m", "venv", str(tmp_path / "empty"))
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel))
    run(python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel))  # what it needs
    run(python, "-m", "pip", "check")
    assert Path(run(python, "-c", "import lit_efficient; print(lit_efficient.__file__)")).is_relative_to(tmp_path)
    installed = {each["name"].lower() for each in json.loads(run(python, "-m", "pip", "list", "--format", "json"))}
    assert not installed & {"transformers", "peft", "diffusers", "torchao", "wandb", "pytest"}
    assert not installed & {"bitsandbytes", "tensorboard", "matplotlib"}
    few = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.max_epochs", "-1"]
    for task in ("language_model", "latent_diffusion"):
        said = run(python, "-m", "lit_efficient", "fit", "-c", task, *few)
        assert (here / "runs" / task / "latest" / "last.ckpt").exists()
        first = said.partition("Next:")[2].split("python ")[1].splitlines()[0]
        run(python, *shlex.split(first))
    lacking = [python, "-m", "lit_efficient", "fit", "-c", "language_model", "-c", "low_bit_optimizer"]
    done = subprocess.run(lacking, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "LowBitOptimizer needs bitsandbytes: pip install 'lit-efficient[bitsandbytes]'" in done.stderr
