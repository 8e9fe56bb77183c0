"""Why a recording cannot be computed. It never reaches the user as an error: the size is captured instead."""

from __future__ import annotations

__all__ = ["NotComputableError", "RunTogetherError"]


class NotComputableError(Exception):
    """The text says what is in the way."""


class RunTogetherError(Exception):
    """Library calls were recorded one after the other, and their nodes cannot be told apart."""
