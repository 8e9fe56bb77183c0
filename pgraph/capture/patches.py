"""Generated modules allocate by functions of their own, which give ghosts while they are captured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["patched"]


@contextlib.contextmanager
def patched(namespace: dict[str, Any], replacements: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions in a namespace within the block, for this thread only.

    Note [Other threads run on]
    The namespace is a generated module's, and another thread may be in the middle of an uncaptured run of
    that very code: it must go on with real memory, or its kernels would write to ghosts.
    """
    before = {name: namespace[name] for name in replacements}
    namespace.update({name: _in_this_thread(new, before[name]) for name, new in replacements.items()})
    try:
        yield
    finally:
        namespace.update(before)


def _in_this_thread(new: Callable[..., Any], old: Callable[..., Any]) -> Callable[..., Any]:
    owner = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == owner else old)(*args, **kwargs)

    return either
