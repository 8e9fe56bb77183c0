"""The torchtitan benchmark's processes: what they are told, how they meet, train and end."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]
BENCH = REPO / "bench"


def has_torchtitan() -> bool:
    try:
        return bool(importlib.metadata.version("torchtitan"))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_the_second_run_goes_on_where_the_first_one_saved(load: Any, tmp_path: Path) -> None:
    (entry,) = load("titan_plans").parse("gpus=2,resume,steps=20")
    ranks = load("titan_ranks")
    specs = [ranks.specification(entry, i, tmp_path, tmp_path, tmp_path / "saved") for i in (0, 1)]
    first, second = (" ".join(spec["settings"]["extra"]) for spec in specs)
    for words in (first, second):
        assert (
            f"--checkpoint.enable --checkpoint.folder {tmp_path / 'saved'} --checkpoint.interval 10" in words
        )
    assert "load_step" not in first
    assert second.endswith("--checkpoint.load_step 10")
    assert all(spec["warmup"] == 20 and spec["timed"] == 0 for spec in specs)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program that each rank runs, as a module."""
    monkeypatch.setattr(sys, "path", [str(BENCH / "titan"), *sys.path])
    spec = importlib.util.spec_from_file_location("titan_worker", BENCH / "titan" / "worker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Cores:
    """A host whose slowdowns are given."""

    def __init__(self, slowdowns: list[float]) -> None:
        self.slowdowns, self.chosen, self.released = iter(slowdowns), 0, False

    def choose(self) -> None:
        self.chosen += 1

    def slowdown(self) -> float:
        return next(self.slowdowns)

    def release(self) -> None:
        self.released = True


@pytest.mark.parametrize(
    ("slowdowns", "counted", "chosen"),
    [
        ([1.0, 1.1, 1.05], [*range(1, 10), *range(11, 20), *range(21, 25)], 1),
        ([1.0, 1.5, 1.1], [*range(1, 10), *range(21, 25)], 2),
        ([2.0, 1.5, 1.3], [*range(11, 20), *range(21, 25)], 4),
    ],
)
def test_steps_on_a_slow_host_do_not_count(
    worker: Any, slowdowns: list[float], counted: list[int], chosen: int
) -> None:
    """But for half of all bursts; and none does that the device waited for."""
    cores = Cores(slowdowns)
    fast = worker.FastCores(25, cores)
    for step in range(28):  # three further ones are not timed
        fast.look(step)
    assert fast.counted(range(25)) == counted
    assert (fast.slowdowns, cores.chosen, cores.released) == (slowdowns, chosen, True)


def test_the_slowest_rank_decides_what_counts(worker: Any) -> None:
    cores, others = Cores([1.0, 1.0, 1.05]), iter([1.0, 1.5, 1.1])
    fast = worker.FastCores(25, cores, lambda own: max(own, next(others)))
    for step in range(28):
        fast.look(step)
    assert fast.counted(range(25)) == [*range(1, 10), *range(21, 25)]
    assert cores.chosen == 2, "its core was fast; all look anew together"


def test_alone_a_rank_is_the_slowest(worker: Any) -> None:
    assert worker.slowest_rank(1.25) == 1.25


def test_where_nothing_is_timed_all_steps_count(worker: Any) -> None:
    fast = worker.FastCores(3, None)
    fast.look(0)
    assert fast.counted([5.0, 6.0, 7.0]) == [5.0, 6.0, 7.0]
    assert worker.FastCores(1, Cores([1.0])).counted([5.0]) == [5.0], "there is no other one"


def test_time_in_compiled_code_counts_once(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """pgraph's runner and what runs in it are one call; time outside is nobody's."""
    import torch
    from torch._inductor.output_code import CompiledFxGraph

    import pgraph
    from pgraph.runtime.graph_runner import GraphRunner
    from pgraph.runtime.partition_runner import PartitionRunner
    from pgraph.runtime.uncaptured import UncapturedPartition

    for kind in (CompiledFxGraph, GraphRunner, PartitionRunner, UncapturedPartition):
        monkeypatch.setattr(kind, "__call__", kind.__call__)  # put back afterwards
    inside = worker.Inside("pgraph")
    clock = iter(range(1000))
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.sin().tan().cos()

    pgraph.mark_unsafe("aten::tan", "is to cut the graph", "nothing to do")
    compiled = torch.compile(
        cut, backend="pgraph", dynamic=False, options={"driver": "host", "codegen": "aten", "min_ops": 1}
    )
    try:
        for calls in range(1, 4):
            with torch.no_grad():
                compiled(torch.randn(8))
            assert inside.seconds == calls, "two readings of the clock for each call, whatever its parts are"
    finally:
        pgraph.unmark_unsafe("aten::tan")
    assert len(pgraph.report().partitions) > 1


# Says that it is there, and then waits for ever, as a rank does whose peer has gone; or ends at once.
STUCK = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
if sys.argv[1] == "fail":
    sys.exit("SomeError: no luck")
print("there", flush=True)
if sys.argv[1] == "listen":
    sys.exit(f"port {sys.stdin.readline()}")
def waits_for_its_peer():
    while True:
        time.sleep(1)
waits_for_its_peer()
"""


@pytest.fixture
def stuck(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """Two ranks that get stuck, or fail; they say where they were."""
    ranks, (entry,) = load("titan_ranks"), load("titan_plans").parse("gpus=2")
    worker = tmp_path / "worker.py"
    worker.write_text(STUCK)
    monkeypatch.setattr(ranks, "WORKER", worker)

    def start(how: str) -> Any:
        monkeypatch.setattr(ranks.json, "dumps", lambda spec: how)
        started = ranks.Ranks(entry, 0, tmp_path / "out", tmp_path, tmp_path)
        logs = [tmp_path / "out" / f"rank{rank}.log" for rank in range(2)]
        while how == "wait" and not all("there" in log.read_text() for log in logs):
            time.sleep(0.05)
        return started

    return start


def test_ranks_that_get_stuck_are_ended_and_say_where(stuck: Callable[[str], Any], tmp_path: Path) -> None:
    ranks = stuck("wait")
    assert ranks.wait(0.2)["status"] == "timeout: not done after 0 s"
    assert all(process.returncode == -signal.SIGKILL for process in ranks.processes)
    for rank in range(2):
        assert "waits_for_its_peer" in (tmp_path / "out" / f"rank{rank}.log").read_text()


def test_no_rank_outlives_its_run(stuck: Callable[[str], Any]) -> None:
    with pytest.raises(SystemExit), stuck("wait") as ranks:
        raise SystemExit  # what SIGTERM becomes
    assert all(process.returncode == -signal.SIGKILL for process in ranks.processes)


def test_a_failed_rank_gives_the_reason(stuck: Callable[[str], Any]) -> None:
    found = stuck("fail").wait(20)
    assert found == {"status": "rank 0: SomeError: no luck", "ranks": []}


def test_ranks_meet_at_one_port(stuck: Callable[[str], Any], tmp_path: Path) -> None:
    ranks = stuck("listen")
    ranks.go()
    ranks.wait(20)
    first, second = ((tmp_path / "out" / f"rank{rank}.log").read_text().split()[-1] for rank in range(2))
    assert first == second
    assert 1024 <= int(first) < 2**16


@pytest.mark.skipif(not has_torchtitan(), reason="torchtitan is not installed")
def test_a_stopped_benchmark_leaves_no_rank(tmp_path: Path) -> None:
    """SIGTERM, as `timeout` sends it, in the middle of a run."""
    command = [sys.executable, str(BENCH / "torchtitan.py"), "--plan", "cpu"]
    command += ["--out", str(tmp_path), "--logs", str(tmp_path)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE)
    logs = [tmp_path / "00-aot_eager" / f"rank{rank}.log" for rank in range(2)]
    while not all(log.exists() and "Building" in log.read_text() for log in logs):
        assert program.poll() is None
        time.sleep(0.1)
    program.terminate()
    program.communicate(timeout=60)
    assert program.returncode == 128 + signal.SIGTERM
    assert all("most recent call first" in log.read_text() for log in logs), "stacks of what was ended"
    said = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert said.stdout == ""


@pytest.mark.skipif(not has_torchtitan(), reason="torchtitan is not installed")
def test_the_benchmark_runs_real_torchtitan(tmp_path: Path) -> None:
    """Two ranks on the CPU; the losses are the reference backend's to the last bit."""
    command = [sys.executable, str(BENCH / "torchtitan.py"), "--plan", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("torchtitan-*.json")
    reference, mine = json.loads(path.read_text())["rows"]
    assert (reference["status"], mine["status"]) == ("ok", "ok"), done.stdout
    assert mine["losses"] == reference["losses"]
    assert mine["captures_warm"] == mine["captures_end"] == 4
    assert mine["fallbacks"] == 0
    assert mine["torn_down"]
