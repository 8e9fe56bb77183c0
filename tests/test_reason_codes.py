"""The catalogue of reasons: the source uses it, decides by it, and people find each code."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from pgraph import reason_codes
from pgraph.reason_codes import CATALOGUE
from pgraph.reasons import Reason

REPO = pathlib.Path(__file__).resolve().parents[1]
SOURCE = {
    path.relative_to(REPO).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((REPO / "pgraph").rglob("*.py"))
}
# What makes a reason -> position of its code among the arguments.
MAKERS = {"Reason": 0, "NameRule": 0, "_refuse": 0, "why": 1}
TEXTS = {"fix", "sentence", "meaning"}


# -- entries -------------------------------------------------------------------------------------


def test_each_code_has_one_entry() -> None:
    groups = [group for name, group in vars(reason_codes).items() if name.startswith("_OF_")]
    codes = [entry.code for group in groups for entry in group]
    assert len(codes) == len(set(codes)) == len(CATALOGUE) >= 40


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=CATALOGUE)
def test_an_entry_is_a_sentence_and_a_fix(entry: reason_codes.ReasonCode) -> None:
    assert entry.meaning[0].isupper() or entry.meaning.startswith("pgraph")
    assert entry.meaning.endswith(".")
    assert entry.fix
    assert not entry.fix.endswith(".")
    assert entry.actionable != entry.fix.startswith("nothing to do")


def test_a_reason_knows_its_entry() -> None:
    general = Reason("host-only", "my::op has no tensors")
    assert general.info is CATALOGUE["host-only"]
    assert general.fix == general.info.fix
    special = dataclasses.replace(general, fix="drop it")
    assert special.fix == "drop it"
    assert special.info is general.info
    assert set(dataclasses.asdict(special)) == {"code", "sentence", "fix", "where"}


def test_an_unknown_code_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no reason has the code 'host-onyl'\. Fix: add it to"):
        Reason("host-onyl", "my::op has no tensors")


# -- the source ----------------------------------------------------------------------------------


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(what is called, the code that it is given) of each call that makes a reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
            by_name = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            yield node.func.id, (by_name or [node.args[MAKERS[node.func.id]]])[0]


def codes_in(code: ast.expr, tree: ast.Module) -> set[str]:
    """The codes that an argument may stand for; none where it is handed on."""
    if isinstance(code, ast.Constant):
        return {code.value}
    if isinstance(code, ast.Name):
        values = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and code.id in {getattr(target, "id", None) for target in _targets(node)}
        ]
        return {
            part.value
            for value in values
            for part in ([value.body, value.orelse] if isinstance(value, ast.IfExp) else [value])
            if isinstance(part, ast.Constant)
        }
    assert isinstance(code, ast.Attribute), ast.unparse(code)
    assert code.attr == "code", ast.unparse(code)
    return set()


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def test_the_catalogue_holds_the_codes_of_the_source_and_no_others() -> None:
    used = {found for tree in SOURCE.values() for _, code in calls(tree) for found in codes_in(code, tree)}
    assert used == set(CATALOGUE)


def test_what_hands_a_code_on_is_known() -> None:
    """Else a code could reach a reason unseen by the test above."""
    for path, tree in SOURCE.items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or function.name in MAKERS:
                continue
            parameters = {argument.arg for argument in function.args.args}
            for _, code in calls(function):
                assert not (isinstance(code, ast.Name) and code.id in parameters), f"{path}: {function.name}"


def decisions(tree: ast.AST) -> Iterator[str]:
    """Places that decide by the text of a reason, or by its code as a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = {side.attr for side in sides if isinstance(side, ast.Attribute)}
            literal = any(
                isinstance(part, ast.Constant) and part.value in CATALOGUE
                for side in sides
                for part in ast.walk(side)
            )
            if named & TEXTS or literal or ("code" in named and not _of_two_reasons(node)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            read = [node.func.value, *(node.args if ast.unparse(node.func.value) == "re" else ())]
            if any(isinstance(part, ast.Attribute) and part.attr in TEXTS | {"code"} for part in read):
                yield ast.unparse(node)
        elif isinstance(node, ast.Set | ast.Dict):
            members = node.elts if isinstance(node, ast.Set) else node.keys
            if any(isinstance(member, ast.Constant) and _only_a_code(member.value) for member in members):
                yield ast.unparse(node)


def _of_two_reasons(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    equal = all(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops)
    return equal and all(isinstance(side, ast.Attribute) and side.attr == "code" for side in sides)


def _only_a_code(value: object) -> bool:
    """Codes of one word are words of other things too."""
    return isinstance(value, str) and "-" in value and value in CATALOGUE


@pytest.mark.parametrize("path", [path for path in SOURCE if path != "pgraph/reasons.py"])
def test_no_decision_reads_a_text_or_a_code(path: str) -> None:
    assert list(decisions(SOURCE[path])) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('reason.fix.startswith("nothing")', True),
        ('"graph" in reason.sentence', True),
        ('reason.code == "too-small"', True),
        ('reason.code in ("rng", "rng-state")', True),
        ("reason.code in _CODES", True),
        ("reason.code == SEEDS", True),
        ('code == "too-small"', True),
        ('_CODES = frozenset({"capture-lost"})', True),
        ('re.search("nothing", reason.fix)', True),
        ("a.code == b.code", False),
        ("reason.info.too_small", False),
        ('Reason("too-small", f"{n} ops")', False),
    ],
)
def test_the_test_above_sees(source: str, found: bool) -> None:
    assert bool(list(decisions(ast.parse(source)))) is found


# -- people --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CATALOGUE)
def test_a_code_is_documented(code: str) -> None:
    pages = [page for page in (REPO / "README.md", REPO / "pgraph" / "README.md") if page.exists()]
    assert any(f"`{code}`" in page.read_text(encoding="utf-8") for page in pages)
