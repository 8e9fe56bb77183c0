"""Run the GPU tests and write down what they said, with the machine they said it on.

    python3 tests/gpu/run_recorded.py --out DIR [pytest arguments]

The environment variable PGRAPH_COMMIT names the commit where git is not at hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Recorder:
    """Collects one outcome per test: the worst of its phases."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(
            report.nodeid, {"nodeid": report.nodeid, "outcome": "passed", "seconds": 0.0}
        )
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if report.skipped and test["outcome"] == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            test.update(outcome="skipped", reason=reason)
        elif report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            test.update(outcome="failed", phase=report.when, text=_here("\n".join(lines))[:3000])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = _here(str(report.longrepr))[-3000:]
            self.tests[report.nodeid] = {"nodeid": report.nodeid, "outcome": "failed", "text": text}


def _here(text: str) -> str:
    """The text with paths as they are from the checkout."""
    return text.replace(f"{ROOT}{os.sep}", "")


def machine() -> dict[str, Any]:
    """GPU, driver and versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    return {
        "gpu": gpu,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": os.environ.get("PGRAPH_COMMIT"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the record")
    args, rest = parser.parse_known_args()
    sys.path.insert(0, str(ROOT))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what has run is written down
    recorder = Recorder()
    options = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-q",
        "--tb=short",
        "--show-capture=no",  # torch's trace records would bury the report
        f"--rootdir={ROOT}",
    ]
    targets = [r for r in rest if not r.startswith("-") and ("::" in r or r.endswith(".py"))] or [str(HERE)]
    status = int(
        pytest.main([*options, *targets, *[r for r in rest if r not in targets]], plugins=[recorder])
    )
    tests = list(recorder.tests.values())
    counts = {what: sum(t["outcome"] == what for t in tests) for what in ("passed", "failed", "skipped")}
    record = {
        **machine(),
        **counts,
        **({"interrupted": True} if status == pytest.ExitCode.INTERRUPTED else {}),
        "seconds": round(sum(t.get("seconds", 0) for t in tests), 1),
        "tests": tests,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", record["gpu"].lower()).strip("-")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpu-tests-{slug}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    lines = ["slowest:"]
    lines += [
        f"  {t['seconds']:6.1f} s  {t['nodeid']}"
        for t in sorted(tests, key=lambda t: -t.get("seconds", 0.0))[:10]
        if "seconds" in t
    ]
    lines += [f"\nFAILED {t['nodeid']}\n{t['text'][:800]}" for t in tests if t["outcome"] == "failed"]
    lines.append(
        f"\n{path}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
