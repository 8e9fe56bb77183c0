"""Why a recording cannot be computed. It never reaches the user as an error: the size is captured instead."""

from __future__ import annotations

__all__ = ["LaunchedOtherwiseError", "NotComputableError", "RunTogetherError"]


class NotComputableError(Exception):
    """The text says what is in the way."""


class LaunchedOtherwiseError(NotComputableError):
    """A generated kernel is not launched as it was when it was captured, or that cannot be told."""


class RunTogetherError(Exception):
    """Library calls were recorded one after the other, and their nodes cannot be told apart."""
