"""`bench/uses.py` on the host driver: each use is measured, compared, and written as a row."""

from __future__ import annotations

import functools
import importlib.util
import json
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

TINY = {"size": "tiny", "device": "cpu"}


def measured(load: Any, use: str, **settings: Any) -> dict[str, Any]:
    """The figures of a tiny use by pgraph, in this process."""
    worker = load("uses_worker")
    for library in load("uses_place").NEEDS[use]:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"not installed: {library}; bash .ci/setup test ecosystem")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries warn of is theirs
        return worker.measure(worker.Spec(use, "pgraph", **TINY, **settings))


@pytest.mark.parametrize(
    ("use", "settings"),
    [
        ("generate", {"batch": 2, "fresh": True}),
        ("adapters", {}),
        ("adapters", {"scope": "block"}),
        ("sleep", {"scope": "block"}),
        ("diffusion", {}),
    ],
)
def test_one_recording_serves_a_use(use: str, settings: dict[str, Any], load: Any) -> None:
    found = measured(load, use, **settings)
    assert found["captures_warm"] == found["captures_end"] == 1
    assert (found["refused"], found["max_diff"]) == (0, pytest.approx(0, abs=1e-5))
    assert found["launches"] > 5
    assert found["ms_p10"] <= found["ms_per_step"] <= found["ms_p90"]
    assert (found.get("tokens_per_s", 0) > 0) == (use == "generate")
    if use in ("adapters", "sleep"):
        assert found["first_ms"] > 0
        assert found["changes"] == {"adapters": 2 * 3, "sleep": 4}[use]


def test_wrong_results_are_no_row_of_figures(load: Any) -> None:
    worker = load("uses_worker")
    place = worker.Place(worker.Spec("sleep", "pgraph", **TINY))
    assert place.near(torch.tensor([1.0, 10.0]), torch.tensor([1.001, 10.0])) < 1e-3
    for wrong in (1.1, float("nan")):
        with pytest.raises(ArithmeticError, match="of the largest value"):
            place.near(torch.tensor([wrong, 10.0]), torch.tensor([1.0, 10.0]))


def test_requests_are_compared_while_their_tokens_agree(load: Any) -> None:
    """After another token the logits are those of another text."""
    worker = load("uses_worker")
    place = worker.Place(worker.Spec("generate", "pgraph", **TINY))

    def said(tokens: list[int], *logits: float) -> Any:
        steps = tuple(torch.tensor([[value, 1.0]]) for value in logits)
        return types.SimpleNamespace(sequences=torch.tensor([[7, *tokens]]), logits=steps)

    theirs = said([1, 2, 3], 0.5, 0.5, 0.5)
    assert worker.agreement(place, said([1, 4, 5], 0.5, 0.5, 0.9), theirs, 1) == 0
    with pytest.raises(ArithmeticError):
        worker.agreement(place, said([1, 2, 5], 0.5, 0.5, 0.9), theirs, 1)


def test_rows_are_written_and_taken_up_again(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uses, schema = load("uses"), load("schema")
    started: list[dict[str, Any]] = []

    def start(spec: dict[str, Any], *args: Any) -> dict[str, Any]:
        started.append(spec)
        if spec["backend"] == "inductor":
            return {"status": "RuntimeError: boom"}
        return {"status": "ok", **dict.fromkeys(schema.FIGURES["uses"]), "ms_per_step": 2.0}

    monkeypatch.setattr(uses, "start_worker", start)
    monkeypatch.setitem(uses.NEEDS, "diffusion", ("no_such_library",))
    monkeypatch.setitem(uses.NEEDS, "generate", ())
    told = ["--size", "tiny", "--device", "cpu", "--out", str(tmp_path), "--backends", "inductor", "pgraph"]
    told += ["--only", "generate", "sleep", "diffusion", "--scopes", "block", "model", "--resume"]
    rows = schema.read(uses.main(told))["rows"]
    assert len(rows) == 2 * (3 + 2 + 1)
    status = {(row["config"], row["backend"]): row["status"] for row in rows}
    assert status["generate-b8", "pgraph"] == status["generate-b1-fresh", "pgraph"] == "ok"
    assert status["sleep", "inductor"] == "RuntimeError: boom"
    assert status["diffusion", "pgraph"].startswith("not installed: no_such_library")
    assert [s["batch"] for s in started[:3]] == [1, 8, 1]
    assert started[2]["fresh"]
    started.clear()
    uses.main(told)
    assert {spec["backend"] for spec in started} == {"inductor"}, "what ended well is not measured again"
    started.clear()
    uses.main([*told, "--deadline", "-1"])
    assert not started
    assert "run it again with --resume" in capsys.readouterr().out
    shown = load("readme_uses").uses_table(schema.read(tmp_path / "uses-cpu.json"))
    assert "| generate-b8 " in shown
    assert "RuntimeError: boom" in shown
    assert load("readme_uses").uses_table({"rows": []}) == ""
    data = schema.read(tmp_path / "uses-cpu.json")
    for floor in ("replay", "guarded"):
        rows = [{**row, "backend": floor} for row in data["rows"] if row["config"] == "generate-b8"]
        assert f"| {floor}" in load("readme_uses").uses_table({**data, "rows": [*data["rows"], *rows]})
        started.clear()
        uses.main([*told[:-1], "--only", "generate", "sleep", "diffusion", "--backends", floor])
        asked = [(s["use"], s["batch"], s["fresh"]) for s in started if s["backend"] == floor]
        decoding = [("generate", 1, False), ("generate", 8, False)]  # its cache stays where it is
        assert asked == [*decoding, *[("sleep", 1, False)] * 2], "a row for each scope"


def test_what_a_graph_behind_guards_writes_stays_in_place(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it only reads is copied to where the graph reads it, wherever it lies today."""
    replay = load("uses_replay")

    def step(weight: Tensor, count: Tensor, small: Tensor, large: Tensor) -> Tensor:
        count.add_(1)
        return weight + count + small + large.sum()

    class Recorded:  # in the place of a graph: the addresses of now, for ever
        def __init__(self, behind: Any) -> None:
            there = list(behind._arguments)
            for position, name in behind._names.items():
                there[position] = behind._model.get_parameter(name)
            self._step, self._results = functools.partial(step, *there), torch.zeros(1, 3)
            behind._results = self._results

        def replay(self) -> None:
            self._results.copy_(self._step())

    monkeypatch.setattr(replay._Behind, "capture", lambda self: setattr(self, "_graph", Recorded(self)))
    model = nn.Linear(3, 1, bias=False)
    behind, count, large = replay._Behind(step, model), torch.zeros(3), torch.ones(5000)
    with torch.no_grad():
        for call in range(1, 8):
            small = torch.randn(3)
            result = behind(model.weight, count, small, large)
            assert torch.equal(count, torch.full((3,), float(call)))
            assert torch.allclose(result, model.weight[0] + call + small + 5000)
        with pytest.raises(RuntimeError, match=r"argument 1 is written into, and was moved: call forget\(\)"):
            behind(model.weight, count.clone(), small, large)
        behind.forget()
        count = count.clone()
        assert torch.allclose(behind(model.weight, count, small, large), model.weight[0] + 8 + small + 5000)


def test_a_process_for_each_row(load: Any, tmp_path: Path) -> None:
    uses = load("uses")
    path = uses.main(["--only", "sleep", "--backends", "pgraph", *_flags(tmp_path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["status"], row["captures_end"], row["size"]) == ("ok", 1, "tiny")


def _flags(out: Path) -> list[str]:
    return ["--size", "tiny", "--device", "cpu", "--out", str(out)]
