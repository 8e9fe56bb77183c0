"""torchtitan's Trainer with a notebook: the loss and the time of every step.

To be imported after `titan_setup.prepare`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.train import Trainer


class RecordingTrainer(Trainer):
    """Trains as torchtitan does and hands itself to `at_end` before anything is torn down.

    Args:
        job_config: torchtitan's.
        at_end: called after the last step.
    """

    def __init__(self, job_config: Any, at_end: Callable[[RecordingTrainer], None]) -> None:
        self.losses: list[list[torch.Tensor]] = []  # per step and microbatch, this rank's share
        self.began: list[float] = []  # host clock at the start of each step, and at the end
        self._at_end = at_end
        super().__init__(job_config)

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**kwargs)
        self.losses[-1].append(loss.detach())
        return loss

    def train_step(self, data_iterator: Any) -> None:
        self.losses.append([])
        self.began.append(time.perf_counter())
        super().train_step(data_iterator)

    def train(self) -> None:
        super().train()
        self._at_end(self)

    def local_losses(self) -> torch.Tensor:
        """This rank's share of each step's loss; the sum over data-parallel ranks is the step's loss."""
        whole = [[x.full_tensor() if isinstance(x, DTensor) else x for x in step] for step in self.losses]
        return torch.stack([torch.stack(step).sum() for step in whole])

    def global_losses(self) -> list[float]:
        """The loss of each step over all ranks."""
        losses = self.local_losses()
        mesh = self.parallel_dims.get_optional_mesh("loss")
        if mesh is not None and self.parallel_dims.dp_cp_enabled:
            torch.distributed.all_reduce(losses, group=mesh.get_group())
        return [float(x) for x in losses.tolist()]
