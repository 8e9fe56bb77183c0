"""List the catalogue, or run all of it and print what came out as a table.

python examples/capture_failures/run_all.py --list      # symptom, cause, fix of each entry
python examples/capture_failures/run_all.py             # each in a process of its own
python examples/capture_failures/run_all.py --device cpu host_read moe_routing
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence

from _harness import CAPTURED, FOLDER, Entry, default_device

TIMEOUT = 600  # seconds for one entry


def names() -> list[str]:
    """Every entry, in the order of the README."""
    order = [
        "host_read",
        "other_thread",
        "unjoined_stream",
        "outside_event",
        "default_stream",
        "stale_stream",
        "autotune_sync",
        "unpinned_copy",
        "mask_assignment",
        "checkpoint_rng",
        "optimizer_capturable",
        "autocast_cache",
        "moe_routing",
        "oom_in_capture",
        "freed_input",
        "hang_at_exit",
        "aliased_gradient",
        "baked_scalar",
    ]
    files = {path.stem for path in FOLDER.glob("[a-z]*.py")} - {"run_all"}
    assert files == set(order), f"files and list differ: {sorted(files ^ set(order))}"
    return order


def load(name: str) -> Entry:
    """The entry of a file."""
    entry: Entry = importlib.import_module(name).ENTRY
    return entry


def catalogue() -> str:
    """The README's table."""
    header = ("symptom", "cause", "fix", "pgraph says", "file")
    rows = []
    for name in names():
        e = load(name)
        says = CAPTURED if e.on_gpu == CAPTURED else f"`{e.on_gpu}`"
        rows.append((e.symptom, e.cause, e.fix, says, f"[{name}.py]({name}.py)"))
    return table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(row) for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def run(name: str, device: str) -> dict[str, str]:
    """One row of the table; an entry that fails to run is a row too."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"entry": name, "pgraph": f"did not end within {TIMEOUT} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"entry": name, "pgraph": f"status {done.returncode}: {last}"}
    row: dict[str, str] = json.loads(found[-1])
    return row


def main() -> None:
    """Run the entries named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "entries", nargs="*", metavar="entry", help="names of files, without .py; all if none"
    )
    parser.add_argument("--list", action="store_true", help="print the catalogue and run nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device().type)
    chosen = parser.parse_args()
    if unknown := set(chosen.entries) - set(names()):
        parser.error(f"no entry {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    if chosen.device == "cuda" and default_device().type != "cuda":
        parser.error("--device cuda, but torch sees no GPU")
    if chosen.list:
        print(catalogue())
        return
    columns = ("entry", "plain CUDA graphs", "pgraph", "fixed")
    rows, failed = [], 0
    for name in chosen.entries or names():
        print(f"running {name}", file=sys.stderr)
        row = run(name, chosen.device)
        failed += "fixed" not in row
        rows.append([row.get(column, "-") for column in columns])
    print(table(columns, rows))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
