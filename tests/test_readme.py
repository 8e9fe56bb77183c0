"""The README says what is so: options, names, commands. (Links, sizes, codes: `test_documents`.)"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pgraph
from pgraph import environment

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
TEST_COMMAND = ".venv/bin/python -m pytest -n 2"


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table whose header row starts with `heading`."""
    lines = README.split(f"\n| {heading} |", 1)[1].splitlines()[2:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def blocks(language: str) -> list[str]:
    """Fenced code of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_option_table_is_the_options() -> None:
    shown = {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in rows("option")}
    assert shown == pgraph.list_options()
    # The defaults as they are written, so that 1 is not taken for True.
    assert {k: json.dumps(v) for k, v in shown.items()} == {
        k: json.dumps(v) for k, v in pgraph.list_options().items()
    }


def test_option_table_names_the_variables() -> None:
    shown = {row[0].strip("`"): row[2].strip("`") for row in rows("option")}
    assert shown == {name: environment.variable(name) or "-" for name in pgraph.list_options()}


def test_public_names_are_mentioned_and_exist() -> None:
    named = set(re.findall(r"pgraph\.([a-z_]+)\(", README)) | set(re.findall(r"`pgraph\.([a-z_]+)`", README))
    assert named == {name for name in pgraph.__all__ if name.islower()}


def test_commands_run_files_that_exist() -> None:
    commands = [command for block in blocks("sh") for command in re.split(r"\n|&&", block) if command.strip()]
    assert len(commands) >= 7
    for command in commands:
        words = shlex.split(command, comments=True)
        assert words[0] in ("bash", ".venv/bin/python"), command
        if words[1] == "-m":
            assert words[2] == "pytest", command
        else:
            assert (REPO / words[1]).is_file(), command


def test_ci_ends_with_the_command_of_the_readme() -> None:
    last = (REPO / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]
    assert last == f"exec {TEST_COMMAND}"
    assert f"bash .ci/setup test && {TEST_COMMAND}\n" in README


def test_the_first_program_prints_what_is_shown() -> None:
    """On the host driver, as the text above its output says. Times and moved addresses vary; where a few
    sets of addresses happen to take turns, each gets an exec of its own."""
    (program,), (shown,) = blocks("python"), blocks("text")[:1]
    assert "PGRAPH_DRIVER=host PGRAPH_CODEGEN=aten" in README
    environment = {**os.environ, "PGRAPH_DRIVER": "host", "PGRAPH_CODEGEN": "aten"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")

    def steady(text: str) -> str:
        return re.sub(r"in [\d,]+ ms|[\d,]+ nodes rewritten|[\d,]+ B of execs", "N", text)

    assert steady(done.stdout) == steady(shown)
