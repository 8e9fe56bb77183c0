"""Correctness on moving addresses: trains one Llama by a reference and by pgraph and compares every tensor.

    python bench/equality.py                                        # 4x256 on a GPU, cpu-tiny on a CPU
    python bench/equality.py --config 16x1024 --scope model --steps 200 --deterministic
    python bench/equality.py --sizes --steps 500 --scope model --deterministic --mode infer
    python bench/equality.py --config cpu-tiny --candidate aot_eager --reference eager   # without pgraph

Three copies of one model in one process: the reference (Inductor), its twin (the same code again, at other
addresses) and the candidate (pgraph). Every step runs all three from the same parameters on the same tokens
and compares loss, logits, block outputs and gradients. Where the reference equals its twin in every step (on
all outputs, or on all gradients) the candidate must equal it bit for bit too; where it does not, tensors must
stay within twice the twins' own spread, or a rounding tolerance of their type. Then the reference's optimizer
steps, and its parameters are copied into the others, so that one atomic addition does not drown all that
follows.

The addresses move on purpose: the candidate's parameters are cloned to new addresses every few steps, and a
seeded shaker allocates filler tensors of random sizes and lifetimes between and inside the steps.

With ``--sizes`` each step has another batch and length, at random, and all is compiled once for all sizes
(``dynamic=True``). pgraph captures whatever comes, or computes it: a run with fewer launches than half of its
partitions' calls fails, since it would prove little.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
from collections.abc import Sequence
from typing import Any

import _paths  # noqa: F401  (puts examples/ on sys.path)
import schema
import torch
from backends import CODEGENS, DRIVERS, as_count, compile_kwargs, default_codegen, pgraph_report
from configs import WORKLOADS, Workload, workload
from llama import Llama, compile_blocks
from torch import Tensor

# Not reduce-overhead: its outputs live only until the next step, and here they are kept longer.
BACKENDS = ("pgraph", "inductor", "eager", "aot_eager")
# Relative to the reference tensor's largest magnitude: a few units in the last place.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-18}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--config", choices=list(WORKLOADS), default="4x256" if on_gpu else "cpu-tiny")
    add("--scope", choices=["block", "model"], default="block")
    add("--mode", choices=["train", "infer"], default="train")
    add("--sizes", action="store_true", help="a batch and a length at random for each step, compiled once")
    add("--steps", type=int, default=200)
    add("--warmup", type=int, default=10, help="steps after which no further capture may happen")
    add("--move-every", type=int, default=3, help="steps between moves of the candidate's parameters")
    add("--reference", choices=BACKENDS, default=None, help="default: inductor, or eager for aten codegen")
    add("--candidate", choices=BACKENDS, default="pgraph")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--driver", choices=DRIVERS, default="auto")
    add("--codegen", choices=CODEGENS, default="auto")
    add("--deterministic", action="store_true", help="torch's deterministic algorithms where there are any")
    add("--seed", type=int, default=0)
    add("--lr", type=float, default=1e-3)
    add("--out", default=None, help="JSON file or folder for the results")
    args = parser.parse_args(argv)
    if not 1 <= args.warmup < args.steps:
        parser.error(f"--warmup {args.warmup} must be at least 1 and below --steps {args.steps}")
    return args


class Shaker:
    """Filler tensors of random size and lifetime, so that the allocator hands out other addresses."""

    def __init__(self, seed: int, device: torch.device, largest: int = 8 << 20) -> None:
        self.random, self.device, self.largest = random.Random(seed), device, largest
        self.living: list[tuple[int, Tensor]] = []
        self.now = 0

    def shake(self) -> None:
        """Let old fillers die and make up to three new ones; sizes are spread evenly over the scales."""
        self.now += 1
        self.living = [(death, filler) for death, filler in self.living if death > self.now]
        for _ in range(self.random.randint(0, 3)):
            size = int(512 * (self.largest / 512) ** self.random.random())
            filler = torch.empty(size, dtype=torch.uint8, device=self.device).fill_(0xFF)
            self.living.append((self.now + self.random.randint(1, 12), filler))


@dataclasses.dataclass
class Verdict:
    """What all steps said about one tensor's name."""

    compared: int = 0
    bit_equal: int = 0
    twin_unequal: int = 0
    first_unequal: str | None = None
    first_outside: str | None = None

    def failure(self, repeatable: bool | None = None) -> str | None:
        """Why this tensor fails, or None. Judged at the end: nondeterminism may show late.

        Args:
            repeatable: whether the reference repeats itself exactly; None: what this tensor's twins say.
        """
        if self.first_outside is not None:
            return self.first_outside
        return self.first_unequal if (self.twin_unequal == 0 if repeatable is None else repeatable) else None


def verdict_failures(verdicts: dict[str, Verdict]) -> list[str]:
    """Why the run fails, if it does. Outputs are judged together, and so are gradients.

    One atomic addition in attention's backward reaches every gradient below it, in some steps and not in
    others: that the twins agree on one gradient says nothing, that they agree on all of them in all steps
    says that the reference is deterministic.
    """
    groups: dict[bool, list[Verdict]] = {}
    for label, verdict in verdicts.items():
        groups.setdefault(label.startswith("gradient of "), []).append(verdict)
    texts = [
        verdict.failure(repeatable=all(other.twin_unequal == 0 for other in group))
        for group in groups.values()
        for verdict in group
    ]
    return [text for text in texts if text is not None]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality; NaNs of equal bits are equal, 0.0 and -0.0 are not."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bits(a), as_bits(b))


def as_bits(x: Tensor) -> Tensor:
    """The bytes of `x`."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def largest_diff(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; infinite where only one is finite."""
    return torch.nan_to_num((a.double() - b.double()).abs(), nan=float("inf")).max().item()


def compare(verdict: Verdict, label: str, step: int, trio: tuple[Tensor, Tensor, Tensor]) -> None:
    """Judge one tensor of one step: (reference, twin, candidate)."""
    reference, twin, candidate = trio
    verdict.compared += 1
    twins_agree = same_bits(reference, twin)
    verdict.twin_unequal += not twins_agree
    if same_bits(reference, candidate):
        verdict.bit_equal += 1
        return
    if candidate.shape != reference.shape or candidate.dtype != reference.dtype:
        shape, dtype = tuple(candidate.shape), candidate.dtype
        verdict.first_outside = verdict.first_outside or f"step {step}: {label} is {shape} {dtype}"
        return
    diff, spread = largest_diff(reference, candidate), largest_diff(reference, twin)
    text = f"step {step}: {label} differs by {diff:.3g} (reference's own spread {spread:.3g})"
    verdict.first_unequal = verdict.first_unequal or text
    scale = reference.double().abs().max().item()
    if not diff <= max(2 * spread, tolerance(reference) * scale):
        verdict.first_outside = verdict.first_outside or text


def tolerance(x: Tensor) -> float:
    """Relative tolerance for `x`; on a GPU bf16's, since an fp32 loss comes from bf16 arithmetic too."""
    return TOLERANCE[torch.bfloat16 if x.is_cuda else x.dtype]


class Copy:
    """One of the three models, with what its last step gave."""

    def __init__(
        self, load: Workload, device: torch.device, scope: str, kwargs: dict[str, Any] | None
    ) -> None:
        self.model = Llama(load.llama).to_training(device)
        if kwargs is not None:
            compile_blocks(self.model, scope, **kwargs)
        self.addresses: dict[str, set[int]] = {}

    def step(self, tokens: Tensor, targets: Tensor, training: bool = True) -> dict[str, Tensor]:
        """Forward, and backward in training; every output and gradient by name."""
        with torch.set_grad_enabled(training):
            loss, logits, *hidden = self.model(tokens, targets, collect=True)
        found = {"loss": loss.detach(), "logits": logits.detach()}
        found |= {f"output of block {i}": x.detach() for i, x in enumerate(hidden)}
        if training:
            loss.backward()
        for name, weight in self.model.named_parameters():
            self.see(f"parameter {name}", weight)
            if training:
                assert weight.grad is not None, f"{name} has no gradient"
                found[f"gradient of {name}"] = weight.grad
                weight.grad = None
        for name, tensor in found.items():
            self.see(name, tensor)
        return found

    def see(self, name: str, tensor: Tensor) -> None:
        """Remember where `tensor` lies."""
        self.addresses.setdefault(name, set()).add(tensor.data_ptr())

    def move(self) -> None:
        """Put every parameter at a new address; the old ones die only when all have moved."""
        old = [weight.data for weight in self.model.parameters()]
        for weight in self.model.parameters():
            weight.data = weight.data.clone()
        del old

    def load_from(self, other: Copy) -> None:
        """Copy the other's parameters, in place."""
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
                mine.copy_(theirs)


class Shapes:
    """Batch and length of each step.

    Args:
        load: without `vary` its own, with it no longer ones.
        vary: whether they are drawn at random; batches of 2 on, for Dynamo compiles 1 apart. The first sizes
            come again and again, half of them multiples of 8, for which Inductor's code is another: from
            captures of three, others are computed.
    """

    AGAIN = 6
    ROUNDS = 4
    BATCHES = (2, 8)

    def __init__(self, load: Workload, vary: bool, seed: int) -> None:
        self._fixed = None if vary else (load.batch, load.seq)
        self._random, self._longest = random.Random(seed), load.seq
        self._drawn: list[tuple[int, int]] = []

    def at(self, step: int) -> tuple[int, int]:
        """Of this step; steps are asked for in order."""
        if self._fixed is not None:
            return self._fixed
        if self.AGAIN <= step < self.AGAIN * self.ROUNDS:
            return self._drawn[step % self.AGAIN]
        length = self._random.randint(2, self._longest)
        if step < self.AGAIN:
            length = max(length // 8, 1) * 8 - step % 2
        self._drawn.append((self._random.randint(*self.BATCHES), length))
        return self._drawn[-1]

    @property
    def distinct(self) -> int:
        return len(set(self._drawn)) or 1


def kwargs_of(args: argparse.Namespace, backend: str, device: torch.device) -> dict[str, Any] | None:
    """How to compile a copy; None for eager."""
    kwargs = compile_kwargs(backend, device, args.driver, args.codegen)
    if kwargs is not None and args.sizes:
        kwargs["dynamic"] = True
        if backend == "pgraph":
            kwargs["options"] |= {"step_aside": False}
    return kwargs


def captures() -> int | None:
    """pgraph's captures so far; None without pgraph."""
    report = pgraph_report()
    return None if report is None else int(as_count(report.captures))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compare as `args` say; returns one row."""
    name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cpu" if args.driver == "host" else name)
    codegen = default_codegen(device) if args.codegen == "auto" else args.codegen
    reference_name = args.reference or ("inductor" if codegen == "inductor" else "eager")
    if args.deterministic:
        # Read when cuBLAS makes its handle, at the first product: early enough here.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    load = workload(args.config)

    torch.manual_seed(args.seed)
    reference_kwargs = kwargs_of(args, reference_name, device)
    reference = Copy(load, device, args.scope, reference_kwargs)
    twin = Copy(load, device, args.scope, reference_kwargs)
    candidate = Copy(load, device, args.scope, kwargs_of(args, args.candidate, device))
    optimizer = torch.optim.AdamW(reference.model.parameters(), lr=args.lr, fused=device.type == "cuda")
    twin.load_from(reference)
    candidate.load_from(reference)

    stream = torch.Generator(device).manual_seed(args.seed + 1)
    shaker = Shaker(args.seed + 2, device)
    verdicts: dict[str, Verdict] = {}
    # The step before's results and their copies: a graph that owned its outputs would overwrite them.
    kept: list[tuple[str, Tensor, Tensor]] = []
    overwritten: str | None = None
    captures_warm = None
    losses: list[Tensor] = []
    shapes, training = Shapes(load, args.sizes, args.seed), args.mode == "train"
    for step in range(args.steps):
        if step == args.warmup:
            captures_warm = captures()
        if step and step % args.move_every == 0:
            candidate.move()
        shape = (2, *shapes.at(step))
        tokens, targets = torch.randint(load.llama.vocab, shape, generator=stream, device=device)
        first = reference.step(tokens, targets, training)
        second = twin.step(tokens, targets, training)
        shaker.shake()
        # A copy of its own, so that the candidate's tokens move too.
        third = candidate.step(tokens.clone(), targets.clone(), training)
        for label, tensor, copy in kept:
            if not same_bits(tensor, copy):
                overwritten = overwritten or f"step {step}: {label} of the step before was overwritten"
        for label, tensor in first.items():
            trio = (tensor, second[label], third[label])
            compare(verdicts.setdefault(label, Verdict()), label, step, trio)
        kept = [(label, tensor, tensor.clone()) for label, tensor in third.items()]
        losses.append(first["loss"])
        if not training:
            continue
        gradients = {label: tensor for label, tensor in first.items() if label.startswith("gradient of ")}
        for parameter, weight in reference.model.named_parameters():
            weight.grad = gradients[f"gradient of {parameter}"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        twin.load_from(reference)
        candidate.load_from(reference)

    captures_end = captures()
    moves = {label: len(seen) for label, seen in candidate.addresses.items()}
    parameter_moves = min(count for label, count in moves.items() if label.startswith("parameter "))
    failures = verdict_failures(verdicts)
    if overwritten is not None:
        failures.append(overwritten)
    if parameter_moves < 2 and args.steps > args.move_every:
        failures.append("a parameter of the candidate kept its address: the run proves nothing about moving")
    report = pgraph_report() if args.candidate == "pgraph" else None
    if args.sizes and report is not None:
        uncaptured = sum(p.uncaptured_runs for p in report.capturable)
        if report.launches < uncaptured:
            failures.append(f"{report.launches} launches and {uncaptured} uncaptured runs prove little")
    elif captures_warm is not None and captures_end != captures_warm:
        failures.append(f"captures grew from {captures_warm} to {captures_end} after {args.warmup} steps")
    # Steps sort by number, so that the first difference in time is the one reported.
    failures.sort(key=lambda text: int(text.split()[1][:-1]) if text.startswith("step ") else args.steps)
    return {
        "bench": "equality",
        "config": args.config + ("-sizes" if args.sizes else ""),
        "mode": args.mode,
        "scope": args.scope,
        "backend": args.candidate,
        "reference": reference_name,
        "deterministic": args.deterministic,
        "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF", schema.DEFAULT_ALLOC_CONF),
        "status": failures[0] if failures else "equal",
        "failures": len(failures),
        "steps": args.steps,
        "tensors_compared": sum(v.compared for v in verdicts.values()),
        "tensors_bit_equal": sum(v.bit_equal for v in verdicts.values()),
        "tensors_reference_bit_equal": sum(v.compared - v.twin_unequal for v in verdicts.values()),
        "names_compared": len(verdicts),
        "names_reference_nondeterministic": sum(v.twin_unequal > 0 for v in verdicts.values()),
        "distinct_addresses": sum(moves.values()),
        "fewest_addresses_of_a_parameter": parameter_moves,
        "captures_warm": captures_warm,
        "captures_end": captures_end,
        "sizes": shapes.distinct,
        "first_loss": losses[0].item(),
        "final_loss": losses[-1].item(),
        "summary": report.summary() if report is not None else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the row and write it; returns 1 if anything differed."""
    args = parse_args(argv)
    row = run(args)
    header = schema.environment(cpu=args.driver == "host" or args.device == "cpu")
    for key, value in row.items():
        print(f"{key:34} {value}")
    print(f"wrote {schema.write(schema.result_path('equality', header['gpu'], args.out), [row], header)}")
    return 0 if row["status"] == "equal" else 1


if __name__ == "__main__":
    raise SystemExit(main())
