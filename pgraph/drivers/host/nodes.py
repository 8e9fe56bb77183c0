"""The host driver's nodes: parameters packed as bytes, and what a launch makes of them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from pgraph.compat import lazily
from pgraph.drivers.host import faults as fault
from pgraph.drivers.interface import extent
from pgraph.drivers.operands import Operand
from pgraph.errors import CaptureError, DriverError
from pgraph.reasons import Reason
from pgraph.template.recording import NodeRecord

__all__ = [
    "TABLE",
    "KernelCall",
    "OpCall",
    "as_copy",
    "as_fill",
    "encode",
    "kernel_node",
    "kinds",
    "packed",
    "refuse_mixed_norms",
    "refuse_random",
    "run",
    "spoil",
]

aten = torch.ops.aten

_CPU = torch.device("cpu")
_DRAWING_ARGUMENTS = ("dropout_p", "p", "train", "training")  # of which 0 and False draw nothing

TABLE = "pointer-table"


class OpCall:
    """Calls a dispatched op on decoded leaves and writes its fresh results where they belong."""

    def __init__(self, op: Any, spec: Any, positions: tuple[int, ...]) -> None:
        self.op, self.spec, self.positions = op, spec, positions

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, OpCall)
            and self.op is other.op
            and self.spec == other.spec
            and self.positions == other.positions
        )

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, leaves: list[Any]) -> None:
        n = len(leaves) - len(self.positions)
        args, kwargs = tree_unflatten(leaves[:n], self.spec)
        results = tree_flatten(self.op(*args, **kwargs))[0]
        made = [results[at] if at < len(results) else None for at in self.positions]
        for target, result in zip(leaves[n:], made, strict=True):  # all of them before the first is written
            if not isinstance(result, torch.Tensor) or (result.dtype, result.size()) != (
                target.dtype,
                target.size(),
            ):
                raise DriverError(f"{self.op} made {_kind(result)} of what was to be {_kind(target)}")
        for target, result in zip(leaves[n:], made, strict=True):
            target.copy_(result)


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.size())}" if isinstance(value, torch.Tensor) else type(value).__name__


class KernelCall:
    """Calls a compiled C++ kernel, which takes tensors only for their addresses."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel = kernel

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelCall) and self.kernel is other.kernel

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, leaves: list[Any]) -> None:
        self.kernel(*leaves)


def encode(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]]:
    """(codes, words): a word per number, and for a tensor its address, sizes, strides and offset. All else
    stands in the code."""
    codes: list[Any] = []
    words: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            codes.append(("tensor", leaf.dim(), leaf.dtype, leaf.is_conj(), leaf.is_neg()))
            words += [leaf.data_ptr(), *leaf.size(), *leaf.stride(), int(leaf.storage_offset())]
        elif type(leaf) is int:
            codes.append(("int",))
            words.append(leaf)
        elif type(leaf) is float:
            codes.append(("float",))
            words += struct.unpack("=Q", struct.pack("=d", leaf))
        else:
            codes.append(("value", leaf))
    return tuple(codes), words


def kernel_node(
    kernel: Any, sample: NodeRecord, arguments: Sequence[Any]
) -> tuple[NodeRecord, list[tuple[int, int]]] | None:
    """See `pgraph.drivers.interface.Driver.kernel_node`."""
    if sample.kind != "kernel" or len(sample.header) != 2 or sample.header[0] != KernelCall(kernel):
        return None
    codes = sample.header[1]
    words: list[int] = []
    addresses: list[tuple[int, int]] = []
    if len(codes) != len(arguments):
        return None
    for at, (code, value) in enumerate(zip(codes, arguments, strict=True)):
        if isinstance(value, Operand):
            if code != ("tensor", len(value.size), value.dtype, *value.lazy):
                return None
            addresses.append((8 * len(words), at))
            words += [value.address, *value.size, *value.stride, value.offset]
        else:
            mine, more = encode([value])
            if mine != (code,):
                return None
            words += more
    kept = (fault.active().cluster(sample.name, words),)
    made = NodeRecord(
        sample.kind, sample.name, sample.header, packed(words), sample.structs, kept, sample.layout
    )
    return made, addresses


def packed(words: Sequence[int]) -> bytes:
    """As parameters of a node."""
    return struct.pack(f"={len(words)}Q", *[w & 0xFFFFFFFFFFFFFFFF for w in words])


def kinds(codes: Sequence[Any]) -> list[str]:
    """What each word stands for: a tensor's address, its layout, or a number."""
    found: list[str] = []
    for code in codes:
        if code[0] == "tensor":
            found += ["tensor", *["layout"] * (2 * code[1] + 1)]
        elif code[0] != "value":
            found.append(code[0])
    return found


def _decode(codes: Sequence[Any], words: Sequence[int]) -> list[Any]:
    values: list[Any] = []
    at = iter(words)
    for code in codes:
        if code[0] == "tensor":
            _, dim, dtype, conj, neg = code
            address, *layout, offset = (next(at) for _ in range(2 * dim + 2))
            values.append(_tensor_at(address, layout[:dim], layout[dim:], dtype, offset, conj, neg))
        elif code[0] == "int":
            word = next(at)
            values.append(word - (1 << 64) if word >> 63 else word)
        elif code[0] == "float":
            values.append(struct.unpack("=d", struct.pack("=Q", next(at)))[0])
        else:
            values.append(code[1])
    return values


def _tensor_at(
    address: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    offset: int,
    conj: bool,
    neg: bool,
) -> torch.Tensor:
    """A tensor at `address`, as far from its storage's start as at capture: some ops count from there."""
    before = offset * dtype.itemsize
    nbytes = before + extent(size, stride) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address - before, _CPU, nbytes)
    return lazily(torch.empty(0, dtype=dtype, device=_CPU).set_(storage, offset, size, stride), conj, neg)


def run(node: NodeRecord, params: bytes | bytearray) -> None:
    """Do what a node does with these parameters."""
    words = struct.unpack_from(f"={len(params) // 8}Q", params)
    if node.kind == "memcpy":
        ctypes.memmove(*words)
    elif node.kind == "memset":
        ctypes.memset(*words)
    elif node.header[0] is TABLE:
        ctypes.memmove(words[0], bytes(params[8:]), 8 * node.header[1])
    else:
        call, codes, *rest = node.header
        if rest == ["table"]:  # the addresses stand in a table in memory
            n = len(kinds(codes))
            words = struct.unpack_from(f"={n}Q", ctypes.string_at(words[0], 8 * n))
        elif rest:  # the pointers are so many bytes off
            pairs = zip(words, kinds(codes), strict=False)
            words = tuple((w + rest[1]) % (1 << 64) if kind == "tensor" else w for w, kind in pairs)
        call(_decode(codes, words))


def spoil(node: NodeRecord, params: bytes | bytearray) -> None:
    """What becomes of a kernel's results where it was launched with attributes that are not its own."""
    call, codes, *_ = node.header
    tensors = [
        leaf for leaf in _decode(codes, struct.unpack_from(f"={len(params) // 8}Q", params)) if _dense(leaf)
    ]
    results = tensors[-len(call.positions) :] if isinstance(call, OpCall) and call.positions else tensors[:1]
    for result in results:
        result.fill_(77)


def refuse_random(op: Any, args: Any, kwargs: Any) -> None:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return
    names = [a.name for a in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    for argument in op._schema.arguments:
        if argument.name in _DRAWING_ARGUMENTS:
            value = given.get(argument.name, argument.default_value)
            if value in (0, 0.0, False):
                return
    raise CaptureError(
        Reason("random-in-capture", f"{op} draws random numbers, and every launch would draw the same ones")
    )


def refuse_mixed_norms(op: Any, args: Any, kwargs: Any) -> None:
    """The statistics have the input's type by PyTorch's rules, and the weights' by its CPU kernels."""
    if "norm" not in op.overloadpacket.__name__:
        return
    tensors = (t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor))
    found = sorted({str(t.dtype) for t in tensors if t.is_floating_point()})
    if len(found) > 1:
        raise CaptureError(
            Reason(
                "not-permitted",
                f"{op} of {' and '.join(found)}: no rule tells which type its results have on a CPU",
                "give the weights the input's type; on a GPU it is captured as it is",
            )
        )


def _dense(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_contiguous() and t.numel() > 0


def as_copy(op: Any, args: Any, kwargs: Any, fresh: list[torch.Tensor]) -> tuple[int, int, int] | None:
    """(destination, source, bytes) if the op is a plain copy between dense tensors."""
    if op is aten.clone.default and fresh:
        source, target = args[0], fresh[0]
    elif op is aten.copy_.default:
        target, source = args[0], args[1]
    else:
        return None
    bits = (source.is_conj(), source.is_neg()) == (target.is_conj(), target.is_neg())
    same = bits and source.dtype == target.dtype and source.size() == target.size()
    if not (same and _dense(source) and _dense(target)):
        return None
    return target.data_ptr(), source.data_ptr(), source.numel() * source.element_size()


def as_fill(op: Any, args: Any, fresh: list[torch.Tensor]) -> tuple[int, int] | None:
    """(address, bytes) if the op fills dense memory with zero bytes."""
    makes_zeros = op in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
    if op is aten.full.default:
        makes_zeros = args[1] in (0, 0.0) and str(args[1]) != "-0.0"
    if makes_zeros and fresh:
        target = fresh[0]
    elif op is aten.zero_.default:
        target = args[0]
    else:
        return None
    if not _dense(target):
        return None
    return target.data_ptr(), target.numel() * target.element_size()
