"""The architecture, read from the imports: they go down only, and nothing imports in a circle."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1] / "pgraph"

# From the bottom to the top. A folder, or a file beside the folders, may import what stands before it.
LAYERS = (
    "text",
    "reason_codes",
    "reasons",
    "errors",
    "environment",
    "options",
    "compat",
    "native",
    "template",
    "ops",
    "rewrites",
    "partition",
    "drivers",
    "capture",
    "compute",
    "launch",
    "runtime",
    "compiler",
    "backend",
    "explanation",
    "__init__",
)
LINES = 400

# What a newcomer reads in one sitting, in this order.
CORE = (
    "capture/record.py",
    "template/match.py",
    "template/plan.py",
    "launch/program.py",
    "launch/interpreter.py",
    "runtime/partition_runner.py",
)
CORE_LINES = 1300


def files() -> list[pathlib.Path]:
    return sorted(ROOT.rglob("*.py"))


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {module_of(path): path for path in files()}


def layer_of(module: str) -> str:
    return module.split(".")[1]


def imports_of(path: pathlib.Path) -> Iterator[str]:
    """Modules of pgraph that a file imports, wherever in it, type checking included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in whole]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "pgraph")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    here = LAYERS.index(layer_of(module))
    for imported in imports_of(MODULES[module]):
        assert imported in MODULES, f"{module} imports {imported}: say which file"
        there = LAYERS.index(layer_of(imported))
        assert there <= here, f"{module} imports {imported}, which stands above it"


def test_no_circles() -> None:
    """Also within a folder."""
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for imported in imports_of(MODULES[module]):
                visit(imported, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


SOURCES = files() + sorted(path for kind in ("c", "cpp", "h") for path in ROOT.rglob(f"*.{kind}"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_read_at_one_go(path: pathlib.Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES


def test_each_folder_says_what_it_is_for() -> None:
    for folder in {path.parent for path in files()} - {ROOT, ROOT / "compat"}:
        (paragraph,) = ast.parse((folder / "__init__.py").read_text()).body
        assert isinstance(paragraph, ast.Expr), f"{folder}/__init__.py holds code"


def test_the_core_is_read_in_one_sitting() -> None:
    assert sum(len((ROOT / name).read_text().splitlines()) for name in CORE) <= CORE_LINES
    told = (ROOT / "README.md").read_text()
    places = [told.index(f"`{name}`", told.index("**The core**")) for name in CORE]
    assert places == sorted(places), "pgraph/README.md tells another order"


def test_a_class_name_stands_for_one_thing() -> None:
    """Wherever it is: who reads of one, or is told of one by an error, need not ask which."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert len(found) > 200
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}
