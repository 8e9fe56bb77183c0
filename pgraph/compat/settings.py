"""Settings of PyTorch by which libraries choose kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final

import torch

__all__ = ["cudnn_settings", "library_settings"]

_FLAGS: Final = (
    "_get_blas_preferred_backend",
    "_get_cublas_allow_tf32",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cudnn_allow_tf32",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cudnn_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_fa3_sdp_enabled",
    "_get_flash_sdp_enabled",
    "_get_float32_matmul_precision",
    "_get_linalg_preferred_backend",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_mkldnn_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_rocm_fa_preferred_backend",
    "_get_sdp_priority_order",
    "_get_sm_carveout_experimental",
)
_PRECISIONS: Final = (
    ("generic", "all"),  # it has no others: to be told so takes longer than all the rest
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
)


def library_settings() -> Hashable:
    """All of them, to be compared; seen on 2.13. What a release lacks is left out."""
    found: list[Any] = [_told(getattr(torch._C, name, None)) for name in _FLAGS]
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    for backend, op in _PRECISIONS:
        found.append(_told(precision, backend, op))
    for device in ("cuda", "cpu"):
        found += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    return tuple(map(_hashable, found))


_CUDNN: Final = tuple(name for name in _FLAGS if name.startswith("_get_cudnn_") and "sdp" not in name)


def cudnn_settings() -> Hashable:
    """Those by which cuDNN chooses kernels, but for attention; seen on 2.13. Told in microseconds."""
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    flags = [_told(getattr(torch._C, name, None)) for name in _CUDNN]
    return *flags, _told(precision, "cuda", "conv"), _told(precision, "cuda", "rnn")


def _told(function: Callable[..., Any] | None, *arguments: str) -> Any:
    try:
        return function(*arguments) if function is not None else None
    except RuntimeError as e:  # a setting that this build does not have, or that was set in two ways
        return str(e)


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value
