"""pgraph among other things: copies, pickles, DDP, threads, somebody else's capture, the end of a process.

What torch.compile's other backends do is asked of them, not written down here.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import MLP, host, launching, same, train
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.parallel import DistributedDataParallel

import pgraph
from pgraph.drivers.host.driver import HostDriver
from pgraph.runtime import registry

ROOT = pathlib.Path(__file__).resolve().parents[1]


def compiled_by(backend: str, module: nn.Module) -> Any:
    return host(module) if backend == "pgraph" else torch.compile(module, backend=backend, dynamic=False)


def outcome(act: Callable[[], Any]) -> Any:
    """What came of it: a result, or the type of the error."""
    try:
        return act()
    except Exception as e:
        return type(e).__name__


# -- copies and pickles --------------------------------------------------------------------------


def in_place(backend: str, module: nn.Module) -> nn.Module:
    """`module.compile()`: the module itself is compiled."""
    options = {"driver": "host", "codegen": "aten"} if backend == "pgraph" else None
    module.compile(backend=backend, options=options)
    return module


def fresh() -> MLP:
    torch.manual_seed(7)
    return MLP()


def deep_copy(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(other.parameters())).mul_(2)
    return other


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(torch.load(file))
    return other


def whole(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("compile_", [compiled_by, in_place], ids=["torch.compile", "module.compile"])
@pytest.mark.parametrize("duplicate", [deep_copy, pickled, saved, whole])
def test_copies_and_pickles_do_what_other_backends_do(compile_: Any, duplicate: Any) -> None:
    """Before the first call and after captures: same outcome, same numbers, and the original is unharmed."""

    def run(backend: str, warm: bool) -> Any:
        torch._dynamo.reset()
        model = compile_(backend, fresh())
        torch.manual_seed(3)
        inputs = [torch.randn(3, 8) for _ in range(4)]
        for x in inputs if warm else ():
            train(model, model, x)

        def act() -> Any:
            other = duplicate(model)
            results = [train(other, other, x) for x in inputs]
            return list(other.state_dict()), [list(r.values()) for r in results]

        mine = outcome(act)
        return mine, [list(train(model, model, x).values()) for x in inputs], list(model.state_dict())

    for warm in (False, True) if duplicate is deep_copy else (True,):
        before = pgraph.report().launches
        got = run("pgraph", warm)
        assert pgraph.report().launches > before
        want = run("aot_eager", warm)
        assert type(got[0]) is type(want[0]), f"{got[0]} and {want[0]}"
        same(got, want)


# -- lifetime ------------------------------------------------------------------------------------


def alive_after(backend: Any, reset: bool) -> tuple[bool, bool]:
    """(module alive, parameter alive) after `del` of a trained model."""
    module = MLP()
    model = host(module) if backend == "pgraph" else torch.compile(module, backend=backend, dynamic=False)
    for _ in range(3):
        train(module, model, torch.randn(3, 8))
    refs = weakref.ref(module), weakref.ref(module.a.weight)
    module.zero_grad()
    del module, model
    if reset:
        torch._dynamo.reset()
    gc.collect()
    return refs[0]() is not None, refs[1]() is not None


@pytest.mark.parametrize("reset", [True, False])
def test_memory_is_freed_when_the_model_dies(reset: bool) -> None:
    """The model always; compiled code, and with it the captures, when Dynamo lets any backend's code go."""
    codes: list[weakref.ref[Any]] = []

    def code_of_another(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        def code(args: list[Any]) -> Any:
            return torch.fx.Interpreter(gm).boxed_run(args)

        codes.append(weakref.ref(code))
        code._boxed_call = True
        return code

    another = aot_autograd(fw_compiler=code_of_another, bw_compiler=code_of_another)
    assert alive_after(another, reset) == (False, False)
    assert alive_after("pgraph", reset) == (False, False)
    assert len(codes) == 2
    assert len(registry.live_capturable()) == sum(code() is not None for code in codes)
    assert (len(registry.live_capturable()) == 0) == reset


def test_execs_die_with_a_reset() -> None:
    module = MLP()
    model = host(module)
    for _ in range(3):
        train(module, model, torch.randn(3, 8))
    execs = weakref.WeakSet(
        e for p in registry.live_capturable() for v in p.specializations() if v.built for e in v.built.execs
    )
    assert len(execs) == 2
    del module, model
    torch._dynamo.reset()
    gc.collect()
    assert len(execs) == 0


# -- threads and other captures ------------------------------------------------------------------


def test_two_models_in_two_threads() -> None:
    """Each compiles, warms up, captures and trains on its own, while the other does."""
    torch.manual_seed(0)
    models = [MLP(), nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))]
    twins = [copy.deepcopy(m) for m in models]
    runs = [host(m) for m in models]
    for model, run in zip(models, runs, strict=True):  # Dynamo compiles in one thread at a time
        train(model, run, torch.randn(3, 8))
    errors: list[BaseException] = []
    gate = threading.Barrier(2, timeout=60)

    def work(k: int) -> None:
        generator = torch.Generator().manual_seed(k)
        try:
            for _ in range(40):
                gate.wait()
                x = torch.randn(3, 8, generator=generator)
                same(train(models[k], runs[k], x), train(twins[k], twins[k], x))
        except BaseException as e:
            errors.append(e)
            gate.abort()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    with launching(2 * 2 * 30):
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
    assert errors == []
    assert pgraph.report().captures == 4


def test_backward_in_another_thread_than_the_forward() -> None:
    model = MLP()
    compiled = host(model)
    errors: list[BaseException] = []

    def backward(out: Tensor) -> None:
        try:
            out.sum().backward()
        except BaseException as e:
            errors.append(e)

    for _ in range(6):
        x, model_grads = torch.randn(3, 8), []
        for call in (compiled, model):
            model.zero_grad()
            thread = threading.Thread(target=backward, args=(call(x),))
            thread.start()
            thread.join(60)
            model_grads.append([p.grad.clone() for p in model.parameters()])
        same(*model_grads)
    assert errors == []
    assert [p.launches > 0 for p in pgraph.report().capturable] == [True, True]


def test_inside_somebody_elses_capture_it_runs_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold, warm and captured: nothing is captured or launched meanwhile, and nothing forgotten."""
    model, capturing = MLP(), [True]
    monkeypatch.setattr(HostDriver, "is_capturing", lambda self: capturing[0])
    compiled = host(model)
    for _ in range(4):
        x = torch.randn(3, 8)
        same(train(model, compiled, x), train(model, model, x))
    assert (pgraph.report().captures, pgraph.report().launches) == (0, 0)
    capturing[0] = False
    for _ in range(3):
        train(model, compiled, torch.randn(3, 8))
    launches = pgraph.report().launches
    assert launches >= 4
    capturing[0] = True
    x = torch.randn(3, 8)
    same(train(model, compiled, x), train(model, model, x))
    assert pgraph.report().launches == launches
    capturing[0] = False
    with launching(2):
        same(train(model, compiled, x), train(model, model, x))


# -- DDP -----------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("order", ["ddp of compiled", "compiled of ddp"])
def test_ddp(order: str) -> None:
    """The same parameters after some steps as with another backend, and the names in its state."""

    def run(backend: str) -> Any:
        torch._dynamo.reset()
        module = fresh()
        if order == "ddp of compiled":
            model: Any = DistributedDataParallel(compiled_by(backend, module))
        else:
            model = compiled_by(backend, DistributedDataParallel(module))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.manual_seed(3)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(3, 8)).square().sum().backward()
            optimizer.step()
        return dict(model.state_dict())

    before = pgraph.report().launches
    got = run("pgraph")
    assert pgraph.report().launches > before
    same(got, run("aot_eager"))


# -- the end of a process ------------------------------------------------------------------------

_TRAINED = """
import os, sys, threading, torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
options = {"driver": "host", "codegen": "aten"}
compiled = torch.compile(model, backend="pgraph", dynamic=False, options=options)
def step():
    compiled(torch.randn(3, 8)).sum().backward()
for _ in range(4):
    step()
import pgraph
assert pgraph.report().launches >= 4, pgraph.report()
"""

ENDINGS = {
    "falls off the end": "sys.modules['keep'] = compiled  # dies late\nprint('END')",
    "sys.exit in a thread": """
def leave():
    step()
    print("END", flush=True)
    sys.exit(3)  # ends the thread only
thread = threading.Thread(target=leave)
thread.start()
thread.join()
""",
    "fork": """
other = torch.compile(model, backend="aot_eager", dynamic=False)
def run():
    try:
        other(torch.randn(3, 8)).sum().backward()
    except RuntimeError:
        return  # 2.11 built for CUDA: nobody's backward runs in a child
    step()
    assert pgraph.report().launches >= 6
for _ in range(2):
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        run()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
run()
print("END")
""",
    "DataLoader workers": """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        return torch.full((8,), float(i))
for batch in torch.utils.data.DataLoader(Data(), batch_size=3, num_workers=2):
    compiled(batch).sum().backward()
print("END")
""",
    "destroy_process_group": """
import tempfile
import torch.distributed as dist
file = tempfile.mktemp()
dist.init_process_group("gloo", init_method="file://" + file, rank=0, world_size=1)
ddp = nn.parallel.DistributedDataParallel(compiled)
for _ in range(4):
    ddp(torch.randn(3, 8)).sum().backward()
dist.destroy_process_group()
print("END")
""",
    "no destroy_process_group": """
import tempfile
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
ddp = nn.parallel.DistributedDataParallel(compiled)
for _ in range(4):
    ddp(torch.randn(3, 8)).sum().backward()
print("END")
""",
}


# One process imports everything and then becomes each of them in turn: importing takes longest.
_FORKS = """
import faulthandler, os, sys, time, traceback
import torch, torch._dynamo, torch._inductor.compile_fx, torch.distributed, pgraph, pgraph.backend
name = None
for name, code in ENDINGS.items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        break
    start, status = time.time(), (0, None)
    while status[0] == 0 and time.time() - start < 60:
        time.sleep(0.02)
        status = os.waitpid(child, os.WNOHANG)
    if status[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    print("STATUS", name, status[1], flush=True)
else:
    name = None
if name is not None:
    exec(compile(code, name, "exec"), {"__name__": "__main__"})
"""


def test_processes_end() -> None:
    """With captures alive: each by itself, within the time, and with nothing to complain of."""
    endings = {name: _TRAINED + code for name, code in ENDINGS.items()}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", f"ENDINGS = {endings!r}\n{_FORKS}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    told = done.stdout + done.stderr[-6000:]
    for name in ENDINGS:
        assert f"STATUS {name} 0" in done.stdout, told
    assert done.stdout.count("END") == len(ENDINGS), told
    assert done.returncode == 0, told
    assert "Traceback" not in done.stderr, told
