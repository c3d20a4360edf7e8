"""Set-up of the whole suite: one thread, no network, no GPU by default, and a cache that all workers share."""

import contextlib
import functools
import gc
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.size import report
from tests.turns import commit, family_of, resting

# Files with a few long tests run first. A worker that gets one of them last would keep the other workers waiting.
FIRST = ("contract/test_pairs", "contract/test_together", "contract/test_alone", "cli/test_check", "test_main")
FIRST += ("commands/test_plan", "evidence/test_plan", "evidence/test_plan_accuracy", "evidence/test_deep_networks")
FIRST += ("evidence/test_compare", "evidence/test_tuning", "trust/test_pieces", "cuda/test_scaler")
FIRST += ("configs/test_diffusion", "cli/test_compare")
MEMORY = "/dev/shm"  # safe saves wait for the disk, thousands of times in these tests

if "PYTEST_XDIST_WORKER" not in os.environ and ("-m", "gpu") not in pairwise(sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or each trainer without an accelerator would use the GPU
if not {"PYTEST_XDIST_WORKER", "TMPDIR"} & {*os.environ} and os.access(MEMORY, os.W_OK):
    room = shutil.disk_usage(MEMORY).free > 4 * 2**30
    os.environ["TMPDIR"], tempfile.tempdir = MEMORY if room else tempfile.gettempdir(), None
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["COMET_START_ONLINE"] = "false"
os.environ.setdefault("MPLBACKEND", "Agg")


@functools.cache
def _found(path: tuple[str, ...], **chosen: str) -> Any:
    return _look(**chosen)


_look = importlib.metadata.entry_points
# Each trainer reads the metadata of all installed packages, which takes as long as some fits. Read it once for a path.
importlib.metadata.entry_points = lambda **chosen: _found(tuple(sys.path), **chosen)
subprocess.run = processes.run_check  # importing the libraries that load an export takes longer than most tests
processes.prepare(heavy="PYTEST_XDIST_WORKER" in os.environ)  # before any other conftest imports the package


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-pairs", action="store_true", help="run every pair of techniques, not a share of them")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # during imports, whose objects stay alive
    if not config.getoption("numprocesses", None):  # this process runs the tests itself
        import torch  # noqa: F401

        processes.ready_torch()


def pytest_unconfigure() -> None:
    processes.end()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let the second worker import the files in reverse order, when the whole suite runs.

    Each worker then finds the files that the other one has compiled. Rewriting the assertions of all files takes
    longer than their imports.
    """
    here = Path(__file__).parent
    whole = [*map(Path.resolve, map(Path, session.config.args))] == [here]
    if whole and os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and not sys.dont_write_bytecode:
        for path in sorted(here.rglob("test_*.py"), reverse=True):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting the file reports the error
                importlib.import_module(".".join(path.relative_to(here.parent).with_suffix("").parts))


def pytest_collection_finish() -> None:
    gc.set_threshold(20_000, 20, 20)  # models and trainers are thousands of objects each
    gc.enable()  # no gc.freeze here: the search for a batch size freezes, and would find garbage of other tests


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    processes.answer_signals()


@pytest.fixture(scope="session", autouse=True)
def _no_snapshots_left() -> Iterator[None]:
    """Remove the snapshots that PowerEMA's row of the contract writes."""
    yield
    effects = sys.modules.get("tests.contract.effects")
    if effects is not None:
        shutil.rmtree(effects.SNAPSHOTS, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for expensive files (tokenizer, token cache, autoencoder), one for all workers of the run."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = root / "lit_efficient_cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def _isolated_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(shared_cache))


@pytest.fixture(autouse=True)
def _nothing_left_in_the_environment() -> Iterator[None]:
    """Remove what Lightning leaves in the environment, and allow nondeterministic algorithms again.

    ExactResume of the next test would read the seed. transformers' trainer begins a process group if there is the
    number of a process. A trainer makes the whole process deterministic.
    """
    yield
    import torch

    for name in ("PL_GLOBAL_SEED", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _nothing_left_in_libraries() -> Iterator[None]:
    """Fail a test that leaves a process group, and undo Lightning's patches of loaders.

    Lightning patches the constructors of loaders and samplers while it calls ``train_dataloader``, and leaves them
    patched if that raises. The next test would then get errors from constructors of its own loaders.
    """
    yield
    if "lightning" not in sys.modules:
        return
    from lightning_utilities.core.inheritance import get_all_subclasses
    from torch import distributed
    from torch.utils.data import BatchSampler, DataLoader

    for base in (DataLoader, BatchSampler):
        for one in (base, *get_all_subclasses(base)):
            for name in ("__init__", "__setattr__", "__delattr__"):
                if f"__old{name}" in vars(one):
                    setattr(one, name, vars(one)[f"__old{name}"])
                    delattr(one, f"__old{name}")
    if distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test leaves a process group")


@pytest.fixture(autouse=True)
def _no_run_left_open() -> Iterator[None]:
    """End the run and the service of W&B, which would continue in the folder of the test that started them."""
    yield
    wandb = sys.modules.get("wandb")
    if wandb is not None:
        if wandb.run is not None:  # or later loggers of this process would continue it
            wandb.finish()
        wandb.teardown()  # finishing a run does not end the service


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # the whole suite
        terminalreporter.section("size of the package")
        terminalreporter.write("\n".join([*report(), ""]))


@pytest.hookimpl(tryfirst=True)  # before the nightly tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("turns"):
            families.setdefault(family_of(item), []).append(item)
    for of, family in families.items():
        turns = family[0].get_closest_marker("turns")
        names = [item.nodeid.removeprefix(f"{of}[").removesuffix("]") for item in family]
        always = set(turns.kwargs.get("always", ()))
        if config.args_source is pytest.Config.ArgsSource.ARGS:  # perhaps one of the cases alone
            always &= {*names}
        rest = resting(names, *turns.args, commit(), always)
        for item, name in zip(family, names, strict=True):
            if name in rest:
                item.add_marker("nightly")
    places = {Path(__file__).parent / f"{name}.py": place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and pytest -m gpu"))
