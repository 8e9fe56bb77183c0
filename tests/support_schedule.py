"""Which tests go to the same worker. (pytest-xdist's own mark for that does nothing under pytest 9.2.)"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# Each worker that got one of their tests would start the ranks for itself: 40 core seconds.
TOGETHER = ("test_fsdp.py", "test_distributed_gpu.py")


class Together(LoadScopeScheduling):
    """Test by test, in their order; but a file whose tests all look at one run goes as a whole, and first."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if path.endswith(TOGETHER) else nodeid
