"""The memory benchmarks: configs and what fits, tasks, the verdict, the search for the largest batch."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def test_names_say_what_is_trained(load: Any) -> None:
    configs = load("configs")
    large = configs.workload("70b-4-ac")
    assert (large.llama.dim, large.llama.heads, large.llama.kv_heads, large.llama.mlp_dim) == (
        8192,
        64,
        8,
        28672,
    )
    assert (large.llama.layers, large.checkpoint, large.batch) == (4, True, 1)
    assert not configs.workload("70b-4").checkpoint
    assert configs.workload("16x1024@b9").batch == 9
    assert configs.workload("16x1024@b9").llama == configs.workload("16x1024").llama
    short = configs.workload("16x1024@t64@b9")
    assert (short.batch, short.seq, short.llama.max_seq) == (9, 64, 64)
    assert configs.without_batch("16x1024@t64@b9") == configs.without_batch("16x1024@t64") == "16x1024@t64"
    vit, gpt2 = configs.workload("vit-b16-256"), configs.workload("gpt2-8")
    assert (vit.family, vit.batch, vit.checkpoint) == ("vit", 256, True)
    assert (gpt2.family, gpt2.batch, gpt2.accumulate) == ("gpt2", 8, 4)
    wrongs = ("70b-0", "70b-2-acc", "vit-b16-", "gpt2-0", "4x256@b0", "x@b2")
    for wrong in (*wrongs, "4x256@t0", "4x256@b2@t8x", "gpt2-8@t64"):
        with pytest.raises(ValueError, match="is unknown; choose from cpu-tiny"):
            configs.workload(wrong)


def test_layers_that_fit_follow_from_the_parameters(load: Any) -> None:
    """The count used for fitting is the model's own; checkpointing fits more; a small device still one."""
    configs, tasks = load("configs"), load("tasks")
    with torch.device("meta"):
        one, two = (tasks.Llama(configs.workload(f"70b-{n}").llama) for n in (1, 2))
    per_layer = sum(p.numel() for p in two.parameters()) - sum(p.numel() for p in one.parameters())
    assert per_layer == configs._LAYER_PARAMETERS_70B
    device = 140 << 30
    plain, checkpointed = (configs.fitting_layers(device, ac) for ac in (False, True))
    assert plain < checkpointed
    assert checkpointed * 8 * per_layer < device
    assert configs.fitting_layers(1 << 30, True) == 1
    assert configs.resolve("70b-fit-ac", device) == f"70b-{checkpointed}-ac"
    assert configs.resolve("70b-fit@b2", device) == f"70b-{plain}@b2"
    assert configs.resolve("4x256", None) == "4x256"
    with pytest.raises(ValueError, match="needs a GPU to fit into"):
        configs.resolve("70b-fit", None)
    assert configs.prepared_by("70b-19-ac", "block") == "70b-2-ac"
    assert configs.prepared_by("70b-19", "model") == "70b-19"


def test_checkpointing_changes_memory_and_not_the_gradients(load: Any) -> None:
    """The same weights, with and without: equal losses and gradients."""
    import dataclasses

    configs, tasks = load("configs"), load("tasks")
    load = configs.workload("cpu-tiny")
    grads, losses = [], []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        task = tasks.task(dataclasses.replace(load, checkpoint=checkpoint), torch.device("cpu"), 1)
        loss = task.loss(*task.batch())
        loss.backward()
        losses.append(loss.detach())
        grads.append([p.grad for p in task.model.parameters()])
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class _VitBlock(nn.Module):
    """A layer of a class of its own, as timm's is: Dynamo does not begin in torch's containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x))


class _Vit(nn.Module):
    """Stands for timm's model: blocks in a Sequential, logits at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_VitBlock() for _ in range(2)))
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images.mean(1)[:, :16, :16].mean(1))))


@pytest.mark.parametrize("scope", ["block", "model"])
def test_vit_blocks_are_checkpointed_and_compiled(
    load: Any, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    tasks = load("tasks")
    made: list[str] = []

    def create_model(name: str, pretrained: bool) -> nn.Module:
        assert not pretrained
        made.append(name)
        return _Vit()

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))
    task = tasks.task(load("configs").workload("vit-b16-2"), torch.device("cpu"), 1)
    assert made == ["vit_base_patch16_224"]
    assert [type(b).__name__ for b in task.model.blocks] == ["Checkpointed"] * 2
    seen: list[torch.fx.GraphModule] = []

    def count(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append(gm)
        return gm

    task.compile(scope, backend=count, dynamic=False)
    task.loss(*task.batch()).backward()
    assert len(seen) == 1, "one code for the model, or one for all blocks"
    assert all(p.grad is not None for p in task.model.parameters())


@pytest.mark.parametrize(("name", "advice"), [("vit-b16-2", "pip install timm"), ("gpt2-2", "transformers")])
def test_a_missing_package_is_named(
    load: Any, monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    tasks = load("tasks")
    for package in ("timm", "torchvision", "torchvision.models", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=advice):
        tasks.task(load("configs").workload(name), torch.device("cpu"), 1)


def test_accumulated_gradients_are_those_of_one_large_batch(load: Any) -> None:
    """A step of four micro-batches moves the weights as one step on all of their data."""
    worker, configs = load("worker"), load("configs")
    import dataclasses

    spec = worker.Spec(config="cpu-tiny", device="cpu")
    trainer = worker.Trainer(spec, worker.Device("cpu"))
    trainer.task.load = dataclasses.replace(configs.workload("cpu-tiny"), accumulate=4)
    twin = worker.Trainer(spec, worker.Device("cpu"))
    batches = [twin.task.batch() for _ in range(4)]
    joined = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    grads: list[list[Tensor]] = []
    for one in (trainer, twin):
        assert one.optimizer is not None
        one.optimizer.step = lambda model=one.task.model: grads.append(  # type: ignore[method-assign]
            [p.grad.clone() for p in model.parameters()]
        )
    twin.task.batch = lambda: joined
    trainer.step()
    twin.step()
    assert len(trainer.addresses) > 1
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_the_verdict_takes_the_larger_bound(load: Any) -> None:
    against = load("readme_tables").against
    sizes = ("peak_allocated_mb", "peak_reserved_mb", "device_used_mb")

    def judge(mine: Sequence[float], theirs: Sequence[float]) -> tuple[str, str]:
        return against(dict(zip(sizes, mine, strict=True)), dict(zip(sizes, theirs, strict=True)))

    assert judge((1000, 2000, 132), (1000, 2000, 100)) == ("1.000 / 1.000 / 1.320", "yes")
    assert judge((1000, 20201, 133), (1000, 20000, 100))[1] == "no: reserved +201 MB, device +33 MB"
    assert judge((1, 20200, 1), (2, 20000, 1))[1] == "yes"
    assert against({"peak_allocated_mb": 1.0}, None) == ("-", "-")


def test_inductors_row_of_the_same_run_comes_first(load: Any) -> None:
    """Of another commit's row only what the allocator counts is compared."""
    rows, against = load("readme_rows"), load("readme_tables").against
    same = dict.fromkeys(("config", "mode", "scope", "alloc_conf", "deterministic"), "x")
    sizes = {"peak_allocated_mb": 100.0, "peak_reserved_mb": 200.0, "device_used_mb": 300.0}
    old, new = ({**same, **sizes, "backend": "inductor", "commit": c, "date": "d"} for c in "ab")
    other = {**old, "config": "y"}
    row = {**same, **sizes, "backend": "pgraph", "commit": "b", "date": "d"}
    assert rows.inductor_of(row, [other, old, new, row]) is new
    assert rows.inductor_of(row, [other, old, row]) is old
    assert rows.inductor_of(row, [other, row]) is None
    assert against(row, new) == ("1.000 / 1.000 / 1.000", "yes")
    assert against({**row, "device_used_mb": 900.0}, old) == ("1.000 / 1.000 / -", "yes")
    assert against({**row, "peak_reserved_mb": 233.0}, old)[1] == "no: reserved +33 MB"


@pytest.mark.parametrize("ways", [1, 3, 5])
@pytest.mark.parametrize("best", [0, 1, 2, 17, 62, 63])
def test_the_search_finds_the_largest_size(load: Any, ways: int, best: int) -> None:
    search = load("largest_batch")
    tried: list[int] = []

    def fits(sizes: Sequence[int]) -> list[bool]:
        assert len(sizes) <= ways
        tried.extend(sizes)
        return [size <= best for size in sizes]

    assert search.largest(fits, 1, 64, ways) == best
    assert len(set(tried)) == len(tried), "a size was tried twice"
    assert len(tried) <= 1 + 6 * ways


def test_a_trial_fits_with_its_graphs_or_not(load: Any) -> None:
    search = load("largest_batch")
    ok = {"status": "ok", "peak_reserved_mb": 98.0}
    assert search.why_not(ok, 100.0) is None
    assert search.why_not({**ok, "exec_mb": 4.0}, 100.0) == "98 MB reserved and 4 MB of graphs"
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
    assert search.why_not({"status": full}, 100.0) == full
    with pytest.raises(search.SearchError, match="ValueError: no"):
        search.why_not({"status": "ValueError: no"}, 100.0)


def test_the_search_writes_rows_of_the_schema(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker that fits up to a size by backend stands for the real one."""
    search, schema, readme = load("largest_batch"), load("schema"), load("readme")

    def worker(spec: dict[str, Any], environment: dict[str, str], timeout: float) -> dict[str, Any]:
        batch = int(spec["config"].partition("@b")[2])
        if spec["backend"] == "eager" and batch == 8:
            return {"status": "RuntimeError: odd"}
        if batch > 11:
            return {"status": "torch.OutOfMemoryError: CUDA out of memory."}
        return {"status": "ok", "peak_reserved_mb": 10.0 * batch, "ms_per_step": 1.0}

    monkeypatch.setattr(search, "start_worker", worker)
    arguments = ["--config", "cpu-tiny", "--backends", "eager", "pgraph", "--high", "16", "--device", "cpu"]
    path = search.main([*arguments, "--out", str(tmp_path)])
    eager, pgraph = schema.read(path)["rows"]
    assert eager["status"] == "cpu-tiny@b8 by eager: RuntimeError: odd"
    assert (pgraph["status"], pgraph["largest_batch"], pgraph["peak_reserved_mb"]) == ("ok", 11, 110.0)
    assert list(pgraph["tried"]) == ["1", "8", "10", "11", "12"]
    assert pgraph["tried"]["11"] == "fits, 110 MB reserved"
    assert pgraph["tried"]["12"] == "torch.OutOfMemoryError: CUDA out of memory."
    text = readme.batch_table(schema.read(path))
    assert [c.strip() for c in text.splitlines()[-1].split("|")[1:6]] == [
        "cpu-tiny, per block",
        "pgraph",
        "4,096",
        "11",
        "110",
    ]


def test_a_run_says_where_it_runs_and_writes(load: Any, tmp_path: Path) -> None:
    memory = load("memory")
    args = memory.parse_args(["--quick", "--device", "cpu", "--configs", "cpu-tiny"])
    here = memory.notices(args, memory.schema.result_path("memory", "cpu"))
    assert [line.split(":")[0].split(" ")[0] for line in here] == ["no", "rows"]
    assert "cpu-tiny on the CPU, for some minutes" in here[0]
    assert "--out out/ puts them elsewhere" in here[1]
    assert memory.notices(args, memory.schema.result_path("memory", "cpu", tmp_path)) == here[:1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_search_is_refused(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load("largest_batch").main([])
    assert stopped.value.code == 2
    assert "there is no GPU, and the search is for what fits a GPU's memory" in capsys.readouterr().err


def test_a_search_that_began_too_high_says_so(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    search, schema = load("largest_batch"), load("schema")
    full = {"status": "torch.OutOfMemoryError: CUDA out of memory."}
    monkeypatch.setattr(search, "start_worker", lambda *args: full)
    arguments = ["--config", "cpu-tiny", "--backends", "pgraph", "--low", "24", "--device", "cpu"]
    (row,) = schema.read(search.main([*arguments, "--out", str(tmp_path)]))["rows"]
    assert row["largest_batch"] == 0
    assert row["status"] == "batch 24 does not fit: lower --low"


def test_a_stopped_measurement_keeps_its_whole_rounds(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The third process of each backend never ends; two of each are in the file."""
    memory, schema = load("memory"), load("schema")
    started: list[str] = []

    def worker(spec: dict[str, Any], environment: dict[str, str], timeout: float) -> dict[str, Any]:
        started.append(spec["backend"])
        if len(started) > 5:
            raise KeyboardInterrupt
        figures = dict.fromkeys(schema.FIGURES["memory"], 1.0)
        return {"status": "ok", **figures, "ms_per_step": float(len(started)), "final_loss": 1.0}

    monkeypatch.setattr(memory, "start_worker", worker)
    arguments = ["--configs", "cpu-tiny", "--scopes", "block", "--backends", "eager", "pgraph"]
    with pytest.raises(KeyboardInterrupt):
        memory.main([*arguments, "--repeats", "3", "--device", "cpu", "--out", str(tmp_path)])
    eager, pgraph = schema.read(tmp_path / "memory-cpu.json")["rows"]
    assert (eager["repeats"], eager["ms_min"], eager["ms_max"]) == (2, 1.0, 3.0)
    assert (pgraph["repeats"], pgraph["ms_min"], pgraph["ms_max"]) == (2, 2.0, 4.0)


def test_what_is_prepared_is_compiled_once_and_never_eager(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = load("workers")
    started: list[dict[str, Any]] = []

    def worker(spec: dict[str, Any], environment: dict[str, str], timeout: float) -> dict[str, Any]:
        started.append(spec)
        return {"status": "ok", "prepare_s": 1.0}

    monkeypatch.setattr(workers, "start_worker", worker)
    base = {"scope": "block", "mode": "train", "device": "cuda", "driver": "auto", "codegen": "auto"}
    specs = [
        {**base, "config": config, "backend": backend, "steps": 50}
        for config in ("70b-19-ac", "70b-3-ac", "4x256")
        for backend in ("eager", "inductor", "pgraph")
    ]
    lines: list[str] = []
    workers.prepare(specs, {}, 1.0, jobs=2, device_bytes=100 << 30, tell=lines.append)
    assert sorted((s["config"], s["backend"]) for s in started) == [
        ("4x256", "inductor"),
        ("4x256", "pgraph"),
        ("70b-2-ac", "inductor"),
        ("70b-2-ac", "pgraph"),
    ]
    assert all(s["prepare"] and s["cap_mb"] == 0.9 * (100 << 10) / 2 for s in started)
    assert len(lines) == 4


def test_a_prepared_process_compiles_and_stops(load: Any) -> None:
    worker = load("worker")
    figures = worker.prepare(worker.Spec(config="cpu-tiny", device="cpu", backend="aot_eager"))
    assert figures["prepare_s"] > 0
    assert not figures["out_of_memory"]
