"""The programs of examples/ecosystem do what their texts say, with the libraries that people use.

Each compares pgraph with a run of the same ops without graphs. What a library lacks here skips its program.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "ecosystem"
NEEDS = {
    "trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("accelerate",),
    "generate": ("transformers",),
    "adapters": ("transformers", "peft"),
    "sleep_and_wake": (),
    "lightning_fit": ("lightning",),
    "diffusion": ("diffusers",),
    "ddp": (),
    "exported": (),
}

Run = Callable[..., dict[str, Any]]


def lacking(name: str) -> str:
    """The libraries of an example that are not installed."""
    return ", ".join(library for library in NEEDS[name] if importlib.util.find_spec(library) is None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run an example's `main` in this process; what libraries warn of is theirs, and what they set goes."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    before, level, environment = set(sys.modules), logging.root.level, dict(os.environ)

    def by_name(name: str, *arguments: Any) -> dict[str, Any]:
        if missing := lacking(name):
            pytest.skip(f"not installed: {missing}; bash .ci/setup test ecosystem")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name).main(*arguments)

    yield by_name
    logging.root.setLevel(level)
    os.environ.clear()
    os.environ.update(environment)
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(FOLDER)):
            del sys.modules[name]


def test_the_programs_are_those_of_the_folder() -> None:
    found = {path.stem for path in FOLDER.glob("*.py") if not path.name.startswith("_")}
    assert found == set(NEEDS)


def test_trainer(run: Run) -> None:
    found = run("trainer")
    assert len(set(found["losses"])) == len(found["losses"]) == 6, "it trains"
    assert (found["difference"], found["resumed difference"]) == (0, 0)
    assert (found["captures"], found["captures of the resumed run"]) == (2, 0)


def test_accelerate_refuses_the_name() -> None:
    """Two texts say so; when it is no longer so, they have a shorter way to tell."""
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="PGRAPH"):
        accelerate.utils.TorchDynamoPlugin(backend="pgraph")


def test_accelerate(run: Run) -> None:
    found = run("accelerate_loop")
    assert (found["difference"], found["loaded difference"]) == (0, 0)
    assert (found["captures"], found["later captures"]) == (2, 0)


def test_generate(run: Run) -> None:
    found = run("generate")
    assert (found["different"], found["refused"]) == (0, 0)
    assert found["captures"] == [1, 2], "one for each batch size, whatever the cache is and the prompt"


def test_adapters(run: Run) -> None:
    found = run("adapters")
    assert found["captures"] == [1, 1, 1], "none for 8 adapters, pointed at or copied"
    assert found["merged captures"] == 2
    assert (found["difference"], found["refused"]) == (0, 0)
    assert found["distinct"] == 8, "adapters that all give the same would show nothing"


def test_sleep_and_wake(run: Run) -> None:
    found = run("sleep_and_wake", ["--cycles", "16"])
    assert found["captures"] == found["captures afterwards"] == 2
    assert (found["difference"], found["refused"]) == (0, 0)
    assert found["addresses"] > 3, "nothing moved: nothing was shown"


def test_lightning(run: Run) -> None:
    for way, found in run("lightning_fit").items():
        assert found["difference"] == 0, way
        assert found["refused"] == 0, way
        assert set(found["captures"][1:]) == {2}, way
        assert found["launches"] >= 22, way
        assert found["trains"], way


def test_diffusion(run: Run) -> None:
    found = run("diffusion")
    for one in found.values():
        assert (one["difference"], one["later captures"], one["refused"]) == (0, 0, 0)
    assert (found["wan"]["captures"], found["wan"]["launches"]) == (1, 3 * 6 * 4 - 1)
    assert found["flux"]["captures"] == 3


def test_ddp(run: Run) -> None:
    found = run("ddp")
    assert set(found) == {"blocks", "model", "ddp"}
    for order, one in found.items():
        assert (one["difference"], one["refused"]) == (0, 0), order
    assert found["blocks"]["captures"] == 2
    assert found["model"]["captures"] == found["ddp"]["captures"] > 2, "one for each bucket"


def test_exported_modules_and_optimizers(run: Run) -> None:
    found = run("exported")
    for name, one in found.items():
        assert (one["difference"], one["refused"]) == (0, 0), name
    assert found["exported"]["captures"] == [0, 1, 1, 1, 2, 2, 2, 2]
    assert {found[name]["captures"] for name in ("adamw", "sgd", "muon")} == {1}
