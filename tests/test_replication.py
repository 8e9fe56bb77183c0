"""Execs that take turns (Note [An exec for each layer]): who gets them, and what they launch."""

from __future__ import annotations

import array
import gc
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import host, same
from torch import Tensor, nn

import pgraph
from pgraph.drivers.host.driver import HostDriver
from pgraph.errors import DriverError
from pgraph.runtime import registry, replication
from pgraph.runtime.budget import EXEC_BYTES, NODE_BYTES
from pgraph.runtime.replication import MOST, Replication, _Sets

LAYERS = 5


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches find free memory in an order, as a device's allocator gives it."""
    pool: dict[int, list[Tensor]] = {}

    def uses(tensor: Tensor) -> int:
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    alone = uses(torch.empty(1))

    def empty_strided(self: HostDriver, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        nbytes = torch.empty_strided(size, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
        mine = pool.setdefault(nbytes, [])
        free = next((base for base in mine if uses(base) == alone), None)
        if free is None:
            mine.append(free := torch.empty(nbytes, dtype=torch.uint8))
        return torch.empty(0, dtype=dtype).set_(free.untyped_storage(), 0, size, stride)

    monkeypatch.setattr(HostDriver, "empty_strided", empty_strided)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


def layers(n: int = LAYERS, **options: Any) -> tuple[list[Layer], Callable[[Tensor], Tensor]]:
    """Layers that share their code, compiled one by one; and all of them, one after the other."""
    torch.manual_seed(0)
    made = [Layer() for _ in range(n)]
    compiled = [host(layer, **options) for layer in made]

    def run(x: Tensor) -> Tensor:
        for layer in compiled:
            x = layer(x)
        return x

    return made, run


def execs() -> list[int]:
    """How many execs serve each capture."""
    live = [p for p in registry.live_capturable() if p.template() is not None]
    built = [s.built for p in live for s in p.specializations() if s.built is not None]
    return [1 + len(r._others) for b in built for r in b.recipes]


def step(made: list[Layer], run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Forward and backward, compared with eager."""
    results = []
    for fn in (run, nn.Sequential(*made)):
        y = fn(x)
        parameters = [p for layer in made for p in layer.parameters()]
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), parameters)])
    same(*results)


def test_each_layer_gets_an_exec_in_training(places: None) -> None:
    made, run = layers()
    kept = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
    for count in range(60):
        step(made, run, kept[count % 3])
    assert min(execs()) >= LAYERS
    assert pgraph.report().captures == 2


def test_parameters_that_alternate_are_set_no_more(places: None) -> None:
    """All addresses of a layer are the same at each call: its exec's nodes are set once."""
    weights = [[torch.randn(8, 8) for _ in range(4)] for _ in range(LAYERS)]
    held: list[Tensor] = [torch.empty(8, 8) for _ in weights]

    def fn(x: Tensor, ws: list[Tensor], out: Tensor) -> None:
        for w in ws:
            x = torch.tanh(x @ w)
        out.copy_(x)

    compiled, x = host(fn), torch.randn(8, 8)
    gone: list[float] = []
    for _ in range(30):
        before = pgraph.report()
        for ws, out in zip(weights, held, strict=True):
            compiled(x, ws, out)
            want = torch.empty(8, 8)
            fn(x, ws, want)
            torch.testing.assert_close(out, want)
        after = pgraph.report()
        gone.append((after.rewritten_nodes - before.rewritten_nodes) / LAYERS)
    (there,) = execs()
    assert there == LAYERS
    assert gone[4] > 4
    assert gone[-1] == 0


def test_sizes_in_turn_get_execs_of_their_own(places: None) -> None:
    """Four sizes share an exec, and each launch finds another one's numbers in it, at first."""

    def fn(x: Tensor, ws: list[Tensor]) -> Tensor:
        for w in ws:
            x = torch.tanh(x @ w)
        return x

    compiled = host(fn, dynamic=True, step_aside=False)
    weights = [torch.randn(8, 8) for _ in range(6)]
    given = [torch.randn(n, 8) for n in (3, 5, 7, 11)]
    gone: list[float] = []
    for _ in range(50):
        before = pgraph.report()
        for x in given:
            torch.testing.assert_close(compiled(x, weights), fn(x, weights))
        after = pgraph.report()
        gone.append((after.rewritten_nodes - before.rewritten_nodes) / len(given))
    assert sorted(execs()) == [1, 2, 2, 2], "three have left the shared one, which is the fourth's now"
    assert min(gone[3:14]) > 4
    assert gone[-1] <= 1, "each call has a result of its own"


def test_an_exec_that_other_sizes_use_is_left_to_them() -> None:
    for found in (lambda count: 0, lambda count: count % 3, lambda count: count):
        replication, recipe = told(found, shared=True)
        assert (len(recipe.others), recipe.itself) == (1, False), "other grids take longer"
        assert replication.nbytes
        assert (replication.over, replication._sets, recipe.room) == (True, [], 0), "nothing is kept"
    for launches in (14, 15):
        _, recipe = told(lambda count: count, shared=True, launches=launches)
        assert len(recipe.others) == launches - 14, "hundreds of sizes may be launched fewer times each"
    for launches in (1, 2):
        _, recipe = told(lambda count: count, shared=True, few=True, launches=launches)
        assert len(recipe.others) == launches - 1, "of a few sizes each comes again"


SLOTS = 16


class Recipes:
    """A recipe that keeps what it is told, for `Replication` alone."""

    nbytes = 100
    exec = type("Exec", (), {"nbytes": 7})()

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.room = 0
        self.others: list[Any] = []
        self.itself = True

    def launch(self, row: int) -> None:
        if len(self.rows) < self.room:
            self.rows.append(array.array("Q", [row * SLOTS + k for k in range(SLOTS)]).tobytes())

    def watch(self, launches: int) -> None:
        self.rows, self.room = [], launches

    def watched(self) -> list[bytes]:
        self.room = 0
        return self.rows

    def take_turns(self, others: list[Any], itself: bool = True) -> None:
        self.others, self.itself = others, itself


class Driver:
    """Makes replicas; says that the device waits for the host, or that it does not."""

    def __init__(self, waits: bool | None = True, most: int = 1000) -> None:
        self.waits, self.most, self.made = waits, most, 0

    def mark(self) -> Any:
        return None if self.waits is None else lambda: self.waits

    def replica(self, recipe: Any) -> Any:
        self.made += 1
        if self.made > self.most:
            raise DriverError("out of memory")
        return Recipes()


def told(
    found: Callable[[int], int],
    driver: Any = None,
    room: int = 1 << 30,
    launches: int = 600,
    shared: bool = False,
    few: bool = False,
) -> tuple[Replication, Recipes]:
    """What is decided after so many launches."""
    recipe = Recipes()
    made = Replication("p", [(recipe, 10)], driver or Driver(), shared, few)  # type: ignore[list-item]
    for count in range(launches):
        recipe.launch(found(count))
        if not made.over:
            made.moved(lambda: room)
    return made, recipe


@pytest.mark.parametrize("n", [2, 6, 80, MOST])
@pytest.mark.parametrize("waits", [True, None])
def test_as_many_execs_as_sets_of_addresses(n: int, waits: bool | None) -> None:
    made, recipe = told(lambda count: count % n, Driver(waits))
    assert made.over
    assert len(recipe.others) == n - 1
    assert made.nbytes == (n - 1) * (10 * NODE_BYTES + EXEC_BYTES)
    assert (made.exec_bytes, made.recipe_bytes) == ((n - 1) * 7, (n - 1) * 100)


@pytest.mark.parametrize(
    ("found", "settings"),
    [
        (lambda count: count, {}),
        (lambda count: 0, {}),
        (lambda count: count % (MOST + 1), {}),
        (lambda count: count % 6 if count % 3 else count + 10, {}),
        (lambda count: count % 6, {"driver": Driver(waits=False)}),
        (lambda count: count % 6, {"room": 5 * (10 * NODE_BYTES + EXEC_BYTES) - 1}),
        (lambda count: count % 6, {"driver": Driver(most=2)}),
    ],
    ids=["new-ones", "one", "too-many", "many-new", "device-sets-pace", "no-room", "no-memory"],
)
def test_no_further_exec(
    found: Callable[[int], int], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    made, recipe = told(found, **settings)
    assert made.over
    assert recipe.others == []
    assert made.nbytes == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]  # nothing went wrong


@pytest.mark.parametrize(("found", "most"), [(lambda count: count, 168), (lambda count: count % 160, 600)])
def test_launches_that_find_new_sets_all_the_time_are_watched_no_longer(
    found: Callable[[int], int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compared with all sets there are. Where sets come again, it is seen that they are too many."""
    compared = []
    like = _Sets._like
    monkeypatch.setattr(_Sets, "_like", lambda self, words: compared.append(self._count) or like(self, words))
    made, _ = told(found)
    assert made.over
    assert MOST < len(compared) <= most


@pytest.mark.parametrize("where", ["mark", "passed", "replica"])
def test_what_goes_wrong_is_told_and_costs_no_result(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """The launch has run by then: its results must not be lost."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("not now")

    driver = Driver()
    if where == "passed":
        driver.mark = lambda: fail  # type: ignore[method-assign]
    else:
        setattr(driver, where, fail)
    made, recipe = told(lambda count: count % 6, driver)
    assert made.over
    assert recipe.others == []
    assert caplog.messages == ["p gets no further execs: RuntimeError: not now"]


@pytest.mark.parametrize(("wandering", "there"), [(2, 6), (3, 1)])
def test_small_tensors_may_wander(wandering: int, there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 slots two are new at each launch: no set comes again, yet each layer's exec keeps the rest."""

    def launch(self: Recipes, row: int) -> None:
        fixed = [row % 6 * SLOTS + k for k in range(SLOTS - wandering)]
        if len(self.rows) < self.room:
            self.rows.append(array.array("Q", fixed + [1000 * row + k for k in range(wandering)]).tobytes())

    monkeypatch.setattr(Recipes, "launch", launch)
    _, recipe = told(lambda count: count + 1)
    assert len(recipe.others) == there - 1


def test_a_few_new_ones_do_no_harm() -> None:
    """The first layer's input is new at each step: it has an exec to itself, and takes no other layer's."""
    _, recipe = told(lambda count: count % 6 if count % 6 else 1000 + count)
    assert len(recipe.others) == 5


def test_what_launches_found_at_first_does_not_count() -> None:
    """Addresses that were new at each launch for a while, as before memory has settled."""
    _, recipe = told(lambda count: 1000 + count if count < 60 else count % 6, launches=60 + 8 + 2 * 24)
    assert len(recipe.others) == 5


def test_a_launch_that_sets_few_of_its_nodes_does_not_count(places: None) -> None:
    """Four of forty: the input that is new at each call."""
    inputs = [torch.randn(8, 8) for _ in range(3)]

    def fn(x: Tensor) -> Tensor:
        y = x + x.sin() + x.cos() + x.exp()
        for _ in range(36):
            y = y.tanh()
        return y

    compiled = host(fn, codegen="aten")
    for count in range(80):
        torch.testing.assert_close(compiled(inputs[count % 3]), fn(inputs[count % 3]))
    before = pgraph.report().rewritten_nodes
    compiled(inputs[80 % 3])
    assert pgraph.report().rewritten_nodes - before >= replication.FEW
    assert execs() == [1]


def test_replicas_go_with_their_capture(monkeypatch: pytest.MonkeyPatch, places: None) -> None:
    made: list[weakref.ref[Any]] = []
    real = HostDriver.replica

    def replica(self: HostDriver, recipe: Any) -> Any:
        found = real(self, recipe)
        made.append(weakref.ref(found.exec))
        return found

    monkeypatch.setattr(HostDriver, "replica", replica)
    weights = [torch.randn(8, 8) for _ in range(4)]

    def fn(w: Tensor) -> Tensor:
        return w @ w + w.sin() + w.cos() + w.tanh() + w.relu() + w.neg()

    compiled = host(fn)
    for count in range(60):
        torch.testing.assert_close(compiled(weights[count % 4]), fn(weights[count % 4]))
    assert len(made) >= 3
    held = pgraph.report().exec_bytes
    gc.disable()
    try:
        pgraph.reset()
        assert not any(ref() is not None for ref in made)
    finally:
        gc.enable()
    assert held > pgraph.report().exec_bytes == 0


def test_what_they_take_is_part_of_what_captures_cost(monkeypatch: pytest.MonkeyPatch, places: None) -> None:
    real = HostDriver.replica

    def slowly(self: HostDriver, recipe: Any) -> Any:
        time.sleep(0.05)
        return real(self, recipe)

    monkeypatch.setattr(HostDriver, "replica", slowly)
    w, other = (torch.randn(8, 8) for _ in range(2))

    def fn(w: Tensor) -> Tensor:
        return w @ w + w.sin() + w.cos() + w.tanh() + w.relu() + w.neg()

    compiled = host(fn)
    compiled(w)
    (runner,) = registry.live_capturable()
    spent = []
    for count in range(60):
        compiled(other if count % 2 else w)
        spent.append(runner._cache.economy._spent)
    assert execs() == [2]
    jumps = [count for count, (a, b) in enumerate(itertools.pairwise(spent)) if b - a >= 0.05]
    assert len(jumps) == 1, "and for once: launches after it cost nothing"
