"""`bench/sizes.py` on the host driver: each sequence is timed, compared, and written as a row."""

from __future__ import annotations

import importlib.util
import json
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pgraph
from pgraph.runtime import trial

TINY = {"size": "tiny", "device": "cpu", "driver": "host", "codegen": "aten"}


@pytest.fixture(autouse=True)
def attention_and_clock_as_they_were() -> Iterator[None]:
    before, clock = torch.backends.cuda.cudnn_sdp_enabled(), trial.clock
    with torch.compiler.config.patch(cache_key_tag=""):  # type: ignore[attr-defined]
        yield
    torch.backends.cuda.enable_cudnn_sdp(before)
    trial.clock = clock


def measured(load: Any, config: str, backend: str = "pgraph", **settings: Any) -> dict[str, Any]:
    """The figures of a tiny sequence, in this process."""
    if config.startswith("generate") and importlib.util.find_spec("transformers") is None:
        pytest.skip("not installed: transformers; bash .ci/setup test ecosystem")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries warn of is theirs
        return load("sizes_worker").measure(load("sizes_place").Spec(config, backend, **{**TINY, **settings}))


def adds_up(found: dict[str, Any]) -> None:
    """Totals grow to the whole."""
    totals = found["totals_ms"]
    assert len(totals) == len(found["marks"]) > 1
    assert totals == sorted(totals)
    assert totals[0] > 0
    assert totals[-1] == found["total_ms"]
    assert 0 < found["ms_p10"] <= found["ms_p90"]


# Sequences


def test_a_server(load: Any) -> None:
    found = measured(load, "serving")
    adds_up(found)
    assert found["marks"] == [5, 10, 15, 20, 24]
    assert found["early_ms"] == found["totals_ms"][1]
    late = found["total_ms"] - found["early_ms"]
    assert found["ms_per_step"] == pytest.approx(late / 14), "a call of the second half"
    assert found["captures"] == 4, "a batch of one, and three others by one compiled function"
    assert (found["graphs"], found["recompiles"], found["refused"]) == (2, 0, 0)
    assert found["launches"] + found["uncaptured_runs"] == 24 + 2
    assert (found["compared"], found["max_diff"]) == (12, 0)


def test_a_server_beside_others(load: Any) -> None:
    load("sizes_turns").PIECE = 2
    found = measured(load, "serving-beside")
    adds_up(found)
    assert found["marks"] == [5, 10, 15, 20, 24]
    assert found["early_ms"] == found["totals_ms"][1]
    assert (found["captures"], found["compared"], found["max_diff"]) == (4, 12, 0)
    assert found["launches"] + found["uncaptured_runs"] == 24 + 2
    for key in ("beside_ms", "trees_ms"):
        assert len(found[key]) == 5
        assert found[key] == sorted(found[key])
    halves = load("readme_sizes").late_over_trees
    row = table_row(load, "pgraph", config="serving-beside", marks=[300, 600], totals_ms=[900.0, 1000.0])
    assert halves(row, [row]) == "-"
    assert halves(row | {"early_ms": 900.0, "trees_ms": [1000.0, 1125.0]}, [row]) == "0.800"
    row |= {"config": "serving", "early_ms": 900.0}
    trees = table_row(load, "reduce-overhead", config="serving", totals_ms=[800.0, 960.0], early_ms=800.0)
    assert halves(row, [row, trees]) == "0.625"
    assert halves(trees, [row, trees]) == "-"


def test_training_on_random_lengths(load: Any) -> None:
    found = measured(load, "lengths", steps=9)
    adds_up(found)
    assert found["marks"] == [5, 9]
    assert found["early_ms"] is None
    assert found["ms_per_step"] == pytest.approx(found["total_ms"] / 9)
    tensors = 1 + 12  # the loss and the gradients of one block, an embedding, a norm and a head
    assert (found["compared"], found["max_diff"]) == (3 * tensors, 0)
    assert found["captures"] > 2
    assert (found["captures_warm"], found["recompiles"]) == (0, 0)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_training_beside_the_reference(load: Any) -> None:
    training = load("sizes_training")
    load("sizes_turns").PIECE, training.AGAIN, training.EARLY = 2, 1, 5
    found = measured(load, "lengths-beside", steps=9)
    assert found["launches"] + found["uncaptured_runs"] == 2 * (9 + 5), (
        "those of the other program are not in it"
    )
    (again,) = found["again"]
    assert again["marks"] == [5]
    assert [len(again[key]) for key in ("totals_ms", "beside_ms")] == [1, 1]
    adds_up(found)
    assert found["marks"] == [5, 9]
    assert len(found["beside_ms"]) == 2
    assert 0 < found["beside_ms"][0] < found["beside_ms"][1]
    assert found["compared"] == 3 * 13
    assert found["captures"] > 2
    against = load("readme_sizes").against
    row = table_row(load, "pgraph", totals_ms=[1030.0, 1900.0], beside_ms=[1000.0, 2000.0])
    assert against(row, [row]) == ("1.030 after 100", "no")
    row["again"] = [
        {"marks": [row["marks"][0]], "totals_ms": [ms], "beside_ms": [1000.0]} for ms in (990.0, 1010.0)
    ]
    assert against(row, [row]) == ("1.010 after 100", "yes"), "the median of three programs"


def test_caches_tell_attentions_apart(load: Any) -> None:
    choose, tags = load("sizes_training").choose_attention, set()
    for cudnn in (False, True):
        choose(cudnn)
        assert torch.backends.cuda.cudnn_sdp_enabled() is cudnn
        tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags - {""}) == 2


def test_lengths_that_were_seen(load: Any) -> None:
    found = measured(load, "lengths-seen")
    adds_up(found)
    assert found["captures"] == found["captures_warm"] == 2 * 3, "nothing is captured while time is taken"
    assert found["compared"] > 0


@pytest.mark.parametrize(("backend", "graphs", "execs"), [("pgraph", 1, 1), ("pgraph-static", 3, 3)])
def test_lengths_in_turn(backend: str, graphs: int, execs: int, load: Any, monkeypatch: Any) -> None:
    runs, seen = load("sizes_run"), []
    ended = runs.ended

    def watched(at: Any) -> dict[str, Any]:
        from pgraph.runtime import registry

        seen.append(
            {e for p in registry.live_capturable() for s in p.specializations() for e in s.built.execs}
        )
        return ended(at)

    monkeypatch.setattr(runs, "ended", watched)
    found = measured(load, "turns", backend)
    adds_up(found)
    assert (found["graphs"], found["recompiles"], found["captures_warm"]) == (graphs, 0, 3)
    assert found["captures"] == 3
    assert [len(one) for one in seen] == [execs], "shared by all lengths, or one for each"
    assert found["marks"] == [3, 6, 9, 12]
    assert found["cpu_issue_ms"] > 0
    assert (found["compared"], found["max_diff"]) == (12, 0)


def test_memory_of_many_sizes(load: Any) -> None:
    found = measured(load, "memory")
    assert (found["kept_one"], found["kept"], found["captures"], found["sizes"]) == (1, 4, 4, 4)
    assert found["nodes"] == 4 * found["nodes_one"] > 0
    assert (found["execs_one"], found["execs"]) == (1, 1)
    assert found["exec_bytes"] == found["exec_bytes_one"] > 0
    assert found["counted_bytes"] == 4 * found["counted_bytes_one"]
    assert 0 < found["own_bytes_a_node"] < found["counted_bytes_a_node"]
    assert found["host_bytes_a_node"] >= 0
    assert 100 < found["traced_bytes_a_node"] < 10_000
    assert found["device_mb"] is found["reserved_mb"] is None, "there is no device"
    assert (found["compared"], found["max_diff"]) == (4, 0)


@pytest.mark.parametrize(("config", "captures"), [("generate-static", 1), ("generate-dynamic", 10)])
def test_generated_text(config: str, captures: int, load: Any) -> None:
    found = measured(load, config)
    adds_up(found)
    assert found["marks"] == [5, 10, 15]
    assert 0 < found["first_ms"] < found["total_ms"]
    assert found["captures"] == captures, "one decoding step, or one for each length that the cache had"
    assert (found["compared"], found["max_diff"]) == (15, 0)


@pytest.mark.parametrize(
    ("backend", "launched", "execs", "asked"),
    [
        ("pgraph", [0, 2, 4, 3, 4, 4, 4], 4, 7),
        ("pgraph", [0, 2, 4, 3, *[4] * 6], 6, 10),
        ("pgraph", [0] * 99, 0, 9),
        ("inductor", [], 0, 0),
    ],
)
def test_generating_is_timed_when_captures_have_settled(
    backend: str, launched: list[int], execs: int, asked: int, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or after its time. `execs`: requests after which there are no further ones."""
    program, clock, said = load("sizes_generate"), [0.0], list[int]()
    monkeypatch.setattr(program, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    def report() -> Any:
        return types.SimpleNamespace(launches=sum(launched[: len(said)]), exec_bytes=min(len(said), execs))

    monkeypatch.setattr(pgraph, "report", report)
    size = types.SimpleNamespace(prompts=(3, 6), new=5)

    def ask(length: int) -> None:
        clock[0] += program.SETTLE_S / 8.5
        said.append(length)

    program.settle(types.SimpleNamespace(spec=types.SimpleNamespace(backend=backend, seed=0), size=size), ask)
    assert len(said) == asked
    assert set(said) <= {3, 4, 5, 6}
    if any(launched):
        assert said[-2:] == [3, 6], "the shortest and the longest prompt"


# Right or wrong


def off_by_a_hundredth(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend whose every result is too large."""
    return lambda *args: tuple(result * 1.01 for result in graph(*args))


@pytest.mark.parametrize(
    ("config", "call"),
    [("serving", "call 2, batch"), ("turns", "call 1, "), ("lengths", "step 2, "), ("memory", "le")],
)
def test_wrong_results_are_no_row_of_figures(config: str, call: str, load: Any, monkeypatch: Any) -> None:
    place = load("sizes_place")
    wrong = {"backend": off_by_a_hundredth, "dynamic": True}
    monkeypatch.setattr(place.Place, "arguments", lambda self, dynamic=True, **options: wrong)
    with pytest.raises(ArithmeticError, match=f"{call}.*tensor 0: results differ by 0.01 of their size"):
        measured(load, config, "aot_eager", steps=6)


def test_near(load: Any) -> None:
    place = load("sizes_place")
    here = place.Place(place.Spec("serving", "pgraph", **TINY))
    one = torch.ones(100)
    assert here.near(one, one) == 0
    assert here.near(one * 1.0005, one) == pytest.approx(5e-4, rel=1e-3)
    assert (here.compared, here.worst) == (2, pytest.approx(5e-4, rel=1e-3))
    one_wrong = one.clone()
    one_wrong[7] = 1.1
    for wrong in (one_wrong, one * float("nan")):
        with pytest.raises(ArithmeticError, match="results differ by"):
            here.near(wrong, one)
        with pytest.raises(ArithmeticError, match="results differ by"):
            here.near(wrong, one, one * 1.004)
    assert here.compared == 2
    assert here.near(one_wrong, one, one * 1.006) == pytest.approx(0.01)
    reference = place.Place(place.Spec("serving", "inductor", **TINY))
    assert reference.near(one_wrong, one, one * 1.004) == pytest.approx(0.01)
    with pytest.raises(ArithmeticError, match="results differ by"):
        reference.near(one_wrong, one, one * 1.002)


def test_a_sequence_is_timed_around_what_is_looked_at(load: Any) -> None:
    """Between marks and checks steps run back to back; what looks at them is not timed."""
    runs, said = load("sizes_run"), []

    def ms(call: Callable[[], Any]) -> float:
        began = len(said)
        call()
        said.append("drained")
        return float(len(said) - 1 - began)

    here: Any = types.SimpleNamespace(ms=ms, on_gpu=False)
    looks = {"before": lambda at: said.append(f"before {at}"), "after": lambda at: said.append(f"after {at}")}
    timed = runs.run(here, 7, said.append, mark=3, checked={1, 6}, **looks)
    assert said == [
        *(0, "drained", "before 1", 1, "drained", "after 1", 2, "drained"),
        *(3, 4, 5, "drained", "before 6", 6, "drained", "after 6"),
    ]
    assert list(timed.parts) == [(1, 1), (1, 1), (1, 1), (3, 3), (1, 1)]
    assert (timed.marks, timed.totals_ms) == ([3, 6, 7], [3, 6, 7])
    assert timed.figures(3)["ms_per_step"] == 1
    said.clear()
    assert [count for count, _ in runs.run(here, 3, said.append, mark=2, waits=True).parts] == [1, 1, 1]
    assert said == [0, "drained", 1, "drained", 2, "drained"]


def test_a_gpus_host_runs_it_on_a_fast_core(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is looked for at a mark if the host has become slow, while no time is taken."""
    runs, said = load("sizes_run"), []

    class Cores:
        slowdowns = iter([1.0, 1.5, 1.1])

        def choose(self) -> None:
            said.append("chosen")

        def slowdown(self) -> float:
            return next(self.slowdowns)

        def release(self) -> None:
            said.append("released")

    def ms(call: Callable[[], Any]) -> float:
        began = len(said)
        call()
        return float(len(said) - began)

    monkeypatch.setattr(load("host_speed"), "Cores", Cores)
    timed = runs.run(types.SimpleNamespace(ms=ms, on_gpu=True), 7, said.append, mark=3)
    assert said == ["chosen", 0, 1, 2, 3, 4, 5, "chosen", 6, "released"]
    assert timed.totals_ms == [3, 6, 7]
    Cores.slowdowns = iter([1.5, 1.0])
    said.clear()
    place = types.SimpleNamespace(ms=ms, on_gpu=True)
    with runs.fast_core(place.on_gpu) as look:
        for _ in range(2):
            runs.run(place, 1, said.append, mark=1, look=look)
    assert said == ["chosen", 0, "chosen", 0, "released"], "one core for several runs"


def test_sequences_are_the_same_everywhere(load: Any) -> None:
    runs = load("sizes_run")
    sizes = runs.draw(0, 16, 256, 3000)
    assert sizes == runs.draw(0, 16, 256, 3000) != runs.draw(1, 16, 256, 3000)
    assert (min(sizes), max(sizes)) == (16, 256)
    assert runs.spaced(16, 256, 16) == list(range(16, 257, 16))
    assert runs.some(600, 6) == {99, 199, 299, 399, 499, 599}
    assert runs.some(2, 6) == {0, 1}


# The program


def figures(load: Any, **more: Any) -> dict[str, Any]:
    marks = {"marks": [100, 200], "totals_ms": [1000.0, 2000.0]}
    return {
        "status": "ok",
        **dict.fromkeys(load("schema").FIGURES["sizes"]),
        "ms_per_step": 10.0,
        **marks,
        **more,
    }


@pytest.fixture
def started(load: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], float]]:
    """Settings and time limits of the processes, none of which is started; aot_eager fails."""
    sizes, asked = load("sizes"), []

    def start(spec: dict[str, Any], environment: Any, timeout: float, program: Path) -> dict[str, Any]:
        asked.append((spec, timeout))
        wrong = spec["backend"] == "aot_eager"
        return {"status": "ArithmeticError: results differ"} if wrong else figures(load)

    monkeypatch.setattr(sizes, "start_worker", start)
    return asked


def test_rows_are_written_and_taken_up_again(
    load: Any, started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, schema = load("sizes"), load("schema")
    told = ["--device", "cpu", "--out", str(tmp_path), "--resume", "--steps", "7"]
    told += ["--only", "serving", "lengths", "turns"]
    path = sizes.main(told)
    rows = schema.read(path)["rows"]
    assert [(row["config"], row["mode"], row["backend"]) for row in rows] == [
        *(("serving", "infer", name) for name in ("aot_eager", "pgraph")),
        *(("lengths", "train", name) for name in ("aot_eager", "pgraph")),
        *(("turns", "infer", name) for name in ("aot_eager", "pgraph", "pgraph-static")),
    ]
    assert [spec["backend"] for spec, _ in started] == [row["backend"] for row in rows]
    assert all((spec["size"], spec["steps"]) == ("tiny", 7) for spec, _ in started)
    assert {row["status"] for row in rows} == {"ok", "ArithmeticError: results differ"}
    started.clear()
    sizes.main(told)
    assert [spec["backend"] for spec, _ in started] == ["aot_eager"] * 3, "what ended well is not begun again"
    started.clear()
    sizes.main([*told, "--steps", "8"])
    assert len(started) == 7, "another number of steps is another measurement"
    started.clear()
    sizes.main([*told, "--deadline", "-1"])
    assert not started
    assert "run it again with --resume" in capsys.readouterr().out


def test_the_deadline_ends_a_process_and_is_no_result(
    load: Any, started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = load("sizes")
    told = ["--device", "cpu", "--out", str(tmp_path), "--only", "serving", "--backends", "pgraph"]
    late = {"status": "timeout: no result after 30 s"}
    monkeypatch.setattr(sizes, "start_worker", lambda *args: (started.append(args), late)[1])
    path = sizes.main([*told, "--deadline", "30"])
    assert started[0][2] <= 30
    assert not path.exists()
    sizes.main([*told, "--deadline", "3000", "--timeout", "30"])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["status"] == late["status"], "its own limit is a result"


def test_what_is_not_installed_is_told(load: Any, started: list[Any], monkeypatch: Any) -> None:
    sizes = load("sizes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    row = sizes.row(load("sizes_place").Spec("generate-static", "pgraph"), 1.0)
    assert row["status"].startswith("not installed: transformers")
    assert not started


def test_a_process_for_each_row(load: Any, tmp_path: Path) -> None:
    began = time.perf_counter()
    told = [
        "--only",
        "serving",
        "--backends",
        "pgraph",
        "--calls",
        "6",
        "--device",
        "cpu",
        "--driver",
        "host",
    ]
    path = load("sizes").main([*told, "--out", str(tmp_path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["status"], row["size"], row["marks"]) == ("ok", "tiny", [5, 6])
    assert 0 < row["compile_s"] < time.perf_counter() - began


# The table


def table_row(load: Any, backend: str, config: str = "lengths", **more: Any) -> dict[str, Any]:
    identity = {"bench": "sizes", "config": config, "mode": "train", "scope": "model", "backend": backend}
    stamp = {"commit": "abc", "date": "2026-01-02"}
    return {**identity, **stamp, **figures(load), **more}


def test_totals_are_compared_at_each_mark(load: Any) -> None:
    against = load("readme_sizes").against
    inductor = table_row(load, "inductor")
    early = table_row(load, "pgraph", totals_ms=[1030.0, 1900.0])
    assert against(early, [inductor, early]) == ("1.030 after 100", "no")
    late = table_row(load, "pgraph", totals_ms=[900.0, 2030.0])
    assert against(late, [inductor, late]) == ("1.015 after 200", "yes")
    assert against(inductor, [inductor, late]) == ("-", "-")
    for other in ({"commit": "xyz"}, {"marks": [100, 300]}, {"status": "ArithmeticError: x"}):
        assert against(table_row(load, "pgraph", **other), [inductor]) == ("-", "-")


def test_the_table(load: Any) -> None:
    readme, header = load("readme_sizes"), {"gpu": "nvidia-h200", "driver": "1", "torch": "2", "python": "3"}
    header |= {"commit": "abc", "date": "2026-01-02"}
    rows = [
        table_row(load, "replay", "turns"),
        table_row(load, "pgraph", totals_ms=[1000.0, 2080.0], captures=7),
        table_row(load, "inductor"),
        table_row(load, "reduce-overhead", status="ArithmeticError: a | b"),
        table_row(
            load,
            "pgraph",
            "memory",
            sizes=64,
            captures=64,
            execs=1,
            exec_bytes_one=2**20,
            exec_bytes=2**21,
            counted_bytes_a_node=1400.0,
        ),
    ]
    load("schema").validate(rows, "test")
    times, memory = readme.sizes_table({**header, "rows": rows}).split("\n\n")[1:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in times.splitlines()]
    assert [line[:2] for line in cells[2:]] == [
        ["turns", "replay"],
        ["lengths", "inductor"],
        ["lengths", "reduce-overhead"],
        ["lengths", "pgraph"],
    ]
    assert cells[5][cells[0].index("largest total over Inductor's")] == "1.040 after 200"
    assert cells[5][cells[0].index("at most 1.02")] == "no"
    assert cells[5][cells[0].index("at the end")] == "7"
    assert cells[4][cells[0].index("result")] == "ArithmeticError: a / b"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in memory.splitlines()]
    assert cells[2][:4] == ["pgraph", "64", "64", "1"]
    assert cells[2][cells[0].index("execs MB, one size to all")] == "1.00 to 2.00"
    assert cells[2][cells[0].index("as counted")] == "1,400"
    assert readme.sizes_table({"rows": []}) == ""
