"""The correctness and coverage of one model under one backend, in a process of its own.

Not a program: `coverage.py` forks children that call `check`.
"""

from __future__ import annotations

import time
from typing import Any

from backends import pgraph_report
from coverage_judge import Mismatch, Verdict, judge, outside, shared
from coverage_subject import Holes, Job, Run, Subject, dirty_allocations, spoil
from zoo.entry import Inputs

LAUNCHED = 5  # steps that must be compared after all captures exist
REASONS = 12  # sentences that a row keeps


def check(job: Job) -> dict[str, Any]:
    """Compare `job.steps` steps or more with eager by `coverage_judge`'s note; returns the fields of a row.

    Inputs lie elsewhere at every step; parameters and buffers move, the former changing slightly, at every
    second one; old weights, old inputs and all free memory are full of NaN. Where captures come late, steps
    are added until `LAUNCHED` of them have launched what there is.
    """
    subject = Subject(job)
    trial = Trial(job, subject)
    holes = Holes(subject.device)
    compile_s = 0.0
    number = 0
    while number < job.steps or (trial.unsettled and number < 4 * job.steps):
        holes.shake()
        if number and number % 2 == 0:
            subject.move()
        inputs = subject.inputs(number)
        trial.addresses.add(inputs[0].data_ptr())
        began = time.perf_counter()
        trial.step(number, inputs, holes)
        compile_s = compile_s or time.perf_counter() - began
        for tensor in inputs:
            spoil(tensor)
        del inputs
        number += 1
    report = pgraph_report() if job.backend == "pgraph" else None
    fields = coverage_of(report) if report is not None else {}
    status = trial.status()
    if status == "ok" and trial.unsettled:
        status = f"only {trial.launched} of {number} compared steps launched what is captured"
    return {
        "status": status,
        "batch": subject.entry.batch,
        "check_batch": subject.batch,
        "params_mb": subject.params_mb,
        "precision": subject.entry.precision,
        "compile_s": compile_s,
        "steps": number,
        "steps_launched": trial.launched,
        "tensors_compared": trial.compared,
        "input_addresses": len(trial.addresses),
        "error": trial.error,
        "eager_error": trial.eager_error,
        "inductor_differs": trial.inductor_differs,
        **fields,
    }


class Trial:
    """Steps of one model, each run by eager twice, in fp32, and compiled."""

    def __init__(self, job: Job, subject: Subject) -> None:
        self.job, self.subject = job, subject
        self.compiled = subject.compiled(job)
        self.inductor: Run | None = None
        self.addresses: set[int] = set()
        self.problems: list[tuple[int, Mismatch]] = []
        self.inductor_differs: list[str] = []
        self.compared = self.launched = 0
        self.error = self.eager_error = 0.0

    def step(self, number: int, inputs: Inputs, holes: Holes) -> None:
        """Run and judge one step."""
        subject = self.subject
        saved = subject.saved()
        try:
            truth = subject.truth(inputs)
            subject.fit_scale(inputs)
            eager = self._from(saved, subject.program, inputs)
            again = self._from(saved, subject.program, inputs)
        except Exception as error:
            raise RuntimeError(f"eager itself: {type(error).__name__}: {error}") from error
        subject.restore(saved)
        holes.shake()  # what eager left in free memory is right; nobody may find it there
        before = self._counts()
        mine = subject.step(self.compiled, inputs)
        self._count(before, self._counts())
        verdict = judge(truth, eager, again, mine)
        self.compared += verdict.compared
        self._note(verdict)
        if verdict.mismatches:
            after = subject.saved()
            clean, dirty = self._by_inductor(saved, inputs)
            subject.restore(after)
            for mismatch in verdict.mismatches:
                if shared(mismatch, truth, clean) or outside(mismatch, truth, dirty):
                    self.inductor_differs += [mismatch.name] * (mismatch.name not in self.inductor_differs)
                else:
                    self.problems.append((number, mismatch))

    def status(self) -> str:
        """ "ok", or the first tensor that is wrong and how many there are."""
        if not self.problems:
            return "ok"
        number, first = self.problems[0]
        count = len(self.problems)
        return f"mismatch: step {number}: {first} ({count} tensor{'s' * (count > 1)} over all steps)"

    def _from(self, saved: list[Any], run: Run, inputs: Inputs) -> Any:
        self.subject.restore(saved)
        return self.subject.step(run, inputs)

    def _by_inductor(self, saved: list[Any], inputs: Inputs) -> tuple[Any, Any]:
        """The step by plain Inductor, and once more in memory full of NaN; empty where there is none."""
        if self.job.backend != "pgraph" or self.job.device != "cuda":
            return {}, {}
        if self.inductor is None:  # a compiled list of modules has a length, and may not be asked for it
            self.inductor = self.subject.compiled(self.job, "inductor")
        clean = self._from(saved, self.inductor, inputs)
        with dirty_allocations():
            return clean, self._from(saved, self.inductor, inputs)

    def _note(self, verdict: Verdict) -> None:
        self.error = max(self.error, verdict.error)
        self.eager_error = max(self.eager_error, verdict.eager_error)

    @property
    def unsettled(self) -> bool:
        """Whether there are captures and too few steps have launched them; sizes that vary never settle."""
        return not self.subject.entry.dynamic and self._counts()[0] > 0 and self.launched < LAUNCHED

    def _count(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        """Count a step that launched and captured nothing; a step that captured starts the count anew."""
        if after[0] != before[0]:
            self.launched = 0
        elif after[1] > before[1]:
            self.launched += 1

    def _counts(self) -> tuple[int, int]:
        """(captures, launches) of pgraph so far."""
        report = pgraph_report() if self.job.backend == "pgraph" else None
        return (0, 0) if report is None else (int(report.captures), int(report.launches))


def coverage_of(report: Any) -> dict[str, Any]:
    """What pgraph's report says of a process that ran one model.

    Ops are counted once for each compiled graph that ran. A part that only draws seeds for the graph behind
    it costs nothing and counts neither as captured nor as uncaptured. What Python runs between two graphs
    never reaches pgraph; `graph_breaks` says how many graphs end in such a break.
    """
    partitions = [
        p
        for p in report.partitions
        if p.state != "not run"
        and p.facts.device_ops
        and not (p.reasons and all(r.info.free for r in p.reasons))
    ]
    outside = [p for p in partitions if p.state != "captured"]
    codes: dict[str, int] = {}
    sentences: dict[str, None] = {}
    for partition in outside:
        reasons = {reason.code: reason for reason in partition.reasons}
        for code in reasons or {partition.state: None}:
            codes[code] = codes.get(code, 0) + 1
        sentences |= {f"[{r.code}] {r.sentence}": None for r in reasons.values()}
    graphs = {(p.facts.graph.kind, p.facts.graph.number): p.facts.graph for p in report.partitions}
    broken = [g.broken for g in graphs.values() if g.broken is not None]
    sentences |= {f"[{r.code}] {r.sentence}": None for r in broken}
    return {
        "captured_ops": sum(p.facts.device_ops for p in partitions if p.state == "captured"),
        "device_ops": sum(p.facts.device_ops for p in partitions),
        "captures": int(report.captures),
        "capture_s": float(report.capture_s),
        "launches": int(report.launches),
        "splits": int(report.splits),
        "parts": len(partitions),
        "uncaptured_parts": len(outside),
        "fallbacks": int(report.refused),
        "uncaptured": codes,
        "reasons": [sentence[:300] for sentence in list(sentences)[:REASONS]],
        "graph_breaks": len(broken),
    }
