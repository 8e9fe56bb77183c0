"""The seeds benchmark: its workloads, what is special about their steps, and a whole run on a CPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support_coverage import job
from torch import Tensor, nn

REPO = Path(__file__).resolve().parents[1]


class Parts(nn.Module):
    """Two parts that may be compiled each by itself, with a loss between them and the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in "ab")

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return (x - target).square().mean()


@pytest.fixture
def subject(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a subject of `Parts` with further settings of its entry, and the job that it is for."""
    zoo, subjects = load("zoo"), load("coverage_subject")

    def made(kind: str = "check", **settings: Any) -> tuple[Any, Any]:
        entry = zoo.Entry(
            "own/parts",
            Parts,
            lambda draw, batch, train: (draw.normal(batch, 8), draw.normal(batch, 8)),
            **{"precision": "fp32", **settings},
        )
        monkeypatch.setitem(zoo.ALL, entry.name, entry)
        told = job(load, kind, model=entry.name)
        return subjects.Subject(told), told

    return made


# Workloads


def test_the_workloads_are_those_that_claims_are_about(load: Any) -> None:
    zoo = load("zoo")
    seeds = zoo.SEEDS
    assert {name.split("/")[1] for name in seeds} == {
        *("resnet50-amp", "resnet50-fp16", "efficientnet-b0", "efficientnet-b0-b1"),
        *("bert-large-b8-t128", "bert-large-b32-t128", "bert-large-b8-t512", "bert-large-b32-t512"),
        *("bert-large-b1-t128", "vit-b16-checkpointed", "gpt2-attention", "mlp-loop", "server-b1"),
        "lstm-lengths",
    }
    assert seeds["seeds/resnet50-fp16"].precision == "fp16 autocast"
    assert all(
        e.modes == (("infer",) if e.name.endswith(("-b1", "-b1-t128")) else ("train",))
        for e in seeds.values()
    )
    assert all(e.timed and (e.optimizer != "none" or "infer" in e.modes) for e in seeds.values())
    assert [len(e.modes) for e in zoo.TINY_SEEDS.values()] == [len(e.modes) for e in seeds.values()]
    assert not {*seeds, *zoo.TINY_SEEDS} & set(zoo.ALL)
    assert load("seeds").select([]) == list(seeds.values())
    with pytest.raises(ValueError, match="no model is called 'hf/bert'; there are seeds/resnet50-amp"):
        load("seeds").select(["hf/bert"])
    with pytest.raises(ValueError, match="'adam' is unknown; choose one of none, sgd, adamw"):
        dataclasses.replace(seeds["seeds/mlp-loop"], optimizer="adam")


def test_each_workload_has_its_kinds_of_processes(load: Any) -> None:
    program, seeds = load("coverage"), load("seeds")
    args = program.parse_args(["--models", "seeds/bert*", "seeds/vit*"], seeds.SEEDS)
    jobs = program.jobs_of(args)
    assert {j.bench for j in jobs} == {"seeds"}
    of = {
        kind: {j.model.split("/")[1] for j in jobs if j.kind == kind} for kind in ("check", "time", "count")
    }
    assert of["check"] == {"bert-large-b8-t128", "bert-large-b1-t128", "vit-b16-checkpointed"}
    assert len(of["time"]) == 6
    assert of["count"] == {"bert-large-b1-t128"}
    assert {j.mode for j in jobs if j.model.endswith("b1-t128")} == {"infer"}
    counts = program.parse_args(["--models", "seeds/mlp-loop", "--counts-only"], seeds.SEEDS)
    assert [j.kind for j in program.jobs_of(counts)] == ["count"] * 4


def test_lengths_differ_from_input_to_input(load: Any) -> None:
    zoo, draw = load("zoo"), load("zoo.entry").Draw
    entry = zoo.find("tiny/lstm-lengths")
    fed = [entry.inputs(draw(torch.device("cpu"), seed), 2, True) for seed in range(entry.input_sets)]
    assert len({ids.shape[1] for ids, _ in fed}) > 10
    losses = [entry.program()(*inputs) for inputs in fed[:2]]
    assert all(loss.isfinite() for loss in losses)


# Steps


def test_regions_are_compiled_in_a_twin_that_shares_the_weights(subject: Any) -> None:
    made, told = subject(regions=lambda program: program.parts)
    counted: list[int] = []
    run = made.compiled(dataclasses.replace(told, backend="aot_eager"))
    assert run is not made.program
    assert [id(p) for p in run.parameters()] == [id(p) for p in made.program.parameters()]
    assert all(part._compiled_call_impl is not None for part in run.parts)
    assert all(part._compiled_call_impl is None for part in made.program.parts)
    inputs = made.inputs(0)
    mine, eager = made.step(run, inputs), made.step(made.program, inputs)
    assert list(mine) == list(eager)
    for name, tensor in eager.items():
        torch.testing.assert_close(mine[name], tensor)
        counted.append(tensor.numel())
    assert len(counted) == 9
    assert made.compiled(dataclasses.replace(told, backend="eager")) is made.program


def test_a_loss_in_fp16_is_scaled_as_far_as_gradients_stay_finite(subject: Any) -> None:
    made, _ = subject(precision="fp16 autocast")
    inputs = made.inputs(0)
    big = (inputs[0] * 300, inputs[1] * 300)
    assert made.scale == 2.0**16
    made.fit_scale(inputs)
    first = made.scale
    made.fit_scale(big)
    assert made.scale < first
    truth, mine = made.truth(big), made.step(made.program, big)
    for name, tensor in truth.items():
        torch.testing.assert_close(
            mine[name].float(), tensor, rtol=0.05, atol=0.02 * float(tensor.abs().max())
        )


def test_timed_steps_update_the_weights_as_the_entry_says(load: Any, subject: Any) -> None:
    timing = load("coverage_time")
    for settings, moves in (
        ({}, False),
        ({"optimizer": "sgd"}, True),
        ({"optimizer": "adamw"}, True),
        ({"precision": "fp16 autocast", "optimizer": "sgd"}, True),
    ):
        made, told = subject("time", **settings)
        step = timing.Stepper(dataclasses.replace(told, backend="eager"), made)
        before = [p.detach().clone() for p in made.program.parameters()]
        for _ in range(12):  # a scaler leaves out its first steps, until nothing overflows
            step()
        moved = [not torch.equal(a, b) for a, b in zip(before, made.program.parameters(), strict=True)]
        assert all(moved) if moves else not any(moved)
        assert all(p.grad is None for p in made.program.parameters())
        assert step.value() > 0


def test_sizes_that_vary_are_left_to_torch_compile(
    load: Any, subject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda module, **kwargs: told.append(kwargs) or module)
    for dynamic in (False, True):
        made, one = subject(dynamic=dynamic)
        made.compiled(dataclasses.replace(one, backend="inductor"))
    assert [kwargs.get("dynamic", "unset") for kwargs in told] == [False, "unset"]


def test_a_check_may_take_fewer_rows(subject: Any) -> None:
    assert subject("check", batch=64, check_batch=3)[0].inputs(0)[0].shape[0] == 3
    assert subject("time", batch=64, check_batch=3)[0].inputs(0)[0].shape[0] == 64


# Counts


def test_launches_of_a_step(load: Any) -> None:
    counting = load("coverage_count")
    events = [
        *[("cudaLaunchKernelExC", False, 6.0)] * 4,
        *[("cuLaunchKernel", False, 3.0)] * 2,
        ("cudaGraphLaunch", False, 10.0),
        ("cudaStreamSynchronize", False, 500.0),
        ("aten::add", False, 9.0),
        *[("some_kernel", True, 100.0)] * 8,
    ]
    figures = counting.per_step(events, 400.0, 3.0, 2)
    assert figures == {
        "launch_calls": 5.0,
        "launch_call_share": 0.1,
        "device_work": 4.0,
        "device_busy_ms": 0.4,
    }
    assert set(counting.per_step((), 0.0, 0.0, 0).values()) == {None}


def test_the_profilers_memory_is_no_figure(load: Any) -> None:
    rows = load("coverage_rows")
    timed, counted = (job(load, kind, bench="seeds") for kind in ("time", "count"))
    row = rows.combine(None, timed, {"status": "ok", "ms_per_step": 2.0, "device_used_mb": 700.0})
    row = rows.combine(row, counted, {"status": "ok", "launch_calls": 9.0, "device_used_mb": 950.0})
    assert (row["bench"], row["device_used_mb"], row["launch_calls"]) == ("seeds", 700.0, 9.0)
    assert rows.combine(row, counted, {"status": "no profiler"})["status"] == "no profiler"
    assert load("schema").problems(row) == []


# A whole run


def test_it_runs_end_to_end_on_a_cpu(load: Any, tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "bench" / "seeds.py"), "--models", "tiny/mlp-loop", "--jobs", "2"]
    command += ["--device", "cpu", "--driver", "host", "--codegen", "aten", "--backends", "eager", "pgraph"]
    command += ["--seconds", "0.05", "--steps", "7", "--out", str(tmp_path), "--logs", str(tmp_path / "logs")]
    env = {**os.environ, "PGRAPH_COMMIT": "feed"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    rows = {r["backend"]: r for r in load("schema").read(tmp_path / "seeds-cpu.json")["rows"]}
    assert {r["config"] for r in rows.values()} == {"tiny/mlp-loop"}
    assert {r["bench"] for r in rows.values()} == {"seeds"}
    assert [rows["pgraph"][f"{kind}_status"] for kind in ("check", "time", "count")] == ["ok"] * 3
    assert rows["pgraph"]["captured_ops"] == rows["pgraph"]["device_ops"] > 10
    assert min(rows[name]["ms_p10"] for name in rows) > 0
    assert rows["eager"]["launch_calls"] is None
