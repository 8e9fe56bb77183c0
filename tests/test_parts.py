"""Ops that are recorded as several calls give what one gives (Note [Results in the place of scratch])."""

from __future__ import annotations

import pytest
import torch
from support import host
from torch import nn

from pgraph.capture.parts import in_parts, joined
from pgraph.runtime import registry

BACKWARD = torch.ops.aten.convolution_backward.default


def arguments(
    mask: list[bool], memory_format: torch.memory_format = torch.contiguous_format, groups: int = 1
) -> tuple[object, ...]:
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=memory_format)
    weight = torch.randn(8, 4 // groups, 3, 3).contiguous(memory_format=memory_format)
    grad = torch.randn(2, 8, 4, 4).contiguous(memory_format=memory_format)
    return (grad, x, weight, [8], [1, 1], [0, 0], [1, 1], False, [0, 0], groups, mask)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mask", [[True, True, True], [True, True, False], [True, False, True]])
def test_parts_give_what_one_call_gives(
    mask: list[bool], memory_format: torch.memory_format, groups: int
) -> None:
    args = arguments(mask, memory_format, groups)
    parts = in_parts(BACKWARD, args)
    assert [part[10] for part in parts] == [[True, False, False], [False, *mask[1:]]]
    got = joined([BACKWARD(*part) for part in parts])
    want = BACKWARD(*args)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine.stride() == theirs.stride()
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, True], [False, False, True]])
def test_one_result_or_none_beside_scratch_is_one_call(mask: list[bool]) -> None:
    args = arguments(mask)
    assert in_parts(BACKWARD, args) == [args]


def test_a_gradient_that_each_call_would_copy_is_one_call() -> None:
    grad, *rest = arguments([True, True, False], torch.channels_last)
    assert isinstance(grad, torch.Tensor)
    assert len(in_parts(BACKWARD, (grad.contiguous(), *rest))) == 1
    wide = torch.randn(2, 8, 4, 8)[..., ::2]
    assert len(in_parts(BACKWARD, (wide, *arguments([True, True, False])[1:]))) == 1


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_of_one_pixel_that_each_call_would_copy_is_one_call(
    memory_format: torch.memory_format,
) -> None:
    """Both are contiguous in both formats; ATen looks at the strides, of which the last two mean nothing."""
    rest = torch.randn(8, 4, 1, 1), [8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    plain, last = ((channels, 1, *last) for channels, last in ((8, (1, 1)), (8, (8, 8))))
    x = torch.randn(2, 4, 1, 1).as_strided((2, 4, 1, 1), (4, 1, 4, 4))
    x = x if memory_format == torch.channels_last else x.as_strided((2, 4, 1, 1), (4, 1, 1, 1))
    for strides in (plain, last):
        grad = torch.randn(2, 8, 1, 1).as_strided((2, 8, 1, 1), strides)
        copied = grad.to(memory_format=memory_format) is not grad
        assert copied == ((strides == last) != (memory_format == torch.channels_last))
        assert len(in_parts(BACKWARD, (grad, x, *rest))) == (1 if copied else 2)


def test_other_ops_are_left_alone() -> None:
    args = (torch.randn(2, 2), torch.randn(2, 2))
    assert in_parts(torch.ops.aten.mm.default, args) == [args]
    result = torch.randn(2)
    assert joined([result]) is result


def test_both_calls_are_launched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).double()
    compiled = host(model, codegen="aten", min_ops=1)
    for _ in range(6):
        x = torch.randn(2, 3, 9, 9, dtype=torch.double)
        compiled(x).sum().backward()
        got = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()
        for mine, parameter in zip(got, model.parameters(), strict=True):
            assert torch.equal(mine, parameter.grad)
        model.zero_grad(set_to_none=True)
    (_, backward) = (p.template() for p in registry.live_capturable())
    nodes = [node.name for node in backward.nodes if "convolution_backward" in node.name]
    # Two calls for the second convolution; the first one's input needs no gradient.
    assert len(nodes) == 3, nodes
