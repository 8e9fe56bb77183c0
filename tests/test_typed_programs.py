"""Programs without a file: typed at a prompt, piped in, given to -c, run with exec()."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support import host

import pgraph
from pgraph.ops.fx import user_frame

SKIPPED = """
import torch

class Layers(torch.nn.Module):
    def forward(self, x):
        for _ in range(3):
            x = x * 2
            torch._dynamo.graph_break()
        return x
"""

READS = """
def step(x):
    y = x.sin().cos() * 2
    y = torch.linalg.solve(torch.eye(2), y)
    return y.exp() + y.sin() * 3
"""


def typed(text: str, name: str) -> dict[str, Any]:
    module: dict[str, Any] = {"torch": torch}
    exec(compile(text, name, "exec"), module)
    return module


NAMES = ["<stdin>", "<console>", "<ipython-input-3-0a1b>", "<python-input-0>", "<string>"]


@pytest.mark.parametrize("name", NAMES)
def test_what_dynamo_skips_is_told_of(name: str) -> None:
    host(typed(SKIPPED, name)["Layers"]())(torch.ones(3))
    assert "Layers.forward: skipped by Dynamo; [graph-break]" in str(pgraph.report())


@pytest.mark.parametrize("name", NAMES[:-1])
def test_reasons_name_the_line(name: str) -> None:
    host(typed(READS, name)["step"])(torch.ones(2, 2))
    report = str(pgraph.report())
    assert "[solver]" in report
    assert f" at {name}:4" in report


@pytest.mark.parametrize(("program", "line"), [("-c", "<string>:3"), ("train.py", None)])
def test_code_of_no_file(program: str, line: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields of a dataclass are set by such code, too, which is nobody's where the program has a file."""
    monkeypatch.setattr("sys.argv", [program])
    assert user_frame([(torch.__file__, 9), ("<string>", 3)]) == line
    assert user_frame([("/home/me/model.py", 17), ("<string>", 3)]) == "/home/me/model.py:17"


@pytest.mark.parametrize("how", ["-c", "-"])
def test_a_whole_program(how: str) -> None:
    program = SKIPPED + textwrap.dedent(
        """
        import pgraph
        options = {"driver": "host", "codegen": "aten"}
        torch.compile(Layers(), backend="pgraph", options=options)(torch.ones(3))
        print(pgraph.report())
        """
    )
    given = [program] if how == "-c" else []
    done = subprocess.run(
        [sys.executable, how, *given],
        input=None if given else program,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=300,
    )
    assert "Layers.forward: skipped by Dynamo; [graph-break]" in done.stdout, done.stderr
