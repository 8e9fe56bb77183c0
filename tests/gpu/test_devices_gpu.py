"""Two GPUs in one process: each is captured on and launched on, whichever is current."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_helpers import assert_launched, compile_pgraph, explain, outside_codes, python, report, same_bits
from gpu_helpers import finish as finished
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
WIDE = 64
STEPS = 8


@pytest.fixture(autouse=True)
def sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Else Inductor cuts them as timings say, differently in each compilation.

    Its own setting does not last: Dynamo sets this one anew after each function, and Inductor's with it.
    """
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Net(nn.Module):
    """With a product, a normalization and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(nn.functional.gelu(self.inner(self.norm(x))).cumsum(0))


def nets(device: torch.device, seed: int = 0) -> tuple[Net, Net]:
    """Two with the same weights."""
    torch.manual_seed(seed)
    one, other = Net().to(device), Net().to(device)
    other.load_state_dict(one.state_dict())
    return one, other


def trained(net: Net, run: Callable[[Tensor], Tensor], device: torch.device, seed: int = 0) -> list[Tensor]:
    """Losses and weights of some steps, on new data in other memory each time."""
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses, held = [], []
    for step in range(STEPS):
        held.append(torch.full((1 + step * 1000,), float("nan"), device=device))
        loss = run(torch.randn(16, WIDE, device=device, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    found = [*losses, *net.parameters()]
    assert all(t.isfinite().all() for t in found), "it diverges: there is nothing to compare"
    return found


def all_same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(same_bits(a, b) and a.device == b.device for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("current", [FIRST, SECOND], ids=["another one is current", "it is current"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_training_on_the_second_device(current: torch.device, own_stream: bool) -> None:
    reference, net = nets(SECOND)
    stream = torch.cuda.Stream(SECOND) if own_stream else torch.cuda.default_stream(SECOND)
    stream.wait_stream(torch.cuda.default_stream(SECOND))
    before = torch.cuda.memory_reserved(FIRST)
    with torch.cuda.stream(stream), torch.cuda.device(current):
        want = trained(reference, torch.compile(reference, dynamic=False), SECOND)
        got = trained(net, compile_pgraph(net), SECOND)
        assert torch.cuda.current_device() == current.index
    torch.cuda.synchronize(SECOND)
    assert_launched(STEPS - 2)
    assert all_same(got, want), explain()
    assert torch.cuda.memory_reserved(FIRST) <= before, "it took memory of a device that it has no use for"


def test_models_on_two_devices_take_turns() -> None:
    """The same code, captured for each; the current device is the first one all the time."""
    runs: list[tuple[Net, Any, torch.device, list[Tensor]]] = []
    for device in (FIRST, SECOND):
        reference, net = nets(device, seed=device.index)
        want = trained(reference, torch.compile(reference, dynamic=False), device, seed=device.index)
        runs.append((net, compile_pgraph(net), device, want))
    for net, run, device, want in runs:
        assert all_same(trained(net, run, device, seed=device.index), want), explain()
    assert_launched(STEPS - 2)
    x = [torch.randn(16, WIDE, device=device) for device in (FIRST, SECOND)]
    want = [net(x[i]) for i, (net, *_) in enumerate(runs)]
    for _ in range(6):
        for i, (_, run, device, _) in enumerate(runs):
            got = run(x[i])
            assert got.device == device
            torch.testing.assert_close(got, want[i], rtol=1e-3, atol=1e-4)


def test_threads_with_a_device_each() -> None:
    """Both warm up, capture and launch at the same time."""
    pairs = {device: nets(device, seed=device.index) for device in (FIRST, SECOND)}
    want = {
        device: trained(reference, torch.compile(reference, dynamic=False), device, seed=device.index)
        for device, (reference, _) in pairs.items()
    }
    got: dict[torch.device, list[Tensor]] = {}
    errors: list[BaseException] = []

    def work(device: torch.device) -> None:
        try:
            with torch.cuda.device(device):
                net = pairs[device][1]
                got[device] = trained(net, compile_pgraph(net), device, seed=device.index)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(device,)) for device in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors, errors
    for device in pairs:
        torch.cuda.synchronize(device)
        assert all_same(got[device], want[device]), explain()


def test_a_model_that_moves_to_another_device() -> None:
    """There and back: each device has a capture, and the first one's still serves."""
    reference, net = nets(FIRST)
    run, x = compile_pgraph(net), torch.randn(16, WIDE, device=FIRST)
    with torch.no_grad():
        want = reference(x)
        for device in (FIRST, SECOND, FIRST, SECOND):
            net.to(device)
            for _ in range(4):
                torch.testing.assert_close(run(x.to(device)).to(FIRST), want, rtol=1e-3, atol=1e-4)
        captures = report().captures
        for device in (FIRST, SECOND):
            net.to(device)
            run(x.to(device))
    assert captures == report().captures == 2, explain()
    assert_launched(4)


def test_layers_on_two_devices_in_one_graph() -> None:
    """What is on the device of the graph is captured; the copy and what lies on the other one are not."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, WIDE, device=device) for device in (FIRST, FIRST, SECOND, SECOND)]

    def forward(x: Tensor) -> Tensor:
        x = layers[1](torch.relu(layers[0](x))).to(SECOND)
        return layers[3](torch.relu(layers[2](x))).cumsum(0)

    run, parameters = compile_pgraph(forward), [p for layer in layers for p in layer.parameters()]
    for _ in range(5):
        x = torch.randn(16, WIDE, device=FIRST)
        want, got = forward(x), run(x)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        theirs, mine = (torch.autograd.grad(y.square().mean(), parameters) for y in (want, got))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert outside_codes() <= {"device-copy", "other-device", "several-devices"}, explain()
    assert outside_codes()


_FILLED = """
import torch
from pgraph.drivers.cuda import peaks
device = torch.device("cuda", 1)
torch.use_deterministic_algorithms(True)
torch.cuda.set_device(1)
for _ in range(5):
    torch.cuda.reset_peak_memory_stats()
    gone = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    before = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    del gone
    torch.cuda.empty_cache()
    assert peaks.restore(device, *before)
    assert (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) == before
    torch.cuda.synchronize()
assert torch.cuda.max_memory_allocated(0) == 0
print("RIGHT")
"""


def test_peaks_of_the_second_device() -> None:
    output = finished(python(_FILLED))
    assert "RIGHT" in output, output
