"""The README says what is so: options, names, commands. (Links, sizes, codes: `test_documents`.)"""

from __future__ import annotations

import ast
import json
import re
import shlex
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


def test_example_code_is_python() -> None:
    assert blocks("python")
    for block in blocks("python"):
        ast.parse(block)
