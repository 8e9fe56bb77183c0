"""Write the measured tables and charts of the documents from ``bench/results/*.json``.

    python bench/readme.py            # rewrite `PAGES` and bench/results/*.svg
    python bench/readme.py --check    # exit 1 if a document or a chart is not what the results say

A table goes between ``<!-- table:NAME -->`` and ``<!-- /table -->``; the names are in `NAMES`. A name may end
in ``@GPU`` (``memory@nvidia-h200``) to show one machine only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import schema
from _paths import REPO, RESULTS
from readme_chart import chart, chart_link, chart_name
from readme_claims import claims_table
from readme_coverage import coverage_table, models_table, summary_table
from readme_rows import File, is_expandable
from readme_seeds import seeds_table
from readme_sizes import probes_table, sizes_table
from readme_tables import (
    batch_table,
    equality_table,
    gpu_tests_table,
    losses_table,
    memory_table,
    reasons_table,
    saved_table,
    titan_table,
)
from readme_uses import uses_table

MARKERS = re.compile(r"(<!-- table:(?P<name>[\w@.-]+) -->\n)(?P<body>.*?)(<!-- /table -->)", re.DOTALL)
PAGES = tuple(
    REPO / name for name in ("README.md", "bench/RESULTS.md", "bench/COVERAGE.md", "pgraph/REASONS.md")
)

TABLES: dict[str, Callable[[File], str]] = {
    "summary": summary_table,
    "memory": lambda data: memory_table(data, lambda row: not is_expandable(row)),
    "memory-expandable": lambda data: memory_table(data, is_expandable),
    "equality": equality_table,
    "largest-batch": batch_table,
    "torchtitan": lambda data: titan_table(data, lambda row: not is_expandable(row)),
    "torchtitan-expandable": lambda data: titan_table(data, is_expandable),
    "torchtitan-saved": saved_table,
    "torchtitan-losses": losses_table,
    "coverage": coverage_table,
    "coverage-models": models_table,
    "seeds": seeds_table,
    "uses": uses_table,
    "sizes": sizes_table,
    "probes": probes_table,
}
# A marker's name, and how the names of its pictures begin.
CHARTS = {"chart": "memory", "torchtitan-chart": "torchtitan", "coverage-chart": "coverage"}
GPU_TESTS = "gpu-tests"
REASONS = "reasons"
CLAIMS = "claims"
NAMES = (*TABLES, *CHARTS, GPU_TESTS, REASONS, CLAIMS)


@dataclasses.dataclass(frozen=True)
class Results:
    """What the tables of one page are made of.

    Args:
        files: the benchmarks' results.
        records: the records of GPU tests, by file name.
        folder: where these files and the pictures are, seen from the page.
    """

    files: Sequence[File]
    records: Mapping[str, File]
    folder: str


def table(name: str, results: Results) -> str:
    """The Markdown of the table or chart called `name`, with a blank line around it."""
    kind, _, gpu = name.partition("@")
    if kind not in NAMES:
        raise ValueError(
            f"table:{name} is unknown; choose one of {', '.join(NAMES)}, with @GPU behind it or not"
        )
    if kind == REASONS:
        return "\n" + reasons_table() + "\n"
    if kind == CLAIMS:
        return "\n" + claims_table([data for data in results.files if not gpu or data["gpu"] == gpu]) + "\n"
    if kind == GPU_TESTS:
        return "\n" + gpu_tests_table(results.records, results.folder) + "\n"

    def one(data: File) -> str:
        return TABLES[kind](data) if kind in TABLES else chart_link(data, CHARTS[kind], results.folder)

    shown = [text for data in results.files if not gpu or data["gpu"] == gpu if (text := one(data))]
    return "\n" + "\n".join(shown or ["No results yet.\n"]) + "\n"


def rewrite(text: str, results: Results) -> str:
    """`text` with every marked table written anew."""
    return MARKERS.sub(lambda match: match[1] + table(match["name"], results) + match[4], text)


def load(folder: Path) -> tuple[list[File], dict[str, File]]:
    """The benchmarks' results in a folder, in order of their names, and the records of GPU tests by name."""
    files, records = [], {}
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("gpu-tests-"):
            records[path.name] = json.loads(path.read_text(encoding="utf-8"))
        else:
            files.append(schema.read(path))
    return files, records


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check; returns 1 if something is stale or missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is stale")
    parser.add_argument("--pages", type=Path, nargs="+", default=list(PAGES), help="default: `PAGES`")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)

    files, records = load(args.results)
    written: dict[Path, str] = {}
    stale = []
    for page in args.pages:
        old = page.read_text(encoding="utf-8")
        if not MARKERS.search(old):
            print(
                f"{page}: no table markers; "
                "add <!-- table:memory --> and <!-- /table --> on lines of their own"
            )
            return 1
        folder = os.path.relpath(args.results.resolve(), page.resolve().parent)
        written[page] = rewrite(old, Results(files, records, folder))
        stale += [f"{page.name} is stale"] if written[page] != old else []
    for data in files:
        problem = chart(data, args.results / chart_name(data), args.check)
        stale += [problem] if problem else []
    if args.check:
        if stale:
            print("; ".join(stale) + ": run python bench/readme.py and commit what it writes")
        return bool(stale)
    for page, text in written.items():
        page.write_text(text, encoding="utf-8")
    names = ", ".join(page.name for page in written)
    print(f"{names}: {'rewritten' if stale else 'unchanged'}, {len(files)} result file(s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
