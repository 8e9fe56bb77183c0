"""What keeps the suite quick: left out, every test still passes, and all of them take twice as long."""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import shutil
import subprocess
import sys
from collections import OrderedDict
from unittest import mock

import pytest
import torch
from support_dynamo import as_new

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.mark.skipif(WORKERS == 1, reason="it is about workers side by side: -n 2")
def test_workers_share_the_cores() -> None:
    assert torch.get_num_threads() * WORKERS <= max(WORKERS, os.cpu_count() or 1)
    assert os.environ["OMP_NUM_THREADS"] == str(torch.get_num_threads())


def test_ranks_are_started_by_one_worker() -> None:
    """The tests of a file go to one worker if the file starts ranks, and only then."""
    together = pytest.importorskip("support_schedule").Together
    files = sorted(pathlib.Path(__file__).parent.rglob("test_*.py"))
    ranks = [file.name for file in files if "\nfrom support_ranks import" in file.read_text()]
    assert ranks
    for file in files:
        scopes = {
            together._split_scope(None, f"tests/{file.name}::{test}") for test in ("one", "Two::three[4]")
        }
        assert (len(scopes) == 1) == (file.name in ranks), file.name


CRASHING = """
import os
import pytest

@pytest.mark.parametrize("number", range(12))
def test_it(number):
    if number in (0, 5, 11):
        os._exit(9)
"""


def test_a_worker_that_crashes_costs_one_test(tmp_path: pathlib.Path) -> None:
    """The run ends, the test that crashed has failed, and all others have run."""
    pytest.importorskip("support_schedule")
    here = pathlib.Path(__file__).parent
    shutil.copy(here / "support_schedule.py", tmp_path)
    hook = "import pytest\nfrom support_schedule import Together\n\n@pytest.hookimpl(optionalhook=True)\n"
    hook += "def pytest_xdist_make_scheduler(config, log):\n    return Together(config, log)\n"
    (tmp_path / "conftest.py").write_text(hook)
    (tmp_path / "test_crashing.py").write_text(CRASHING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "3 failed, 9 passed" in ran.stdout, ran.stdout + ran.stderr
    assert ran.stdout.count("crashed while running 'test_crashing.py::test_it[") >= 3


def test_a_worker_that_has_not_told_its_tests_gets_none() -> None:
    """As where two crash at once: the new one in the second one's place is still collecting."""
    together = pytest.importorskip("support_schedule").Together
    schedule, worker = together.__new__(together), mock.Mock(shutting_down=False)
    schedule.registered_collections, schedule.assigned_work = {}, {worker: {}}
    schedule.workqueue = {"test": {"test": False}}
    schedule._reschedule(worker)
    assert schedule.workqueue == {"test": {"test": False}}


def test_a_worker_that_crashed_unheard_keeps_what_it_could_not_be_told() -> None:
    """As where two crash at once: the run ended, since nothing could be sent to the second one."""
    together = pytest.importorskip("support_schedule").Together
    schedule, worker = together.__new__(together), mock.Mock(shutting_down=False)
    worker.send_runtest_some.side_effect = OSError("cannot send (already closed?)")
    schedule.registered_collections = {worker: ["one", "two", "three"]}
    schedule.assigned_work, schedule.log = {worker: {"one": {"one": False}}}, mock.Mock()
    schedule.workqueue = OrderedDict((name, {name: False}) for name in ("two", "three"))
    schedule._reschedule(worker)
    assert list(schedule.workqueue) == ["three"]
    assert schedule.remove_node(worker) == "one", "the test that it crashed in"
    assert sorted(schedule.workqueue) == ["three", "two"]


def test_collections_leave_torch_alone() -> None:
    assert gc.get_freeze_count() > 100_000
    assert not any(thing is torch.nn.Module.__dict__["forward"] for thing in gc.get_objects())


def test_sizes_may_vary_after_threads_have_compiled() -> None:
    """They may leave ``dynamic=False`` of one of them behind: six tests of counters failed then."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.assume_static_by_default = False
    as_new()
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(lambda x: x * 2, backend=backend)
    for n in range(3, 9):
        run(torch.ones(n))
    assert len(graphs) == 2, "one for the first size, one for all others"


def test_nobody_listens_to_torchs_trace() -> None:
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
    assert not logging.getLogger("torch.__trace").handlers
