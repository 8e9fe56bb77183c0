"""Options: a misspelt or ill-typed one is an error that names the nearest right one."""

from __future__ import annotations

import functools
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

    def test_no_dict(self) -> None:
        with pytest.raises(OptionError, match="pgraph options are 'warmup'; they must be a dict"):
            parse("warmup")  # type: ignore[arg-type]

    def test_a_wrapper_in_cpp(self) -> None:
        self.assertExpectedInline(
            self.refused(inductor={"cpp_wrapper": True}),
            """\
pgraph option 'inductor' sets cpp_wrapper: no capture can follow C++ that
allocates by itself, and launches need no wrapper. Fix: leave it out""",
        )

    def test_unknown_without_any(self) -> None:
        self.assertExpectedInline(
            self.refused(zzz=3),
            """\
unknown pgraph option 'zzz': the options are driver, codegen, warmup, min_ops,
capture_memory_mb, max_captures, memory_slack_mb, capture_sizes, compute_sizes,
step_aside, require_full_capture, inductor (pgraph.list_options() lists them)""",
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
        self.assertExpectedInline(
            self.refused(driver="HOST"),
            """\
pgraph option 'driver' is 'HOST'; it must be one of 'auto', 'cuda', 'host', did
you mean 'host'?""",
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
        self.assertExpectedInline(
            self.refused(inductor={1: True}),
            """\
pgraph option 'inductor' has the key 1, which is no str. Fix: name the setting,
e.g. {'max_autotune': True}""",
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


@pytest.mark.parametrize(
    "name", ["warmup", "min_ops", "max_captures", "capture_memory_mb", "memory_slack_mb"]
)
def test_the_least_value_is_allowed(name: str) -> None:
    least = 0 if name == "memory_slack_mb" else 1
    assert getattr(parse({name: least}), name) == least
    with pytest.raises(OptionError, match=f"at least {least}"):
        parse({name: least - 1})


@pytest.mark.parametrize("name", ["max_captures", "capture_memory_mb"])
def test_none_is_a_number_where_there_need_be_no_limit(name: str) -> None:
    assert getattr(parse({name: None}, {}), name) is None
    with pytest.raises(OptionError, match="it must be an int, not float"):
        parse({name: 2.5})
    with pytest.raises(OptionError, match="it must be an int, not NoneType"):
        parse({"warmup": None})


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


class TestEnvironment(expecttest.TestCase):
    """`PGRAPH_<OPTION>`: for programs whose config has no place for options."""

    def refused(self, **variables: str) -> str:
        with pytest.raises(OptionError) as caught:
            parse(None, variables)
        return textwrap.fill(str(caught.value), 80)

    def test_wrong_values_name_variable_value_and_fix(self) -> None:
        self.assertExpectedInline(
            self.refused(PGRAPH_WARMUP="two"),
            """\
PGRAPH_WARMUP is 'two'; it must be a whole number, e.g. 2. Fix: export
PGRAPH_WARMUP=... or unset it""",
        )
        self.assertExpectedInline(
            self.refused(PGRAPH_REQUIRE_FULL_CAPTURE="maybe"),
            """\
PGRAPH_REQUIRE_FULL_CAPTURE is 'maybe'; it must be 1 or 0 (also true, false,
yes, no, on, off). Fix: export PGRAPH_REQUIRE_FULL_CAPTURE=... or unset it""",
        )
        self.assertExpectedInline(
            self.refused(PGRAPH_CAPTURE_SIZES="128;256"),
            """\
PGRAPH_CAPTURE_SIZES is '128;256'; it must be sizes between commas, e.g.
128,256. Fix: export PGRAPH_CAPTURE_SIZES=... or unset it""",
        )

    def test_choices_and_ranges_are_those_of_the_options(self) -> None:
        self.assertExpectedInline(
            self.refused(PGRAPH_DRIVER="hosts"),
            """\
pgraph option 'driver' (from PGRAPH_DRIVER) is 'hosts'; it must be one of
'auto', 'cuda', 'host', did you mean 'host'?""",
        )
        self.assertExpectedInline(
            self.refused(PGRAPH_MAX_CAPTURES="0"),
            """pgraph option 'max_captures' (from PGRAPH_MAX_CAPTURES) is 0; it must be at\nleast 1""",
        )

    def test_an_option_without_a_variable(self) -> None:
        self.assertExpectedInline(
            self.refused(PGRAPH_INDUCTOR="max_autotune"),
            """\
PGRAPH_INDUCTOR is set, but 'inductor' has no variable. Fix: set Inductor's own
variables (TORCHINDUCTOR_...), or torch._inductor.config""",
        )


def test_every_option_but_inductor_can_come_from_the_environment() -> None:
    texts = {
        "driver": ("host", "host"),
        "codegen": ("aten", "aten"),
        "warmup": ("2", 2),
        "min_ops": (" 7 ", 7),
        "capture_memory_mb": ("64", 64),
        "max_captures": ("3", 3),
        "memory_slack_mb": ("0", 0),
        "capture_sizes": ("128, 256,", (128, 256)),
        "compute_sizes": ("check", "check"),
        "step_aside": ("no", False),
        "require_full_capture": ("True", True),
    }
    assert set(texts) == set(pgraph.list_options()) - {"inductor"}
    chosen = parse(None, {f"PGRAPH_{name.upper()}": text for name, (text, _) in texts.items()})
    assert {name: getattr(chosen, name) for name in texts} == {n: value for n, (_, value) in texts.items()}
    assert parse(None, {"PGRAPH_REQUIRE_FULL_CAPTURE": "off", "PGRAPH_WARMUP": ""}) == Options()


def test_explicit_options_win_over_the_environment() -> None:
    environment = {"PGRAPH_WARMUP": "5", "PGRAPH_MIN_OPS": "9", "PGRAPH_DRIVER": "nonsense"}
    chosen = parse({"warmup": 2, "driver": "host"}, environment)
    assert (chosen.warmup, chosen.min_ops, chosen.driver) == (2, 9, "host")


def test_unknown_variables_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    ours = {"PGRAPH_NATIVE": "0", "PGRAPH_COMMIT": "feed", "PGRAPH_TORCH": "torch==2.11.0", "OTHER": "1"}
    ours |= {"PGRAPH_FUZZ_PROGRAMS": "1000", "PGRAPH_OTHER": "/other"}
    assert parse(None, ours) == Options()
    assert caplog.messages == []
    for _ in range(2):
        assert parse(None, {"PGRAPH_MAX_CAPTURE": "3"}) == Options()
    (said,) = caplog.messages
    assert "PGRAPH_MAX_CAPTURE is set" in said
    assert "did you mean PGRAPH_MAX_CAPTURES" in said


def test_a_variable_in_small_letters_is_a_slip(caplog: pytest.LogCaptureFixture) -> None:
    assert parse(None, {"PGRAPH_driver": "host"}) == Options()
    (said,) = caplog.messages
    assert "PGRAPH_driver is set" in said
    assert "did you mean PGRAPH_DRIVER" in said


def test_the_environment_reaches_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any options in the program."""
    for name, value in {"DRIVER": "host", "CODEGEN": "aten", "MIN_OPS": "1"}.items():
        monkeypatch.setenv(f"PGRAPH_{name}", value)
    compiled = torch.compile(lambda x: (x * 2).cumsum(0), backend="pgraph")
    for _ in range(3):
        compiled(torch.randn(4))
    assert pgraph.report().launches == 2


def test_a_name_of_the_region_is_taken() -> None:
    """torch.compile hands it to the backend since 2.15."""
    backend = functools.partial(pgraph.backend.Backend(), name="a region")
    compiled = torch.compile(lambda x: x + 1, backend=backend, options={"driver": "host"})
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
