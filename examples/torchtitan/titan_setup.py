"""What real torchtitan needs to run here: flavors, arguments, offline environment, stand-ins on a CPU.

Nothing of torchtitan is patched on a GPU; on a CPU, which it was not written for, it gets stand-ins for
what a CPU does not have (`stand_in_for_a_gpu`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any, Literal

import titan_assets
import torch

DATASET = "python_sources"
BACKENDS = ("pgraph", "inductor", "aot_eager", "eager")

# Dimensions as torchtitan has them; `layers` is the depth of the published model.
_LLAMA: dict[str, dict[str, Any]] = {
    "debug": {"dim": 256, "n_layers": 6, "n_heads": 16, "vocab_size": titan_assets.VOCABULARY},
    "8B": {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "ffn_dim_multiplier": 1.3,
        "multiple_of": 1024,
    },
    "70B": {
        "dim": 8192,
        "n_layers": 80,
        "n_heads": 64,
        "n_kv_heads": 8,
        "ffn_dim_multiplier": 1.3,
        "multiple_of": 4096,
    },
}
FLAVORS = tuple(_LLAMA)


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training run.

    Args:
        flavor: one of `FLAVORS`.
        layers: depth; None for the flavor's own.
        backend: one of `BACKENDS`; "eager" compiles nothing.
        steps: optimizer steps.
        seq: tokens in a sequence.
        batch: sequences per rank and microbatch.
        accumulate: microbatches per step.
        ac: activation checkpointing; "selective" is by op.
        ranks: processes of the run, all of them data parallel (times tensor parallel).
        tp: tensor-parallel degree.
        ddp: replicate parameters instead of sharding them.
        reshard: FSDP's ``reshard_after_forward``.
        seed: of the weights.
        deterministic: torch's deterministic algorithms.
        log_freq: steps between torchtitan's log lines.
        extra: further arguments for torchtitan, they win.
    """

    flavor: str = "debug"
    layers: int | None = None
    backend: str = "pgraph"
    steps: int = 30
    seq: int = 2048
    batch: int = 8
    accumulate: int = 1
    ac: Literal["none", "selective", "full"] = "none"
    ranks: int = 1
    tp: int = 1
    ddp: bool = False
    reshard: Literal["default", "always", "never"] = "default"
    seed: int = 0
    deterministic: bool = False
    log_freq: int = 10
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name under which the flavor is registered."""
        return f"pgraph_{self.flavor}_{self.depth}"

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.layers if self.layers is not None else int(_LLAMA[self.flavor]["n_layers"])


def missing() -> str | None:
    """What to tell a user who lacks torchtitan, or what it imports; None where all is there."""
    try:
        importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return "torchtitan is not installed. Fix: bash .ci/setup examples torchtitan"
    if importlib.util.find_spec("triton") is None:  # builds of torch for a CPU come without
        return f"torchtitan imports triton, on a CPU too. Fix: {sys.executable} -m pip install triton"
    return None


def arguments(settings: Settings, cache: Path, dump: Path) -> list[str]:
    """The command line that torchtitan gets.

    Args:
        settings: the run.
        cache: where tokenizer and dataset are kept; they are made if need be.
        dump: where torchtitan may write.
    """
    data_parallel = settings.ranks // settings.tp
    pairs: dict[str, Any] = {
        "job.dump_folder": dump,
        "model.name": "llama3",
        "model.flavor": settings.name,
        "model.hf_assets_path": titan_assets.tokenizer_folder(cache),
        "training.dataset": DATASET,
        "training.dataset_path": titan_assets.dataset_folder(cache),
        "training.steps": settings.steps,
        "training.seq_len": settings.seq,
        "training.local_batch_size": settings.batch,
        "training.global_batch_size": settings.batch * data_parallel * settings.accumulate,
        "activation_checkpoint.mode": settings.ac,
        "metrics.log_freq": settings.log_freq,
        "debug.seed": settings.seed,
        "parallelism.tensor_parallel_degree": settings.tp,
        "parallelism.data_parallel_replicate_degree": data_parallel if settings.ddp else 1,
        "parallelism.data_parallel_shard_degree": 1 if settings.ddp else -1,
        "parallelism.fsdp_reshard_after_forward": settings.reshard,
    }
    if settings.ac == "selective":
        pairs["activation_checkpoint.selective_ac_option"] = "op"
    if settings.backend != "eager":
        pairs |= {"compile.backend": settings.backend, "compile.components": "model,loss"}
    words = [word for key, value in pairs.items() for word in (f"--{key}", str(value))]
    words += ["--compile.enable"] if settings.backend != "eager" else []
    words += ["--debug.deterministic"] if settings.deterministic else []
    return [*words, *settings.extra]


def environment(cache: Path) -> None:
    """Offline, and one rank of one where torchrun says nothing else; to be called before imports."""
    os.environ.setdefault("HF_HOME", str(cache / "hf"))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ[name] = "1"
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "RANK" not in os.environ:
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(one | {"MASTER_PORT": str(free_port())})


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepare(settings: Settings) -> None:
    """Import torchtitan and register flavor, dataset and pgraph; `environment` comes first."""
    if not torch.cuda.is_available():
        # pgraph's options have no place in torchtitan's config, so they come from the environment.
        os.environ.setdefault("PGRAPH_DRIVER", "host")
        os.environ.setdefault("PGRAPH_CODEGEN", "aten")
        stand_in_for_a_gpu()
    from datasets import load_dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    sizes = _LLAMA[settings.flavor] | {"n_layers": settings.depth, "rope_theta": 500_000}
    llama3_args[settings.name] = TransformerModelArgs(**sizes)
    DATASETS[DATASET] = DatasetConfig(
        path="",
        loader=lambda path: load_dataset(str(path), split="train"),
        sample_processor=lambda sample: sample["text"],
    )
    if settings.backend == "pgraph":
        import backends

        backends.register_pgraph()


# -- CPU ---------------------------------------------------------------------------------------------


def stand_in_for_a_gpu() -> None:
    """Have torchtitan run on a CPU with gloo: what it asks of a device, a CPU answers or shrugs off."""
    cpu = types.SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in ("synchronize", "is_available", "current_stream")},
        Stream=torch.cpu.Stream,
        set_device=lambda device: None,
        current_device=lambda: 0,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=1 << 34),
        memory_stats=lambda device=None: {},
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
    )
    before = torch._utils._get_available_device_type, torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: cpu
    try:
        import torchtitan.train
    finally:
        torch._utils._get_available_device_type, torch._utils._get_device_module = before
    from torchtitan.models.llama3.infra import parallelize

    # gloo's barrier takes no device ids, and it has no premultiplied sum.
    torchtitan.train.dist_utils.set_pg_timeouts = lambda **kwargs: None
    undivided = parallelize.disable_fsdp_gradient_division

    def plain_sums(model: torch.nn.Module) -> None:
        undivided(model)
        for module in model.modules():
            if isinstance(module, parallelize.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    parallelize.disable_fsdp_gradient_division = plain_sums
