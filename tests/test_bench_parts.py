"""The parts of `.ci/gpu`: each command is one that its program understands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PARTS = REPO / ".ci" / "gpu"

# Instead of Python: notes its arguments.
NOTING = """#!/bin/sh
exec "{python}" -c 'import json, sys; print(json.dumps(sys.argv[1:]), file=open("{log}", "a"))' "$@"
"""

# Runs a program up to the point where it has understood its arguments.
PARSING = """
import argparse, json, runpy, sys
sys.path.insert(0, "bench")
real = argparse.ArgumentParser.parse_args
def parse(self, args=None, namespace=None):
    real(self, args, namespace)
    raise SystemExit("understood")
argparse.ArgumentParser.parse_args = parse
for line in sys.stdin:
    sys.argv = json.loads(line)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        told = "it has no arguments"
    except SystemExit as end:
        told = str(end)
    print(json.dumps([sys.argv, told]))
"""


def parts() -> list[str]:
    """The names that the script itself lists."""
    line = next(line for line in PARTS.read_text().splitlines() if line.startswith("part="))
    return line.partition("one of: ")[2].rstrip("}").split()


def test_each_part_is_there() -> None:
    assert len(parts()) >= 15
    assert all(f"\n{part})" in PARTS.read_text() for part in parts())


def test_programs_understand_what_the_parts_tell_them(tmp_path: Path) -> None:
    log, stand_in = tmp_path / "log", tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(NOTING.format(python=sys.executable, log=log))
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{stand_in.parent}:{os.environ['PATH']}", "PGRAPH_OTHER": str(REPO)}
    for part in parts():
        done = subprocess.run(
            ["bash", str(PARTS), part, str(tmp_path / "out"), "60"],
            capture_output=True,
            text=True,
            env=env,
            timeout=120,
        )
        assert done.returncode == 0, f"{part}: {done.stderr}"
    commands = [json.loads(line) for line in log.read_text().splitlines()]
    programs = sorted({json.dumps(c) for c in commands if c[0].startswith("bench/")})
    assert len(programs) >= 12
    done = subprocess.run(
        [sys.executable, "-c", PARSING],
        input="\n".join(programs),
        capture_output=True,
        text=True,
        cwd=REPO,
        timeout=300,
        env={**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'examples'}"},
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    if len(found) < len(programs):
        pytest.fail(done.stderr[-2000:])
    assert [command for command, told in found if told != "understood"] == [], done.stderr[-2000:]


def test_what_has_run_is_written_down_when_time_is_up(tmp_path: Path) -> None:
    """A part that is ended with SIGTERM, as `timeout` does it, leaves a record of its finished tests."""
    test = tmp_path / "test_slow.py"
    begun = tmp_path / "begun"
    test.write_text(
        "import pathlib, time\n\ndef test_one(): pass\n\n"
        f"def test_two():\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(60)\n"
    )
    command = [sys.executable, str(REPO / "tests" / "gpu" / "run_recorded.py"), "--out", str(tmp_path)]
    with subprocess.Popen(
        [*command, "-p", "no:xdist", str(test)], stdout=subprocess.PIPE, text=True, cwd=REPO
    ) as process:
        deadline = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        process.communicate(timeout=60)
    (path,) = tmp_path.glob("gpu-tests-*.json")
    record = json.loads(path.read_text())
    assert record["interrupted"]
    assert [t["outcome"] for t in record["tests"] if t["nodeid"].endswith("test_one")] == ["passed"]
