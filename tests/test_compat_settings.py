"""The settings by which libraries choose kernels, a private interface for each (see `test_compat`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pgraph import compat

FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Any]] = {
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "cuDNN": (
        lambda: torch.backends.cudnn.enabled,
        lambda value: setattr(torch.backends.cudnn, "enabled", value),
        False,
    ),
    "cuDNN benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        True,
    ),
    "cuDNN deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
        True,
    ),
    "cuDNN TF32": (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
        False,
    ),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "memory-efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
        False,
    ),
    "math attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "cuDNN attention": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    "fp16 reduction": (
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", value),
        False,
    ),
    "bf16 reduction": (
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", value),
        False,
    ),
    "fp16 accumulation": (
        lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", value),
        True,
    ),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "autocast": (
        lambda: torch.is_autocast_enabled("cuda"),
        lambda value: torch.set_autocast_enabled("cuda", value),
        True,
    ),
    "autocast type": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda value: torch.set_autocast_dtype("cpu", value),
        torch.float16,
    ),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_settings_of_libraries_are_told_apart(flag: str) -> None:
    get, put, other = FLAGS[flag]
    before, was = compat.library_settings(), get()
    assert was != other
    try:
        put(other)
        changed = compat.library_settings()
    finally:
        put(was)
    assert changed != before
    assert hash(before) != hash(changed)


@pytest.mark.parametrize("flag", FLAGS)
def test_settings_of_cudnn_are_told_by_themselves(flag: str) -> None:
    """At each call of a partition with convolutions: no others, and attention's choice is made before."""
    get, put, value = FLAGS[flag]
    before, was = compat.cudnn_settings(), get()
    try:
        put(value)
        assert (compat.cudnn_settings() != before) == (flag.startswith("cuDNN") and "attention" not in flag)
    finally:
        put(was)
    assert compat.cudnn_settings() == before
