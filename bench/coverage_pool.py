"""Children side by side: forked from one parent that has imported everything, measured one at a time.

Note [Alone on the GPU]: Many children may compile at once, but while one measures all others stand still. A
child that is ready says so and waits. The parent stops every other child's process group (SIGSTOP, and waits
until the kernel reports it), lets the measuring one go, and takes its figures. What a stopped child had
queued on the GPU runs out within milliseconds; the measuring child idles first. Then the parent reads
the device's used memory, lets the measured child exit, and reads it again: nobody else could allocate, so the
difference is that process's memory, its CUDA context included. A stopped child may hold a lock of the compile
cache: the measuring one has compiled already and needs none.

Note [In turns]: On a shared machine the host may run half as fast for some seconds. So the backends of one
model and mode wait until all of them are ready, and measure in turns, a few steps each, until each has its
figures.

Note [The first one compiles for all]: The children of one model and mode, its check among them, compile much
the same kernels. The first starts alone; when it is ready, and the compile cache has its kernels, the others
start, in less than half of the time each (Inductor, H200: 82 s, then 37 s for a conv net). Other models'
children start between.

Note [Checks on every GPU]: Compiling takes most of the time, and a machine of several GPUs has more cores.
Checks go to the GPU that has the fewest children; whatever is measured runs on the first one, and those on
the others stand still as well.

Not a program: `coverage.py` imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from coverage_subject import Job
from workers import last_error

Fields = dict[str, Any]
Work = Callable[[Job, Callable[[], None]], Fields]
"""``(job, alone)`` to the fields of a row; ``alone()`` returns once all other children stand still. It may be
called again: then others that are measured with this one have their turn before."""

MEASURING_S = 60.0
IDLE_S = 0.03
_PR_SET_PDEATHSIG = 1


class Child:
    """One forked process."""

    def __init__(self, job: Job, work: Work, timeout: float, log: Path, gpu: str | None = None) -> None:
        self.job, self.log, self.gpu = job, log, gpu
        self.link, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_live, args=(job, work, theirs, log, gpu))
        with warnings.catch_warnings():
            # Python 3.12 warns where libraries have threads; none of theirs holds a lock that a child needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)  # as the child itself does: whoever comes first
        self.started = time.monotonic()
        self.due = self.started + timeout
        self.ready = False
        self.fields: Fields | None = None  # of its row, once there are any

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the child and to what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stopped(self) -> bool:
        """Whether the kernel says that it stands still, or is gone."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return True
        return state in "TtZX"

    def end(self) -> None:
        """Kill it and what it started, and reap it."""
        self.signal(signal.SIGKILL)
        self.process.join()
        self.link.close()

    def fate(self) -> Fields:
        """What a row says of a child that ended without a result."""
        code = self.process.exitcode
        text = self.log.read_text(encoding="utf-8", errors="replace")[-20000:] if self.log.exists() else ""
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        error = last_error(text)
        return {"status": f"{how}: {error}" if error else how}


@dataclasses.dataclass
class Pool:
    """Runs jobs, `size` at a time.

    Args:
        work: what a child does.
        size: children side by side.
        timeout: seconds that a child may run; waiting and standing still do not count.
        deadline: `time.monotonic` at which the rest is killed; None for never.
        logs: folder for what children print.
        device_used_mb: reads the first device's used memory in MB; None where it cannot be known.
        gpus: their names, as CUDA_VISIBLE_DEVICES has them, by Note [Checks on every GPU]; none: children see
            what this process sees.
    """

    work: Work
    size: int
    timeout: float
    deadline: float | None
    logs: Path
    device_used_mb: Callable[[], float | None]
    gpus: Sequence[str] = ()

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Fields]]:
        """Each job's fields as soon as it has ended; jobs that the deadline cut off are left out."""
        waiting, living, compiled = list(jobs), list[Child](), set[tuple[str, ...]]()
        try:
            while (waiting or living) and not self._late():
                busy = sum(not child.ready for child in living)
                while busy < self.size and (job := startable(waiting, living, compiled, self.size)):
                    waiting.remove(job)
                    gpu = place(job, self.gpus, living)
                    living.append(Child(job, self.work, self.timeout, self._log(job), gpu))
                    busy += 1
                for child in self._news(living):
                    self._hear(child)
                    if child.ready or child.fields is not None:
                        compiled.add(_kernels(child.job))
                if group := complete(waiting, living):
                    self._measure(group, living)
                for child in [child for child in living if child.fields is not None]:
                    living.remove(child)
                    child.end()
                    yield child.job, {**(child.fields or {}), "child_s": time.monotonic() - child.started}
        finally:
            for child in living:
                child.end()

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _log(self, job: Job) -> Path:
        return self.logs / (job.name.replace(" ", "-").replace("/", "-") + ".log")

    def _news(self, living: list[Child]) -> list[Child]:
        """Children that said something, ended, or took too long; waits for at most half a second."""
        sources = {child.link: child for child in living} | {c.process.sentinel: c for c in living}
        found = {id(sources[source]): sources[source] for source in wait(list(sources), 0.5)}
        now = time.monotonic()
        return [child for child in living if id(child) in found or (now > child.due and not child.ready)]

    def _hear(self, child: Child) -> None:
        """Note what `child` has to say: that it is ready, or its fields."""
        try:
            if child.link.poll():
                kind, fields = child.link.recv()
                if kind == "row":
                    child.fields = fields
                else:
                    child.ready = True
                return
        except (EOFError, ConnectionError):
            child.process.join(10)
        if child.process.exitcode is not None:
            child.fields = child.fate()
        elif time.monotonic() > child.due:
            child.fields = {"status": f"timeout: no result after {self.timeout:.0f} s"}

    def _measure(self, group: Sequence[Child], living: Sequence[Child]) -> None:
        """Let these measure in turns while all others stand still, by Note [Alone on the GPU]."""
        began = time.monotonic()
        others = [other for other in living if other not in group]
        try:
            for other in others:
                other.signal(signal.SIGSTOP)
            while not all(other.stopped() for other in others) and time.monotonic() < began + 5:
                time.sleep(0.001)
            while left := [child for child in group if child.fields is None]:
                for child in left:
                    self._turn(child)
        finally:
            for other in others:
                other.due += time.monotonic() - began
                other.signal(signal.SIGCONT)

    def _turn(self, child: Child) -> None:
        try:
            time.sleep(IDLE_S)
            child.link.send("go")
            if not child.link.poll(MEASURING_S):
                child.fields = {"status": f"timeout: measuring took more than {MEASURING_S:.0f} s"}
                return
            kind, fields = child.link.recv()
            if kind == "row":
                child.fields = {**fields, "device_used_mb": self._released(child)}
        except (EOFError, ConnectionError):
            child.process.join(10)
            child.fields = child.fate()

    def _released(self, child: Child) -> float | None:
        """MB of device memory that the process gives back by ending; None where it cannot be known."""
        before = self.device_used_mb()
        child.link.send("exit")
        child.process.join(20)
        after = self.device_used_mb()
        if before is None or after is None or child.process.exitcode is None:
            return None
        for _ in range(20):  # the driver may still be giving pages back
            time.sleep(0.02)
            again = self.device_used_mb()
            if again is None or again == after:
                break
            after = again
        return max(0.0, before - after)


def place(job: Job, gpus: Sequence[str], living: Sequence[Child]) -> str | None:
    """The GPU for a job, by Note [Checks on every GPU]; None where none is named."""
    if not gpus or job.kind != "check":
        return next(iter(gpus), None)
    return min(gpus, key=lambda gpu: sum(child.gpu == gpu for child in living))


def startable(
    waiting: Sequence[Job], living: Sequence[Child], compiled: Collection[tuple[str, ...]], groups: int
) -> Job | None:
    """The next job that need not wait, by Note [The first one compiles for all]; None: all have to.

    Those that others wait for come first.

    Args:
        compiled: whose first job is ready or has ended, as `_kernels` names them.
        groups: of jobs that are measured together, so many may be under way.
    """
    begun = {_kernels(child.job) for child in living}
    mates = (job for job in waiting if _kernels(job) in compiled)
    others = (job for job in waiting if _kernels(job) not in begun and len(begun) < groups)
    return next(mates, None) or next(others, None)


def complete(waiting: Sequence[Job], living: Sequence[Child]) -> list[Child]:
    """Children that are measured together, by Note [In turns], if all of some group are ready."""
    groups: dict[tuple[str, ...], list[Child]] = {}
    for child in living:
        if child.fields is None:
            groups.setdefault(_together(child.job), []).append(child)
    missing = {_together(job) for job in waiting}
    found = (g for name, g in groups.items() if name not in missing and all(child.ready for child in g))
    return next(found, [])


def _kernels(job: Job) -> tuple[str, ...]:
    """Jobs of which this is the same compile much the same kernels."""
    return job.model, job.mode


def _together(job: Job) -> tuple[str, ...]:
    """Jobs of which this is the same are measured together."""
    return job.kind, job.model, job.mode


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux; elsewhere nothing)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _live(job: Job, work: Work, link: Connection, log: Path, gpu: str | None) -> None:
    """A child's life: print to the log, do the work, say the result."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    die_with_parent()
    log.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    waits = False

    def alone() -> None:
        nonlocal waits
        waits = True
        link.send(("ready", None))
        link.recv()

    try:
        fields = work(job, alone)
    except BaseException as error:
        # A log is for people; the row has the error's last line.
        traceback.print_exc()
        fields = {"status": last_error("".join(traceback.format_exception(error))) or type(error).__name__}
    sys.stdout.flush()
    sys.stderr.flush()
    link.send(("row", fields))
    if waits:
        link.recv()
    os._exit(0)
