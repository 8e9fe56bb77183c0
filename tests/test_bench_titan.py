"""The torchtitan benchmark: plans, rows from what ranks wrote, comparisons of losses, tables."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HEADER = {"gpu": "nvidia-h200", "driver": "580.1", "torch": "2.11.0", "python": "3.12.0", "commit": "abc"}


@pytest.fixture
def bench(load: Any) -> ModuleType:
    return load("torchtitan")


def rank(losses: list[float], times: list[float], **changes: Any) -> dict[str, Any]:
    """What one rank of a run with pgraph writes."""
    counters = {
        "recordings": None,
        "captures": 4,
        "nodes": 40,
        "slots": 80,
        "launches": 10,
        "rewritten_nodes": 100,
        "refused": 0,
        "capture_s": 0.5,
        "exec_mb": 1.0,
        "summary": "pgraph: 4 captures",
        "report": "",
    }
    sizes = {"peak_allocated_mb": 10.0, "peak_reserved_mb": 20.0, "device_used_mb": 30.0}
    return {
        "times_ms": times,
        "issue_ms": 3.0,
        "compiled_ms": 1.0,
        "warm_s": [9.0, 1.0],
        "losses": losses,
        "before": counters,
        "after": counters | {"launches": 30, "rewritten_nodes": 500},
        "end": counters | {"launches": 40, "captures": 5},
        "finished": True,
        "run_s": 12.0,
        **sizes,
        "private_pools_mb": 0.0,
        **changes,
    }


@pytest.mark.parametrize(
    ("titan", "triton", "said"),
    [
        (False, False, "torchtitan is not installed. Fix: bash .ci/setup examples torchtitan"),
        (True, False, "torchtitan imports triton, on a CPU too. Fix: .* -m pip install triton"),
        (True, True, None),
    ],
)
def test_what_torchtitan_lacks_is_told(
    load: Any, titan: bool, triton: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("_paths")
    setup = load("titan_setup")

    def version(name: str) -> str:
        if not titan:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.2.2"

    found = object() if triton else None
    monkeypatch.setattr(setup.importlib.metadata, "version", version)
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: found)
    missing = setup.missing()
    assert missing == said if said is None else re.fullmatch(said, missing)


def test_a_plan_is_a_name_or_a_configuration(load: Any) -> None:
    plans = load("titan_plans")
    (entry,) = plans.parse(
        "flavor=70B,layers=4,gpus=2,batch=1,ac=selective,expandable,backends=inductor+pgraph"
    )
    assert (entry.flavor, entry.layers, entry.gpus, entry.batch) == ("70B", 4, 2, 1)
    assert entry.expandable
    assert entry.backends == ("inductor", "pgraph")
    assert entry.config == "70B 4 layers, seq 2048, batch 1, AC selective, 2 GPUs"
    assert len(plans.parse("gpu2")) == len(plans.PLANS["gpu2"]) > 1


def test_comparisons_take_as_many_runs_as_they_need(load: Any) -> None:
    plans = load("titan_plans")
    assert plans.parse("compare,deterministic")[0].backends == ("inductor", "pgraph")
    assert plans.parse("compare")[0].backends == ("inductor", "inductor", "pgraph")
    assert plans.parse("compare")[0].steps == 200


def test_a_resumed_run_is_two_runs_of_one_backend(load: Any) -> None:
    plans = load("titan_plans")
    (entry,) = plans.parse("gpus=2,resume,steps=20")
    assert entry.backends == ("pgraph", "pgraph")
    assert (entry.deterministic, entry.untimed, entry.saved_at) == (True, True, 10)
    assert plans.parse("resume,backends=inductor")[0].backends == ("inductor", "inductor")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("resume,compare", "resume takes one backend"),
        ("resume,backends=inductor+pgraph", "resume takes one backend"),
        ("resume,steps=1", "two steps or more"),
        ("flavour=8B", "'flavour' is no key"),
        ("batch=x", "batch='x' must be a whole"),
        ("repeats=0", "repeats must be at least 1"),
        ("compare,repeats=2", "1 where only losses are compared"),
        ("backends=fast", "fast"),
    ],
)
def test_wrong_plans_are_refused(load: Any, text: str, said: str) -> None:
    plans = load("titan_plans")
    with pytest.raises(plans.PlanError, match=said):
        plans.parse(text)


def test_every_named_plan_fits_its_machine(load: Any) -> None:
    plans = load("titan_plans")
    for name, entries in plans.PLANS.items():
        expected = {"gpu1": 1, "gpu2": 2, "gpu2-checks": 2, "gpu4": 4, "cpu": 2}[name]
        assert {entry.gpus for entry in entries} == {expected}


def test_a_row_is_that_of_the_slowest_and_the_largest_rank(bench: Any, load: Any) -> None:
    (entry,) = load("titan_plans").parse("gpus=2,batch=2,seq=100,steps=4")
    ranks = [
        rank([1.0, 2.0], [10.0] * 4, issue_ms=4.0, compiled_ms=0.5),
        rank([0.5, 0.25], [20.0] * 4, peak_reserved_mb=25.0),
    ]
    row = bench.row(entry, "pgraph", {"status": "ok", "ranks": ranks}, first=False)
    assert row["ms_per_step"] == 20.0
    assert row["tokens_per_s"] == 2 * 100 / 0.020
    assert row["peak_reserved_mb"] == 25.0
    assert (row["cpu_issue_ms"], row["compiled_ms"]) == (4.0, 0.5), "both of the rank that issues longest"
    assert row["losses"] == [1.5, 2.25]
    assert (row["captures_warm"], row["captures_end"]) == (4, 5)
    assert row["launches_per_step"] == 5.0
    assert row["rewritten_per_launch"] == 20.0
    assert load("schema").problems(row) == []


def rounds(bench: Any, load: Any, *steps_ms: float) -> list[dict[str, Any]]:
    """Rows of as many rounds; 0 stands for a run that failed."""
    (entry,) = load("titan_plans").parse("gpus=2,repeats=9")
    found = [
        {"status": "ok", "ranks": [rank([1.0], [ms] * 3, warm_s=[ms + 9])] * 2}
        if ms
        else {"status": "rank 1: OutOfMemoryError", "ranks": []}
        for ms in steps_ms
    ]
    return [bench.row(entry, "pgraph", f, first=i == 0) for i, f in enumerate(found)]


@pytest.mark.parametrize(
    ("steps_ms", "median"), [([30.0, 10.0, 20.0], 20.0), ([20.0, 10.0], 10.0), ([9.0], 9.0)]
)
def test_of_several_rounds_the_median_run_counts(
    bench: Any, load: Any, steps_ms: list[float], median: float
) -> None:
    lines = rounds(bench, load, *steps_ms)
    row = bench.median_of(lines)
    assert row["ms_per_step"] == median
    assert row["compile_s"] == steps_ms[0] + 9, "the first round's: later ones find its kernels"
    assert (row["ms_min"], row["ms_max"], row["repeats"]) == (min(steps_ms), max(steps_ms), len(steps_ms))
    assert load("schema").problems(row) == []


def test_a_round_that_failed_is_told(bench: Any, load: Any) -> None:
    row = bench.median_of(rounds(bench, load, 30.0, 0.0, 20.0))
    assert row["status"] == "1 of 3 repeats failed: rank 1: OutOfMemoryError"
    assert row["ms_per_step"] == 20.0
    late = bench.median_of(rounds(bench, load, 0.0, 20.0))
    assert late["compile_s"] == 29.0, "of the first round that compiled"
    assert "20.00 ms/step" in bench.brief({}, late)
    assert bench.median_of(rounds(bench, load, 0.0, 0.0))["status"] == "rank 1: OutOfMemoryError"


def test_all_rounds_are_one_row(bench: Any, load: Any, tmp_path: Path) -> None:
    (entry,) = load("titan_plans").parse("gpus=2,repeats=3,backends=inductor+pgraph")
    account = bench.Account(str(tmp_path), cold=True)
    for ms in (30.0, 10.0, 20.0):
        for position in range(2):
            account.add(entry, position, {"status": "ok", "ranks": [rank([1.0], [ms + position] * 3)] * 2})
    rows = load("schema").read(account.path)["rows"]
    assert [(r["backend"], r["ms_per_step"], r["repeats"]) for r in rows] == [
        ("inductor", 20.0, 3),
        ("pgraph", 21.0, 3),
    ]


def test_rounds_take_the_backends_in_turn(bench: Any, tmp_path: Path) -> None:
    args = bench.parse_args(["--plan", "gpus=2,repeats=2,backends=inductor+pgraph", "--cache", str(tmp_path)])
    jobs = [(position, backend) for _, position, backend in bench.Runs(args, tmp_path).jobs]
    assert jobs == [(0, "inductor"), (1, "pgraph")] * 2


def test_a_failed_run_is_a_row_that_says_so(bench: Any, load: Any) -> None:
    (entry,) = load("titan_plans").parse("gpus=2")
    row = bench.row(entry, "inductor", {"status": "rank 1: OutOfMemoryError", "ranks": []}, first=True)
    assert row["status"] == "rank 1: OutOfMemoryError"
    assert load("schema").problems(row) == []


@pytest.mark.parametrize(
    ("mine", "again", "status"),
    [
        ([1.0, 2.0], [1.0, 2.5], "equal"),
        ([1.0, 2.3], [1.0, 2.2], "ok"),
        ([1.0, 2.5], [1.0, 2.2], "losses differ by up to 0.5"),
    ],
)
def test_losses_are_judged_by_what_two_reference_runs_differ(
    bench: Any, load: Any, mine: list[float], again: list[float], status: str
) -> None:
    (entry,) = load("titan_plans").parse("compare,steps=2")
    runs = [
        ("inductor", {"status": "ok", "ranks": [rank([1.0, 2.0], [])]}),
        ("inductor", {"status": "ok", "ranks": [rank(again, [])]}),
        ("pgraph", {"status": "ok", "ranks": [rank(mine, [])]}),
    ]
    row = bench.compared(entry, runs)
    assert row["status"] == status
    assert row["losses_compared"] == 2
    assert load("schema").problems(row) == []


def test_losses_that_differ_count_as_different_without_a_second_reference(bench: Any, load: Any) -> None:
    (entry,) = load("titan_plans").parse("compare,deterministic,steps=2")
    runs = [
        ("inductor", {"status": "ok", "ranks": [rank([1.0, 2.0], [])]}),
        ("pgraph", {"status": "ok", "ranks": [rank([1.0, 2.0 + 1e-9], [])]}),
    ]
    row = bench.compared(entry, runs)
    assert row["losses_equal"] == 1
    assert row["status"].startswith("losses differ")


@pytest.mark.parametrize(
    ("again", "status", "equal"),
    [
        ([3.0, 4.0], "equal", 4),
        ([3.0, 4.0 + 1e-9], "losses differ by up to 2e-09", 2),  # of two ranks each
        ([1.0, 2.0], "losses differ by up to 4", 0),  # began anew
    ],
)
def test_a_resumed_run_must_give_the_same_losses(
    bench: Any, load: Any, again: list[float], status: str, equal: int
) -> None:
    (entry,) = load("titan_plans").parse("gpus=2,resume,steps=4")
    runs = [
        ("pgraph", {"status": "ok", "ranks": [rank([1.0, 2.0, 3.0, 4.0], [])] * 2}),
        ("pgraph", {"status": "ok", "ranks": [rank(again, [])] * 2}),
    ]
    row = bench.resumed(entry, runs)
    assert (row["status"], row["losses_equal"], row["losses_compared"]) == (status, equal, 4)
    assert row["config"].endswith("resumed after 2 steps")
    assert load("schema").problems(row) == []
    runs[1][1]["status"] = "trained, then: timeout"
    assert bench.resumed(entry, runs)["status"] == "pgraph: trained, then: timeout"


@pytest.mark.parametrize("losses", [[], [3.0], [2.0, 3.0, 4.0]])
def test_a_run_of_other_steps_is_no_resumed_one(bench: Any, load: Any, losses: list[float]) -> None:
    (entry,) = load("titan_plans").parse("resume,steps=4")
    found = {"status": "ok", "ranks": [rank([1.0, 2.0, 3.0, 4.0], [])]}
    other = {"status": "ok", "ranks": [rank(losses, [])]}
    row = bench.resumed(entry, [("pgraph", found), ("pgraph", other)])
    assert row["status"] == f"pgraph: resumed, it trained {len(losses)} steps instead of 2"


def test_tables_show_rows_and_failures(bench: Any, load: Any, tmp_path: Path) -> None:
    (entry,) = load("titan_plans").parse("gpus=2")
    good = bench.row(entry, "pgraph", {"status": "ok", "ranks": [rank([1.0], [10.0])] * 2}, first=True)
    base = bench.row(entry, "inductor", {"status": "ok", "ranks": [rank([1.0], [20.0])] * 2}, first=True)
    bad = bench.row(entry, "reduce-overhead", {"status": "timeout", "ranks": []}, first=False)
    schema, readme = load("schema"), load("readme")
    path = schema.write(
        tmp_path / "torchtitan-nvidia-h200.json", [base, good, bad], HEADER | {"date": "2026-01-02"}
    )
    data = schema.read(path)
    text = readme.TABLES["torchtitan"](data)
    assert "inductor, CUDA graph trees" in text
    assert "4 + 1" in text
    assert "of it in compiled code" in text
    assert "20.0 |" in text
    repeated = [{**row, "repeats": 3, "ms_min": 1.0, "ms_max": 2.5} for row in data["rows"]]
    assert "20.0 (1.0 to 2.5) |" in readme.TABLES["torchtitan"]({**data, "rows": repeated})
    older = [{**row, "compiled_ms": None} for row in data["rows"]]
    assert "in compiled code" not in readme.TABLES["torchtitan"]({**data, "rows": older})
    assert "reduce-overhead: timeout" in text
    mine = next(line for line in text.splitlines() if "pgraph" in line)
    assert [c.strip() for c in mine.split("|")[-5:-2]] == ["2.000 x", "1.000 / 1.000 / 1.000", "yes"]
    apart = [{**row, "commit": row["backend"]} for row in data["rows"]]
    assert " x |" not in readme.TABLES["torchtitan"]({**data, "rows": apart}), "times of two runs"
    assert readme.TABLES["torchtitan-expandable"](data) == ""
    assert readme.chart_link(data, "memory", "results") == ""
    assert "(results/torchtitan-nvidia-h200.svg)" in readme.chart_link(data, "torchtitan", "results")
    assert readme.chart(data, tmp_path / readme.chart_name(data), check=False) is None
    assert (tmp_path / "torchtitan-nvidia-h200.svg").exists()


def test_what_is_saved_is_told_of_the_small_model(bench: Any, load: Any, tmp_path: Path) -> None:
    (entry,) = load("titan_plans").parse("gpus=2")
    recorded = rank([1.0], [12.0])["before"] | {"recordings": 7}
    trees = rank([1.0], [12.0], before=recorded, after=recorded)
    ranks = {
        "inductor": rank([1.0], [20.0], compiled_ms=9.0),
        "reduce-overhead": trees,
        "pgraph": rank([1.0], [10.0], compiled_ms=2.5),
    }
    rows = [
        bench.row(entry, backend, {"status": "ok", "ranks": [one] * 2}, first=True)
        for backend, one in ranks.items()
    ]
    schema, table = load("schema"), load("readme").TABLES["torchtitan-saved"]
    path = schema.write(tmp_path / "torchtitan-nvidia-h200.json", rows, HEADER | {"date": "2026-01-02"})
    data = schema.read(path)
    (line,) = [line for line in table(data).splitlines() if line.startswith("| debug")]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["9.0", "2.5", "6.5", "20.0", "10.0", "10.0"]
    assert "steps of CUDA graph trees take 12.0 ms; pgraph's 10.0 ms" in table(data)
    moved = [{**row, "recordings_timed": row["backend"] == "reduce-overhead" and 3} for row in data["rows"]]
    assert "trees" not in table({**data, "rows": moved})
    large = [{**row, "config": "8B 32 layers"} for row in data["rows"]]
    assert table({**data, "rows": large}) == ""
    apart = [{**row, "commit": row["backend"]} for row in data["rows"]]
    assert table({**data, "rows": apart}) == "", "times of two runs"


def test_a_comparison_says_how_it_was_run(bench: Any, load: Any, tmp_path: Path) -> None:
    plans, schema, readme = load("titan_plans"), load("schema"), load("readme")
    rows = []
    for text in ("compare,deterministic,steps=1", "compare,deterministic,steps=1,expandable"):
        (entry,) = plans.parse(text)
        runs = [(name, {"status": "ok", "ranks": [rank([1.0], [])]}) for name in entry.backends]
        rows.append(bench.compared(entry, runs))
    path = schema.write(tmp_path / "torchtitan-nvidia-h200.json", rows, HEADER | {"date": "2026-01-02"})
    text = readme.TABLES["torchtitan-losses"](schema.read(path))
    places = [line.split("|")[1].strip() for line in text.splitlines()[-2:]]
    assert places[0].endswith("1 GPU, deterministic")
    assert places[1].endswith("1 GPU, deterministic, expandable segments")
