"""What `pgraph.explain` says about whole models, as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from support import BEFORE_2_15, Block
from support_explain import HOST, explain, text
from torch import Tensor, nn

import pgraph

F = nn.functional

# Dynamo's settings that keep data-dependent ops in the graph instead of breaking it.
TRACED = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


class LanguageModel(nn.Module):
    """Embedding, one block, tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.block = Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens)) @ self.embed.weight.t()


def masked_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Only the tokens that count, picked by a mask."""
    logits = model(tokens)
    counts = targets >= 0
    return F.cross_entropy(logits[counts], targets[counts])


def padded_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The same loss with a fixed shape."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)


def training_step(loss: Any, model: nn.Module) -> Any:
    compiled = torch.compile(loss, backend="pgraph", dynamic=False, options=HOST)

    def step(tokens: Tensor, targets: Tensor) -> None:
        compiled(model, tokens, targets).backward()

    return step


def batch() -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, 11, (2, 5))
    targets[0, :2] = -1
    return torch.randint(0, 11, (2, 5)), targets


class Experts(nn.Module):
    """Top-1 routing: each expert takes the tokens that chose it."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.dense = dense

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.dense:
                out = out + torch.where(choice == i, weight, 0) * expert(x)
            else:
                rows = torch.nonzero(choice[:, 0] == i).squeeze(1)
                out = out.index_add(0, rows, weight[rows] * expert(x[rows]))
        return out


class Scaled(nn.Module):
    """Reads its own activation on the host."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 2).cumsum(0)
        x = x / x.abs().max().item()
        return x.cumsum(1) + 1


class Mixed(nn.Module):
    """Embedding, convolution, LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2)).relu()
        x, _ = self.lstm(x.transpose(1, 2))
        return self.out(x)


def check(explanation: pgraph.Explanation) -> None:
    """Whatever the model: the data survives JSON, the page shows every part, no number is left out."""
    data = explanation.to_dict()
    assert json.loads(explanation.to_json()) == data
    page = explanation.to_html()
    assert page.count('class="bar"') == len(explanation.partitions)
    for partition in explanation.partitions:
        assert f"{partition.name}: {partition.state}" in page
    assert "<script" not in page
    assert "http" not in page
    assert data["device_ops"]["all"] == sum(p["device_ops"] * p["calls"] for p in data["partitions"])
    assert all(p.seconds is not None and p.seconds > 0 for p in explanation.partitions if p.calls)


def test_language_model_with_a_masked_loss() -> None:
    found = pgraph.explain(training_step(masked_loss, LanguageModel()))(*batch())
    check(found)
    assert not found.complete
    assert_expected_inline(
        text(found),
        """\
pgraph: 4 of 4 partitions captured, 1 graph break
captured: device ops 45 of 45 (100 %), kernels 45 of 45 (100 %)
memory of the recordings: 9,088 B of execs
not compiled: 18 ops: aten::add_ x 13, aten::index x 2, aten::ones_like, aten::new_zeros, and 1 kind more

What to change first:
  1. joins what lies before and after the break, and compiles what Python runs there
     [graph-break] indexing by a mask (or nonzero) has a result whose shape depends on data
     at test_explain_models.py: return F.cross_entropy(logits[counts], targets[counts])
     fix: use torch.where, masked_fill, or integer indices

forward 0
  partition 0: captured, 13 device ops
    ops: aten::addmm x 4, aten::native_layer_norm x 2, aten::add x 2, aten::embedding, and 4 kinds more
    1 capture: 13 kernels; slots 16 input, 29 output, 4 temp; 2,688 B of execs
    plan: 1 chunk, 17 blocks, peak 62,976 B, eager 61,952 B

forward 1
  partition 0: captured, 2 device ops
    ops: aten::_log_softmax, aten::nll_loss_forward
    1 capture: 2 kernels; slots 2 input, 4 output, 0 temp; 232 B of execs
    plan: 1 chunk, 3 blocks, peak 2,560 B, eager 2,048 B

backward 2
  partition 0: captured, 2 device ops
    ops: aten::nll_loss_backward, aten::_log_softmax_backward_data
    1 capture: 2 kernels; slots 5 input, 1 output, 2 temp; 328 B of execs
    plan: 1 chunk, 2 blocks, peak 3,072 B, eager 2,560 B

backward 3
  partition 0: captured, 28 device ops
    ops: aten::mm x 10, aten::add x 5, aten::sum x 4, aten::select_backward x 3, and 5 kinds more
    1 capture: 28 kernels; slots 29 input, 13 output, 52 temp; 5,840 B of execs
    plan: 1 chunk, 16 blocks, peak 103,936 B, eager 60,928 B
""",
    )


def test_language_model_with_a_masked_loss_in_one_graph() -> None:
    """The mask is to blame for everything behind it, in the backward too."""
    with torch._dynamo.config.patch(TRACED):
        found = pgraph.explain(training_step(masked_loss, LanguageModel()))(*batch())
    check(found)
    if torch.__version__ < "2.13":  # two comparisons fewer in the backward
        assert "2 of 4 partitions captured\ncaptured: device ops 41 of 58 (71 %)" in text(found)
        return
    assert_expected_inline(
        text(found),
        """\
pgraph: 2 of 4 partitions captured
captured: device ops 41 of 60 (68 %), kernels 41 of 60 (68 %)
memory of the recordings: 8,528 B of execs
not compiled: 14 ops: aten::add_ x 13, aten::ones_like

What to change first:
  1. 19 more device ops captured, 2 partitions fewer
     [bool-index] aten::index is indexed by the mask ge (bool[2, 5] on cpu), which hides a nonzero
     at test_explain_models.py: return F.cross_entropy(logits[counts], targets[counts])
     fix: use torch.where, masked_fill, or integer indices

forward 0
  partition 0: captured, 13 device ops
    ops: aten::addmm x 4, aten::native_layer_norm x 2, aten::add x 2, aten::embedding, and 4 kinds more
    1 capture: 13 kernels; slots 16 input, 29 output, 4 temp; 2,688 B of execs
    plan: 1 chunk, 17 blocks, peak 62,976 B, eager 61,440 B
  partition 1: uncaptured, 10 device ops
    ops: aten::index x 2, aten::_assert_scalar x 2, aten::sym_size, ge, and 4 kinds more
    [bool-index] aten::index is indexed by the mask ge (bool[2, 5] on cpu), which hides a nonzero
    at test_explain_models.py: return F.cross_entropy(logits[counts], targets[counts])
    fix: use torch.where, masked_fill, or integer indices

backward 1
  partition 0: uncaptured, 9 device ops
    ops: aten::_assert_scalar x 2, ge, le, aten::nll_loss_backward, and 4 kinds more
    [bool-index] aten::index is indexed by the mask ge (bool[2, 5] on cpu), which hides a nonzero
    at test_explain_models.py: return F.cross_entropy(logits[counts], targets[counts])
    fix: use torch.where, masked_fill, or integer indices
  partition 1: captured, 28 device ops
    ops: aten::mm x 10, aten::add x 5, aten::sum x 4, aten::select_backward x 3, and 5 kinds more
    1 capture: 28 kernels; slots 29 input, 13 output, 52 temp; 5,840 B of execs
    plan: 1 chunk, 16 blocks, peak 103,936 B, eager 60,928 B
""",
    )


def test_language_model_with_a_padded_loss() -> None:
    found = pgraph.explain(training_step(padded_loss, LanguageModel()))(*batch())
    check(found)
    assert found.complete
    assert not found.changes
    assert_expected_inline(
        text(found),
        """\
pgraph: all that is compiled is captured
captured: device ops 44 of 44 (100 %), kernels 44 of 44 (100 %)
memory of the recordings: 8,984 B of execs
not compiled: 14 ops: aten::add_ x 13, aten::ones_like

forward 0
  partition 0: captured, 14 device ops
    ops: aten::addmm x 4, aten::native_layer_norm x 2, aten::add x 2, aten::embedding, and 5 kinds more
    1 capture: 14 kernels; slots 16 input, 31 output, 6 temp; 2,816 B of execs
    plan: 1 chunk, 18 blocks, peak 63,488 B, eager 61,952 B

backward 1
  partition 0: captured, 30 device ops
    ops: aten::mm x 10, aten::add x 5, aten::sum x 4, aten::select_backward x 3, and 7 kinds more
    1 capture: 30 kernels; slots 32 input, 13 output, 57 temp; 6,168 B of execs
    plan: 1 chunk, 16 blocks, peak 105,472 B, eager 60,928 B
""",
    )


@pytest.mark.parametrize("traced", [False, True])
def test_experts_that_take_their_tokens(traced: bool) -> None:
    with torch._dynamo.config.patch(TRACED if traced else {}), torch.no_grad():
        found = explain(Experts(dense=False), torch.randn(6, 8))
    check(found)
    assert not found.complete
    if traced:
        assert_expected_inline(
            text(found),
            """\
pgraph: 2 of 4 partitions captured
captured: device ops 6 of 30 (20 %), kernels 6 of 30 (20 %)
memory of the recordings: 600 B of execs

What to change first:
  1. 24 more device ops captured, 3 partitions fewer
     [dynamic-shape] aten::nonzero has a result whose shape depends on data
     at test_explain_models.py: rows = torch.nonzero(choice[:, 0] == i).squeeze(1)
     fix: use torch.where(mask, a, b), or torch.nonzero_static with a size

inference 0
  partition 0: captured, 5 device ops
    ops: aten::addmm, aten::_softmax, aten::topk, aten::zeros_like, and 1 kind more
    1 capture: 5 kernels; slots 3 input, 5 output, 4 temp; 528 B of execs
    plan: 1 chunk, 4 blocks, peak 3,584 B, eager 3,072 B
  partition 1: uncaptured, 12 device ops
    ops: aten::_assert_scalar x 2, aten::index x 2, aten::nonzero, aten::sym_size, and 6 kinds more
    [dynamic-shape] aten::nonzero has a result whose shape depends on data
    at test_explain_models.py: rows = torch.nonzero(choice[:, 0] == i).squeeze(1)
    fix: use torch.where(mask, a, b), or torch.nonzero_static with a size
  partition 2: captured, 1 device op
    ops: aten::eq
    1 capture: 1 kernel; slots 1 input, 1 output, 0 temp; 72 B of execs
    plan: 1 chunk, 1 block, peak 1,024 B, eager 1,024 B
  partition 3: uncaptured, 12 device ops
    ops: aten::_assert_scalar x 2, aten::index x 2, aten::nonzero, aten::sym_size, and 6 kinds more
    [dynamic-shape] aten::nonzero has a result whose shape depends on data
    at test_explain_models.py: rows = torch.nonzero(choice[:, 0] == i).squeeze(1)
    fix: use torch.where(mask, a, b), or torch.nonzero_static with a size
""",
        )
    else:
        assert_expected_inline(
            text(found),
            """\
pgraph: nothing was compiled, 1 graph break
captured: device ops 0 of 0, kernels 0 of 0
not compiled: 18 ops: aten::index x 4, aten::linear x 3, aten::eq x 2, aten::nonzero x 2, and 5 kinds more

What to change first:
  1. compiles what Python runs there
     [graph-break] indexing by a mask (or nonzero) has a result whose shape depends on data
     at test_explain_models.py: rows = torch.nonzero(choice[:, 0] == i).squeeze(1)
     fix: use torch.where, masked_fill, or integer indices
""",
        )


def test_experts_that_take_all_tokens() -> None:
    with torch.no_grad():
        found = explain(Experts(dense=True), torch.randn(6, 8))
    check(found)
    assert found.complete
    assert_expected_inline(
        text(found),
        """\
pgraph: all that is compiled is captured
captured: device ops 16 of 16 (100 %), kernels 16 of 16 (100 %)
memory of the recordings: 1,960 B of execs

inference 0
  partition 0: captured, 16 device ops
    ops: aten::addmm x 3, aten::eq x 2, aten::scalar_tensor x 2, aten::where x 2, and 5 kinds more
    1 capture: 16 kernels; slots 9 input, 1 output, 34 temp; 1,960 B of execs
    plan: 1 chunk, 6 blocks, peak 6,656 B, eager 6,656 B
""",
    )


def test_a_number_read_in_the_middle() -> None:
    found = explain(Scaled(), torch.randn(4, 4))
    check(found)
    assert_expected_inline(
        text(found),
        """\
pgraph: 2 of 2 partitions captured, 1 graph break
captured: device ops 7 of 7 (100 %), kernels 7 of 7 (100 %)
memory of the recordings: 680 B of execs

What to change first:
  1. joins what lies before and after the break, and compiles what Python runs there
     [graph-break] Tensor.item() (or int(), float(), a slice up to a tensor) reads a value on the host
     at test_explain_models.py: x = x / x.abs().max().item()
     fix: keep the value in a tensor: x * s instead of x * s.item(), torch.where instead of if

inference 0
  partition 0: captured, 4 device ops
    ops: aten::mul, aten::cumsum, aten::abs, aten::max
    1 capture: 4 kernels; slots 1 input, 3 output, 4 temp; 368 B of execs
    plan: 1 chunk, 3 blocks, peak 2,048 B, eager 1,536 B

inference 1
  partition 0: captured, 3 device ops
    ops: aten::div, aten::cumsum, aten::add
    1 capture: 3 kernels; slots 1 input, 1 output, 4 temp; 312 B of execs
    plan: 1 chunk, 2 blocks, peak 1,536 B, eager 1,024 B
""",
    )


@pytest.mark.skipif(not BEFORE_2_15, reason="Dynamo goes on around the LSTM")
def test_embedding_convolution_and_lstm() -> None:
    model = torch.compile(Mixed(), backend="pgraph", dynamic=False, options=HOST)
    found = pgraph.explain(lambda tokens: model(tokens).sum().backward())(torch.randint(0, 7, (2, 6)))
    check(found)
    assert_expected_inline(
        text(found),
        """\
pgraph: 2 of 2 partitions captured, 1 graph break
captured: device ops 6 of 6 (100 %), kernels 7 of 7 (100 %)
memory of the recordings: 1,568 B of execs
not compiled: 22 ops: aten::add_ x 9, aten::zeros x 2, aten::sum x 2, aten::reshape x 2, and 6 kinds more

What to change first:
  1. joins what lies before and after the break, and compiles what Python runs there
     [graph-break] Dynamo does not trace torch.nn.RNN, GRU and LSTM
     at test_explain_models.py: x, _ = self.lstm(x.transpose(1, 2))
     fix: write the cell with plain ops, e.g. torch.nn.LSTMCell in a loop

forward 0
  partition 0: captured, 3 device ops
    ops: aten::embedding, aten::convolution, aten::relu
    1 capture: 3 kernels; slots 4 input, 3 output, 2 temp; 552 B of execs
    plan: 1 chunk, 3 blocks, peak 3,584 B, eager 3,584 B

backward 1
  partition 0: captured, 3 device ops
    ops: aten::threshold_backward, aten::convolution_backward, aten::embedding_dense_backward
    1 capture: 4 kernels; slots 7 input, 3 output, 5 temp; 1,016 B of execs
    plan: 1 chunk, 4 blocks, peak 4,608 B, eager 3,584 B
""",
    )
