"""The answer of `pgraph.explain`: what was found, with ways to show it.

Made by `pgraph.explanation.session`.
"""

from __future__ import annotations

import json
import pathlib

from pgraph.explanation import as_page, as_text
from pgraph.explanation.findings import Findings

__all__ = ["Explanation"]


class Explanation(Findings):
    """What `explain` found. Print it, or take `to_dict()`, `to_json()`, `to_html()`."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.render()

    def render(self, *, times: bool = True) -> str:
        """The explanation as text.

        Args:
            times: include measured times, which differ from run to run; the rest does not.
        """
        return as_text.render(self, times=times)

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self, path: str | pathlib.Path | None = None, *, times: bool = True) -> str:
        """A timeline as one self-contained page; written to `path` if one is given.

        Args:
            path: file to write.
            times: width of a bar by host time instead of by device ops.
        """
        page = as_page.render(self, times=times)
        if path is not None:
            pathlib.Path(path).write_text(page, encoding="utf-8")
        return page
