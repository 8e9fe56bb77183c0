"""Train a byte-level Llama on the Python standard library's own sources.

    python examples/train_llama.py                        # pgraph; on a CPU its host driver, under a minute
    python examples/train_llama.py --compare              # a reference run first, then pgraph, side by side
    python examples/train_llama.py --backend inductor --scope model --steps 200
    python examples/train_llama.py --dim 1024 --layers 16 --heads 16 --kv-heads 8 --batch 4 --seq 512

bf16 parameters on a GPU, fp32 on a CPU. Works installed and from a checkout.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from backends import (
    CODEGENS,
    DRIVERS,
    compile_kwargs,
    default_codegen,
    peak_rss_mb,
    pgraph_report,
    reset_compiled,
)
from llama import Llama, LlamaConfig, compile_blocks, count_parameters

# Steps before the clock counts (half of a shorter run): compiling, autotuning and capturing happen in them.
WARMUP = 10
TEXT_BYTES = 4_000_000


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of this program; `argv` None reads the real one."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    backends = ["pgraph", "inductor", "eager", "reduce-overhead", "aot_eager"]
    add("--backend", choices=backends, default="pgraph")
    add("--scope", choices=["block", "model"], default="block", help="what is compiled as one piece")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--driver", choices=DRIVERS, default="auto", help="pgraph's driver; auto follows the device")
    add("--codegen", choices=CODEGENS, default="auto", help="auto: inductor on a GPU, aten on a CPU")
    add("--dim", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--tied", action="store_true", help="share the embedding's weight with the head")
    add("--batch", type=int, default=4)
    add("--seq", type=int, default=128, help="tokens (bytes) in one sequence")
    add("--steps", type=int, default=100)
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add(
        "--compare", action="store_true", help="first a reference run (inductor, or eager) with the same seed"
    )
    add("--quiet", action="store_true", help="no progress bar, no table")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: give at least 1")
    if args.driver == "host" and args.device == "cuda":
        parser.error("--driver host runs on the CPU; drop --device cuda")
    return args


def pick_device(args: argparse.Namespace) -> torch.device:
    """The device asked for; `auto` takes a GPU if there is one and the host driver was not asked for."""
    if args.device != "auto":
        return torch.device(args.device)
    return torch.device("cuda" if torch.cuda.is_available() and args.driver != "host" else "cpu")


def load_text(limit: int = TEXT_BYTES) -> Tensor:
    """The standard library's top-level sources, in order of their names, as uint8 tokens."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces, size = [], 0
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
        if size >= limit:
            break
    if not size:
        raise FileNotFoundError(
            f"no *.py sources in {folder}: this Python was installed without its library's text"
        )
    return torch.frombuffer(bytearray(b"".join(pieces)[:limit]), dtype=torch.uint8)


class TokenStream:
    """Random windows of a text; the same seed gives the same windows."""

    def __init__(self, text: Tensor, batch: int, seq: int, seed: int, device: torch.device) -> None:
        self.text, self.batch, self.seq, self.device = text, batch, seq, device
        self.random = torch.Generator().manual_seed(seed)
        self.window = torch.arange(seq + 1)

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each (B, T) int64, fresh tensors at every call."""
        start = torch.randint(len(self.text) - self.seq - 1, (self.batch, 1), generator=self.random)
        piece = self.text[start + self.window].to(self.device).long()
        return piece[:, :-1].contiguous(), piece[:, 1:].contiguous()


def progress(steps: int, label: str, quiet: bool) -> Any:
    """A tqdm bar over `steps`; a plain range where quiet or without tqdm."""
    if quiet:
        return range(steps)
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"{label}: {steps} steps (pip install tqdm shows a progress bar)")
        return range(steps)
    return tqdm(range(steps), desc=label, unit="step", dynamic_ncols=True)


@dataclasses.dataclass
class Result:
    """What one training run gave. Times in ms, sizes in MB (2**20 bytes)."""

    backend: str
    losses: list[float]
    ms_per_step: float
    first_step_s: float
    peak: dict[str, float | None]
    parameters: int
    summary: str | None


def train(backend: str, args: argparse.Namespace, device: torch.device, text: Tensor) -> Result:
    """One training run from the seed."""
    reset_compiled()
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        dim=args.dim,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        max_seq=args.seq,
        tied=args.tied,
    )
    model = Llama(config).to_training(device)
    kwargs = compile_kwargs(backend, device, args.driver, args.codegen)
    if kwargs is not None:
        compile_blocks(model, args.scope, **kwargs)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=on_gpu)
    stream = TokenStream(text, args.batch, args.seq, args.seed, device)

    losses, times = [], []
    warm = min(WARMUP, args.steps // 2)
    bar = progress(args.steps, backend, args.quiet)
    for step in bar:
        if on_gpu and step == warm:
            # Captures count in the memory statistics while they run; what matters is the steady state.
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        if backend == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        tokens, targets = stream.next()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device, so that the time below is the whole step's
        times.append(time.perf_counter() - began)
        if hasattr(bar, "set_postfix"):
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)

    peak: dict[str, float | None] = {"max_rss_mb": peak_rss_mb()}
    if on_gpu:
        peak = {
            "peak_allocated_mb": torch.cuda.max_memory_allocated() / 2**20,
            "peak_reserved_mb": torch.cuda.max_memory_reserved() / 2**20,
        }
    report = pgraph_report() if backend == "pgraph" else None
    return Result(
        backend=backend,
        losses=losses,
        ms_per_step=statistics.median(times[warm:]) * 1e3,
        first_step_s=times[0],
        peak=peak,
        parameters=count_parameters(model),
        summary=report.summary() if report is not None else None,
    )


def reference_backend(args: argparse.Namespace, device: torch.device) -> str:
    """What `--compare` compares with: the same code generator without graphs."""
    codegen = default_codegen(device) if args.codegen == "auto" else args.codegen
    return "inductor" if codegen == "inductor" else "eager"


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text as aligned columns: names to the left, figures to the right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def show(results: list[Result], device: torch.device, max_loss_diff: float | None) -> None:
    """Print the summary table."""
    columns = list(results[0].peak)
    names = {
        "peak_allocated_mb": "peak allocated MB",
        "peak_reserved_mb": "peak reserved MB",
        "max_rss_mb": "max RSS MB",
    }
    rows = [["backend", "first loss", "final loss", "ms/step", "first step s", *(names[c] for c in columns)]]
    for result in results:
        peaks = [f"{value:,.0f}" if (value := result.peak[c]) is not None else "-" for c in columns]
        rows.append(
            [
                result.backend,
                f"{result.losses[0]:.4f}",
                f"{result.losses[-1]:.4f}",
                f"{result.ms_per_step:.2f}",
                f"{result.first_step_s:.2f}",
                *peaks,
            ]
        )
    print(f"\n{results[-1].parameters:,} parameters on {device.type}")
    print(table(rows))
    if len(results) > 1 and "max_rss_mb" in columns:
        print("(max RSS is the process's: the second run's includes the first)")
    if max_loss_diff is not None:
        first, second = results[0].backend, results[-1].backend
        print(f"largest loss difference, {second} against {first}, over all steps: {max_loss_diff:.3g}")
    for result in results:
        if result.summary:
            print(result.summary)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train as `args` say.

    Returns:
        ``{"device", "runs": [one `Result` as a dict each], "max_loss_diff": float or None}``; the last run
        is that of ``args.backend``, a reference run comes before it.
    """
    device = pick_device(args)
    text = load_text()
    backends = [reference_backend(args, device)] if args.compare else []
    results = [train(backend, args, device, text) for backend in [*backends, args.backend]]
    diff = None
    if args.compare:
        pairs = zip(results[0].losses, results[-1].losses, strict=True)
        diff = max(abs(a - b) for a, b in pairs)
    if not args.quiet:
        show(results, device, diff)
    return {"device": device.type, "runs": [dataclasses.asdict(r) for r in results], "max_loss_diff": diff}


if __name__ == "__main__":
    run(parse_args())
