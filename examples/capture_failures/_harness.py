"""What every entry of the catalogue shares: its parts, how they are run, what is printed of them.

An entry has a program as people write it, the way in which it fails under plain CUDA graphs, and a
program that works. `symptom` shows the failure in a process of its own, since many of these failures
outlive their process's next capture, or the process. `judge` compiles a program with pgraph, asks
`pgraph.explain` about it and compares every step with eager.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

FOLDER: Final = Path(__file__).resolve().parent
if str(FOLDER.parent) not in sys.path:
    sys.path.append(str(FOLDER.parent))

from backends import default_codegen, default_driver, register_pgraph, reset_compiled  # noqa: E402

import pgraph  # noqa: E402

CAPTURED: Final = "captured"
UNSHOWN: Final = "needs a GPU"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A program with its state.

    Args:
        fn: what is compiled.
        step: (`fn` or its compiled form, number of the step) -> results of one step.
    """

    fn: Callable[..., Any]
    step: Callable[[Callable[..., Any], int], list[Tensor]]


Start = Callable[[torch.device], Trial]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of the catalogue.

    Args:
        symptom: what people see, in a sentence.
        cause: why.
        fix: what to change.
        shows: regular expression that the output of `plain` matches when the failure is there.
        plain: the failure under plain CUDA graphs; runs on a GPU, in a process of its own.
        program: makes the program as people write it.
        fixed: makes the program that pgraph captures as a whole.
        on_gpu: code of the reason that pgraph gives for `program`, or `CAPTURED`.
        on_cpu: the same with the host driver; `UNSHOWN` where a CPU has nothing like it.
        why_captured: for programs that pgraph captures as they are.
        tolerance: largest difference to eager, relative to the largest magnitude.
        gpus: how many `plain` needs.
        seconds: after which `plain` counts as hung.
        finish: called when all is done, with the recordings still alive.
    """

    symptom: str
    cause: str
    fix: str
    shows: str
    plain: Callable[[], None]
    program: Start
    fixed: Start
    on_gpu: str
    on_cpu: str
    why_captured: str = ""
    tolerance: float = 1e-4
    gpus: int = 1
    seconds: int = 180
    finish: Callable[[], None] = lambda: None

    @property
    def file(self) -> Path:
        return Path(inspect.getfile(self.plain))

    def expected(self, device: torch.device) -> str:
        """What pgraph says of `program` there: a code, `CAPTURED` or `UNSHOWN`."""
        return self.on_gpu if device.type == "cuda" else self.on_cpu


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What pgraph made of a program.

    Args:
        explanation: of one step.
        difference: largest one to eager over all steps, relative to the largest magnitude.
        launches: over all steps.
        results: of each step.
    """

    explanation: pgraph.Explanation
    difference: float
    launches: int
    results: list[list[Tensor]]

    @property
    def codes(self) -> set[str]:
        """Codes of all reasons why something stays outside."""
        reasons = [*self.explanation.breaks, *(r for p in self.explanation.partitions for r in p.reasons)]
        return {r.code for r in reasons}

    @property
    def verdict(self) -> str:
        return CAPTURED if self.explanation.complete else ", ".join(sorted(self.codes))


def calls(fn: Callable[..., Any], inputs: Callable[[torch.device], tuple[Any, ...]]) -> Start:
    """A program without state: a step calls it on fresh inputs, at addresses of their own.

    Gradients of the inputs that require them are results too.
    """

    def start(device: torch.device) -> Trial:
        def step(run: Callable[..., Any], number: int) -> list[Tensor]:
            args = inputs(device)
            out = run(*args)
            results = list(out) if isinstance(out, tuple) else [out]
            wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
            if wanted:
                results += torch.autograd.grad(sum(r.float().sum() for r in results), wanted)
            return [r.detach() for r in results]

        return Trial(fn, step)

    return start


# -- plain CUDA graphs ---------------------------------------------------------------------------


def record(fn: Callable[..., Any], *args: Any, **how: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The usual recipe: warm up on a side stream, then `torch.cuda.graph`. Returns graph and result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        out = fn(*args)
    return graph, out


def symptom(entry: Entry) -> str | None:
    """What the failing program prints, in a process of its own; None if there are too few GPUs."""
    if torch.cuda.device_count() < entry.gpus:
        return None
    child = subprocess.Popen(
        [sys.executable, str(entry.file), "--plain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return child.communicate(timeout=entry.seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # its own group: what it started goes with it
        return f"{child.communicate()[0]}\nstill running after {entry.seconds} s: it hangs"


def _show_plain(entry: Entry) -> None:
    """The child's part: fail, say how, and leave without asking the broken context for anything."""
    try:
        entry.plain()
    except BaseException as e:
        chain: list[BaseException] = [e]
        while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(before)
        for error in reversed(chain):
            lines = str(error).strip().splitlines() or [""]
            print(f"{type(error).__name__}: {lines[0]}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# -- pgraph --------------------------------------------------------------------------------------


def default_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def judge(start: Start, device: torch.device, *, full: bool = False, steps: int = 4) -> Outcome:
    """Explain a program compiled with pgraph, then compare it with eager step by step.

    Args:
        start: makes the program; called anew for each use, so that states move alike.
        device: where to run. On a CPU the host driver captures.
        full: with `require_full_capture`.
        steps: to compare.

    Raises:
        pgraph.FullCaptureError: `full` is set and something stays outside.
    """
    options = {
        "driver": default_driver(device),
        "codegen": default_codegen(device),
        "min_ops": 1,  # these programs are small on purpose
        "require_full_capture": full,
    }

    def compiled(trial: Trial) -> Callable[..., Any]:
        return torch.compile(trial.fn, backend=register_pgraph(), dynamic=False, options=options)

    reset_compiled()
    trial = _seeded(start, device)
    run = compiled(trial)
    explanation = pgraph.explain(lambda: trial.step(run, 0))()
    eager, ours = _seeded(start, device), _seeded(start, device)
    run = compiled(ours)
    before = pgraph.report().launches
    results, difference = [], 0.0
    for number in range(steps):
        torch.manual_seed(number)
        want = eager.step(eager.fn, number)
        torch.manual_seed(number)
        got = ours.step(run, number)
        difference = max(difference, *(_difference(g, w) for g, w in zip(got, want, strict=True)))
        results.append(got)
    return Outcome(explanation, difference, pgraph.report().launches - before, results)


def _seeded(start: Start, device: torch.device) -> Trial:
    torch.manual_seed(0)
    return start(device)


def _difference(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    scale = want.abs().max().item() if want.numel() else 0.0
    worst = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
    return worst / scale if scale else worst


# -- as a program --------------------------------------------------------------------------------


def main(entry: Entry) -> None:
    """Run one entry: the symptom, what pgraph says, the result of the fix."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules["__main__"]))
    parser.add_argument(
        "--plain", action="store_true", help="only fail under plain CUDA graphs (needs a GPU)"
    )
    parser.add_argument("--json", action="store_true", help="one line for run_all.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device().type)
    chosen = parser.parse_args()
    if chosen.plain:
        _show_plain(entry)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it warns of what is explained here
    logging.getLogger("pgraph").setLevel(logging.ERROR)
    show: Callable[..., None] = (lambda *text: None) if chosen.json else print
    row = _run(entry, torch.device(chosen.device), show)
    if chosen.json:
        print(json.dumps(row))


def _run(entry: Entry, device: torch.device, show: Callable[..., None]) -> dict[str, str]:
    row = {"entry": entry.file.name}
    show(f"{entry.file.name}: {entry.symptom}\n\n1. Under plain CUDA graphs")
    output = symptom(entry) if device.type == "cuda" else None
    if output is None:
        row["plain CUDA graphs"] = "not shown"
        show(f"   not shown: it takes {entry.gpus} GPU{'s' if entry.gpus > 1 else ''}")
    else:
        found = re.search(entry.shows, output)
        row["plain CUDA graphs"] = found[0] if found else "NO FAILURE"
        show(textwrap.indent(output.strip(), "   "))
    show(f"\n2. With pgraph, on {device}")
    if entry.expected(device) == UNSHOWN:
        row["pgraph"] = UNSHOWN
        show(f"   {UNSHOWN}: a CPU has nothing like it")
    else:
        outcome = judge(entry.program, device)
        row["pgraph"] = _verdict(outcome, entry)
        show(textwrap.indent(_words(outcome.explanation), "   "))
        if entry.expected(device) == CAPTURED:
            show(f"   {entry.why_captured}")
        show(f"   largest difference to eager: {outcome.difference:.1g}")
    show(f"\n3. Fixed: {entry.fix}")
    outcome = judge(entry.fixed, device, full=True)
    row["fixed"] = _verdict(outcome, entry)
    show(textwrap.indent(_words(outcome.explanation), "   "))
    show(f"   {outcome.launches} launches, largest difference to eager: {outcome.difference:.1g}")
    entry.finish()
    reset_compiled()
    return row


def _words(explanation: pgraph.Explanation) -> str:
    """The explanation as printed, less the list of parts, which the catalogue has no use for."""
    text = re.split(r"\n\n(?=(?:forward|backward|inference) \d)", explanation.render(times=False))[0]
    # Where there is nothing to change, the reason stands with its part.
    reasons = {str(r): r.sentence for p in explanation.partitions for r in p.reasons}
    return "\n".join([text, *(line for line, sentence in reasons.items() if sentence not in text)])


def _verdict(outcome: Outcome, entry: Entry) -> str:
    right = "right" if outcome.difference <= entry.tolerance else f"WRONG by {outcome.difference:.1g}"
    return f"{outcome.verdict}; {right}"
