"""What `TORCH_TRACE` (and tlparse) shows of pgraph: each graph's partitions and reasons, by compilation."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import MLP, host

import pgraph
from pgraph.drivers.host.faults import HostFaults, inject


class Listener(logging.Handler):
    """Keeps pgraph's texts: (name, compilation, text)."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.heard: list[tuple[str, str | None, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        known: dict[str, Any] = record.metadata  # type: ignore[attr-defined]
        artifact = known.get("artifact", {})
        if str(artifact.get("name", "")).startswith("pgraph"):
            assert artifact["encoding"] == "string"
            frame = known.get("frame_id")
            compilation = None if frame is None else f"{frame}/{known['frame_compile_id']}"
            self.heard.append((artifact["name"], compilation, record.payload))  # type: ignore[attr-defined]


@pytest.fixture
def heard() -> Iterator[list[tuple[str, str | None, str]]]:
    """As TORCH_TRACE does, by a handler of PyTorch's logger of traces."""
    logger, listener = logging.getLogger("torch.__trace"), Listener()
    propagate = logger.propagate
    logger.addHandler(listener)
    logger.propagate = False
    yield listener.heard
    logger.removeHandler(listener)
    logger.propagate = propagate


def steady(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def test_each_graph_says_how_it_was_cut_and_why(heard: list[tuple[str, str | None, str]]) -> None:
    compiled = host(lambda x: (x.sin() * 2).cumsum(0) + torch.randn_like(x).exp())
    compiled(torch.randn(8))
    ((name, compilation, text),) = heard
    facts = pgraph.report().partitions[0].facts.graph
    assert name == f"pgraph_inference_{facts.number}"
    assert compilation == facts.compilation
    assert re.fullmatch(r"\d+/\d+", str(compilation))
    assert "in 2 of 3 partitions" in text
    refused = text.split("partition 1: 1 device op, runs uncaptured\n")[1]
    assert "[rng]" in refused.splitlines()[1]
    assert f"{__file__}:" in refused
    assert "partition 0: 3 device ops, to be captured" in text


def test_forward_and_backward_are_of_one_compilation(heard: list[tuple[str, str | None, str]]) -> None:
    compiled = host(MLP())
    compiled(torch.randn(3, 8)).sum().backward()
    compiled(torch.randn(5, 8)).sum().backward()
    assert [steady(name) for name, _, _ in heard] == ["pgraph_forward_N", "pgraph_backward_N"] * 2
    first, second = heard[0][1], heard[2][1]
    assert [compilation for _, compilation, _ in heard] == [first, first, second, second]
    assert first != second


def test_a_refusal_at_a_later_call_is_told_where_it_belongs(heard: list[tuple[str, str | None, str]]) -> None:
    """No compilation is under way then: the graph knows its own."""
    compiled = host(lambda x: x.sin())
    with inject(HostFaults(refused=frozenset({"sin"}))):
        for _ in range(3):
            compiled(torch.randn(8))
    cut, refused = heard
    assert refused[0] == cut[0] + "_refused"
    assert refused[1] == cut[1] is not None
    assert "its capture was refused" in refused[2]
    assert str(pgraph.report().partitions[0].reason) in refused[2]


def test_a_split_is_told_with_the_op(heard: list[tuple[str, str | None, str]]) -> None:
    compiled = host(lambda x: (x.sin() * 2).cumsum(0).cos() * 3)
    with inject(HostFaults(refused=frozenset({"cumsum"}))):
        for _ in range(3):
            compiled(torch.randn(8))
    assert pgraph.report().splits == 1
    cut, split = heard
    assert split[:2] == cut[:2]
    assert "was split around aten::cumsum" in split[2]
    assert "in 2 of 3 partitions" in split[2]


def test_nobody_listens_and_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgraph.runtime.trace._text", lambda *args: pytest.fail("made for nobody"))
    host(lambda x: x.sin() * 2 + 1)(torch.randn(8))
