"""Claims and what was measured of them: the table from rows, and the measures on the host driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

REPO = Path(__file__).resolve().parents[1]
HEADER = {
    "gpu": "nvidia-h200",
    "driver": "580.1",
    "torch": "2.11.0",
    "python": "3.12.0",
    "commit": "abc",
    "date": "2026-01-02",
}
RUN = {"alloc_conf": "default", "deterministic": False, "commit": "abc", "date": "2026-01-02"}


def seed(config: str, backend: str, mode: str = "train", **figures: Any) -> dict[str, Any]:
    """A row of the seeds benchmark."""
    identity = {"bench": "seeds", "config": f"seeds/{config}", "mode": mode, "scope": "model"}
    return {**identity, "backend": backend, **RUN, "status": "ok", "time_status": "ok", **figures}


def claim(config: str, backend: str = "pgraph", **figures: Any) -> dict[str, Any]:
    """A row of `claims.py`."""
    identity = {"bench": "claims", "config": config, "mode": "infer", "scope": "block", "backend": backend}
    return {**identity, **RUN, "status": "ok", **figures}


def bert(**of: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of BERT-Large at batch 32: 100 ms eager, 90 ms Inductor, 80 ms pgraph, with changes by backend."""
    times = {"eager": 100.0, "inductor": 90.0, "pgraph": 80.0}
    return [seed("bert-large-b32-t128", b, **{"ms_per_step": ms, **of.get(b, {})}) for b, ms in times.items()]


def answers(load: Any, rows: list[dict[str, Any]]) -> dict[str, str]:
    """The claims that these rows answer."""
    table = load("readme_claims")
    found = table.answers([{**HEADER, "rows": rows}])
    return {claim.text: text for claim, text in zip(table.CLAIMED, found, strict=True) if text is not None}


@pytest.mark.parametrize(
    ("of", "text"),
    [
        ({}, "bert-large-b32-t128: pgraph -20.0 % (eager 100.00 ms), -11.1 % (inductor 90.00 ms)"),
        ({"pgraph": {"commit": "other"}}, None),
        ({"pgraph": {"ms_per_step": None}}, None),
        ({"eager": {"time_status": "boom"}}, "bert-large-b32-t128: pgraph -11.1 % (inductor 90.00 ms)"),
        ({"pgraph": {"time_status": "boom"}}, "bert-large-b32-t128: pgraph failed"),
        ({"pgraph": {"check_status": "mismatch"}}, "bert-large-b32-t128: pgraph gave wrong results"),
    ],
)
def test_a_step_is_compared_with_those_of_the_same_run(load: Any, of: Any, text: str | None) -> None:
    found = answers(load, bert(**of))
    assert [v for k, v in found.items() if k.startswith("BERT-Large, batch 32")] == ([text] if text else [])


def test_the_driver_level_claims(load: Any) -> None:
    rows = [
        claim("launch-200", "eager", us=1300.0, nodes=200),
        claim("launch-200", "replay", us=4.0, nodes=200),
        claim("address-200", us=40.0, unchanged_us=3.0, launched_right=30, launches=30, nodes=200),
        claim("exec-200", device_bytes=2**20, host_bytes=2**19),
        claim("malloc-20", "eager", us=210.0),
    ]
    found = list(answers(load, rows).values())
    assert found == [
        "eager, small kernels: 6.5 us in a row of 200",
        "eager, small kernels: 6.5 us in a row of 200",
        "200 kernels, host time: one by one 1,300.0 us, `CUDAGraph.replay` 4.0 us",
        "200 nodes: device 1.00 MB, host 0.50 MB (5.1 and 2.6 KB a node)",
        "0.21 ms for 20 MB",
        "30 of 30 launches right, with new addresses for all 200 nodes of one exec before each (kernels, a "
        "fill, a copy): 40 us of host time, 3 us with none changed",
    ]
    (wrong,) = answers(load, [{**rows[2], "status": "3 of 30 launches wrong"}]).values()
    assert wrong == "3 of 30 launches wrong"


def test_extra_graphs_are_scaled_by_layers(load: Any) -> None:
    sizes = {"eager": 50_000.0, "graphed": 58_192.0, "inductor": 49_000.0, "pgraph": 49_000.0}
    rows = [claim("graphs-70b-8", name, reserved_mb=mb, layers=8, mode="train") for name, mb in sizes.items()]
    rows.append(
        claim("graphs-70b-8", "reduce-overhead", layers=8, mode="train", status="OutOfMemoryError: no")
    )
    (text,) = answers(load, rows).values()
    assert text == (
        "one GPU, 70B's dimensions: "
        "graphed +8,192 MB on eager with 8 layers (+80.0 GB if 80 add as much each); "
        "pgraph +0 MB on inductor with 8 layers (+0.0 GB if 80 add as much each); "
        "reduce-overhead failed with 8 layers"
    )


def test_what_counts_and_captures_say(load: Any) -> None:
    counted = {"count_status": "ok", "launch_calls": 500.0, "launch_call_share": 0.125, "device_busy_ms": 3.0}
    rows = [
        seed("resnet50-amp", "eager", ms_per_step=10.0, cpu_issue_ms=8.0, device_allocations=0.02, **counted),
        seed("resnet50-amp", "inductor", ms_per_step=9.0, cpu_issue_ms=7.0, device_allocations=0.0),
        seed("resnet50-amp", "pgraph", ms_per_step=5.0, cpu_issue_ms=2.0, capture_s=0.4, **counted),
        seed("server-b1", "eager", "infer", ms_per_step=4.0, cpu_issue_ms=4.0),
        seed("server-b1", "pgraph", "infer", ms_per_step=0.1, cpu_issue_ms=0.1),
        seed("mlp-loop", "eager", ms_per_step=12.0, cpu_issue_ms=1.0, **counted),
    ]
    found = answers(load, rows)
    assert found["launch overhead falls by up to 90 %"] == (
        "host time of a step against eager's: pgraph -75.0 % at best (resnet50-amp), median -75.0 %"
    )
    assert found["capturing costs about one run; replay at least 100 times"] == (
        "pgraph: 40 eager steps (median of 1 workloads), paid back against Inductor after 100 (median)"
    )
    assert found["from 30 % utilization to nearly all"] == "mlp-loop: eager 25%"
    assert found["ResNet-50: 400 to 600 launches a training step"] == "resnet50-amp: eager 500, pgraph 500"
    assert (
        "eager 12% of profiled time"
        in found["500 launches take 10 to 20 % of a step of small to medium batches"]
    )
    assert "eager 2, inductor 0" in found["ResNet-50: 1,200 cudaMalloc calls in 100 steps, none with graphs"]


def test_without_a_figure_the_table_says_so(load: Any) -> None:
    table = load("readme_claims")
    empty = table.claims_table([])
    assert empty.count("not measured") == len(table.CLAIMED) > 20
    on_cpu = {**HEADER, "gpu": "cpu", "rows": [claim("malloc-2", "eager", us=1.0)]}
    assert table.claims_table([on_cpu]) == empty
    shown = table.claims_table([on_cpu, {**HEADER, "rows": bert()}])
    assert shown.startswith("- **nvidia-h200**, driver 580.1")
    assert shown.count("not measured") == len(table.CLAIMED) - 1


def test_a_claim_has_a_line_for_each_gpu_that_answers_it(load: Any) -> None:
    other = {**HEADER, "gpu": "nvidia-h100", "rows": [*bert(), claim("malloc-2", "eager", us=50.0)]}
    shown = load("readme_claims").claims_table([{**HEADER, "rows": bert()}, other])
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if "|" in line]
    gpus = {text: [line[2] for line in cells if line[0] == text] for text, *_ in cells}
    assert gpus["BERT-Large, batch 32: 480 to 390 ms, 19 % (A100, no length given)"] == [
        "nvidia-h200",
        "nvidia-h100",
    ]
    assert gpus["a cudaMalloc takes about 0.2 ms"] == ["nvidia-h100"]
    assert gpus["no graphs for LSTMs of varying length"] == ["-"]


def test_every_claim_names_programs_and_workloads_that_exist(load: Any) -> None:
    zoo, claims = load("zoo"), load("claims")
    for one in load("readme_claims").CLAIMED:
        for command in one.command.split("; "):
            program, *words = command.split()
            assert (REPO / program).is_file(), command
            names = [word.strip("'") for word in words if word.strip("'").startswith("seeds/")]
            assert not names or zoo.select(names, zoo.SEEDS)
            assert program != "bench/claims.py" or words[1] in claims.MEASURES


def test_the_table_of_workloads(load: Any) -> None:
    rows = [
        seed("mlp-loop", "pgraph", ms_per_step=0.5, ms_p10=0.4, ms_p90=0.6, captures=2, check_status="ok")
        | {"captured_ops": 19, "device_ops": 19, "launch_calls": 5.0},
        seed("mlp-loop", "eager", ms_per_step=1.5),
        seed("mlp-loop", "inductor", status="RuntimeError: a | b", time_status="RuntimeError: a | b"),
        {**seed("mlp-loop", "eager"), "config": "tiny/mlp-loop"},
    ]
    text = load("readme_seeds").seeds_table({**HEADER, "rows": rows})
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[4:] if "|" in line
    ]
    assert [(line[2], line[3], line[4], line[-2]) for line in cells] == [
        ("eager", "1.50", "-", "ran"),
        ("inductor", "-", "-", "RuntimeError: a / b"),
        ("pgraph", "0.50", "0.40 to 0.60", "right"),
    ]
    assert cells[2][8:12] == ["5", "-", "2", "100.0%"]
    assert load("readme_seeds").seeds_table({**HEADER, "rows": []}) == ""


# The measures


def test_a_launch_on_other_addresses_is_checked(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    claims, device = load("claims"), load("worker").Device("cpu")
    monkeypatch.setattr(claims, "REPEATS", 4)
    (row,) = claims.address(5, device)
    assert (row["status"], row["launched_right"], row["rewritten"], row["nodes"]) == ("ok", 4, 5, 5)

    class Stale:
        """An exec that keeps its first addresses."""

        def __init__(self, made: Any) -> None:
            self.made, self.first = made, None

        def launch(self, bases: list[int], stream: int) -> int:
            self.first = self.first or bases
            return self.made.launch(self.first, stream)

    real = claims.exec_of
    monkeypatch.setattr(claims, "exec_of", lambda *args: Stale(real(*args)))
    (row,) = claims.address(5, device)
    assert row["status"] == "2 of 4 launches on other addresses gave wrong results"


def test_work_shows_a_node_that_did_not_run(load: Any) -> None:
    claims = load("claims")
    work = claims.Work.on(torch.device("cpu"), 2.0)
    work.y.fill_(2.0 * 4)
    assert work.right(6)
    assert not work.right(6), "it spoils what it has compared"


def test_the_measures_run_on_a_cpu(load: Any, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(REPO / "bench" / "claims.py"),
        "--only",
        "launch",
        "exec",
        "address",
        "malloc",
    ]
    command += ["--device", "cpu", "--nodes", "4", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = {(r["config"], r["backend"]): r for r in load("schema").read(tmp_path / "claims-cpu.json")["rows"]}
    assert set(rows) == {
        *(("launch-4", "eager"), ("launch-4", "pgraph"), ("exec-4", "pgraph"), ("address-4", "pgraph")),
    }
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert all(row["us"] > 0 for row in rows.values())
    assert rows["exec-4", "pgraph"]["device_bytes"] is None
