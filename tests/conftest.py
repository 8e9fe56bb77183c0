"""Fixtures for every test: a fresh process state, fixed seeds, no test on a GPU that is not there."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings
from support_dynamo import as_new

# torch traces every compilation on this logger, if anybody listens: the records would bury the report of a
# failed test, keep the compiled code of one test alive into the next, and take time. pytest listens to
# loggers that do not propagate.
_trace = logging.getLogger("torch.__trace")
_trace.handlers.clear()
_trace.propagate = True
# Compiling and slow machines: hypothesis must not call an example flaky for the time it took.
settings.register_profile("pgraph", deadline=None)
settings.load_profile("pgraph")

# Workers side by side share the cores, and so do the programs that tests start. A thread of OpenMP spins
# while it waits for its twin, and with more threads than cores the twin does not even run: on two busy cores,
# tests/test_training.py took 71 core seconds with two threads and 31 with one.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n, the tests that share one run of the ranks go to one worker, before all others."""
    from support_schedule import Together

    return Together(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/gpu is marked, and skipped where there is no CUDA device."""
    for item in items:
        if pathlib.Path(item.path).parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


_modules = 0  # how many were imported when their objects were last put aside


def put_modules_aside() -> None:
    """Collections look only at what tests have made.

    torch and what it brings are 400,000 objects that live for ever; to look at them after each test took a
    fifth of a second.
    """
    global _modules
    if len(sys.modules) > _modules and not hasattr(sys, "last_value"):  # it holds what a failed test had made
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Same seed for each test; no compiled code, no capture and no driver survives it."""
    put_modules_aside()
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        as_new()
        gc.collect()  # Dynamo's own reference cycles hold the compiled code, and with it the runners
    if "pgraph.backend" in sys.modules:
        sys.modules["pgraph.backend"].reset()
        sys.modules["pgraph.runtime.registry"].forget()


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Compiled C++ goes to a directory of this session, shared by its workers, and from nowhere else."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if WORKERS > 1 else folder) / "inductor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import programs of bench/ and examples/ by name; afterwards sys.path and sys.modules are as before."""
    repo = pathlib.Path(__file__).resolve().parents[1]
    folders = [str(repo / "bench"), str(repo / "examples")]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    before = set(sys.modules)

    def by_name(name: str) -> ModuleType:
        if name != "torchtitan":
            return importlib.import_module(name)
        known = "bench_torchtitan"  # under its own name it would hide the package
        if known not in sys.modules:
            spec = importlib.util.spec_from_file_location(known, repo / "bench" / "torchtitan.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules[known] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[known])
        return sys.modules[known]

    yield by_name
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(tuple(folders)):
            del sys.modules[name]


@pytest.fixture
def no_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own sizes teach how others are computed, as they do where lessons fail (`test_lessons`)."""
    from pgraph.compute.stand_ins import Family

    monkeypatch.setattr(Family, "made_up", lambda family: ())
