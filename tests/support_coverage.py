"""A job for the tests of the coverage benchmark."""

from __future__ import annotations

from typing import Any


def job(load: Any, kind: str = "check", model: str = "own/mlp", **changes: Any) -> Any:
    """A job of the coverage benchmark on the CPU."""
    settings = {"mode": "train", "backend": "pgraph", "device": "cpu", "driver": "host", "codegen": "aten"}
    return load("coverage_subject").Job(kind, model, **{**settings, **changes})
