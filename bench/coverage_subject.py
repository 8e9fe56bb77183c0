"""A model of the zoo on a device, made to run steps: what checks and timings share.

Not a program: `coverage_check.py`, `coverage_time.py` and `coverage_count.py` import it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import _paths  # noqa: F401  (puts examples/ on sys.path)
import torch
import zoo
from backends import compile_kwargs
from coverage_judge import numbers_of
from torch import Tensor
from zoo.entry import Draw, Inputs, calibrated, lively, without_chance

MB = 2**20
SCALE = 2.0**16
"""What a loss in fp16 is scaled by at first."""
CALIBRATION = 4  # a batch norm needs more than one value of a channel
AUTOCAST = {"bf16 autocast": torch.bfloat16, "fp16 autocast": torch.float16}
Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """What one child does.

    Args:
        kind: ``"check"`` (compare with eager, count what is captured), ``"time"``, ``"count"`` (launches) or
            ``"memory"``.
        model: name in the zoo.
        mode: ``"train"`` (forward, loss, backward) or ``"infer"``.
        backend: name of the backend.
        device: ``"cuda"`` or ``"cpu"``.
        driver, codegen: pgraph's options.
        steps: compared steps of a check.
        seconds: how long a timing's steps may take.
        bench: name of the benchmark, which its rows bear.
    """

    kind: str
    model: str
    mode: str
    backend: str
    device: str = "cuda"
    driver: str = "auto"
    codegen: str = "auto"
    steps: int = 9
    seconds: float = 0.8
    bench: str = "coverage"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.model} {self.mode} {self.backend}"

    @property
    def cost(self) -> float:
        """Rough compile time; forward and backward take about two and a half times the forward's."""
        graphs = 2.5 if self.mode == "train" else 1.0
        return zoo.find(self.model).cost * (0.2 if self.backend == "eager" else graphs)


class Subject:
    """The model, and how to run it.

    Everything is seeded: two processes have the same weights and inputs.
    """

    def __init__(self, job: Job) -> None:
        self.entry = zoo.find(job.model)
        self.train = job.mode == "train"
        self.device = torch.device(job.device)
        fewer = self.entry.check_batch if job.kind == "check" else None
        self.batch = self.entry.batch if fewer is None else fewer
        torch.manual_seed(0)
        self.program = lively(without_chance(self.entry.program())).to(self.device).train()
        if not self.train:
            draw = Draw(self.device, 2**31)
            calibrated(self.program, self.entry.inputs(draw, max(self.batch, CALIBRATION), True)).eval()
        if self.entry.precision == "bf16 weights":
            self.program.to(torch.bfloat16)
        self.reference: torch.nn.Module | None = None
        self.random = torch.Generator(self.device).manual_seed(1)
        self.scale = SCALE if self.entry.precision == "fp16 autocast" else 1.0

    def compiled(self, job: Job, backend: str | None = None) -> Run:
        """The program compiled by `backend` (the job's), or itself for eager."""
        kwargs = compile_kwargs(backend or job.backend, self.device, job.driver, job.codegen)
        if kwargs is None:
            return self.program
        if self.entry.dynamic:
            del kwargs["dynamic"]
        if job.kind == "check" and "options" in kwargs:
            kwargs["options"]["step_aside"] = False  # compare all that can be captured
        if self.entry.regions is None:
            return torch.compile(self.program, **kwargs)
        # A twin with the same parameters and buffers: the program itself stays what eager runs.
        twin = copy.deepcopy(self.program, {id(tensor): tensor for tensor in _tensors(self.program)})
        for region in self.entry.regions(twin):
            region.compile(**kwargs)
        return twin

    def inputs(self, seed: int) -> Inputs:
        """Inputs at fresh addresses; those of a served model are in the host's memory (pinned)."""
        home = torch.device("cpu") if self.entry.served else self.device
        made = self.entry.inputs(Draw(home, seed), self.batch, self.train)
        if self.entry.precision == "bf16 weights":
            made = tuple(x.bfloat16() if x.is_floating_point() else x for x in made)
        if self.entry.served and self.device.type == "cuda":
            made = tuple(x.pin_memory() for x in made)
        return made

    def here(self, inputs: Inputs) -> Inputs:
        """The inputs on the device."""
        return tuple(x.to(self.device, non_blocking=True) for x in inputs) if self.entry.served else inputs

    @property
    def params_mb(self) -> float:
        return sum(p.numel() * p.element_size() for p in self.program.parameters()) / MB

    def forward(self, run: Run, inputs: Inputs) -> Any:
        """The loss in training, the outputs in inference, in the model's precision."""
        given, dtype = self.here(inputs), AUTOCAST.get(self.entry.precision)
        with torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            if self.train:
                return run(*given)
            with torch.no_grad():
                return run(*given)

    def step(self, run: Run, inputs: Inputs) -> dict[str, Tensor]:
        """One step; loss, gradients and buffers, or the outputs, each by its name."""
        return self._named(self.forward(run, inputs), self.program, self.scale)

    def fit_scale(self, inputs: Inputs) -> None:
        """Lower the loss's scale until eager's gradients of this step are finite, as a `GradScaler` would.

        What still overflows at a scale of 1 stays, and the judge says so. Buffers change.
        """
        while self.scale > 1 and not all(
            numbers_of([x.isfinite().all() for x in self.step(self.program, inputs).values()])
        ):
            self.scale /= 4

    def _named(self, result: Any, program: torch.nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
        if not self.train:
            return {f"output {i}": tensor for i, tensor in enumerate(result)}
        (result if scale == 1 else result * scale).backward()
        found = {"loss": result.detach()}
        for name, parameter in program.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad if scale == 1 else parameter.grad / scale
                parameter.grad = None
        # Masks of -inf are no results. A buffer that is NaN in one run alone is missing there: that shows.
        buffers = dict(program.named_buffers())
        finite = numbers_of([b.isfinite().all() for b in buffers.values()])
        whole = [name for name, yes in zip(buffers, finite, strict=True) if yes]
        return found | {f"buffer {name}": buffers[name].detach().clone() for name in whole}

    def truth(self, inputs: Inputs) -> dict[str, Tensor]:
        """The same step in fp32 throughout, by a copy of the program that takes over today's values."""
        if self.reference is None:
            self.reference = copy.deepcopy(self.program).float()
        with torch.no_grad():
            for mine, theirs in zip(_tensors(self.program), _tensors(self.reference), strict=True):
                theirs.copy_(mine)
        floats = tuple(x.float() if x.is_floating_point() else x for x in self.here(inputs))
        with _fp32(), torch.set_grad_enabled(self.train):
            return self._named(self.reference(*floats), self.reference)

    def saved(self) -> list[Tensor]:
        """Copies of the buffers, which training changes."""
        return [b.detach().clone() for b in self.program.buffers()]

    def restore(self, saved: list[Tensor]) -> None:
        """Put the buffers back, in place."""
        with torch.no_grad():
            for buffer, old in zip(self.program.buffers(), saved, strict=True):
                buffer.copy_(old)

    def move(self) -> int:
        """Give parameters and buffers new storage, parameters slightly other values; returns how many.

        What they leave is filled with NaN (integers: zero), so that a stale address shows. Tensors that share
        storage, or fill only a part of theirs, stay.
        """
        both = _tensors(self.program)
        storages = [t.untyped_storage().data_ptr() for t in both]
        moved = []
        for tensor, storage in zip(both, storages, strict=True):
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() > 0
            if storages.count(storage) > 1 or not whole:
                continue
            old = tensor.data
            new = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=old.device)
            new.copy_(old)
            if isinstance(tensor, torch.nn.Parameter) and new.is_floating_point():
                noise = torch.empty_like(new).normal_(generator=self.random)
                new.mul_(1 + 0.02 * noise)
            tensor.data = new
            moved.append(old)
        for old in moved:  # only now, so that no new tensor took an old one's place
            spoil(old)
        return len(moved)


def _tensors(program: torch.nn.Module) -> list[Tensor]:
    return [*program.parameters(), *program.buffers()]


@contextlib.contextmanager
def dirty_allocations() -> Iterator[None]:
    """What Inductor's generated code allocates inside is full of NaN (integers: of the largest number)."""
    from torch._inductor.codecache import PyCodeCache

    def dirty(real: Run) -> Run:
        return lambda *args: _fill(real(*args))

    found = [vars(m) for m in PyCodeCache.modules if "empty_strided_cuda" in vars(m)]
    real = [(namespace, namespace["empty_strided_cuda"]) for namespace in found]
    try:
        for namespace, function in real:
            namespace["empty_strided_cuda"] = dirty(function)
        yield
    finally:
        for namespace, function in real:
            namespace["empty_strided_cuda"] = function


def _fill(x: Tensor) -> Tensor:
    whole = x.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=x.device).set_(whole, 0, (whole.nbytes(),), (1,)).fill_(0xFF)
    return x


def spoil(x: Tensor) -> None:
    """Fill with what shows when it is read."""
    with torch.no_grad():
        x.fill_(float("nan")) if x.is_floating_point() else x.zero_()


@contextlib.contextmanager
def _fp32() -> Iterator[None]:
    """No TF32 anywhere; what was set before is set again afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


class Holes:
    """Keeps the allocator's free memory full of NaN, and its next addresses unlike its last ones."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device, self.random = device, random.Random(seed)
        self.pads: list[Tensor] = []

    def shake(self) -> None:
        """Poison all free blocks, let old pads go and place new ones of random size."""
        del self.pads[: len(self.pads) // 2]
        if self.device.type == "cuda":
            self._poison()
        for _ in range(8):
            size = int(512 * 2 ** (17 * self.random.random()))  # 512 B to 64 MB, evenly over the scales
            self.pads.append(torch.empty(size, dtype=torch.uint8, device=self.device).fill_(0xFF))

    def _poison(self) -> None:
        """Write NaN into every free block of the allocator that a request of a power of two can get."""
        held: list[Tensor] = []
        for power in range(28, 9, -1):  # 256 MB to 1 KB
            for _ in range(64):
                before, allocated = _bytes()
                if before - allocated < 2**power:
                    break
                block = torch.empty(2**power, dtype=torch.uint8, device=self.device)
                if _bytes()[0] > before:
                    break  # no free block was large enough, this one is new
                held.append(block.fill_(0xFF))


def _bytes() -> tuple[int, int]:
    """Reserved and allocated ones. PyTorch's functions for each make a table of all statistics, each time."""
    numbers = torch.cuda.memory_stats_as_nested_dict()
    return tuple(numbers[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
