"""The benchmark programs: result schema, README tables, the worker, and the judge of the equality run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

REPO = Path(__file__).resolve().parents[1]
BENCH = REPO / "bench"
HEADER = {
    "gpu": "nvidia-h200",
    "driver": "580.1",
    "torch": "2.11.0",
    "python": "3.12.0",
    "commit": "abc",
    "date": "2026-01-02",
}


def memory_row(backend: str = "pgraph", **changes: Any) -> dict[str, Any]:
    """A valid row of the memory benchmark."""
    return {
        "bench": "memory",
        "config": "4x256",
        "mode": "train",
        "scope": "block",
        "backend": backend,
        "alloc_conf": "default",
        "ms_per_step": 2.5,
        "cpu_issue_ms": 1.5,
        "peak_allocated_mb": 100.0,
        "peak_reserved_mb": 200,
        "device_used_mb": 900.0,
        "compile_s": 12.0,
        "capture_s": None,
        "status": "ok",
        **changes,
    }


def equality_row(**changes: Any) -> dict[str, Any]:
    """A valid row of the equality run."""
    identity = {
        "bench": "equality",
        "config": "4x256",
        "mode": "train",
        "scope": "model",
        "backend": "pgraph",
    }
    counts = {"steps": 200, "tensors_compared": 5000, "tensors_bit_equal": 5000, "distinct_addresses": 321}
    return {
        **identity,
        **counts,
        "captures_warm": 2,
        "captures_end": 2,
        "tensors_reference_bit_equal": 4990,
        "reference": "inductor",
        "status": "equal",
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"backend": "magic"}, "backend='magic' must be one of eager"),
        ({"scope": ""}, "scope='' must be a non-empty string"),
        ({"ms_per_step": "fast"}, "ms_per_step='fast' must be a number or None"),
        ({"peak_reserved_mb": float("nan")}, "peak_reserved_mb=nan must be finite"),
        ({"compile_s": -1.0}, "compile_s=-1.0 must be finite and not negative"),
        ({"steps": True}, None),
    ],
)
def test_row_problems_name_the_value(load: Any, changes: dict[str, Any], text: str | None) -> None:
    found = load("schema").problems(memory_row(**changes))
    assert found == [] if text is None else text in "; ".join(found)


def test_missing_figures_are_refused_unless_the_run_failed(load: Any, tmp_path: Path) -> None:
    schema = load("schema")
    row = memory_row()
    del row["cpu_issue_ms"], row["mode"]
    with pytest.raises(
        schema.SchemaError, match=r"x\.json: row 0: mode is missing; row 0: cpu_issue_ms is miss"
    ):
        schema.write(tmp_path / "x.json", [row], HEADER)
    assert not (tmp_path / "x.json").exists()
    failed = {
        key: value for key, value in memory_row(status="RuntimeError: no").items() if key != "cpu_issue_ms"
    }
    assert schema.problems(failed) == []


def test_write_merges_by_identity_and_keeps_the_measuring_commit(load: Any, tmp_path: Path) -> None:
    schema = load("schema")
    path = tmp_path / "deep" / "memory-nvidia-h200.json"
    schema.write(path, [memory_row("inductor"), memory_row("pgraph")], HEADER)
    other = memory_row("pgraph", alloc_conf="expandable_segments:True")
    schema.write(path, [memory_row("pgraph", ms_per_step=9.0), other], {**HEADER, "commit": "def"})
    data = schema.read(path)
    assert data["commit"] == "def"
    found = [(r["backend"], r["alloc_conf"], r["ms_per_step"], r["commit"]) for r in data["rows"]]
    assert found == [
        ("inductor", "default", 2.5, "abc"),
        ("pgraph", "default", 9.0, "def"),
        ("pgraph", "expandable_segments:True", 2.5, "def"),
    ]


def test_a_file_of_another_machine_or_twin_rows_are_refused(load: Any, tmp_path: Path) -> None:
    schema = load("schema")
    path = tmp_path / "r.json"
    with pytest.raises(schema.SchemaError, match="rows 0 and 1 are the same measurement"):
        schema.write(path, [memory_row(), memory_row()], HEADER)
    schema.write(path, [memory_row()], HEADER)
    with pytest.raises(schema.SchemaError, match="holds results of nvidia-h200, not cpu"):
        schema.write(path, [memory_row()], {**HEADER, "gpu": "cpu"})
    path.write_text("{")
    with pytest.raises(schema.SchemaError, match="not JSON"):
        schema.read(path)


def test_commit_and_slug(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = load("schema")
    monkeypatch.setenv("PGRAPH_COMMIT", "feed")
    assert schema.commit() == "feed"
    assert schema.gpu_slug("NVIDIA H200") == "nvidia-h200"
    assert schema.environment()["commit"] == "feed"


def test_the_commit_is_the_one_that_changed_the_measured_code_last(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not one of documents or results."""
    schema = load("schema")
    monkeypatch.delenv("PGRAPH_COMMIT", raising=False)
    monkeypatch.setattr(schema, "REPO", tmp_path)

    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *name, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "pgraph").mkdir()
    for file in ("pgraph/code.py", "README.md"):
        (tmp_path / file).write_text("x\n")
        git("add", file)
        git("commit", "-q", "-m", file)
    assert schema.commit() == git("rev-parse", "--short=12", "HEAD~1")
    (tmp_path / "pgraph" / "code.py").write_text("y\n")
    assert schema.commit().endswith("+dirty")


def test_a_run_on_the_cpu_is_filed_as_one(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is a GPU."""
    schema = load("schema")
    monkeypatch.setattr(schema, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(schema, "driver_version", lambda: "570.1")
    there, here = schema.environment(), schema.environment(cpu=True)
    assert (there["gpu"], there["driver"]) == ("nvidia-h200", "570.1")
    assert here == there | {"gpu": "cpu", "driver": None}


def run_readme(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run bench/readme.py on a folder that holds the page README.md and the results."""
    command = [sys.executable, str(BENCH / "readme.py"), "--pages", str(folder / "README.md")]
    return subprocess.run(
        [*command, "--results", str(folder), *flags], capture_output=True, text=True, timeout=120
    )


def test_readme_tables_charts_and_stale_check(load: Any, tmp_path: Path) -> None:
    schema = load("schema")
    failed = {k: v for k, v in memory_row("eager", status="MemoryError: full").items() if v != 2.5}
    rows = [memory_row("pgraph", peak_reserved_mb=1234.4, capture_s=0.25), memory_row("inductor"), failed]
    path = schema.write(tmp_path / "memory-nvidia-h200.json", rows, HEADER)
    schema.write(tmp_path / "equality-nvidia-h200.json", [equality_row()], HEADER)
    readme = tmp_path / "README.md"
    readme.write_text(
        "top\n<!-- table:memory -->\nold\n<!-- /table -->\nmiddle\n<!-- table:equality -->\n<!-- /table -->\n"
        "<!-- table:memory@nvidia-b200 -->\n<!-- /table -->\nend\n"
    )

    before = run_readme(tmp_path, "--check")
    assert before.returncode == 1
    assert "README.md is stale; memory-nvidia-h200.svg is stale" in before.stdout
    assert "old" in readme.read_text()

    done = run_readme(tmp_path)
    assert done.returncode == 0, done.stderr
    text = readme.read_text()
    assert text.startswith("top\n")
    assert text.endswith("end\n")
    assert "\nmiddle\n" in text
    assert "old" not in text
    assert "No results yet." in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    # Usual order of the backends, not that of the file; a figure that is missing is a dash.
    assert [line[1] for line in lines if line[0] == "4x256, per block"] == ["eager", "inductor", "pgraph"]
    assert [
        "4x256, per block",
        "pgraph",
        "2.50",
        "1.50",
        "100",
        "1,234",
        "900",
        "12.0",
        "0.25",
        "1.000 / 6.172 / 1.000",
        "no: reserved +1,034 MB",
        "abc",
    ] in lines
    assert "- 4x256, per block, eager: MemoryError: full" in text
    assert [
        "4x256, whole model",
        "pgraph against inductor",
        "200",
        "5,000",
        "5,000",
        "4,990",
        "321",
        "2 -> 2",
        "equal",
        "abc",
    ] in lines

    svg = (tmp_path / "memory-nvidia-h200.svg").read_bytes()
    assert run_readme(tmp_path, "--check").returncode == 0
    assert run_readme(tmp_path).returncode == 0
    assert (tmp_path / "memory-nvidia-h200.svg").read_bytes() == svg

    schema.write(path, [memory_row("pgraph", ms_per_step=3.0)], HEADER)
    after = run_readme(tmp_path, "--check")
    assert after.returncode == 1
    assert "stale" in after.stdout


def test_records_of_gpu_tests_make_a_table(load: Any, tmp_path: Path) -> None:
    record = {"gpu": "NVIDIA H200", "torch": "2.11.0", "python": "3.12.3", "commit": "feed123456"}
    (tmp_path / "results").mkdir()
    path = tmp_path / "results" / "gpu-tests-nvidia-h200.json"
    path.write_text(json.dumps({**record, "passed": 41, "failed": 1, "skipped": 2, "tests": []}))
    page = tmp_path / "RESULTS.md"
    page.write_text("<!-- table:gpu-tests -->\n<!-- /table -->\n<!-- table:memory -->\n<!-- /table -->\n")
    assert load("readme").main(["--pages", str(page), "--results", str(path.parent)]) == 0
    text = page.read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    link = f"[{path.name}](results/{path.name})"
    assert cells[-1] == [link, "NVIDIA H200", "2.11.0", "3.12.3", "41", "1", "2", "feed123"]
    assert "No results yet." in text, "a record of tests was taken for a benchmark's"
    stopped = {**record, "passed": 9, "failed": 0, "skipped": 0, "interrupted": True}
    assert "| 9 until it was stopped |" in " ".join(
        load("readme_tables").gpu_tests_table({path.name: stopped}, "results").split()
    )


def test_pgraph_has_settled_when_it_tries_nothing(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks warm up for as long as it has not."""
    settled = load("backends").pgraph_settled
    import pgraph.backend  # noqa: F401
    from pgraph.runtime import trimming

    monkeypatch.setattr(trimming, "pending", None)
    assert settled()
    monkeypatch.setattr(trimming, "pending", object())
    assert not settled()


def test_pages_need_markers_and_markers_need_names(load: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    arguments = ["--pages", str(page), "--results", str(tmp_path)]
    page.write_text("no marker")
    assert load("readme").main(arguments) == 1
    page.write_text("<!-- table:memori -->\n<!-- /table -->\n")
    with pytest.raises(ValueError, match="table:memori is unknown; choose one of summary, memory, "):
        load("readme").main(arguments)


def test_memory_benchmark_writes_a_valid_row(load: Any, tmp_path: Path) -> None:
    schema = load("schema")
    command = [
        sys.executable,
        str(BENCH / "memory.py"),
        "--configs",
        "cpu-tiny",
        "--backends",
        "eager",
        "--steps",
        "2",
    ]
    small = ["--warmup", "1", "--repeats", "1", "--memory-steps", "2", "--scopes", "block", "--device", "cpu"]
    env = {**os.environ, "PGRAPH_COMMIT": "feed"}
    done = subprocess.run(
        [*command, *small, "--out", str(tmp_path)], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    data = schema.read(tmp_path / "memory-cpu.json")
    (row,) = data["rows"]
    assert row["status"] == "ok"
    assert row["ms_per_step"] > 0
    assert 4.0 < row["final_loss"] < 7.0
    assert row["token_addresses"] > 1
    assert row["peak_reserved_mb"] is None
    assert data["commit"] == row["commit"] == "feed"


def test_a_failing_worker_becomes_a_status(load: Any) -> None:
    memory = load("memory")
    figures = memory.start_worker({"config": "no-such", "device": "cpu"}, dict(os.environ), 60.0)
    assert figures == {
        "status": "ValueError: config 'no-such' is unknown; choose from cpu-tiny, 4x256, 48x256, 16x1024, "
        "8x4096, or 70b-N[-ac], 70b-fit[-ac], vit-b16-B, gpt2-B, NAME[@tT][@bB]"
    }
    assert (
        memory.last_error("Traceback\n  x\ntorch.FooError: bad\n\nSet X=1 for more\n")
        == "torch.FooError: bad"
    )
    here = Path(memory.__file__)
    assert memory.last_error(f'FooError: in "{here}", line 1') == 'FooError: in "bench/memory.py", line 1'
    good = {"status": "ok", "ms_per_step": 2.0, "compile_s": 9.0}
    row = memory.summarise([good, {"status": "boom"}, {**good, "ms_per_step": 4.0, "compile_s": 1.0}])
    assert row["ms_per_step"] == 3.0
    assert row["compile_s"] == 9.0
    assert row["status"] == "1 of 3 repeats failed: boom"


def test_equality_judges_by_the_references_own_spread(load: Any) -> None:
    equality = load("equality")
    x = torch.linspace(-1, 1, 64)
    tiny, large = x + 2e-7, x + 0.1

    def judge(*trios: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> str | None:
        verdict = equality.Verdict()
        for step, trio in enumerate(trios):
            equality.compare(verdict, "x", step, trio)
        return verdict.failure()

    assert judge((x, x.clone(), x.clone())) is None
    # The reference repeats itself exactly, so a rounding error in the candidate is a failure.
    assert "step 1: x differs by 2" in str(judge((x, x.clone(), x.clone()), (x, x.clone(), tiny)))
    # Nondeterminism of the reference that shows later excuses it, within the tolerance.
    assert judge((x, x.clone(), tiny), (x, tiny, x.clone())) is None
    assert "step 0: x differs by 0.1" in str(judge((x, tiny, large)))
    assert "step 0" in str(judge((x, tiny, torch.full_like(x, float("nan")))))
    assert "(32,)" in str(judge((x, x.clone(), x[:32])))
    assert not equality.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_equality_judges_gradients_together(load: Any) -> None:
    equality = load("equality")
    x = torch.linspace(-1, 1, 64)
    tiny = x + 2e-7

    def judge(twin_of_b: torch.Tensor) -> list[str]:
        verdicts = {name: equality.Verdict() for name in ("loss", "gradient of a", "gradient of b")}
        equality.compare(verdicts["loss"], "loss", 0, (x, x.clone(), x.clone()))
        equality.compare(verdicts["gradient of a"], "gradient of a", 0, (x, x.clone(), tiny))
        equality.compare(verdicts["gradient of b"], "gradient of b", 0, (x, twin_of_b, x.clone()))
        return equality.verdict_failures(verdicts)

    assert len(judge(x.clone())) == 1  # the reference repeats itself: rounding is a failure
    assert judge(tiny) == []  # it does not


def test_equality_run_moves_addresses_and_agrees(load: Any, tmp_path: Path) -> None:
    equality = load("equality")
    args = ["--config", "cpu-tiny", "--candidate", "aot_eager", "--reference", "eager", "--device", "cpu"]
    assert equality.main([*args, "--steps", "8", "--warmup", "2", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "equality-cpu.json").read_text())["rows"]
    assert row["tensors_compared"] == row["tensors_bit_equal"] == 8 * row["names_compared"]
    assert row["fewest_addresses_of_a_parameter"] >= 2
    torch._dynamo.reset()


def test_equality_run_finds_a_wrong_backend(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that stores its first parameters' addresses, as a stale graph would, must not pass."""
    equality = load("equality")

    def stale(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        first: list[list[Any]] = []

        def call(*inputs: Any) -> Any:
            if not first:
                first.append(
                    [x.detach().clone() if isinstance(x, torch.nn.Parameter) else None for x in inputs]
                )
            mixed = [
                x if old is None else x - x.detach() + old for x, old in zip(inputs, first[0], strict=True)
            ]
            return graph(*mixed)

        return call

    real = equality.compile_kwargs

    def kwargs(backend: str, *rest: Any) -> Any:
        return {"backend": stale, "dynamic": False} if backend == "aot_eager" else real(backend, *rest)

    monkeypatch.setattr(equality, "compile_kwargs", kwargs)
    args = ["--config", "cpu-tiny", "--candidate", "aot_eager", "--reference", "eager", "--device", "cpu"]
    row = equality.run(equality.parse_args([*args, "--scope", "model", "--steps", "4", "--warmup", "2"]))
    assert row["status"].startswith("step 1: ")
    torch._dynamo.reset()
