"""Which layout of the framework's free memory reserves least: some are tried, one after another.

Note [Layouts on trial]
Which holes the next large tensor finds depends on the layout in a way that no rule foretells without a log
of all that the program allocates. With one piece of 108 MB the training of a BERT reserved 328 MB on an
H100, with one of 12 MB 288, and 308 with segments as they come. So layouts are tried: first one piece for
all that a round needs on top of what is in use where it begins, then segments as they come, and while all
of these reserve far more than is ever in use, a piece half as large as the last one. Each is judged after
two rounds, since the second finds other holes than the first and may need one segment more. The one that
reserved least stays.
"""

from __future__ import annotations

__all__ = ["SettledLayouts"]

_SHARE = 0.95  # of what is needed: small blocks come from segments of their own
_WORTH = 64 << 20  # bytes: where a round needs less, segments as they come will do
_LEAST = 8 << 20  # bytes of the smallest piece
_ROUND = 2 << 20

_GOOD = 1 / 64  # what is larger than what is in use by no more than this part stays
_FAIR = 1 / 8  # and by no more than this, no third layout is tried

_PARTS = (1.0, 0.0, 1 / 2, 1 / 4, 1 / 8)  # of what is needed in one piece


class SettledLayouts:
    """The layouts of one time that captures have settled.

    Args:
        growth: bytes that a round needs on top of what is in use where it begins; 0 if that cannot be told.
    """

    def __init__(self, growth: int) -> None:
        self._reserved: list[int] = []  # with each of those tried so far
        self._part = _PARTS[0]
        self._growth = growth
        self.final = growth < _WORTH
        """Whether the layout of now stays, whatever it reserves."""

    def piece(self, growth: int) -> int:
        """Bytes to take in one piece for the layout of now; 0: segments as they come."""
        return int(growth * self._part * _SHARE) // _ROUND * _ROUND if growth >= _WORTH else 0

    def taken(self, nbytes: int) -> None:
        """So much was taken. Where the allocator takes no piece, there is one layout."""
        self.final = self.final or (self._part > 0 and nbytes == 0)

    def judge(self, reserved: int, peak: int) -> bool:
        """Whether the layout of now stays; if not, the next one is that of now.

        Args:
            reserved: bytes that the allocator holds after two rounds with it.
            peak: bytes in use at the most.
        """
        if self.final or reserved <= peak * (1 + _GOOD):
            return True
        self._reserved.append(reserved)
        tried, least = len(self._reserved), min(self._reserved)
        further = tried < 2 or (tried < len(_PARTS) and least > peak * (1 + _FAIR))
        if further and (tried < 2 or self._growth * _PARTS[tried] * _SHARE >= _LEAST):
            self._part = _PARTS[tried]
            return False
        self._part = _PARTS[self._reserved.index(least)]
        self.final = True
        return reserved == least
