"""Two ranks of a small Llama: what `support_ranks.py` starts. Not a test by itself.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... \\
        python tests/distributed_program.py OUT PLACE SCENARIO...

The place is ``cpu`` (gloo, pgraph's host driver) or ``cuda`` (NCCL, a GPU for each rank). Each scenario
trains with pgraph, from the same weights and on the same tokens as a reference, and each rank writes what
both did to ``OUT/SCENARIO-RANK.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pgraph.runtime import registry

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import pgraph
from pgraph.backend import backend as pgraph_backend

LAYERS = 3
STEPS = 4
CONFIG = LlamaConfig(vocab=64, dim=32, layers=LAYERS, heads=4, kv_heads=2, max_seq=16)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the ranks train.

    Args:
        device: of the model.
        group: the process group's backend.
        reference: the backend whose code pgraph runs, too.
        options: pgraph's.
    """

    device: str
    group: str
    reference: str
    options: dict[str, Any]


PLACES = {
    "cpu": Place("cpu", "gloo", "aot_eager", {"driver": "host", "codegen": "aten", "min_ops": 1}),
    "cuda": Place("cuda", "nccl", "inductor", {"min_ops": 1}),
}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """How the model is wrapped and trained.

    Args:
        parallel: "fsdp", "ddp", or "tp+fsdp" (all ranks in one tensor-parallel group).
        reshard: FSDP's `reshard_after_forward`.
        accumulate: microbatches per step.
        clip: clip the gradients' norm.
        mixed: bf16 parameters and activations, float32 master weights and reductions.
        ac: activation checkpointing: "none", "selective" or "full".
        resume_at: step at which a checkpoint is saved, trained past, and loaded again.
        like: name of the scenario whose reference run this one must equal; its own if empty.
        same_code: goes on with the code and the captures of the scenario before it.
    """

    parallel: str = "fsdp"
    reshard: bool = True
    accumulate: int = 1
    clip: bool = False
    mixed: bool = False
    ac: str = "none"
    resume_at: int | None = None
    like: str = ""
    same_code: bool = False


SCENARIOS: dict[str, Scenario] = {
    "fsdp": Scenario(),
    "kept-after-forward": Scenario(reshard=False, like="fsdp", same_code=True),
    "resume": Scenario(resume_at=2, like="fsdp", same_code=True),
    "full-checkpointing": Scenario(ac="full", like="fsdp"),
    "selective-checkpointing": Scenario(ac="selective", like="fsdp"),
    "ddp": Scenario(parallel="ddp", like="fsdp"),
    "mixed-accumulate-clip": Scenario(mixed=True, accumulate=2, clip=True),
    "tensor-parallel": Scenario(parallel="tp+fsdp"),
}


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing by op: products are saved, the rest is computed again."""
    saved = op in (
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
    )
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(block: nn.Module, ac: str) -> nn.Module:
    """`block` with activation checkpointing as torchtitan wraps it, inside of what is compiled."""
    if ac == "none":
        return block
    if ac == "full":
        return checkpoint_wrapper(block, preserve_rng_state=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)


def tensor_parallel(block: nn.Module, mesh: DeviceMesh) -> None:
    """torchtitan's plan for a block: sequence-parallel norms, column- and row-wise products."""
    # Each rank has its share of the heads.
    block.attention.heads //= mesh.size()
    block.attention.kv_heads //= mesh.size()
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, mesh, plan)


def build(scenario: Scenario, device: str, backend: Any, options: dict[str, Any] | None) -> nn.Module:
    """The model, in torchtitan's order: TP, AC, compile per block, FSDP or DDP."""
    torch.manual_seed(0)
    model: nn.Module = Llama(CONFIG).to(device)
    shape = (1, 2) if scenario.parallel.startswith("tp") else (2, 1)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    if scenario.parallel.startswith("tp"):
        outer = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], outer)
        # torch 2.13 cannot compile for the result of a collective that nobody has waited for, whatever the
        # backend: its gradient comes back as a plain tensor. An op waits.
        model.embed.register_forward_hook(lambda module, args, out: out.clone())
    for i, block in enumerate(model.blocks):
        if scenario.parallel.startswith("tp"):
            tensor_parallel(block, mesh["tp"])
        block = checkpointed(block, scenario.ac)
        model.blocks[i] = torch.compile(
            block, backend=backend, options=options, fullgraph=True, dynamic=False
        )
    if scenario.parallel == "ddp":
        torch._dynamo.config.optimize_ddp = "ddp_optimizer"
        return nn.parallel.DistributedDataParallel(model)
    if "fsdp" in scenario.parallel:
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if scenario.mixed else MixedPrecisionPolicy()
        )
        shard = functools.partial(fully_shard, mesh=mesh["dp"], mp_policy=policy)
        for block in model.blocks:
            shard(block, reshard_after_forward=scenario.reshard)
        shard(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    return model


class Shaker:
    """Makes parameters move: every call of a block is preceded by allocations that stay for a while."""

    def __init__(self, blocks: nn.ModuleList, device: str) -> None:
        self.device = device
        self.random = random.Random(dist.get_rank())
        self.held: list[Tensor] = []
        self.seen: set[int] = set()
        for block in blocks:
            # The first runs before FSDP's own hook, which gathers the parameters; the second after it.
            block.register_forward_pre_hook(self.shake, prepend=True)
            block.register_forward_pre_hook(self.look)

    def shake(self, module: nn.Module, args: Any) -> None:
        sizes = [p.numel() for p in module.parameters()]
        many = self.random.randint(1, 4)
        self.held += [torch.empty(self.random.choice(sizes) * 2, device=self.device) for _ in range(many)]
        del self.held[: max(0, len(self.held) - 40)]

    def look(self, module: nn.Module, args: Any) -> None:
        weight = next(p for p in module.parameters() if p.dim() == 2)
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        self.seen.add(local.data_ptr())


@dataclasses.dataclass
class Outcome:
    """What one training run did."""

    losses: list[float]
    norms: list[float]
    weights: list[float]
    addresses: int
    captures: list[int]
    launches: int
    refused: int
    nodes_per_launch: float
    outside: list[str]
    freed: bool


class Data:
    """Tokens and targets; tensor-parallel ranks see the same ones."""

    def __init__(self, scenario: Scenario, device: str) -> None:
        self.device = device
        self.random = torch.Generator().manual_seed(
            0 if scenario.parallel.startswith("tp") else dist.get_rank()
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        both = torch.randint(CONFIG.vocab, (2, 2, CONFIG.max_seq), generator=self.random).to(self.device)
        return both[0], both[1]


def train(
    scenario: Scenario, device: str, backend: Any, options: dict[str, Any] | None, folder: Path
) -> Outcome:
    """Train for `STEPS` steps; with `resume_at`, into a saved checkpoint and out of it again."""
    launches, rewritten = pgraph.report().launches, pgraph.report().rewritten_nodes
    model = build(scenario, device, backend, options)
    inner = model.module if scenario.parallel == "ddp" else model
    shaker = Shaker(inner.blocks, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Data(scenario, device)
    losses, norms, captures = [], [], []
    step = 0
    saved = False
    while step < STEPS:
        if scenario.resume_at == step and not saved:
            saved = True
            save_and_spoil(model, optimizer, folder, data)
        total = torch.zeros((), device=device)
        for piece in range(scenario.accumulate):
            with last_only(model, piece == scenario.accumulate - 1):
                loss = model(*data.batch()) / scenario.accumulate
                loss.backward()
            total += loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()
        if scenario.clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        step += 1
        captures.append(pgraph.report().captures)
    report = pgraph.report()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in inner.parameters()]
    outside = sorted({r.code for p in report.partitions if not p.facts.safe for r in p.reasons})
    return Outcome(
        losses,
        norms,
        [float(p.detach().double().sum()) for p in whole],
        len(shaker.seen),
        captures,
        report.launches - launches,
        report.refused,
        (report.rewritten_nodes - rewritten) / max(report.launches - launches, 1),
        outside,
        unsharded_freed(inner),
    )


@contextlib.contextmanager
def last_only(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients travel after the last microbatch only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def unsharded_freed(model: nn.Module) -> bool:
    """True if no block's gathered parameters are alive after the step: nobody holds them but FSDP."""
    states = [b._get_fsdp_state() for b in model.blocks if isinstance(b, FSDPModule)]
    params = [p for s in states for p in s._fsdp_param_group.fsdp_params]
    return all(t.untyped_storage().size() == 0 for p in params for t in p.all_gather_outputs)


def save_and_spoil(model: nn.Module, optimizer: Any, folder: Path, data: Data) -> None:
    """Save a checkpoint, train past it, and load it again: the steps after that must not notice."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder))
    at = data.random.get_state()
    for _ in range(2):
        model(*data.batch()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    data.random.set_state(at)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def forget() -> None:
    """Compiled code and pgraph's counters start anew."""
    torch._dynamo.reset()
    gc.collect()
    registry.forget()


def main() -> None:
    """Run the scenarios, and tear down."""
    out, place = Path(sys.argv[1]), PLACES[sys.argv[2]]
    if place.device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(place.group)
    references: dict[str, Any] = {}
    for name in sys.argv[3:]:
        scenario = SCENARIOS[name]
        like = scenario.like or name
        if like not in references:
            forget()
            references[like] = train(SCENARIOS[like], place.device, place.reference, None, out)
        if not scenario.same_code:
            forget()
        mine = train(scenario, place.device, pgraph_backend, place.options, out / f"{name}-checkpoint")
        found = {"reference": references[like], "pgraph": mine}
        text = json.dumps({label: dataclasses.asdict(run) for label, run in found.items()})
        (out / f"{name}-{dist.get_rank()}.json").write_text(text, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
