"""`bench/probes.py` without a GPU: what is passed to a driver, what is made of its answers, the rows."""

from __future__ import annotations

import ctypes
import struct
import types
from pathlib import Path
from typing import Any

import pytest
from support_native import FakeDevice

from pgraph.drivers.host.driver import HostDriver
from pgraph.native.libraries import load_tensors

FUNCTIONS = {"once": 11, "twice": 12, "sum": 13, "scratch": 14, "any": 15, "pair": 16, "four": 17}
STATIC = {"pair": 2, "four": 4}
WRONG = "wrong: [3.0] in the place of"


class Driver:
    """Does what a node was set to, by what the structs say; `faults` are its ways to misbehave."""

    def __init__(self, probes: Any, *faults: str) -> None:
        self.faults = set(faults)
        self.capability = (9, 0)
        self.held: dict[int, tuple[str, list[float], int, str]] = {}
        self.limit = 49152
        self._clusters = 0
        self.out = types.SimpleNamespace(data_ptr=lambda: 4096)
        self.params = lambda *args, **how: probes.Machine.params(self, *args, **how)
        self.asked = lambda *args: probes.Machine.asked(self, *args)
        self.cu = types.SimpleNamespace(
            CUresult=lambda code: types.SimpleNamespace(name=f"ERROR_{code}"),
            CUfunction=int,
            CUfunction_attribute=int,
            cuFuncSetAttribute=self._raise,
            cuGraphLaunch=lambda made, stream: (0,),
        )

    def check(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        return result[1:]

    def ok(self, code: int) -> None:
        assert code == 0

    def function(self, name: str) -> int:
        return FUNCTIONS[name]

    def _raise(self, function: int, attribute: int, value: int) -> tuple[int]:
        assert (function, attribute) == (FUNCTIONS["scratch"], 8)
        self.limit = value
        return (0,)

    def _read(self, address: int) -> tuple[str, list[float], int, str]:
        from pgraph.drivers.cuda.nodes import KernelParams

        told = KernelParams.from_address(address)
        name = next(name for name, handle in FUNCTIONS.items() if handle == told.func)
        forms = "Qfffd" if name == "sum" else "Qf"
        if told.extra:
            table = (ctypes.c_void_p * 5).from_address(told.extra)
            assert (table[0], table[2], table[4]) == (1, 2, None)
            size = ctypes.c_size_t.from_address(table[3]).value
            values = list(struct.unpack_from(f"@{forms}", ctypes.string_at(table[1], size)))
        else:
            table = (ctypes.c_void_p * len(forms)).from_address(told.kernel_params)
            values = [
                struct.unpack(f"={form}", ctypes.string_at(at, struct.calcsize(form)))[0]
                for form, at in zip(forms, table, strict=True)
            ]
        assert values[0] == 4096, "where it writes"
        assert list(told.grid) == [4, 1, 1]
        return name, values[1:], told.shared, "buffer" if told.extra else "list"

    def exec_of(self, params: Any, *, clusters: int = 0, upload: bool = True) -> tuple[int, list[int]]:
        self.held = {i: self._read(one.address) for i, one in enumerate(params)}
        self._clusters = clusters or STATIC.get(self.held[0][0], 1)
        return 1, list(self.held)

    def set(self, made: int, node: int, address: int) -> int:
        name, values, nbytes, how = self._read(address)
        if how != self.held[node][3] and "no other passing" in self.faults:
            return 1
        if nbytes > self.limit:
            return 1
        if "ignored" not in self.faults:
            self.held[node] = name, values, nbytes, how
        if "static clusters" in self.faults:
            self._clusters = STATIC.get(name, self._clusters)
        return 0

    def launch(self, made: int) -> list[float]:
        name, values, nbytes, _ = self.held[max(self.held)]
        if name in ("once", "twice"):
            return [values[0] * (1 + (name == "twice"))]
        if name == "sum":
            return [sum(values)]
        return [values[0] + (nbytes if name == "scratch" else self._clusters)]


@pytest.fixture
def ask(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask a driver with these faults."""
    pytest.importorskip("cuda.bindings.driver")
    probes = load("probes")
    monkeypatch.setattr(probes.torch.cuda, "synchronize", lambda: None)

    def asked(name: str, *faults: str) -> dict[str, Any]:
        monkeypatch.setattr(probes, "Machine", lambda: Driver(real, *faults))
        return probes.PROBES[name]()

    real = types.SimpleNamespace(Machine=probes.Machine)
    return asked


@pytest.mark.parametrize(
    ("name", "faults", "answer"),
    [
        ("function-same-size", (), "yes"),
        ("function-other-size", (), "yes"),
        ("function-same-size", ("ignored",), f"{WRONG} 10.0; and back: {WRONG} 7.0"),
        ("passing-list-to-buffer", (), "yes"),
        ("passing-buffer-to-list", (), "yes"),
        ("passing-buffer-to-list", ("no other passing",), "no: ERROR_1"),
        ("clusters-plain-to-static", (), "wrong: [201.0] in the place of 202.0"),
        ("clusters-plain-to-static", ("static clusters",), "yes"),
        ("clusters-static-to-plain", (), "wrong: [202.0] in the place of 201.0"),
        ("clusters-static-to-larger", ("static clusters",), "yes"),
        ("clusters-of-the-node-stay", (), "yes"),
        ("shared-above", (), "no: ERROR_1"),
        ("shared-raised", (), "yes"),
        ("shared-raised-and-lowered", (), "yes"),
    ],
)  # fmt: skip
def test_answers(name: str, faults: tuple[str, ...], answer: str, ask: Any) -> None:
    assert ask(name, *faults)["answer"] == answer


def test_launches_are_timed(ask: Any) -> None:
    for name in ("upload-yes", "upload-no-then-set"):
        found = ask(name)
        assert (found["answer"], found["nodes"]) == ("yes", 200)
        assert 0 < found["us"] <= found["done_us"]
        assert found["first_us"] > 0
    assert ask("upload-yes-then-set", "ignored")["answer"] == "wrong: [199.0] in the place of 398.0"


def test_clusters_are_not_asked_for_on_older_devices(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Driver.__init__

    def older(self: Driver, *args: Any) -> None:
        real(self, *args)
        self.capability = (8, 0)

    monkeypatch.setattr(Driver, "__init__", older)
    assert ask("clusters-plain-to-static")["answer"] == "clusters need compute capability 9.0"


def test_parameters_lie_as_in_c(load: Any) -> None:
    data, offsets = load("probes").packed([("Q", 7), ("f", 1.0), ("d", 4.0), ("f", 2.0)])
    assert offsets == [0, 8, 16, 24]
    assert data == struct.pack("@Qfdf", 7, 1.0, 4.0, 2.0)


def test_each_question_has_a_process(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes, schema, asked = load("probes"), load("schema"), []

    def start(spec: Any, environment: Any, timeout: float, program: Path) -> dict[str, Any]:
        asked.append((spec["probe"], environment.get(probes.VARIABLE)))
        broken = spec["probe"].startswith("clusters")
        return (
            {"status": "DriverError: CUDA_ERROR_LAUNCH_FAILED"}
            if broken
            else {"status": "ok", "answer": "yes"}
        )

    header = {"gpu": "nvidia-h200", "driver": "1", "torch": "2", "python": "3", "commit": "abc", "date": "d"}
    monkeypatch.setattr(probes, "start_worker", start)
    monkeypatch.setattr(probes.schema, "environment", lambda: header)
    monkeypatch.delenv(probes.VARIABLE, raising=False)
    path = probes.main(["--out", str(tmp_path)])
    assert [name for name, _ in asked] == list(probes.PROBES)
    variables = {name: value for name, value in asked if value is not None}
    assert variables == {"attention-cudnn": "0", "attention-deprioritized": "1"}
    table = load("readme_sizes").probes_table(schema.read(path))
    assert "| clusters-plain-to-static       | DriverError: CUDA_ERROR_LAUNCH_FAILED |" in table
    assert "| function-same-size             | yes " in table
    assert load("readme_sizes").probes_table({"rows": []}) == ""


def test_nothing_is_asked_without_a_gpu(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = load("probes")
    monkeypatch.setattr(probes.schema, "environment", lambda: {"gpu": "cpu"})
    monkeypatch.setattr(probes, "start_worker", lambda *args: pytest.fail("was asked"))
    assert probes.main(["--out", str(tmp_path)]) is None
    assert "there is no CUDA device here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["memory_alone", "tensors", "from_python"])
def test_what_results_cost(what: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are there at once, and all are freed."""
    if load_tensors() is None:
        pytest.skip("no C++ compiler, or PGRAPH_NATIVE=0")
    results, device = load("probes_results"), FakeDevice()
    device.made_on = -1
    monkeypatch.setattr(results, "ROUNDS", 20)
    found = getattr(results, what)(device)
    assert found["answer"] == "13 at once, each"
    assert all(isinstance(found[name], float) for name in ("us", "done_us"))
    assert not device.living
    kinds = [event[0] for event in device.events]
    assert kinds.count("alloc") == kinds.count("free") == (0 if what == "tensors" else 260)
    if what == "memory_alone":
        assert kinds[:26] == ["alloc"] * 13 + ["free"] * 13


def test_what_results_cost_is_not_told_without_native_calls(load: Any) -> None:
    with pytest.raises(RuntimeError, match="lacks what a launch in C calls"):
        load("probes_results").memory_alone(HostDriver())
