"""What `torchtitan.py` runs: entries, and named lists of them. Not a program."""

from __future__ import annotations

import dataclasses
from typing import Any

# "reduce-overhead" is Inductor with CUDA graph trees (TORCHINDUCTOR_CUDAGRAPHS=1; torchtitan has no modes).
TIMED = ("inductor", "pgraph", "reduce-overhead", "eager")


class PlanError(ValueError):
    """An entry of a plan is not understood."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One configuration and the backends to run it with.

    Args:
        flavor, layers, seq, batch, accumulate, ac, tp, ddp, reshard: as in `titan_setup.Settings`.
        gpus: ranks, one for each GPU.
        backends: in this order; the first one meets an empty compile cache, if it was empty.
        repeats: rounds of all backends in turn, of which the median run counts; where the host sets the
            pace, runs of the same code differ by 10 % and more.
        warmup, steps, issue: steps not measured, timed back to back, and timed on the host's clock. No
            step counts during which the host of a rank was slow.
        expandable: with ``PYTORCH_ALLOC_CONF=expandable_segments:True``.
        compare: compare the losses of `steps` steps instead of measuring.
        resume: save a checkpoint in the middle of `steps` steps, go on from it in new processes, and compare
            the losses with those of the run that was not stopped. Always deterministic.
        deterministic: torch's deterministic algorithms.
        timeout: seconds for one run.
    """

    flavor: str = "debug"
    layers: int | None = None
    gpus: int = 1
    seq: int = 2048
    batch: int = 8
    accumulate: int = 1
    ac: str = "none"
    tp: int = 1
    ddp: bool = False
    reshard: str = "default"
    backends: tuple[str, ...] = TIMED
    repeats: int = 1
    warmup: int = 20  # pgraph tries layouts of memory in the first 15 or so
    steps: int = 20
    issue: int = 5
    expandable: bool = False
    compare: bool = False
    resume: bool = False
    deterministic: bool = False
    timeout: int = 150

    @property
    def untimed(self) -> bool:
        """Whether only the losses count."""
        return self.compare or self.resume

    @property
    def saved_at(self) -> int:
        """Steps before the checkpoint."""
        return self.steps // 2

    @property
    def config(self) -> str:
        """The row's name."""
        depth = f" {self.layers} layers" if self.layers else ""
        parts = [f"{self.flavor}{depth}", f"seq {self.seq}", f"batch {self.batch}"]
        parts += [f"x {self.accumulate}"] if self.accumulate > 1 else []
        parts += [f"AC {self.ac}"] if self.ac != "none" else []
        parts += [f"TP {self.tp}"] if self.tp > 1 else []
        parts += ["DDP"] if self.ddp else []
        parts += [f"reshard {self.reshard}"] if self.reshard != "default" else []
        return ", ".join([*parts, f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"])


def parse(text: str) -> list[Entry]:
    """Entries of a named plan, or the one that a text like ``flavor=8B,layers=22,expandable`` describes.

    Raises:
        PlanError: a key or value is not known.
    """
    if text in PLANS:
        return list(PLANS[text])
    fields = {f.name: f for f in dataclasses.fields(Entry)}
    values: dict[str, Any] = {}
    for piece in text.split(","):
        key, _, value = piece.partition("=")
        if key not in fields:
            raise PlanError(
                f"plan {text!r}: {key!r} is no key; the keys are {', '.join(fields)}, the named plans "
                f"{', '.join(PLANS)}"
            )
        values[key] = _value(text, key, value, str(fields[key].type))
    if values.get("compare") and "backends" not in values:
        # Without deterministic algorithms two Inductor runs differ too: the second one says by how much.
        again = () if values.get("deterministic") else ("inductor",)
        values["backends"] = ("inductor", *again, "pgraph")
    if values.get("compare"):
        values.setdefault("steps", 200)
    if values.get("resume"):
        values["deterministic"] = True
        values.setdefault("backends", ("pgraph",))
        if values.get("compare") or len(values["backends"]) != 1 or values.get("steps", 20) < 2:
            raise PlanError(f"plan {text!r}: resume takes one backend, two steps or more, and no compare")
        values["backends"] *= 2  # the run that goes on, and the one that is resumed
    if values.get("repeats", 1) < 1 or (values.get("repeats", 1) > 1 and Entry(**values).untimed):
        raise PlanError(f"plan {text!r}: repeats must be at least 1, and 1 where only losses are compared")
    return [Entry(**values)]


def _value(text: str, key: str, value: str, kind: str) -> Any:
    if kind == "bool":
        if value:
            raise PlanError(f"plan {text!r}: {key} takes no value; leave it out for no")
        return True
    if kind.startswith("tuple"):
        unknown = [name for name in value.split("+") if name not in (*TIMED, "aot_eager")]
        if unknown:
            raise PlanError(f"plan {text!r}: backends {unknown} are unknown; choose from {', '.join(TIMED)}")
        return tuple(value.split("+"))
    if kind.startswith("int"):
        if not value.isdigit():
            raise PlanError(f"plan {text!r}: {key}={value!r} must be a whole number")
        return int(value)
    return value


_BIG: dict[str, Any] = {"seq": 4096, "batch": 1, "ac": "selective", "warmup": 5, "steps": 10, "issue": 3}
_THREE = ("inductor", "pgraph", "reduce-overhead")
_TWO = ("inductor", "pgraph")
_REST = ("reduce-overhead", "eager")

# Losses, bit for bit, of what is not timed.
_CHECK: dict[str, Any] = {"compare": True, "deterministic": True, "steps": 30, "backends": _TWO}
_RESUME: dict[str, Any] = {"resume": True, "deterministic": True, "backends": ("pgraph", "pgraph")}

PLANS: dict[str, tuple[Entry, ...]] = {
    # As many layers as fit on an H200: 16 bytes a parameter over the GPUs (one more layer of 70B takes each
    # of two GPUs 7 GB), and what the allocator keeps; of 8B all 32. (30 of 70B leave each of four 1 GB.)
    # The order is that of importance: what time runs out on is least missed.
    "gpu1": (
        Entry(flavor="8B", layers=32, backends=_THREE, **_BIG),
        Entry(batch=1, steps=50),
        Entry(flavor="8B", layers=32, expandable=True, backends=_TWO, **_BIG),
    ),
    "gpu2": (
        Entry(gpus=2, batch=8, steps=50, backends=_TWO, repeats=3),
        Entry(gpus=2, batch=1, steps=50, backends=_TWO, repeats=3),
        Entry(gpus=2, flavor="70B", layers=14, backends=_THREE, **_BIG),
        Entry(gpus=2, flavor="8B", layers=32, backends=_THREE, **_BIG),
        Entry(gpus=2, batch=8, compare=True, deterministic=True, steps=200, backends=_TWO),
        Entry(gpus=2, flavor="70B", layers=14, expandable=True, backends=_TWO, **_BIG),
        Entry(gpus=2, batch=8, steps=50, expandable=True, backends=_TWO, repeats=3),
        Entry(gpus=2, batch=1, steps=50, expandable=True, backends=_TWO, repeats=3),
        Entry(gpus=2, batch=8, steps=50, backends=_REST),
        Entry(gpus=2, batch=1, steps=50, backends=_REST),
        Entry(gpus=2, batch=8, steps=50, expandable=True, backends=_REST),
        Entry(gpus=2, batch=1, steps=50, expandable=True, backends=_REST),
        Entry(gpus=2, flavor="8B", layers=32, expandable=True, backends=_TWO, **_BIG),
    ),
    "gpu2-checks": (
        Entry(gpus=2, **_RESUME),
        Entry(gpus=2, ac="full", accumulate=2, reshard="never", **_CHECK),
        Entry(gpus=2, ac="selective", reshard="always", **_CHECK),
        Entry(gpus=2, ddp=True, **_CHECK),
        Entry(gpus=2, tp=2, **_CHECK),
        Entry(gpus=2, expandable=True, **_RESUME),
    ),
    "gpu4": (
        Entry(gpus=4, flavor="70B", layers=28, backends=_TWO, **_BIG),
        Entry(gpus=4, flavor="70B", layers=28, expandable=True, backends=_TWO, **_BIG),
        Entry(gpus=4, flavor="8B", layers=32, backends=_THREE, **_BIG),
        Entry(gpus=4, flavor="8B", layers=32, expandable=True, backends=_TWO, **_BIG),
        Entry(gpus=4, flavor="8B", layers=32, seq=4096, batch=1, ac="selective", **_CHECK),
        Entry(gpus=4, batch=8, steps=50, backends=_THREE),
        Entry(gpus=4, batch=8, steps=50, expandable=True, backends=_TWO),
        Entry(gpus=4, flavor="70B", layers=30, backends=_TWO, **_BIG),
        Entry(gpus=4, flavor="70B", layers=28, backends=("reduce-overhead",), **_BIG),
    ),
    # Seconds on a CPU: for tests of this program.
    "cpu": (
        Entry(
            layers=2, gpus=2, seq=32, batch=1, warmup=4, steps=3, issue=2, backends=("aot_eager", "pgraph")
        ),
    ),
}
