"""What holds for the package as a whole: imports, entry point, logs, size."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

import pgraph

PACKAGE = pathlib.Path(pgraph.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that sees the same package."""
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=variables, check=False
    )


def test_importing_brings_neither_torch_nor_cuda() -> None:
    done = python("import sys, pgraph; print([m for m in ('torch', 'cuda', 'numpy') if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_dir_is_complete_from_the_start() -> None:
    done = python(
        "import pgraph; print(set(pgraph.__all__) - set(dir(pgraph)), '__version__' in dir(pgraph))"
    )
    assert (done.stdout.strip(), done.stderr) == ("set() True", "")


def test_public_names_resolve() -> None:
    for name in pgraph.__all__:
        assert callable(getattr(pgraph, name))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        pgraph.nonsense  # noqa: B018


def test_the_entry_point_is_registered() -> None:
    """torch.compile finds the backend by name, without an import of pgraph."""
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="pgraph")
    assert entry.value == "pgraph.backend:backend"
    import torch

    assert "pgraph" in torch._dynamo.list_backends()


PROGRAM = """
import torch
f = torch.compile(lambda x: (x * 2).cumsum(0), backend="pgraph",
                  options={"driver": "host", "codegen": "aten", "min_ops": 1})
for _ in range(3):
    f(torch.randn(4))
import pgraph
print(pgraph.report().launches)
"""


@pytest.mark.parametrize(
    ("setting", "heard"),
    [("+pgraph", True), ("+pgraph.template.match", False), ("+pgraph.capture.build", True)],
)
def test_torch_logs(setting: str, heard: bool) -> None:
    """The variable imports pgraph in the middle of torch's own import; the logs then appear."""
    done = python(PROGRAM, TORCH_LOGS=setting)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2"
    assert ("captured in" in done.stderr) == heard


def test_nothing_prints() -> None:
    """Whoever uses the package decides where texts go."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_the_pure_parts_stay_pure() -> None:
    """Neither torch nor CUDA in what is only logic."""
    names = ("text", "reason_codes", "reasons", "options", "errors")
    for path in (*(PACKAGE / f"{name}.py" for name in names), *sorted((PACKAGE / "template").glob("*.py"))):
        tree = ast.parse(path.read_text())
        imported = {
            module.split(".")[0]
            for node in ast.walk(tree)
            for module in (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not imported & {"torch", "cuda"}, path.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_small_and_say_what_they_are_for(path: pathlib.Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 550
    assert ast.get_docstring(ast.parse(text))
