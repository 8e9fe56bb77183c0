"""What the CUDA driver knows without a device."""

from __future__ import annotations

import threading

import pytest
import torch

from pgraph.ops import op_names
from pgraph.template.recording import NodeRecord
from pgraph.template.template import Slot

cuda = pytest.importorskip("pgraph.drivers.cuda.driver", reason="needs cuda-bindings")
cuda_exec = pytest.importorskip("pgraph.drivers.cuda.exec", reason="needs cuda-bindings")


def test_seeds_of_attention_are_where_a_plain_run_has_them() -> None:
    """Numbers of the host's kind for the 0-dim integers, everything else as it was."""
    attended, sums = torch.randn(2, 3), torch.randn(2)
    seed = torch.empty((), dtype=torch.int64, device="meta")  # stands for the device
    got = cuda._host_seeds((attended, sums, seed, seed, 7))
    assert got[0] is attended
    assert got[1] is sums
    assert [(t.device.type, t.dtype, tuple(t.shape)) for t in got[2:4]] == [("cpu", torch.int64, ())] * 2
    assert got[4] == 7


def test_only_the_memory_efficient_kernel_has_its_seeds_on_the_host() -> None:
    """cuDNN's backward refuses seeds that are not on the device."""
    assert op_names.HOST_SEEDS < op_names.ATTENTION_OPS
    assert all("efficient" in name for name in op_names.HOST_SEEDS)
    assert not any("backward" in name for name in op_names.HOST_SEEDS)


def test_copies_that_no_launch_changes_are_not_sent_elsewhere() -> None:
    """The anchor is somebody's memory: a node that keeps its parameters must not get that address."""
    kinds = ("kernel", "memset", "memcpy", "memset")
    nodes = [NodeRecord(kind, kind, (), bytes(16)) for kind in kinds]
    slots = [Slot(0, 0, 0, 0), Slot(2, 0, 1, 0), Slot(2, 8, 0, 0), Slot(3, 0, 0, 0)]
    assert cuda_exec._rebound_copies(nodes, slots) == [2, 3]


def test_a_driver_is_not_closed_while_somebody_captures() -> None:
    driver = cuda.CudaDriver(0)
    closing = threading.Thread(target=driver.close)
    with driver.capture_lock():
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
    closing.join(10)
    assert not closing.is_alive()
