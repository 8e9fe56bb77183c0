"""Options: a misspelt or ill-typed one is an error that names the nearest right one."""

from __future__ import annotations

import textwrap
from typing import Any

import expecttest
import pytest
import torch

import pgraph
from pgraph.errors import OptionError
from pgraph.options import Options, parse


class TestTexts(expecttest.TestCase):
    """What a user reads."""

    def refused(self, **given: Any) -> str:
        with pytest.raises(OptionError) as caught:
            parse(given)
        return textwrap.fill(str(caught.value), 80)

    def test_unknown_with_near_matches(self) -> None:
        self.assertExpectedInline(
            self.refused(max_capture=3),
            """\
unknown pgraph option 'max_capture': did you mean 'max_captures' or
'capture_sizes' or 'require_full_capture'? (pgraph.list_options() lists them)""",
        )
        self.assertExpectedInline(
            self.refused(drivers="host"),
            """\
unknown pgraph option 'drivers': did you mean 'driver'? (pgraph.list_options()
lists them)""",
        )

    def test_unknown_without_any(self) -> None:
        self.assertExpectedInline(
            self.refused(zzz=3),
            """\
unknown pgraph option 'zzz': the options are driver, codegen, warmup, min_ops,
max_captures, memory_slack_mb, capture_sizes, require_full_capture, inductor
(pgraph.list_options() lists them)""",
        )

    def test_not_one_of_the_choices(self) -> None:
        self.assertExpectedInline(
            self.refused(driver="hosts"),
            """\
pgraph option 'driver' is 'hosts'; it must be one of 'auto', 'cuda', 'host', did
you mean 'host'?""",
        )
        self.assertExpectedInline(
            self.refused(codegen=7), """pgraph option 'codegen' is 7; it must be one of 'inductor', 'aten'"""
        )

    def test_ill_typed(self) -> None:
        self.assertExpectedInline(
            self.refused(warmup="3"), """pgraph option 'warmup' is '3'; it must be an int, not str"""
        )
        self.assertExpectedInline(
            self.refused(min_ops=True), """pgraph option 'min_ops' is True; it must be an int, not bool"""
        )
        self.assertExpectedInline(
            self.refused(inductor=[1]), """pgraph option 'inductor' is [1]; it must be a dict, not list"""
        )

    def test_out_of_range(self) -> None:
        self.assertExpectedInline(
            self.refused(max_captures=0), """pgraph option 'max_captures' is 0; it must be at least 1"""
        )
        self.assertExpectedInline(
            self.refused(memory_slack_mb=-1),
            """pgraph option 'memory_slack_mb' is -1; it must be at least 0""",
        )


def test_defaults_are_listed() -> None:
    """What `list_options` says is what no options give."""
    listed = pgraph.list_options()
    assert parse(None) == parse({}) == Options(**listed)
    assert listed["driver"] == "auto"
    listed["driver"] = "nonsense"
    assert pgraph.list_options()["driver"] == "auto", "a copy"


@pytest.mark.parametrize("name", ["warmup", "min_ops", "max_captures", "memory_slack_mb"])
def test_the_least_value_is_allowed(name: str) -> None:
    least = 0 if name == "memory_slack_mb" else 1
    assert getattr(parse({name: least}), name) == least
    with pytest.raises(OptionError, match=f"at least {least}"):
        parse({name: least - 1})


def test_errors_reach_the_user_of_torch_compile() -> None:
    """Dynamo passes them on, with the text."""
    compiled = torch.compile(lambda x: x + 1, backend="pgraph", options={"drvier": "host"})
    with pytest.raises(Exception, match="did you mean 'driver'"):
        compiled(torch.randn(3))


def test_unknown_modes_are_refused() -> None:
    """The modes are torch.compile's own."""
    compiled = torch.compile(lambda x: x + 1, backend="pgraph", mode="fastest")
    with pytest.raises(Exception, match="fastest"):
        compiled(torch.randn(3))
