"""The coverage benchmark: its zoo, its rule of comparison, and what a check does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_coverage import job
from torch import Tensor, nn

# The zoo


def test_the_zoo_is_large_and_names_are_its_own(load: Any) -> None:
    zoo = load("zoo")
    collections = [entry.name.split("/")[0] for entry in zoo.PUBLISHED]
    assert collections.count("hf") >= 38
    assert collections.count("timm") >= 31
    assert collections.count("tv") >= 9
    assert len(zoo.ALL) == len(zoo.PUBLISHED) + 2
    timed = [entry for entry in zoo.PUBLISHED if entry.timed]
    assert len(timed) >= 24
    assert 2 * sum(entry.conv for entry in timed) >= len(timed)


def test_models_are_chosen_by_pattern(load: Any) -> None:
    zoo = load("zoo")
    assert [entry.name for entry in zoo.select(["own/*", "hf/bert"])] == ["hf/bert", "own/mlp", "own/convnet"]
    assert zoo.select([]) == list(zoo.PUBLISHED)
    with pytest.raises(ValueError, match="no model is called 'hf/nobody'; there are hf/bert"):
        zoo.select(["own/mlp", "hf/nobody"])


@pytest.mark.parametrize(
    ("package", "name"),
    [("transformers", "hf/t5"), ("timm", "timm/levit_128s"), ("torchvision", "tv/squeezenet1_1")],
)
def test_a_published_model_trains_and_infers(load: Any, package: str, name: str) -> None:
    pytest.importorskip(package)
    zoo, entries = load("zoo"), load("zoo.entry")
    entry = zoo.find(name)
    program = entries.without_chance(entry.program())
    draw = entries.Draw(torch.device("cpu"), 0)
    losses = [program(*entry.inputs(draw, 2, True)) for draw in [entries.Draw(draw.device, 0)] * 1]
    losses[0].backward()
    assert sum(p.grad is not None for p in program.parameters()) > 10
    with torch.no_grad():
        outputs = program.eval()(*entry.inputs(draw, 2, False))
    assert all(isinstance(out, Tensor) and out.isfinite().all() for out in outputs)


def test_nothing_is_left_to_chance_or_at_zero(load: Any) -> None:
    entries = load("zoo.entry")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout, self.drop_prob, self.rate = 0.1, 0.2, 0.3
            self.dropout = nn.Dropout(0.5)
            self.head, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 1e-6))
            nn.init.zeros_(self.head.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(self.head(x)) * self.scale

    model = entries.lively(entries.without_chance(Model()))
    assert (model.attention_dropout, model.drop_prob, model.rate, model.dropout.p) == (0, 0, 0.3, 0)
    assert model.head.weight.abs().max() > 1e-3
    assert 0.2 <= model.scale.min() <= model.scale.max() <= 0.6
    x = torch.randn(2, 4)
    assert torch.equal(model(x), model(x))


def test_batch_norms_are_calibrated(load: Any) -> None:
    entries = load("zoo.entry")
    norm = nn.BatchNorm1d(3)
    x = torch.randn(64, 3) * 5 + 7
    entries.calibrated(norm, (x,))
    torch.testing.assert_close(norm.running_mean, x.mean(0))
    assert norm.momentum == 0.1


# The rule


def tensors(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    names = ("loss", "gradient of a", "gradient of b", "gradient of c", "buffer n")
    return {name: torch.randn(() if name == "loss" else (256,), generator=random) for name in names}


def rounded(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16().float() for name, tensor in named.items()}


def test_rounding_as_eager_rounds_is_right(load: Any) -> None:
    judge = load("coverage_judge").judge
    truth = tensors()
    mine = {name: tensor * (1 + 2**-8) for name, tensor in truth.items()}
    verdict = judge(truth, rounded(truth), rounded(truth), mine)
    assert verdict.mismatches == ()
    assert verdict.compared == 5
    assert 0 < verdict.eager_error < verdict.error < 2**-7


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gradient of a", lambda x: x * 1.1),
        ("gradient of a", lambda x: torch.cat([x[:-1], x[-1:] + 1])),
        ("gradient of b", lambda x: torch.cat([x[:-1], x[-1:] * float("nan")])),
        ("gradient of c", lambda x: x[:-1]),
        ("buffer n", torch.zeros_like),
        ("loss", lambda x: x + 0.5),
    ],
)
def test_a_wrong_tensor_is_named(load: Any, name: str, wrong: Callable[[Tensor], Tensor]) -> None:
    truth = tensors()
    mine = {**rounded(truth), name: wrong(truth[name])}
    verdict = load("coverage_judge").judge(truth, rounded(truth), rounded(truth), mine)
    assert [mismatch.name for mismatch in verdict.mismatches] == [name]
    assert name in str(verdict.mismatches[0])


def test_missing_and_new_tensors_are_wrong(load: Any) -> None:
    truth = tensors()
    mine = {name: tensor for name, tensor in truth.items() if name != "gradient of b"}
    mine["gradient of d"] = torch.zeros(3)
    found = load("coverage_judge").judge(truth, truth, truth, mine).mismatches
    assert [mismatch.name for mismatch in found] == ["gradient of b", "gradient of d (new)"]


def test_a_gradient_of_pure_rounding_may_be_any_rounding(load: Any) -> None:
    """A bias before a norm: eager's noise is 1e-5 by luck, the compiled model's is 1e-3."""
    truth = {**tensors(), "gradient of z": torch.zeros(8)}
    eager = {**rounded(truth), "gradient of z": torch.full((8,), 1e-5)}
    mine = {**rounded(truth), "gradient of z": torch.full((8,), -1e-3)}
    judge = load("coverage_judge").judge
    assert judge(truth, eager, eager, mine).mismatches == ()
    mine["gradient of z"] = torch.full((8,), 0.05)
    assert [m.name for m in judge(truth, eager, eager, mine).mismatches] == ["gradient of z"]


def test_nondeterminism_of_eager_widens_the_bound(load: Any) -> None:
    truth = tensors()
    again = {**truth, "gradient of a": truth["gradient of a"] * 1.2}
    mine = {**truth, "gradient of a": truth["gradient of a"] * 1.15}
    judge = load("coverage_judge").judge
    assert judge(truth, truth, truth, mine).mismatches
    assert judge(truth, truth, again, mine).mismatches == ()


def test_a_deviation_of_inductors_is_not_pgraphs(load: Any) -> None:
    rules = load("coverage_judge")
    truth = tensors()
    mine = {**truth, "gradient of a": truth["gradient of a"] * 1.2}
    (mismatch,) = rules.judge(truth, truth, truth, mine).mismatches
    assert rules.shared(mismatch, truth, {"gradient of a": truth["gradient of a"] * 1.15})
    assert not rules.shared(mismatch, truth, {"gradient of a": truth["gradient of a"] * 1.05})
    assert not rules.shared(mismatch, truth, {})
    assert rules.outside(
        mismatch, truth, {"gradient of a": torch.full_like(truth["gradient of a"], float("nan"))}
    )
    assert not rules.outside(mismatch, truth, truth)
    assert not rules.outside(mismatch, truth, {})
    (stale,) = rules.judge(truth, truth, truth, {**truth, "loss": torch.tensor(float("nan"))}).mismatches
    assert not rules.shared(stale, truth, {"loss": torch.tensor(float("nan"))})


def test_an_eager_run_that_is_not_finite_judges_nobody(load: Any) -> None:
    truth = {**tensors(), "loss": torch.tensor(float("inf"))}
    with pytest.raises(ValueError, match="eager's loss is not finite"):
        load("coverage_judge").judge(truth, truth, truth, truth)


# What a child does


def test_a_stale_parameter_or_input_shows(load: Any) -> None:
    """A compiled model that keeps the first weights' address reads NaN once they have moved."""
    checks, subjects = load("coverage_check"), load("coverage_subject")
    subject = subjects.Subject(job(load))
    first = [p.data for p in subject.program.parameters()]
    old = [p.clone() for p in first]
    assert subject.move() == len(old)
    for before, kept, parameter in zip(first, old, subject.program.parameters(), strict=True):
        assert before.isnan().all()
        assert parameter.data_ptr() != before.data_ptr()
        assert not torch.equal(parameter, kept)
        torch.testing.assert_close(parameter.data, kept, rtol=0.15, atol=0)
    # A backend that swaps in the weights of its first call stands for one with stale addresses.
    trial = checks.Trial(job(load, backend="eager"), subject)
    frozen = [p.data for p in subject.program.parameters()]

    def stale(*inputs: Tensor) -> Any:
        today = [p.data for p in subject.program.parameters()]
        for parameter, data in zip(subject.program.parameters(), frozen, strict=True):
            parameter.data = data
        result = subject.program(*inputs)
        for parameter, data in zip(subject.program.parameters(), today, strict=True):
            parameter.data = data
        return result

    trial.compiled = stale
    holes = subjects.Holes(subject.device)
    trial.step(0, subject.inputs(0), holes)
    assert trial.status() == "ok"
    subject.move()
    trial.step(1, subject.inputs(1), holes)
    assert trial.status().startswith("mismatch: step 1: loss is off by nan")


def test_buffers_and_tied_weights_keep_what_they_are(load: Any) -> None:
    subject = load("coverage_subject").Subject(job(load, model="own/convnet"))
    subject.step(subject.program, subject.inputs(0))
    before = {name: b.clone() for name, b in subject.program.named_buffers()}
    subject.move()
    after = dict(subject.program.named_buffers())
    assert all(torch.equal(before[name], after[name]) for name in before)
    saved = subject.saved()
    subject.program.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    found = subject.step(subject.program, subject.inputs(1))
    assert "buffer model.1.running_mean" in found
    assert "buffer mask" not in found
    del subject.program.mask
    assert not all(torch.equal(before[name], after[name]) for name in before)
    subject.restore(saved)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_truth_follows_moved_weights_and_has_none_of_bf16(load: Any) -> None:
    subject = load("coverage_subject").Subject(job(load))
    inputs = subject.inputs(0)
    before = subject.truth(inputs)
    subject.move()
    now = subject.truth(inputs)
    assert not torch.equal(before["loss"], now["loss"])
    mine = subject.step(subject.program, inputs)
    assert set(mine) == set(now)
    assert all(torch.equal(mine[name], now[name]) for name in now)
    subject.program.to(torch.bfloat16)
    rounded = subject.truth(inputs)
    assert {tensor.dtype for tensor in rounded.values()} == {torch.float32}
    torch.testing.assert_close(rounded["loss"], now["loss"], rtol=1e-2, atol=0)
    assert not torch.equal(rounded["loss"], now["loss"])


def test_a_check_counts_what_is_captured(load: Any) -> None:
    row = load("coverage_check").check(job(load, mode="infer", steps=7))
    assert row["status"] == "ok"
    assert row["captured_ops"] == row["device_ops"] > 3
    assert (row["captures"], row["fallbacks"], row["uncaptured_parts"], row["uncaptured"]) == (1, 0, 0, {})
    assert row["steps_launched"] >= 5
    assert row["input_addresses"] > 1
    assert row["error"] <= 2 * row["eager_error"] + 1e-6


def test_an_op_that_stays_outside_is_in_the_row(load: Any) -> None:
    import pgraph

    pgraph.mark_unsafe("aten::relu", "it is only a test", "nothing")
    try:
        row = load("coverage_check").check(job(load, mode="infer", steps=7))
    finally:
        pgraph.unmark_unsafe("aten::relu")
    assert row["status"] == "ok"
    assert row["captured_ops"] < row["device_ops"]
    assert "marked" in row["uncaptured"]
    assert any(reason.startswith("[marked]") for reason in row["reasons"])
