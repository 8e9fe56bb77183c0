"""Which tests go to the same worker. (pytest-xdist's own mark for that does nothing under pytest 9.2.)"""

from __future__ import annotations

import contextlib

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Each worker that got one of their tests would start the ranks for itself: 40 core seconds.
TOGETHER = ("test_fsdp.py", "test_distributed_gpu.py")


class Together(LoadScopeScheduling):
    """Test by test, in their order; but a file whose tests all look at one run goes as a whole, and first.

    A worker that crashes costs the run the one test that it crashed in. pytest-xdist 3.8's scheduling by
    scope gives out again all that the worker had done, as empty pieces, and the test that crashed, and then
    waits for ever for a new worker that waits for a second test before it starts its first.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if path.endswith(TOGETHER) else nodeid

    def remove_node(self, node: WorkerController) -> str | None:
        """What the worker had left goes back to the queue. Returns the test it crashed in, if any."""
        units = self.assigned_work.pop(node)
        left = [test for unit in units.values() for test, done in unit.items() if not done]
        if not left:
            return None
        for scope, unit in units.items():
            unit.pop(left[0], None)
            if not all(unit.values()):
                self.workqueue[scope] = unit
        for other in self.assigned_work:
            self._reschedule(other)
        return left[0]

    def _reschedule(self, node: WorkerController) -> None:
        """More work for the worker; one with a single test left would wait for another, or the end. One that
        takes another's place gets none before it has told its tests. One may have crashed meanwhile: what it
        cannot be told is its work all the same, and goes back to the queue when the crash is heard of.
        """
        if node not in self.registered_collections:
            return
        with contextlib.suppress(OSError):
            super()._reschedule(node)
            while self._pending_of(self.assigned_work[node]) == 1 and not node.shutting_down:
                super()._reschedule(node)
