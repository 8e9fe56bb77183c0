"""From a first try to full capture, by doing what `pgraph.explain` says. Prints the transcript.

    python examples/explain_transcript.py            # print it
    python examples/explain_transcript.py --write    # put it into explain.md, where it is shown

A small network with three habits that no graph can hold. Each version applies the fix that was printed
for the one before it; the last one runs with ``require_full_capture=True``. On a machine without a GPU
the host driver stands in.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import re
from pathlib import Path

import torch
from backends import default_codegen, default_driver
from torch import Tensor

import pgraph

PAGE = Path(__file__).with_name("explain.md")
FENCE = "```text\n"

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIONS = {"driver": default_driver(DEVICE), "codegen": default_codegen(DEVICE), "min_ops": 1}

COVARIANCE = torch.diag(torch.arange(1.0, 9.0)).to(DEVICE)


def version_1(x: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    h = x @ torch.linalg.inv(COVARIANCE)
    h = h / h.abs().max().item()
    return ((h[counts] - target[counts]) ** 2).mean()


def version_2(x: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    h = x @ torch.linalg.inv(COVARIANCE)
    h = h / h.abs().max()
    return ((h[counts] - target[counts]) ** 2).mean()


def version_3(x: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    h = x @ torch.linalg.inv(COVARIANCE)
    h = h / h.abs().max()
    error = torch.where(counts[:, None], (h - target) ** 2, 0)
    return error.sum() / (counts.sum() * h.shape[1])


WHITEN = torch.linalg.inv(COVARIANCE)


def version_4(x: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    h = x @ WHITEN
    h = h / h.abs().max()
    error = torch.where(counts[:, None], (h - target) ** 2, 0)
    return error.sum() / (counts.sum() * h.shape[1])


def transcript() -> str:
    """Explanations of all versions; each must compute what the first does."""
    torch.manual_seed(0)
    x, target = torch.randn(16, 8, device=DEVICE), torch.randn(16, 8, device=DEVICE)
    counts = torch.rand(16, device=DEVICE) < 0.5
    lines = []
    for version in (version_1, version_2, version_3, version_4):
        last = version is version_4
        torch.testing.assert_close(version(x, target, counts), version_1(x, target, counts))
        settings = {**OPTIONS, "require_full_capture": True} if last else OPTIONS
        found = pgraph.explain(version, dynamic=False, **settings)(x, target, counts)
        assert found.complete == last, str(found)
        flags = ", require_full_capture=True" if last else ""
        lines += [inspect.getsource(version).rstrip(), ""]
        lines += [f">>> print(pgraph.explain({version.__name__}{flags})(x, target, counts))"]
        lines += [found.render(times=False)]
    folders = re.compile(r"(?:/[^\s/:]+)+/(?=[^\s/:]+\.py:\d)")
    return folders.sub("", "\n".join(lines))


def page(text: str) -> str:
    """The page that shows the transcript, with `text` in its place."""
    old = PAGE.read_text(encoding="utf-8")
    first = old.index(FENCE) + len(FENCE)
    return f"{old[:first]}{text.rstrip()}\n{old[old.index('```', first) :]}"


def main() -> None:
    """Print it, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help=f"rewrite {PAGE.name}")
    args = parser.parse_args()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # Dynamo warns of what is explained here
    text = transcript()
    if args.write:
        PAGE.write_text(page(text), encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
