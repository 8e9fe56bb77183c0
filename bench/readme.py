"""Write the README's measured tables and the charts from ``bench/results/*.json``.

    python bench/readme.py            # rewrite README.md and bench/results/*.svg in place
    python bench/readme.py --check    # exit 1 if the README or a chart is not what the results say

A table goes between ``<!-- table:NAME -->`` and ``<!-- /table -->``; names: memory, memory-expandable,
largest-batch, equality, chart; torchtitan, torchtitan-expandable, torchtitan-losses, torchtitan-chart; and
coverage, coverage-chart, and for ``bench/COVERAGE.md``, which is written too, coverage-models. A name may
end in ``@GPU`` (``memory@nvidia-h200``) to show one machine only.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import schema
from _paths import REPO, RESULTS
from readme_chart import chart, chart_link, chart_name
from readme_coverage import coverage_table, models_table
from readme_rows import File, is_expandable
from readme_tables import batch_table, equality_table, losses_table, memory_table, titan_table

MARKERS = re.compile(r"(<!-- table:(?P<name>[\w@.-]+) -->\n)(?P<body>.*?)(<!-- /table -->)", re.DOTALL)

TABLES: dict[str, Callable[[File], str]] = {
    "memory": lambda data: memory_table(data, lambda row: not is_expandable(row)),
    "memory-expandable": lambda data: memory_table(data, is_expandable),
    "equality": equality_table,
    "largest-batch": batch_table,
    "chart": lambda data: chart_link(data, "memory"),
    "torchtitan": lambda data: titan_table(data, lambda row: not is_expandable(row)),
    "torchtitan-expandable": lambda data: titan_table(data, is_expandable),
    "torchtitan-losses": losses_table,
    "torchtitan-chart": lambda data: chart_link(data, "torchtitan"),
    "coverage": coverage_table,
    "coverage-chart": lambda data: chart_link(data, "coverage"),
    "coverage-models": models_table,
}


def table(name: str, files: Sequence[File]) -> str:
    """The Markdown of the table called `name`, with a blank line around it."""
    kind, _, gpu = name.partition("@")
    if kind not in TABLES:
        raise ValueError(
            f"table:{name} is unknown; choose one of {', '.join(TABLES)}, with @GPU behind it or not"
        )
    chosen = [data for data in files if not gpu or data["gpu"] == gpu]
    partitions = [text for data in chosen if (text := TABLES[kind](data))]
    return "\n" + "\n".join(partitions or ["No results yet.\n"]) + "\n"


def rewrite(text: str, files: Sequence[File]) -> str:
    """`text` with every marked table written anew."""
    return MARKERS.sub(lambda match: match[1] + table(match["name"], files) + match[4], text)


def load(folder: Path) -> list[File]:
    """All result files of a folder, in order of their names."""
    # The record of the GPU tests lies there too; it is no benchmark's.
    paths = [path for path in sorted(folder.glob("*.json")) if not path.name.startswith("gpu-tests-")]
    return [schema.read(path) for path in paths]


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check; returns 1 if something is stale or missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is stale")
    parser.add_argument("--readme", type=Path, default=REPO / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    help_models = "default: bench/COVERAGE.md beside the README"
    parser.add_argument("--models", type=Path, default=None, help=help_models)
    args = parser.parse_args(argv)

    files = load(args.results)
    models = args.models or args.readme.parent / "bench" / "COVERAGE.md"
    pages = [args.readme, *([models] if models.exists() else [])]
    written: dict[Path, str] = {}
    stale = []
    for page in pages:
        old = page.read_text(encoding="utf-8")
        if not MARKERS.search(old):
            print(
                f"{page}: no table markers; "
                "add <!-- table:memory --> and <!-- /table --> on lines of their own"
            )
            return 1
        written[page] = rewrite(old, files)
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
    print(f"{args.readme}: {'rewritten' if stale else 'unchanged'}, {len(files)} result file(s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
