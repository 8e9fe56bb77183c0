"""The table of `test_safety`: each rule's op, and its nearest neighbour that may be captured."""

from __future__ import annotations

import operator

import torch
import torch._dynamo.source
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._prims.rng_prims import (
    graphsafe_run_with_rng_state,
    run_and_save_rng_state,
    run_with_rng_state,
)

import torch._inductor.inductor_prims  # isort: skip  # registers prims.inductor_*
from support_rules import (
    COLLECTIVES,
    CPU,
    CUDA,
    FBGEMM,
    Case,
    batched,
    checkpointed_attention,
    flex,
    grouped,
    index,
    plain,
    python_scalar,
    relu,
    sdpa,
    sdpa_backward,
    symbolic_mm,
)

aten = torch.ops.aten
prims = torch.ops.prims

HOPS = {
    name: getattr(torch.ops.higher_order, name)
    for name in ("while_loop", "scan", "associative_scan", "map_impl", "invoke_subgraph", "call_torchbind")
    if hasattr(torch.ops.higher_order, name)
}
fbgemm, quantize = torch.ops.fbgemm, aten.fake_quantize_per_tensor_affine
CASES = [
    Case(
        "tagged",
        "tag",
        plain(torch.ops.pgraph_test.tagged.default),
        plain(torch.ops.pgraph_test.plain.default),
    ),
    Case(
        "tagged",
        "tag under auto_functionalized",
        lambda b: b.call(auto_functionalized, torch.ops.pgraph_test.tagged.default, x=b.tensor(4), like=()),
        lambda b: b.call(auto_functionalized, torch.ops.pgraph_test.writes.default, x=b.tensor(4), like=()),
    ),
    Case(
        "higher-order",
        "cond",
        lambda b: b.call(torch.ops.higher_order.cond, b.tensor(dtype=torch.bool), like=b.tensor(4)),
        lambda b: b.graph.call_function(triton_kernel_wrapper_mutation, (), {"kwargs": {"x": b.tensor(4)}}),
    ),
    Case(
        "higher-order",
        "effects",
        lambda b: b.call(torch.ops.higher_order.with_effects, b.tensor(4), like=b.tensor(4)),
        lambda b: b.call(out_dtype, aten.mm.default, torch.int32, b.tensor(4, 4), like=b.tensor(4, 4)),
    ),
    *(
        Case(
            "higher-order",
            name,
            lambda b, op=op: b.call(op, b.tensor(4), like=b.tensor(4)),
            lambda b: b.call(out_dtype, aten.mm.default, torch.int32, b.tensor(4, 4), like=b.tensor(4, 4)),
        )
        for name, op in HOPS.items()
    ),
    *(
        Case(
            "rng-state",
            op.name(),
            lambda b, op=op: b.call(op, b.tensor(4), aten.rand.default, [4], like=b.tensor(4)),
            lambda b: flex(b, aten.tanh.default),
        )
        for op in (run_with_rng_state, graphsafe_run_with_rng_state)
    ),
    Case(
        "host-read",
        "flex subgraph",
        lambda b: flex(b, aten.item.default),
        lambda b: flex(b, aten.tanh.default),
    ),
    Case(
        "rng-state",
        "checkpointed dropout",
        lambda b: b.call(run_and_save_rng_state, aten.rand.default, [4], like=b.tensor(4)),
        relu,
    ),
    Case(
        "rng-state",
        "checkpointed attention",
        lambda b: checkpointed_attention(b, 0.1),
        lambda b: checkpointed_attention(b, 0.0),
    ),
    Case(
        "collective",
        "all_reduce",
        plain(torch.ops._c10d_functional.all_reduce_.default),
        relu,
    ),
    *(
        Case("collective", str(op), plain(op), relu)
        for namespace, names in COLLECTIVES.items()
        for name in names
        for op in [getattr(getattr(torch.ops, namespace), name).default]
    ),
    Case("stream", "record_stream", plain(aten.record_stream.default, None), relu),
    Case(
        "host-read",
        "item",
        lambda b: b.call(aten._local_scalar_dense.default, b.tensor(), like=2.0),
        lambda b: b.call(aten.sum.default, b.tensor(4)),
    ),
    Case("host-read", "equal", plain(aten.equal.default, 1), plain(aten.eq.Scalar, 1)),
    Case("host-read", "assert", lambda b: b.call(aten._assert_scalar.default, True, "no", like=0), relu),
    Case("host-sync", "histc", plain(aten.histc.default, 8), plain(aten.histc.default, 8, 0, 1)),
    *(
        Case("host-sync", str(op), plain(op.default), plain(quantize.default, 1.0, 0))
        for op in (
            aten._fused_moving_avg_obs_fq_helper,
            aten._fused_moving_avg_obs_fq_helper_functional,
            aten._fake_quantize_learnable_per_tensor_affine,
            aten._fake_quantize_learnable_per_tensor_affine_backward,
            aten._fake_quantize_learnable_per_channel_affine,
            aten.fake_quantize_per_channel_affine_cachemask,
        )
    ),
    Case("host-sync", "grouped float32", lambda b: grouped(b, torch.float32), lambda b: grouped(b)),
    Case(
        "host-sync",
        "grouped to float32",
        lambda b: grouped(b, out_dtype=torch.float32),
        lambda b: grouped(b, torch.float32, offsets=False),
    ),
    Case(
        "host-sync",
        "segment_reduce",
        lambda b: b.call(aten.segment_reduce.default, b.tensor(4), "sum", like=b.tensor(4)),
        lambda b: b.call(aten.segment_reduce.default, b.tensor(4), "sum", unsafe=True, like=b.tensor(4)),
    ),
    *(
        Case(
            "bool-index",
            f"{op} by {dtype}",
            lambda b, op=op, dtype=dtype: index(b, op, dtype, b.tensor(4)),
            lambda b, op=op: index(b, op, torch.int64, b.tensor(4)),
        )
        for op in (aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default)
        for dtype in (torch.bool, torch.uint8)
    ),
    Case(
        "bool-index",
        "index",
        lambda b: index(b, aten.index.Tensor, torch.bool),
        lambda b: index(b, aten.index.Tensor, torch.int32),
    ),
    Case("dynamic-shape", "nonzero", plain(aten.nonzero.default), plain(aten.nonzero_static.default)),
    Case("dynamic-shape", "masked_select", plain(aten.masked_select.default), plain(aten.masked_fill.Scalar)),
    Case("dynamic-shape", "unique", plain(aten._unique2.default), plain(aten.sort.default)),
    Case("dynamic-shape", "bincount", plain(aten.bincount.default), plain(aten.index_add.default)),
    Case(
        "dynamic-shape",
        "repeat_interleave",
        plain(aten.repeat_interleave.Tensor),
        lambda b: b.call(aten.repeat_interleave.Tensor, b.tensor(4), output_size=8, like=b.tensor(8)),
    ),
    Case(
        "unbacked-size",
        "unbacked argument",
        lambda b: b.call(aten.full.default, [b.unbacked()], 1.0, device=CUDA, like=b.tensor(4)),
        symbolic_mm,
    ),
    Case(
        "unbacked-size",
        "unbacked arithmetic",
        lambda b: b.call(operator.add, b.unbacked(), 1),
        lambda b: b.call(operator.add, b.value(3), 1),
    ),
    Case("storage", "resize_", plain(aten.resize_.default, [8]), plain(aten.fill_.Scalar, 0)),
    Case("storage", "set_", plain(aten.set_.source_Tensor), plain(aten.copy_.default)),
    Case("storage", "t_", plain(aten.t_.default), plain(aten.t.default)),
    Case(
        "pinned",
        "pin_memory",
        lambda b: b.call(aten.empty.memory_format, [4], pin_memory=True, like=b.tensor(4, device="cpu")),
        lambda b: b.call(aten.empty.memory_format, [4], device=CUDA),
    ),
    Case("pinned", "_pin_memory", plain(aten._pin_memory.default), relu),
    Case(
        "device-copy",
        "to the CPU",
        lambda b: b.call(aten._to_copy.default, b.tensor(4), device=CPU),
        lambda b: b.call(aten._to_copy.default, b.tensor(4), dtype=torch.float16),
    ),
    Case(
        "device-copy",
        "copy_ from the CPU",
        lambda b: b.call(aten.copy_.default, b.tensor(4), b.tensor(4, device="cpu")),
        lambda b: b.call(aten.copy_.default, b.tensor(4), b.tensor(4)),
    ),
    Case(
        "device-copy",
        "from pinned memory",
        lambda b: b.call(aten._to_copy.default, b.tensor(4, device="cpu"), device=CUDA, non_blocking=True),
        lambda b: b.call(aten._to_copy.default, b.tensor(4), non_blocking=True, dtype=torch.float16),
    ),
    Case(
        "device-copy",
        "device_put",
        lambda b: b.call(prims.device_put.default, b.tensor(4), CPU, like=b.tensor(4, device="cpu")),
        lambda b: b.call(prims.device_put.default, b.tensor(4), CUDA, like=b.tensor(4)),
    ),
    Case(
        "solver",
        "cholesky",
        lambda b: b.call(aten.linalg_cholesky_ex.default, b.tensor(4, 4)),
        lambda b: b.call(aten.linalg_vector_norm.default, b.tensor(4, 4)),
    ),
    Case("solver", "triangular_solve", plain(aten.triangular_solve.default), plain(aten.triu.default)),
    # Batched: a table of pointers is built on the host. The batched product takes strides.
    *(
        Case("solver", f"batched {op}", plain(op.default), batched)
        for op in (
            aten.linalg_inv_ex,
            aten.linalg_lu_factor_ex,
            aten._linalg_solve_ex,
            aten._linalg_svd,
            aten._linalg_eigh,
            aten.linalg_qr,
            aten.cholesky_solve,
            aten.lu_solve,
        )
    ),
    Case(
        "library-state",
        "cudnn rnn",
        plain(aten._cudnn_rnn.default),
        plain(aten._thnn_fused_lstm_cell.default),
    ),
    Case("library-state", "ctc", plain(aten._ctc_loss.default), plain(aten.nll_loss_forward.default)),
    Case(
        "rng",
        "rand",
        lambda b: b.call(aten.rand.default, [4], device=CUDA),
        lambda b: b.call(aten.full.default, [4], 1.0, device=CUDA),
    ),
    Case(
        "rng",
        "native_dropout",
        lambda b: b.call(aten.native_dropout.default, b.tensor(4), 0.1, True),
        lambda b: b.call(aten.native_dropout.default, b.tensor(4), 0.1, False),
    ),
    Case(
        "rng",
        "native_dropout of nothing",
        lambda b: b.call(aten.native_dropout.default, b.tensor(4), 0.1, None),
        lambda b: b.call(aten.native_dropout.default, b.tensor(4), 0.0, True),
    ),
    Case("rng", "bernoulli", plain(aten.bernoulli.p, 0.0), relu),
    Case(
        "rng",
        "rrelu",
        plain(aten.rrelu_with_noise.default, None, 0.1, 0.3, True),
        plain(aten.rrelu_with_noise.default),
    ),
    Case(
        "rng-seeds",
        "seeds",
        lambda b: b.call(prims.inductor_seeds.default, 2, CUDA, like=b.tensor(2, dtype=torch.int64)),
        lambda b: b.call(
            prims.inductor_lookup_seed.default,
            b.tensor(2, dtype=torch.int64),
            0,
            like=b.tensor(dtype=torch.int64),
        ),
    ),
    Case("rng", "attention with dropout", lambda b: sdpa(b, 0.1, "cuda"), lambda b: sdpa(b, 0.0)),
    Case(
        "cpu-scalar", "attention backward", lambda b: sdpa_backward(b, 0.1), lambda b: sdpa_backward(b, 0.0)
    ),
    Case(
        "layout",
        "sparse",
        lambda b: b.call(aten.relu.default, b.value(torch.eye(3).to_sparse()), like=b.tensor(4)),
        relu,
    ),
    Case(
        "layout",
        "sparse result",
        lambda b: b.call(aten.relu.default, b.tensor(3, 3), like=torch.eye(3).to_sparse()),
        relu,
    ),
    *(
        Case("layout", name, plain(getattr(fbgemm, name).default), plain(fbgemm.dense_sum.default))
        for name in FBGEMM[:-1]
    ),
    Case("layout", "jagged", plain(aten._jagged_to_padded_dense_forward.default), relu),
    Case(
        "opaque",
        "script object",
        lambda b: b.call(aten.relu.default, b.value(type("FakeScriptObject", (), {})()), like=b.tensor(4)),
        relu,
    ),
    Case("not-an-op", "Python call", lambda b: b.call(print, b.tensor(4), like=b.tensor(4)), relu),
    Case(
        "no-metadata",
        "no value",
        lambda b: b.graph.call_function(aten.relu.default, (b.tensor(4),)),
        lambda b: b.graph.call_function(operator.getitem, (relu(b), 0)),
    ),
    Case(
        "no-metadata",
        "nothing returned",
        lambda b: b.graph.call_function(torch.ops.pgraph_test.plain.default, (b.tensor(4),)),
        lambda b: b.graph.call_function(torch.ops.pgraph_test.writes.default, (b.tensor(4),)),
    ),
    Case(
        "cpu-scalar",
        "CPU scalar",
        lambda b: b.call(aten.mul.Tensor, b.tensor(4), b.tensor(device="cpu")),
        lambda b: b.call(aten.mul.Tensor, b.tensor(4), 2.0),
    ),
    Case(
        "cpu-scalar",
        "Python number as a tensor",
        lambda b: b.call(aten.add.Tensor, b.tensor(4), b.tensor(device="cpu", dtype=torch.float64)),
        python_scalar,
    ),
    Case(
        "other-device",
        "CPU op",
        lambda b: b.call(aten.relu.default, b.tensor(4, device="cpu")),
        lambda b: b.call(aten.sym_size.int, b.tensor(4, device="cpu"), 0),
    ),
    Case(
        "other-device",
        "CPU scalar made",
        lambda b: b.call(aten.full.default, [], 1.0, device=CPU),
        lambda b: b.call(aten.full.default, [], 1.0, device=CUDA),
    ),
    Case(
        "several-devices",
        "two GPUs",
        lambda b: b.call(aten._to_copy.default, b.tensor(4), device=torch.device("cuda:1")),
        lambda b: b.call(aten._to_copy.default, b.tensor(4), device=torch.device("cuda:0")),
    ),
    Case(
        "host-only",
        "no tensors",
        lambda b: b.call(torch.ops.pgraph_test.silent.default, 3, like=3),
        lambda b: b.call(aten.sym_size.int, b.tensor(4), 0),
    ),
]
