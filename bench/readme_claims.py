"""What others have claimed of CUDA graphs, and what was measured here. Not a program: `readme.py` imports it.

Figures are computed from the rows of the result files (`readme_answers.py`). Where those of no GPU answer a
claim, the table says that it was not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from readme_answers import (
    COMPILED,
    Answer,
    Rows,
    address_update,
    allocations,
    best_issue,
    beyond_inductor,
    busy,
    capture_cost,
    changes,
    counted,
    exec_memory,
    extra_graphs,
    launch_cost,
    malloc_cost,
    one_launch,
    several,
)
from readme_rows import File
from readme_tables import caption
from tabulate import tabulate

NOT_MEASURED = "not measured"
SEEDS = "bench/seeds.py --models"
CLAIMS = "bench/claims.py --only"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim.

    Args:
        text: what is claimed.
        where: which source, and where in it.
        measured: the answer from the rows; None without the rows that it takes.
        command: what measures them.
    """

    text: str
    where: str
    measured: Answer
    command: str


CLAIMED: tuple[Claim, ...] = (
    Claim("a launch costs the CPU 5 to 10 us", "1, introduction", launch_cost, f"{CLAIMS} launch"),
    Claim("a launch costs 3 to 15 us (A100)", "3", launch_cost, f"{CLAIMS} launch"),
    Claim(
        "200 kernels: from 1 to 2 ms of CPU time down to about 10 us",
        *("1, section 2", one_launch, f"{CLAIMS} launch"),
    ),
    Claim("launch overhead falls by up to 90 %", "3", best_issue, f"{SEEDS} 'seeds/*'"),
    Claim(
        "largest speedups: tight loops, small kernels, servers of fixed shapes",
        "1, section 3",
        several(
            changes("mlp-loop"),
            changes("efficientnet-b0-b1", mode="infer"),
            changes("bert-large-b1-t128", mode="infer"),
            changes("server-b1", mode="infer"),
        ),
        f"{SEEDS} 'seeds/*b1*' seeds/mlp-loop",
    ),
    Claim(
        "capturing costs about one run; replay at least 100 times",
        *("1, section 5", capture_cost, f"{SEEDS} 'seeds/*'"),
    ),
    Claim(
        "from 30 % utilization to nearly all", "1, section 7", busy, f"{SEEDS} seeds/mlp-loop 'seeds/eff*'"
    ),
    Claim(
        "Llama 70B in torchtitan: 2 GB more than without graphs, about 10 GB with the usual technique",
        "2",
        several(beyond_inductor("torchtitan", "70B"), beyond_inductor("memory", "70b"), extra_graphs),
        f"bench/torchtitan.py; bench/memory.py --configs 70b-fit; {CLAIMS} graphs",
    ),
    Claim(
        "ResNet-50: 400 to 600 launches a training step",
        "3",
        several(
            counted("resnet50-amp", "launch_calls", "{:,.0f}", ("eager", *COMPILED)),
            counted("resnet50-fp16", "launch_calls", "{:,.0f}", ("eager", *COMPILED)),
        ),
        f"{SEEDS} 'seeds/resnet50-*' --counts-only",
    ),
    Claim(
        "500 launches take 10 to 20 % of a step of small to medium batches",
        "3",
        counted("resnet50-amp", "launch_call_share", "{:.0%} of profiled time", ("eager",)),
        f"{SEEDS} seeds/resnet50-amp --counts-only",
    ),
    Claim(
        "ResNet-50 with mixed precision and gradient scaling gains more",
        *("3", several(changes("resnet50-amp"), changes("resnet50-fp16")), f"{SEEDS} 'seeds/resnet50-*'"),
    ),
    Claim(
        "BERT-Large, batch 32: 480 to 390 ms, 19 % (A100, no length given)",
        "3",
        several(changes("bert-large-b32-t128"), changes("bert-large-b32-t512")),
        f"{SEEDS} 'seeds/bert-large-b32-*'",
    ),
    Claim(
        "BERT-Large, batch 8: 35 %",
        "3",
        several(changes("bert-large-b8-t128"), changes("bert-large-b8-t512")),
        f"{SEEDS} 'seeds/bert-large-b8-*'",
    ),
    Claim(
        "a graph of 200 kernels takes 5 to 20 MB of the device's memory and 1 to 2 MB of the host's",
        *("3", exec_memory, f"{CLAIMS} exec"),
    ),
    Claim(
        "EfficientNet-B0: 30 % of a training step is driver overhead",
        "3",
        several(
            counted(
                "efficientnet-b0", "launch_call_share", "{:.0%} of profiled time in launches", ("eager",)
            ),
            changes("efficientnet-b0"),
        ),
        f"{SEEDS} seeds/efficientnet-b0",
    ),
    Claim(
        "ViT with gradient checkpointing: 23.4 to 24.1 GB, 3 % more memory",
        "3",
        several(
            changes("vit-b16-checkpointed", "peak_reserved_mb"),
            changes("vit-b16-checkpointed", "device_used_mb"),
            beyond_inductor("memory", "vit-b16"),
        ),
        f"{SEEDS} seeds/vit-b16-checkpointed; bench/memory.py --configs vit-b16-8192",
    ),
    Claim(
        "ResNet-50: 1,200 cudaMalloc calls in 100 steps, none with graphs",
        *("3", allocations, f"{SEEDS} seeds/resnet50-amp"),
    ),
    Claim("a cudaMalloc takes about 0.2 ms", "3", malloc_cost, f"{CLAIMS} malloc"),
    Claim(
        "GPT-2 with captured attention and a loss outside: launches -40 %, step -12 % (RTX 4090)",
        "3",
        several(
            changes("gpt2-attention", "launch_calls", of=COMPILED),
            changes("gpt2-attention"),
        ),
        f"{SEEDS} seeds/gpt2-attention",
    ),
    Claim(
        "only scalars of a captured kernel can be updated, no addresses; with a cudaMemset, capture again",
        *("3", address_update, f"{CLAIMS} address"),
    ),
    Claim(
        "no graphs for LSTMs of varying length",
        *("3", changes("lstm-lengths"), f"{SEEDS} seeds/lstm-lengths"),
    ),
)


def claims_table(files: Sequence[File]) -> str:
    """Every claim with its figures: a line for each GPU whose rows answer it; one that says so if none do."""
    groups: dict[str, list[File]] = {}
    for data in files:
        if data["gpu"] != "cpu":
            groups.setdefault(data["gpu"], []).append(data)
    answered = {gpu: answers(found) for gpu, found in groups.items()}
    answered = {gpu: texts for gpu, texts in answered.items() if any(text is not None for text in texts)}
    captions = [f"- {_caption(groups[gpu])}\n" for gpu in answered]
    lines = []
    for at, claim in enumerate(CLAIMED):
        measured = [(gpu, texts[at]) for gpu, texts in answered.items() if texts[at] is not None]
        lines += [
            [claim.text, claim.where, gpu, text, f"`{claim.command}`"]
            for gpu, text in measured or [("-", NOT_MEASURED)]
        ]
    head = ["claimed", "where", "GPU", "measured here", "command"]
    table = tabulate(lines, head, "github", disable_numparse=True) + "\n"
    return "".join(captions) + "\n" * bool(captions) + table


def answers(files: Sequence[File]) -> list[str | None]:
    """The answer to each of `CLAIMED` by the files of one machine."""
    rows = Rows([row for data in files for row in data["rows"]])
    return [claim.measured(rows) for claim in CLAIMED]


def _caption(files: Sequence[File]) -> str:
    """One line about the machine, as its latest file has it."""
    return caption(max(files, key=lambda data: data["date"]))
