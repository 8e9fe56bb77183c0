"""Train a Llama with torchtitan and pgraph: its own Trainer, a tokenizer and a text made on the spot.

    python examples/torchtitan/train.py                                  # one GPU; a small run without one
    torchrun --nproc-per-node 2 examples/torchtitan/train.py --flavor 8B --ac selective --batch 1 --seq 4096
    torchrun --nproc-per-node 2 examples/torchtitan/train.py --flavor 70B --layers 4 --ac selective --batch 1
    python examples/torchtitan/train.py --backend inductor               # the same without graphs

Arguments that are not listed go to torchtitan as they are: ``--checkpoint.enable --checkpoint.interval 10``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import titan_assets
import titan_setup
import torch


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """This program's arguments, and those for torchtitan; `argv` None reads the real command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--flavor", choices=titan_setup.FLAVORS, default="debug", help="dimensions of the model")
    add("--layers", type=int, default=None, help="depth; the flavor's own if not given")
    add("--backend", choices=titan_setup.BACKENDS, default="pgraph")
    add("--steps", type=int, default=50 if on_gpu else 8)
    add("--seq", type=int, default=2048 if on_gpu else 64, help="tokens in a sequence")
    add("--batch", type=int, default=8 if on_gpu else 2, help="sequences per GPU and microbatch")
    add("--accumulate", type=int, default=1, help="microbatches per step")
    add("--ac", choices=["none", "selective", "full"], default="none", help="activation checkpointing")
    add("--tp", type=int, default=1, help="tensor-parallel degree")
    add("--ddp", action="store_true", help="replicate the parameters instead of sharding them")
    add("--reshard", choices=["default", "always", "never"], default="default", help="after forward")
    add("--seed", type=int, default=0)
    add("--deterministic", action="store_true")
    add("--log-freq", type=int, default=10, help="steps between torchtitan's log lines")
    add("--cache", type=Path, default=titan_assets.default_cache(), help="for tokenizer and dataset")
    add("--dump", type=Path, default=None, help="torchtitan's folder; a temporary one if not given")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the command line says, and print a summary on rank 0."""
    args, extra = parse_args(argv)
    if missing := titan_setup.missing():
        sys.exit(missing)
    titan_setup.environment(args.cache)
    fields = {k: v for k, v in vars(args).items() if k not in ("cache", "dump")}
    settings = titan_setup.Settings(**fields, ranks=int(os.environ["WORLD_SIZE"]), extra=tuple(extra))
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as scratch:
        # torchtitan takes the command line of the moment when it is imported.
        sys.argv[1:] = titan_setup.arguments(settings, args.cache, args.dump or Path(scratch))
        titan_setup.prepare(settings)
        import torchtitan.train
        from titan_trainer import RecordingTrainer

        torchtitan.train.main(lambda config: RecordingTrainer(config, lambda t: show(t, settings)))


def show(trainer: Any, settings: titan_setup.Settings) -> None:
    """Losses, speed, memory, and what pgraph did; every rank takes part, rank 0 prints."""
    losses = trainer.global_losses()
    if torch.distributed.get_rank() != 0:
        return
    began = trainer.began[len(trainer.began) // 2 :]
    steady = [b - a for a, b in itertools.pairwise(began)]
    seconds = statistics.median(steady) if steady else float("nan")
    tokens = settings.batch * settings.accumulate * settings.seq / settings.tp
    print(f"\n{settings.flavor}, {settings.depth} layers, {settings.ranks} rank(s), {settings.backend}")
    print("losses " + " ".join(f"{loss:.5f}" for loss in losses[-10:]))
    print(f"{seconds * 1e3:.1f} ms/step, {tokens / seconds:,.0f} tokens/s per rank (last half of the steps)")
    if torch.cuda.is_available():
        print(
            f"peak since torchtitan last logged: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MB "
            f"allocated, {torch.cuda.max_memory_reserved() / 2**20:,.0f} MB reserved"
        )
    if settings.backend == "pgraph":
        import pgraph

        print(pgraph.report().summary())


if __name__ == "__main__":
    main()
