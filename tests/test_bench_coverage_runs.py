"""The coverage benchmark: its processes, its rows, its tables, and a whole run on a CPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_coverage import job

REPO = Path(__file__).resolve().parents[1]
PROGRAM = REPO / "bench" / "coverage.py"
ON_CPU = ["--device", "cpu", "--driver", "host", "--codegen", "aten"]
HEADER = {
    "gpu": "nvidia-h200",
    "driver": "580.1",
    "torch": "2.11.0",
    "python": "3.12.0",
    "commit": "abc",
    "date": "2026-01-02",
}


# Processes


class Fakes:
    """Work for forked children: what a job does is written in its model's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, job: Any, alone: Callable[[], None]) -> dict[str, Any]:
        if job.model == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if job.model == "raise":
            raise RuntimeError("out of luck")
        if job.model == "hang":
            time.sleep(60)
        if job.model == "tick":
            # Writes the time every millisecond: a gap is a time in which it stood still.
            with (self.folder / "ticks").open("w") as ticks:
                end = time.monotonic() + 4
                while time.monotonic() < end and not (self.folder / "measured").exists():
                    ticks.write(f"{time.monotonic()}\n")
                    ticks.flush()
                    time.sleep(0.001)
                time.sleep(0.05)
                ticks.write(f"{time.monotonic()}\n")
        if job.model == "turns":
            return self.in_turns(job, alone)
        if job.model == "where":
            return {"status": "ok", "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
        if job.kind == "time":
            while not (self.folder / "ticks").exists():
                time.sleep(0.01)
            time.sleep(0.2)
            alone()
            began = time.monotonic()
            time.sleep(0.5)
            (self.folder / "measured").write_text(json.dumps([began, time.monotonic()]))
        return {"status": "ok", "model": job.model}

    def in_turns(self, job: Any, alone: Callable[[], None]) -> dict[str, Any]:
        """Three turns; the times of each. Backend z needs long to be ready, y ends after its second turn."""
        time.sleep(1.0 if job.backend == "z" else 0.0)
        spans = []
        for _ in range(3):
            alone()
            if job.backend == "y" and len(spans) == 2:
                raise RuntimeError("no third turn")
            began = time.monotonic()
            time.sleep(0.05)
            spans.append((began, time.monotonic()))
        return {"status": "ok", "spans": spans}


def pool(load: Any, folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"size": 2, "timeout": 20.0, "deadline": None, "logs": folder / "logs"}
    settings |= {"work": Fakes(folder), "device_used_mb": lambda: None}
    return load("coverage_pool").Pool(**{**settings, **changes})


def test_a_child_that_fails_leaves_a_status_and_the_rest_goes_on(load: Any, tmp_path: Path) -> None:
    jobs = [job(load, model=model) for model in ("crash", "raise", "hang", "fine")]
    began = time.monotonic()
    found = {j.model: fields for j, fields in pool(load, tmp_path, timeout=2.0).run(jobs)}
    assert time.monotonic() - began < 15
    assert found["crash"]["status"].startswith("killed by signal 9")
    assert found["raise"]["status"] == "RuntimeError: out of luck"
    assert found["hang"]["status"] == "timeout: no result after 2 s"
    assert found["fine"]["status"] == "ok"
    assert "out of luck" in (tmp_path / "logs" / "check-raise-train-pgraph.log").read_text()


def test_the_deadline_kills_what_still_runs(load: Any, tmp_path: Path) -> None:
    jobs = [job(load, model="fine"), job(load, model="hang"), job(load, model="hang", mode="infer")]
    jobs.append(job(load, model="late"))
    began = time.monotonic()
    found = list(pool(load, tmp_path, deadline=began + 2).run(jobs))
    assert [j.model for j, _ in found] == ["fine"]
    assert time.monotonic() - began < 10


def test_the_first_backend_compiles_for_the_others(load: Any, tmp_path: Path) -> None:
    """They start when it has ended; another model's child, and another mode's, start beside it."""
    lists = {
        mode: [job(load, "time", "a", mode=mode, backend=b) for b in "xyz"] for mode in ("train", "infer")
    }
    jobs = [*lists["train"], *lists["infer"], job(load, "time", "b")]
    startable = load("coverage_pool").startable
    living = [SimpleNamespace(job=jobs[0])]
    assert startable(jobs[1:], living, set(), 9) is jobs[3]
    assert startable(jobs[1:], living, set(), 1) is None, "as many as may be under way"
    living.append(SimpleNamespace(job=jobs[3]))
    assert startable([*jobs[1:3], *jobs[4:]], living, set(), 9) is jobs[6]
    assert startable(jobs[1:3], living, set(), 9) is None
    compiled = {("a", "train")}
    assert startable([jobs[6], *jobs[1:3]], living, compiled, 9) is jobs[1], "the others wait for it"
    assert startable(jobs[2:3], [SimpleNamespace(job=jobs[1])], compiled, 1) is jobs[2], (
        "no longer one by one"
    )


def test_those_that_belong_together_wait_for_one_another(load: Any) -> None:
    complete = load("coverage_pool").complete

    def child(backend: str, ready: bool, model: str = "a", fields: Any = None) -> Any:
        return SimpleNamespace(job=job(load, "time", model, backend=backend), ready=ready, fields=fields)

    x, y, z, other = child("x", True), child("y", True), child("z", False), child("x", False, "b")
    assert complete([], [x, y, other]) == [x, y]
    assert complete([], [x, y, z, other]) == []
    assert complete([z.job], [x, y, other]) == []
    assert complete([], [x, child("y", True, fields={"status": "gone"}), other]) == [x]


def test_checks_are_spread_over_gpus_and_the_first_one_measures(load: Any, tmp_path: Path) -> None:
    place = load("coverage_pool").place
    check, timing = job(load, model="a"), job(load, "time", "a")
    living = [SimpleNamespace(gpu="2"), SimpleNamespace(gpu="2"), SimpleNamespace(gpu="5")]
    assert place(check, ["2", "5"], living) == "5"
    assert place(check, ["2", "5"], []) == "2"
    assert place(timing, ["2", "5"], living) == "2"
    assert place(check, [], living) is None
    ((_, fields),) = pool(load, tmp_path, gpus=["7"]).run([job(load, model="where")])
    assert fields["gpu"] == "7"


def test_a_check_waits_for_the_timing_that_compiles_the_same_and_is_no_part_of_it(load: Any) -> None:
    module = load("coverage_pool")
    timing, check = job(load, "time", "a"), job(load, model="a")
    living = [SimpleNamespace(job=timing, ready=True, fields=None)]
    assert module.startable([check], living, set(), 9) is None
    assert module.startable([check], living, {("a", "train")}, 9) is check
    assert module.complete([check], living) == living


def test_gpus_are_named_as_cuda_would_see_them(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = load("coverage_nvml")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert nvml.visible() == ["3", "1"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(nvml, "_nvml", lambda: None)
    assert nvml.visible() == []


def test_backends_of_one_model_measure_in_turns(load: Any, tmp_path: Path) -> None:
    """Also when one of them fails between two turns."""
    jobs = [job(load, "time", "turns", backend=backend) for backend in "xyz"]
    found = {j.backend: fields for j, fields in pool(load, tmp_path, size=3).run(jobs)}
    assert {b: fields["status"] for b, fields in found.items()} == {
        "x": "ok",
        "y": "RuntimeError: no third turn",
        "z": "ok",
    }
    turns = sorted((began, end, b) for b in "xz" for began, end in found[b]["spans"])
    assert [b for _, _, b in turns] == ["x", "z"] * 3
    assert all(end <= began for (_, end, _), (began, _, _) in itertools.pairwise(turns))


def test_others_stand_still_while_one_measures(load: Any, tmp_path: Path) -> None:
    """The other child's clock has a gap around the measurement, and its timeout is longer by it."""
    used = iter([900.0, 350.0, 350.0])
    jobs = [job(load, model="tick"), job(load, "time", model="measured")]
    run = pool(load, tmp_path, device_used_mb=lambda: next(used, 350.0)).run(jobs)
    found = {j.model: fields for j, fields in run}
    assert {fields["status"] for fields in found.values()} == {"ok"}
    assert found["measured"]["device_used_mb"] == 550.0
    began, ended = json.loads((tmp_path / "measured").read_text())
    ticks = [float(line) for line in (tmp_path / "ticks").read_text().split()]
    assert ticks[0] < began
    assert ticks[-1] > ended
    assert not [tick for tick in ticks if began < tick < ended]


# Rows


def figures(**changes: Any) -> dict[str, Any]:
    return {"status": "ok", "captured_ops": 10, "device_ops": 10, "uncaptured_parts": 0, **changes}


def test_a_check_and_a_timing_make_one_row(load: Any, tmp_path: Path) -> None:
    rows, schema = load("coverage_rows"), load("schema")
    path = tmp_path / "coverage.json"
    book = rows.Rows(path, HEADER)
    checked, timed = job(load), job(load, "time")
    book.add(checked, figures(fallbacks=0, compile_s=9.0))
    book.add(timed, {"status": "ok", "ms_per_step": 2.0, "compile_s": 5.0})
    (row,) = schema.read(path)["rows"]
    assert (row["captured_ops"], row["ms_per_step"], row["compile_s"], row["status"]) == (10, 2.0, 5.0, "ok")
    book.add(checked, figures(captured_ops=9, compile_s=8.0))
    assert (book.all()[0]["captured_ops"], book.all()[0]["compile_s"]) == (9, 5.0)
    book.add(checked, {"status": "mismatch: step 3: loss is off"})
    assert book.all()[0]["status"] == "mismatch: step 3: loss is off"
    assert book.all()[0]["time_status"] == "ok"


def test_resuming_leaves_out_what_went_well_at_this_commit(load: Any, tmp_path: Path) -> None:
    rows = load("coverage_rows")
    path = tmp_path / "coverage.json"
    book = rows.Rows(path, HEADER)
    book.add(job(load), figures())
    book.add(job(load, mode="infer"), {"status": "RuntimeError: no"})
    again = rows.Rows(path, HEADER)
    assert again.done(job(load))
    assert not again.done(job(load, mode="infer"))
    assert not again.done(job(load, "time"))
    newer = rows.Rows(path, {**HEADER, "commit": "def"})
    assert not newer.done(job(load))
    told = rows.Rows(path, {**HEADER, "commit": "def"}, ["other", "abc"])
    assert told.done(job(load))
    assert not told.done(job(load, mode="infer"))


def test_each_part_of_a_row_says_how_old_it_is(load: Any, tmp_path: Path) -> None:
    rows = load("coverage_rows")
    path, key = tmp_path / "coverage.json", rows.row_key(job(load))
    rows.Rows(path, HEADER).add(job(load), figures())
    newer = rows.Rows(path, {**HEADER, "commit": "def"})
    newer.add(job(load, "time"), {"status": "ok", "ms_per_step": 2.0})
    row = newer.rows[key]
    assert (row["captured_ops"], row["ms_per_step"], row["commit"]) == (10, 2.0, "def")
    assert [rows.part_commit(row, kind) for kind in rows.KINDS] == ["abc", "def", None, None]
    again = rows.Rows(path, {**HEADER, "commit": "def"})
    assert again.done(job(load, "time"))
    assert not again.done(job(load))
    # A row as it was before parts said so.
    del newer.rows[key]["check_commit"]
    del newer.rows[key]["time_commit"]
    newer.rows[key]["commit"] = "abc"
    assert newer.add(job(load, "count"), {"status": "ok"})["time_commit"] == "abc"


def test_memory_measured_again_stands_until_the_next_timing(load: Any, tmp_path: Path) -> None:
    rows = load("coverage_rows")
    path, key = tmp_path / "coverage.json", rows.row_key(job(load))
    timed = {"status": "ok", "ms_per_step": 2.0, "peak_reserved_mb": 90.0, "params_mb": 5.0, "batch": 8}
    rows.Rows(path, HEADER).add(job(load, "time"), timed)
    newer = rows.Rows(path, {**HEADER, "commit": "def"})
    newer.add(
        job(load, "memory"), {"status": "ok", "peak_reserved_mb": 80.0, "ms_per_step": 3.0, "child_s": 4.0}
    )
    row = newer.rows[key]
    assert (row["peak_reserved_mb"], row["ms_per_step"], row["params_mb"]) == (80.0, 2.0, 5.0)
    assert (row["time_commit"], row["memory_commit"], row["memory_s"]) == ("abc", "def", 4.0)
    assert newer.done(job(load, "memory"))
    assert not newer.done(job(load, "time"))
    newest = rows.Rows(path, {**HEADER, "commit": "fed"})
    newest.add(job(load, "time"), timed)
    row = newest.rows[key]
    assert (row["peak_reserved_mb"], row["time_commit"], row.get("memory_commit")) == (90.0, "fed", None)
    assert not newest.done(job(load, "memory"))


def test_jobs_start_with_the_longest_and_keep_backends_together(load: Any) -> None:
    program = load("coverage")
    args = program.parse_args(["--models", "timm/densenet121", "hf/bert", "hf/gemma", "own/mlp"])
    jobs = program.jobs_of(args)
    checks = [j for j in jobs if j.kind == "check"]
    assert [(j.model, j.mode) for j in checks[:3]] == [
        ("timm/densenet121", "train"),
        ("timm/densenet121", "infer"),
        ("hf/bert", "train"),
    ]
    assert len(checks) == 8
    assert all(j.backend == "pgraph" for j in checks)
    timings = [j for j in jobs if j.kind == "time"]
    assert [j.backend for j in timings[:4]] == ["pgraph", "reduce-overhead", "inductor", "eager"]
    assert [len({(j.model, j.mode) for j in timings[i : i + 4]}) for i in range(0, 24, 4)] == [1] * 6
    assert [j.kind for j in jobs[:5]] == ["time"] * 4 + ["check"], "nobody waits for a check"
    assert len({(j.model, j.mode) for j in jobs[:5]}) == 1
    assert "hf/gemma" not in {j.model for j in timings}
    assert program.jobs_of(program.parse_args(["--models", "own/mlp", "--checks-only"]))[0].kind == "check"
    again = program.jobs_of(program.parse_args(["--models", "hf/bert", "hf/gemma", "--memory-only"]))
    assert {(j.kind, j.model) for j in again} == {("memory", "hf/bert")}


# Summary and tables


def row(model: str, backend: str = "pgraph", mode: str = "train", **changes: Any) -> dict[str, Any]:
    """A row as `coverage.py` writes it."""
    identity = {"bench": "coverage", "config": model, "mode": mode, "scope": "model", "backend": backend}
    keys = ("ms_p10", "ms_p90", "cpu_issue_ms", "peak_allocated_mb", "capture_s", "compile_s", "params_mb")
    zero = dict.fromkeys((*keys, "captured_ops", "device_ops", "uncaptured_parts", "fallbacks", "captures"))
    timed = {"ms_per_step": 2.0, "peak_reserved_mb": 100.0, "device_used_mb": 600.0, "time_status": "ok"}
    return {**identity, **zero, **timed, "batch": 8, "status": "ok", **changes}


def checked_row(model: str, **changes: Any) -> dict[str, Any]:
    counted = {"captured_ops": 100, "device_ops": 100, "uncaptured_parts": 0, "fallbacks": 0, "captures": 2}
    return row(model, **{"check_status": "ok", **counted, "uncaptured": {}, "reasons": [], **changes})


def example_rows() -> list[dict[str, Any]]:
    reasons = ["[host-read] aten::item reads a value"]
    partition = {"uncaptured_parts": 1, "uncaptured": {"host-read": 1}, "reasons": reasons}
    return [
        checked_row("hf/a", ms_per_step=1.0),
        checked_row("hf/b", captured_ops=97, **partition),
        checked_row("hf/c", captured_ops=50, fallbacks=1, **partition, time_status=None, ms_per_step=None),
        checked_row(
            "hf/d", check_status="mismatch: step 2: loss", status="x", time_status=None, ms_per_step=None
        ),
        row("hf/a", "inductor", ms_per_step=4.0, peak_reserved_mb=50.0),
        row("hf/b", "inductor", ms_per_step=2.0),
        row("hf/a", "reduce-overhead", ms_per_step=2.0),
    ]


def test_the_summary_counts_and_takes_means(load: Any) -> None:
    summaries = load("coverage_summary")
    counts = summaries.counts(example_rows(), "train")
    assert (counts.models, counts.right, counts.mostly, counts.whole) == (4, 3, 2, 1)
    assert [model for model, _ in counts.exceptions] == ["hf/b", "hf/c", "hf/d"]
    assert counts.exceptions[0][1] == "97% captured; host-read x 1: [host-read] aten::item reads a value"
    time_ratio = summaries.ratio(example_rows(), "train", "ms_per_step", "inductor")
    assert (time_ratio.mean, time_ratio.worst, time_ratio.models) == (0.5, (1.0, "hf/b"), 2)
    reserved = summaries.ratio(example_rows(), "train", "peak_reserved_mb", "inductor")
    assert (reserved.median, reserved.worst) == (1.5, (2.0, "hf/a"))
    assert summaries.ratio(example_rows(), "infer", "ms_per_step", "inductor") is None
    text = summaries.summary(example_rows())
    assert "training: 3 of 4 run and are right; 2 with at least 95% captured" in text
    assert "  hf/d: mismatch: step 2: loss" in text
    assert summaries.summary([]) == "no rows"


def test_tables_and_chart_are_written(load: Any, tmp_path: Path) -> None:
    schema, readme = load("schema"), load("readme")
    schema.write(tmp_path / "coverage-nvidia-h200.json", example_rows(), HEADER)
    page = tmp_path / "README.md"
    names = ("coverage", "coverage-chart", "summary")
    page.write_text("".join(f"<!-- table:{name} -->\n<!-- /table -->\n" for name in names))
    models = tmp_path / "COVERAGE.md"
    models.write_text("<!-- table:coverage-models -->\n<!-- /table -->\n")
    arguments = ["--pages", str(page), str(models), "--results", str(tmp_path)]
    assert readme.main([*arguments, "--check"]) == 1
    assert readme.main(arguments) == 0
    assert readme.main([*arguments, "--check"]) == 0
    text = page.read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert ["training", "4", "3 of 4", "-", "2", "1"] in cells
    assert ["time over Inductor's", "2", "0.500", "0.625", "1.000 (hf/b)", "-", "-", "-", "-"] in cells
    assert "- hf/d (training): mismatch: step 2: loss" in text
    assert ["models whose results are right", "3 of 4", "-"] in cells
    assert ["time of a step, over Inductor's", "0.500 (worst of 2: 1.000)", "-"] in cells
    assert ["time of a step, over `reduce-overhead`'s", "0.500 (worst of 1: 0.500)", "-"] in cells
    assert ["peak reserved memory, over Inductor's", "1.414 (worst of 2: 2.000)", "-"] in cells
    assert "(./coverage-nvidia-h200.svg)" in text
    assert (tmp_path / "coverage-nvidia-h200.svg").exists()
    lines = [line for line in models.read_text().splitlines() if "| hf/" in line]
    assert len(lines) == 4
    first = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    assert first[:10] == ["hf/a", "training", "ok", "100.0%", "100", "-", "-", "4.00", "2.00", "1.00"]


def test_tensors_that_are_as_far_off_as_inductors_are_counted(load: Any) -> None:
    tables, rows = load("readme_coverage"), example_rows()
    (right,) = [row for row in rows if (row["config"], row["backend"]) == ("hf/a", "pgraph")]
    right["inductor_differs"] = ["grad a"]
    (wrong,) = [row for row in rows if row.get("check_status", "ok") != "ok"]
    wrong["inductor_differs"] = ["grad b", "grad c"]
    data = {**HEADER, "rows": rows}
    row = ["some tensors as far off as Inductor's", "1 model (1 tensor)", "-"]
    for text, cells in (
        (tables.summary_table(data), row),
        (tables.coverage_table(data), ["training", "4", "3 of 4", "1 model (1 tensor)", "2", "1"]),
    ):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
        assert cells in lines
    assert "| ok (1 tensor as Inductor's) " in tables.models_table(data)


def test_ratios_that_no_model_has_are_left_out_of_the_short_table(load: Any) -> None:
    short = load("readme_coverage").summary_table
    checked = [row for row in example_rows() if row["backend"] == "pgraph"]
    assert "time of a step, over Inductor's" in short({**HEADER, "rows": example_rows()})
    text = short({**HEADER, "rows": checked})
    assert "models whose results are right" in text
    assert "over" not in text


def test_it_runs_end_to_end_on_a_cpu(load: Any, tmp_path: Path) -> None:
    schema = load("schema")
    command = [
        sys.executable,
        str(PROGRAM),
        "--models",
        "own/mlp",
        "--modes",
        "train",
        *ON_CPU,
        "--jobs",
        "2",
    ]
    command += ["--backends", "eager", "pgraph", "--seconds", "0.05", "--steps", "7"]
    command += ["--out", str(tmp_path), "--logs", str(tmp_path / "logs")]
    env = {**os.environ, "PGRAPH_COMMIT": "feed"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    assert "training: 1 of 1 run and are right; 1 with at least 95% captured" in done.stdout
    rows = {r["backend"]: r for r in schema.read(tmp_path / "coverage-cpu.json")["rows"]}
    assert set(rows) == {"eager", "pgraph"}
    assert rows["pgraph"]["check_status"] == rows["pgraph"]["time_status"] == "ok"
    assert rows["pgraph"]["captured_ops"] == rows["pgraph"]["device_ops"] > 10
    assert rows["pgraph"]["ms_per_step"] > 0
    assert all(r["host_cpu_ms"] > 0 and r["preemptions"] >= 0 for r in rows.values())
    fewest = load("coverage_time").TURNS
    most = fewest * load("coverage_time").BURSTS * load("bursts").MOST
    assert all(r["host_slowdown"] >= 1 and fewest <= r["bursts"] <= most for r in rows.values())
    assert rows["pgraph"]["rewritten"] >= 0
    assert rows["eager"]["rewritten"] is None
    assert rows["eager"].get("check_status") is None
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120, env=env)
    assert again.stdout.startswith("0 processes"), again.stdout + again.stderr
    memory = [*command, "--memory-only", "--backends", "pgraph"]
    done = subprocess.run(
        memory, capture_output=True, text=True, timeout=120, env={**env, "PGRAPH_COMMIT": "ace"}
    )
    assert done.returncode == 0, done.stderr
    rows = {r["backend"]: r for r in schema.read(tmp_path / "coverage-cpu.json")["rows"]}
    assert rows["pgraph"]["memory_status"] == "ok"
    assert (rows["pgraph"]["memory_commit"], rows["pgraph"]["time_commit"]) == ("ace", "feed")
    assert "memory_status" not in rows["eager"]


def test_a_missing_package_leaves_its_models_out(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load("coverage")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else real(name))
    args = program.parse_args(["--models", "timm/resnet50", "own/mlp", "--device", "cpu"])
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "1")
    program.prepare(args)
    assert [entry.name for entry in args.entries] == ["own/mlp"]
    assert "timm is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("jobs", "side_by_side", "threads"), [(3, 16, 5), (40, 16, 1), (4, 1, 16), (0, 16, 16), (20, 20, 1)]
)
def test_few_processes_compile_with_many_threads(
    load: Any, jobs: int, side_by_side: int, threads: int
) -> None:
    assert load("coverage").threads_of(jobs, side_by_side, cores=16) == threads
