"""Memory over the time of one training step, a line for each backend: Inductor, reduce-overhead, pgraph.

    python bench/step_memory.py                                    # 16x1024 by blocks, on a GPU
    python bench/step_memory.py --config 8x4096 --scope model --out out/
    python bench/step_memory.py --config cpu-tiny --backends eager pgraph     # without a GPU

Writes a picture and its figures, ``step-memory-<gpu>.svg`` and ``.json``: MB (2**20 bytes) that PyTorch has
allocated, after each allocation and each free of a warm step, by the profiler. On a GPU the line begins with
what was allocated before the step; on a CPU, which does not count, with 0. Private pools of CUDA graphs are
allocated once and for all, so they lie under the whole line. Each backend runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401  (puts the checkout on sys.path)
import schema
import torch
import worker
from configs import scopes_of
from workers import config_name, start_worker

Curve = list[tuple[float, float]]
"""(ms since the step began, MB allocated from then on), in the order of time"""

BACKENDS = ("inductor", "reduce-overhead", "pgraph")
WARMUP = 12


def curve_of(events: Sequence[tuple[int, int]], began: int, before: int) -> Curve:
    """The line of a step.

    Args:
        events: (time in ns, bytes allocated, or freed if negative).
        began: time at which the step began, in ns.
        before: bytes that were allocated by then.
    """
    held, found = before, [(0.0, before / worker.MB)]
    for moment, nbytes in sorted(events, key=lambda event: event[0]):
        held += nbytes
        found.append((max(0.0, (moment - began) / 1e6), held / worker.MB))
    return found


def traced(spec: worker.Spec) -> dict[str, Any]:
    """The curve of one warm step."""
    device = worker.Device(spec.device)
    trainer = worker.Trainer(spec, device)
    for _ in range(spec.warmup):
        trainer.step()
        trainer.check()
    device.drain()
    before = torch.cuda.memory_allocated() if device.on_gpu else 0
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        with torch.profiler.record_function("step"):
            trainer.step()
        device.drain()
    kind = torch.autograd.DeviceType.CUDA if device.on_gpu else torch.autograd.DeviceType.CPU
    found = profile.profiler.kineto_results.events()
    began = next(event.start_ns() for event in found if event.name() == "step")
    events = [
        (event.start_ns(), event.nbytes())
        for event in found
        if event.name() == "[memory]" and event.device_type() == kind
    ]
    return {"curve": curve_of(events, began, before), "reserved_mb": reserved(device)}


def reserved(device: worker.Device) -> float | None:
    """MB that the allocator holds; None on a CPU."""
    return torch.cuda.memory_reserved() / worker.MB if device.on_gpu else None


def draw(curves: dict[str, Curve], title: str, path: Path) -> None:
    """One line for each backend."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axis = plt.subplots(figsize=(9, 4.5))
    for name, curve in curves.items():
        peak = max(mb for _, mb in curve)
        moments, heights = zip(*curve, strict=True)
        axis.plot(moments, heights, drawstyle="steps-post", linewidth=1, label=f"{name}: peak {peak:,.1f} MB")
    axis.set_xlabel("ms since the step began, under the profiler")
    axis.set_ylabel("MB allocated")
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    on_gpu, add = torch.cuda.is_available(), parser.add_argument
    default = list(BACKENDS) if on_gpu else ["eager", "pgraph"]
    add("--config", type=config_name, default="16x1024" if on_gpu else "cpu-tiny", metavar="NAME")
    add("--scope", choices=schema.CHOICES["scope"], default=None, help="default: the config's first")
    add("--backends", nargs="+", choices=schema.BACKENDS, default=default)
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--timeout", type=float, default=300.0, help="seconds for one process")
    add("--out", type=Path, default=Path("out"), help="folder for the picture and its figures")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Path:
    """Trace a step with each backend, draw, write; returns the picture's path."""
    args = parse_args(argv)
    scope = args.scope or scopes_of(args.config)[0]
    gpu = schema.environment(cpu=args.device == "cpu")["gpu"]
    curves: dict[str, Curve] = {}
    found: dict[str, Any] = {}
    for backend in args.backends:
        spec = {"config": args.config, "scope": scope, "backend": backend, "device": args.device}
        figures = start_worker({**spec, "warmup": WARMUP}, dict(os.environ), args.timeout, Path(__file__))
        if figures["status"] != "ok":
            print(f"{backend}: {figures['status']}")
            continue
        found[backend] = figures
        curves[backend] = curve = figures["curve"]
        heights = [mb for _, mb in curve]
        print(
            f"{backend}: {heights[0]:,.1f} MB allocated before the step, peak {max(heights):,.1f} MB, "
            f"{len(curve) - 1:,} allocations and frees"
        )
    if not curves:
        sys.exit("no backend has run")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"step-memory-{gpu}.svg"
    draw(curves, f"{gpu}, {args.config}, per {scope}: memory of one training step", path)
    path.with_suffix(".json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print("\n" + json.dumps(traced(worker.Spec(**json.loads(sys.argv[1])))))
    else:
        main()
