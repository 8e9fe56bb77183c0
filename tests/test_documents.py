"""The documents say what is so: links, files, notes and reason codes are those of the source."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "pgraph"
GUIDE = (PACKAGE / "README.md").read_text(encoding="utf-8")
REASONS = (PACKAGE / "REASONS.md").read_text(encoding="utf-8")
DOCUMENTS = sorted(path for path in REPO.rglob("*.md") if not {".venv", ".git"} & set(path.parts))
SOURCES = [
    path
    for folder in ("pgraph", "bench", "tests", "examples")
    for path in sorted((REPO / folder).rglob("*"))
    if path.suffix in (".py", ".c", ".cpp", ".h")
]
NOTHING: dict[str, set[Any]] = {"missing": set(), "stale": set()}
LIMITS = {"README.md": 12_000, "pgraph/README.md": 15_000}


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one of its level."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def table(text: str) -> list[list[str]]:
    """The cells of every table row in `text`, without the heads and the rules below them."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    below_head = [line.startswith("|--") for line in lines]
    body = [
        line
        for line, rule, head in zip(lines, below_head, [*below_head[1:], False], strict=True)
        if not rule and not head
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


# -- every document ------------------------------------------------------------------------------


LINKS = [
    pytest.param(page, target, id=f"{page.relative_to(REPO)}: {target}")
    for page in DOCUMENTS
    for target in sorted(set(re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))))
]


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_link_resolves(page: Path, target: str) -> None:
    assert not target.startswith("/")
    if "://" in target:
        return
    name, _, anchor = target.partition("#")
    found = page.parent / name if name else page
    assert found.exists()
    if anchor:
        headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings]


@pytest.mark.parametrize("name", LIMITS)
def test_a_document_is_read_in_one_go(name: str) -> None:
    assert len((REPO / name).read_bytes()) <= LIMITS[name]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(REPO)))
def test_commands_run_programs_that_exist(page: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).splitlines():
        for word in shlex.split(line, comments=True):
            if re.search(r"\.py$|^\.ci/", word) and not word.startswith("--"):
                assert (REPO / word).is_file(), line


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(REPO)))
def test_programs_can_be_pasted(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for block in blocks:
        compile(block, str(page), "exec")


def test_the_measured_tables_are_what_the_results_say(load: Any) -> None:
    assert load("readme").main(["--check"]) == 0


def test_every_table_is_shown(load: Any) -> None:
    readme = load("readme")
    pages = [page.read_text(encoding="utf-8") for page in readme.PAGES]
    shown = {match["name"].partition("@")[0] for page in pages for match in readme.MARKERS.finditer(page)}
    assert shown == set(readme.NAMES)


# -- pgraph/README.md ----------------------------------------------------------------------------


def test_the_file_map_names_each_file_once() -> None:
    named = []
    for folder, files in table(section(GUIDE, "Files")):
        name = folder.strip("`/").removeprefix("pgraph")
        named += [PACKAGE / name / file for file in re.findall(r"`([\w.]+)`", files)]
    found = [
        path
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".c", ".cpp", ".h", ".typed") and path.name != "__init__.py"
    ]
    assert {"missing": set(found) - set(named), "stale": set(named) - set(found)} == NOTHING
    assert len(named) == len(set(named)), "a file is named twice"


def test_the_index_of_notes_is_the_notes() -> None:
    """A note is written where a line begins with its name; elsewhere it is referred to."""
    indexed = [(note, PACKAGE / file.strip("`")) for note, file, _ in table(section(GUIDE, "Notes"))]
    begins = re.compile(r'^(?:"""|[\s*#/])*Note \[([^\]]+)\]\s*$', re.MULTILINE)
    written = [
        (note, path)
        for path in SOURCES
        if path.is_relative_to(PACKAGE)
        for note in begins.findall(path.read_text(encoding="utf-8"))
    ]
    assert {"missing": set(written) - set(indexed), "stale": set(indexed) - set(written)} == NOTHING
    assert indexed == sorted(indexed)
    assert len(written) == len(set(written)), "a note is written twice"


def test_notes_that_are_referred_to_exist() -> None:
    known = {note for note, _, _ in table(section(GUIDE, "Notes"))}
    for path in SOURCES:
        # A name may go on in the next line, behind that line's comment sign.
        text = re.sub(r"\s*\n[\s*#/]*", " ", path.read_text(encoding="utf-8"))
        if path.is_relative_to(REPO / "bench"):
            known |= set(re.findall(r"Note \[([^\]]+)\]: ", text))
        named = set(re.findall(r"Note \[([A-Za-z][\w' ,-]+)\]", text))
        assert named <= known, path


# -- reason codes --------------------------------------------------------------------------------


def codes_in_source() -> set[str]:
    """Every code that a reason is made with: constants, or names of constants of the same file."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            given = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
            if name in ("Reason", "ReasonCode", "why", "_refuse"):
                given += call.args[:2]
            values = [getattr(a, "value", constants.get(getattr(a, "id", ""))) for a in given]
            found |= {v for v in values if isinstance(v, str) and re.fullmatch(r"[a-z]+(-[a-z]+)*", v)}
    return found


def codes_of(text: str) -> list[str]:
    return [code for row in table(text) for code in re.findall(r"`([^`]+)`", row[0])]


def test_every_reason_code_is_explained() -> None:
    shown = codes_of(REASONS)
    assert len(shown) == len(set(shown))
    source = codes_in_source()
    assert {"missing": source - set(shown), "stale": set(shown) - source} == NOTHING


def test_the_readme_has_every_reason_code() -> None:
    shown = codes_of(section((REPO / "README.md").read_text(encoding="utf-8"), "Reason codes"))
    assert sorted(shown) == sorted(codes_of(REASONS))
