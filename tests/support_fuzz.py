"""Random programs: small functions of tensors as text, what they are called with, and how runs are compared.

A program is a list of lines over named values; `source` makes a script of it that runs by itself. Values have
a known shape, in which "N" stands for a size that changes from call to call.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Shape = tuple[int | str, ...]

FLOATS = ("float32", "float64")
M = 6  # the size that stays
SIZES = (4, 4, 4, 7, 4, 5, 7)  # of N, call by call
EXPECTED_SIZES = (12, 3, 7, 12, 4, 9, 5, 11, 8, 10, 6, 4, 13, 2, 9, 7)  # the third tells of those between
MANY_SIZES = (3, 3, 5, 5, 9, 9, 4, 4, 17, 2, 30, 17, 6)  # after three of them recordings may be computed
LAYOUTS = ("plain", "transposed", "offset", "stepped", "wide")


@torch.library.custom_op("pgraph_fuzz::cut", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def cut(x: Tensor) -> Tensor:
    """An op that stays outside every graph, so that values cross the border of a partition."""
    return x * 0.5


@cut.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


torch.library.register_autograd("pgraph_fuzz::cut", lambda ctx, grad: torch.ops.pgraph_fuzz.cut(grad))


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of the program."""

    name: str
    shape: Shape
    dtype: str


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument: a layout of fresh memory, or the view `[shift:]` of an earlier argument's memory."""

    name: str
    shape: Shape
    dtype: str
    layout: str
    shares: str | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """Lines of Python over the arguments `inputs`; `outputs` are names of values."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    backward: bool
    dynamic: bool | None

    def source(self) -> str:
        """The function, as text."""
        body = [f"    {line}" for line in self.lines]
        names = ", ".join(i.name for i in self.inputs)
        return "\n".join([f"def program({names}):", *body, f"    return ({', '.join(self.outputs)},)"])

    @property
    def draws(self) -> bool:
        """Whether there are random numbers in it."""
        return any("rand" in line or "dropout" in line for line in self.lines)

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """The function itself."""
        scope: dict[str, Any] = {"torch": torch, "cut": torch.ops.pgraph_fuzz.cut}
        exec(compile(self.source(), "<program>", "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]

    def script(self, codegen: str) -> str:
        """A program of its own that fails as the test did; run it in the folder tests/."""
        return "\n".join(
            [
                "import torch",
                "from support_fuzz import Input, Program, check",
                "",
                f"# {self.source()}".replace("\n", "\n# "),
                f"check({self!r}, codegen={codegen!r})",
            ]
        )


class _Maker:
    """Draws a program line by line."""

    def __init__(self, draw: st.DrawFn, backward: bool) -> None:
        self.draw, self.backward = draw, backward
        self.values: list[Value] = []
        self.lines: list[str] = []
        self.drawn: list[
            str
        ] = []  # all returned: compilers leave out a draw that nobody reads, eager does not

    def pick(self, wanted: Callable[[Value], bool] = lambda v: True) -> Value | None:
        found = [v for v in self.values if wanted(v)]
        return self.draw(st.sampled_from(found)) if found else None

    def add(self, text: str, shape: Shape, dtype: str) -> None:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.values.append(Value(name, shape, dtype))

    # Each takes a value that it may be applied to; it adds a line, or nothing if it does not fit.

    def unary(self, v: Value) -> None:
        ops = (
            "{}.sin()",
            "{}.abs()",
            "-{}",
            "{} * 2",
            "{} + 1",
            "{}.clone()",
            "{}.contiguous()",
            "{}.tanh()",
        )
        self.add(self.draw(st.sampled_from(ops)).format(v.name), v.shape, v.dtype)

    def binary(self, v: Value) -> None:
        w = self.pick(lambda w: w.shape == v.shape and w.dtype == v.dtype)
        assert w is not None
        op = self.draw(st.sampled_from(("{} + {}", "{} * {}", "torch.maximum({}, {})", "{} - {}")))
        self.add(op.format(v.name, w.name), v.shape, v.dtype)

    def product(self, v: Value) -> None:
        w = self.pick(
            lambda w: len(w.shape) == 2 == len(v.shape) and w.shape[0] == v.shape[1] and w.dtype == v.dtype
        )
        if w is not None:
            self.add(f"{v.name} @ {w.name}", (v.shape[0], w.shape[1]), v.dtype)

    def transposed(self, v: Value) -> None:
        self.add(f"{v.name}.t()", v.shape[::-1], v.dtype)

    def rows(self, v: Value) -> None:
        if v.shape and v.shape[0] == M:
            start = self.draw(st.integers(1, 3))
            self.add(f"{v.name}[{start}:]", (M - start, *v.shape[1:]), v.dtype)
        elif v.shape and isinstance(v.shape[0], int) and v.shape[0] > 1:
            self.add(f"{v.name}[1:]", (v.shape[0] - 1, *v.shape[1:]), v.dtype)

    def columns(self, v: Value) -> None:
        if len(v.shape) == 2 and v.shape[1] == M:
            text, width = self.draw(st.sampled_from(((":, 1:", M - 1), (":, ::2", M // 2), (":, 2:5", 3))))
            self.add(f"{v.name}[{text}]", (v.shape[0], width), v.dtype)

    def row(self, v: Value) -> None:
        if len(v.shape) == 2:
            self.add(f"{v.name}[{self.draw(st.integers(0, 1))}]", v.shape[1:], v.dtype)

    def widened(self, v: Value) -> None:
        if len(v.shape) == 1:
            self.add(f"{v.name}.expand({M}, -1)", (M, *v.shape), v.dtype)

    def cast(self, v: Value) -> None:
        to = "float64" if v.dtype == "float32" else "float32"
        self.add(f"{v.name}.to(torch.{to})", v.shape, to)

    def bits(self, v: Value) -> None:
        if v.dtype == "float32" and v.shape and not self.backward:
            self.add(f"{v.name}.view(torch.int32).view(torch.float32)", v.shape, v.dtype)

    def complex_part(self, v: Value) -> None:
        part = self.draw(st.sampled_from(("imag", "real")))
        self.add(f"torch.complex({v.name}, {v.name} + 1).conj().{part}", v.shape, v.dtype)

    def reduced(self, v: Value) -> None:
        if len(v.shape) == 2:
            op = self.draw(st.sampled_from(("sum(0)", "mean(0)", "amax(0)")))
            self.add(f"{v.name}.{op}", v.shape[1:], v.dtype)
            self.widened(self.values[-1])

    def summed(self, v: Value) -> None:
        if v.shape:
            self.add(f"{v.name}.cumsum(0)", v.shape, v.dtype)

    def chosen(self, v: Value) -> None:
        w = self.pick(lambda w: w.shape == v.shape and w.dtype == v.dtype)
        assert w is not None
        self.add(f"torch.where({v.name} > 0.25, {w.name}, {v.name})", v.shape, v.dtype)

    def joined(self, v: Value) -> None:
        w = self.pick(lambda w: w.shape == v.shape and w.dtype == v.dtype)
        assert w is not None
        if v.shape and v.shape[0] == 3:
            self.add(f"torch.cat(({v.name}, {w.name}))", (M, *v.shape[1:]), v.dtype)

    def outside(self, v: Value) -> None:
        self.add(f"cut({v.name})", v.shape, v.dtype)

    def random(self, v: Value) -> None:
        op = self.draw(st.sampled_from(("torch.rand_like({})", "torch.nn.functional.dropout({}, 0.5)")))
        self.add(op.format(v.name), v.shape, v.dtype)
        self.drawn.append(self.values[-1].name)

    def in_place(self, v: Value) -> None:
        w = self.pick(lambda w: w.shape == v.shape and w.dtype == v.dtype)
        assert w is not None
        ops = ("{}.add_({})", "{}.mul_({})", "{}.copy_({})", "{}.sub_({} * 0.5)")
        self.lines.append(self.draw(st.sampled_from(ops)).format(v.name, w.name))

    def fill(self, v: Value) -> None:
        if v.shape:
            self.lines.append(f"{v.name}[:1] = {self.draw(st.integers(-2, 2))}")


OPS: tuple[Callable[[_Maker, Value], None], ...] = (
    _Maker.unary, _Maker.unary, _Maker.unary, _Maker.binary, _Maker.binary, _Maker.product, _Maker.product,
    _Maker.transposed, _Maker.rows, _Maker.columns, _Maker.row, _Maker.widened, _Maker.cast, _Maker.bits,
    _Maker.complex_part, _Maker.reduced, _Maker.summed, _Maker.chosen, _Maker.joined, _Maker.outside,
    _Maker.outside, _Maker.random, _Maker.in_place, _Maker.in_place, _Maker.fill,
)  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Two to four arguments and up to fourteen lines."""
    backward = draw(st.booleans())
    inputs = []
    for i in range(draw(st.integers(2, 4))):
        shape: Shape = draw(st.sampled_from((("N", M), (M, M), (M, 3), (M,), ("N", M))))
        dtype = draw(st.sampled_from(("float32", "float32", "float64")))
        layout = draw(st.sampled_from(LAYOUTS)) if len(shape) == 2 else "plain"
        twins = [x.name for x in inputs if (x.shape, x.dtype) == (shape, dtype) and x.shares is None]
        shares = draw(st.sampled_from((None, None, *twins))) if twins and not backward else None
        inputs.append(Input(f"x{i}", shape, dtype, layout, shares))
    maker = _Maker(draw, backward)
    maker.values = [Value(i.name, i.shape, i.dtype) for i in inputs]
    for op in draw(st.lists(st.sampled_from(OPS), min_size=3, max_size=14)):
        op(maker, draw(st.sampled_from(maker.values[-6:] if draw(st.booleans()) else maker.values)))
    names = [v.name for v in maker.values]
    outputs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    dynamic = draw(st.sampled_from((None, True, False)))
    kept = (*outputs, *maker.drawn, names[-1])
    return Program(tuple(inputs), tuple(maker.lines), kept, backward, dynamic)


# -- running ---------------------------------------------------------------------------------------


def arguments(program: Program, call: int, device: str, sizes: Sequence[int] = SIZES) -> list[Tensor]:
    """Fresh arguments at fresh addresses; the same numbers for the same call."""
    numbers = torch.Generator().manual_seed(call)
    made: dict[str, Tensor] = {}
    for i in program.inputs:
        if i.shares is not None:
            made[i.name] = made[i.shares].view_as(made[i.shares])
            continue
        shape = tuple(sizes[call] if n == "N" else int(n) for n in i.shape)
        data = (
            torch.rand(shape, generator=numbers, dtype=torch.float64).to(getattr(torch, i.dtype)).to(device)
        )
        made[i.name] = _laid_out(data, i.layout).requires_grad_(program.backward)
    return list(made.values())


def _laid_out(data: Tensor, layout: str) -> Tensor:
    """The numbers of `data` in other memory."""
    if layout == "plain":
        return data.clone()
    rows, columns = data.shape
    if layout == "transposed":
        return data.t().contiguous().t()
    if layout == "offset":
        place = data.new_zeros(rows + 1, columns)[1:]
    elif layout == "stepped":
        place = data.new_zeros(rows, 2 * columns)[:, ::2]
    else:
        place = data.new_zeros(rows, columns + 3)[:, 1 : columns + 1]
    place.copy_(data)
    return place


def poison(chance: random.Random, device: str) -> list[Tensor]:
    """Memory full of NaN: half of it is free at once, the rest when the result goes."""
    blocks = [torch.full((chance.randrange(1, 80),), float("nan"), device=device) for _ in range(48)]
    return blocks[::2]


def _seed(number: int, device: str) -> None:
    """The device's generator: torch.manual_seed() also writes down its call stack for each kind not there."""
    if device == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def run(
    program: Program,
    fn: Callable[..., tuple[Tensor, ...]],
    call: int,
    device: str,
    sizes: Sequence[int] = SIZES,
) -> list[Tensor]:
    """Results, arguments as they are afterwards, and gradients of one call."""
    given = arguments(program, call, device, sizes)
    _seed(call, device)
    results = fn(*given)
    found = [r.detach() for r in results] + [x.detach() for x in given]
    if program.backward:
        _seed(call + 100, device)
        loss = sum(r.double().mul(0.5).sum() for r in results if r.requires_grad)
        if isinstance(loss, Tensor):
            loss.backward()
        found += [x.grad for x in given if x.grad is not None]
    return [t.clone() for t in found]


def check(
    program: Program,
    codegen: str = "aten",
    device: str = "cpu",
    compiled: Sequence[Callable[[Any, bool | None], Any]] = (),
    sizes: Sequence[int] = SIZES,
) -> bool:
    """Eager and each compiled function agree over several calls; False if eager itself refuses the program,
    or PyTorch without pgraph cannot compile it.

    Args:
        compiled: (function, dynamic) -> compiled function; pgraph on the host driver if there is none.
        sizes: of N, call by call.
    """
    fn = program.function()
    try:
        wanted = [run(program, fn, call, device, sizes) for call in range(len(sizes))]
    except RuntimeError:  # what is written in place was needed by the backward; two names for one memory
        return False
    for make in compiled or (lambda f, dynamic: _on_host(f, dynamic, codegen),):
        try:
            valid = _compare(program, make(fn, program.dynamic), wanted, device, sizes)
        except AssertionError:
            # A GPU's kernels draw by how their arguments are aligned, and what eager writes in place is
            # elsewhere in a functional graph, whoever compiles that. Every call is compared with such a one.
            others = [_without_pgraph(program, fn, call, device, sizes) for call in range(len(sizes))]
            told = [other for other in others if other is not None]
            if not program.draws or len(told) < len(others):
                raise
            torch._dynamo.reset()
            valid = _compare(program, make(fn, program.dynamic), told, device, sizes)
        if not valid:
            return False
    return True


def _compare(
    program: Program, made: Any, wanted: Sequence[Sequence[Tensor]], device: str, sizes: Sequence[int]
) -> bool:
    """A compiled function agrees with what is wanted, call by call; as `check`."""
    chance = random.Random(0)
    for call, want in enumerate(wanted):
        kept = poison(chance, device)
        try:
            got = run(program, made, call, device, sizes)
        except Exception:
            if _without_pgraph(program, program.function(), call, device, sizes) is None:
                return False
            raise
        del kept
        _agree(call, got, want)
    return True


def _agree(call: int, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert len(got) == len(want), f"call {call}: {len(got)} tensors, there should be {len(want)}"
    for place, (g, w) in enumerate(zip(got, want, strict=True)):
        what = functools.partial(_differ, call, place, g, w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype), what()
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6, equal_nan=True, msg=what)


def _differ(call: int, place: int, got: Tensor, want: Tensor, found: str = "") -> str:
    """Only asked for where they do: to write tensors down takes longer than to compare them."""
    return f"call {call}, tensor {place}: {got} instead of {want}\n{found}"


def _without_pgraph(
    program: Program, fn: Any, call: int, device: str, sizes: Sequence[int]
) -> list[Tensor] | None:
    """As `run`, of what PyTorch alone compiles; None where it cannot compile that for these arguments."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="aot_eager", dynamic=program.dynamic)
    try:
        return run(program, compiled, call, device, sizes)
    except Exception:
        return None


def _on_host(fn: Any, dynamic: bool | None, codegen: str) -> Any:
    options: dict[str, Any] = {"driver": "host", "codegen": codegen, "min_ops": 1, "warmup": 1}
    if codegen == "inductor":
        options["inductor"] = {"fallback_random": True}
    return torch.compile(fn, backend="pgraph", dynamic=dynamic, options=options)
