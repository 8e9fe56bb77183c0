"""Each private interface of AOTAutograd and Inductor that pgraph uses (see `test_compat`)."""

from __future__ import annotations

import contextlib
import functools
import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import get_donated_idxs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pgraph import compat

aten = torch.ops.aten


def traced(n: int = 4) -> torch.fx.GraphModule:
    """An ATen graph of fake tensors, as AOTAutograd would hand it over."""
    return make_fx(lambda x: (x.sin() + 1, x.cos()), tracing_mode="fake")(torch.randn(n))


# --- AOTAutograd


def test_aot_autograd_gives_each_graph_to_its_compiler() -> None:
    """As ATen ops; what an inference writes into its arguments stays in the graph; 2.11, 2.13."""
    given: list[tuple[str, str]] = []

    def compiler(kind: str) -> Any:
        def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            called = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
            given.append((kind, " ".join(called)))
            return compat.boxed_module(gm)

        return compile_graph

    cut: list[int] = []

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        cut.append(len(given))
        return compat.partition_joint(joint, *args, **kwargs)

    backend = compat.aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3, requires_grad=True)).sum().backward()
    kept = torch.ones(3)
    torch.compile(lambda x: x.sin_(), backend=backend)(kept)
    assert cut == [0], "before both compilers"
    assert given == [
        ("forward", "aten.sin.default"),
        ("backward", "aten.cos.default aten.mul.Tensor"),
        ("inference", "aten.sin.default aten.copy_.default"),
    ]
    assert torch.equal(kept, torch.ones(3).sin())


def test_detect_fake_mode() -> None:
    with FakeTensorMode() as mode:
        assert compat.fake_mode_of([torch.empty(2)]) is mode
    assert compat.fake_mode_of([torch.empty(2)]) is None


def test_boxed_code_generation() -> None:
    """One list, emptied by the call; values die after their last use."""
    run = compat.boxed_module(traced())
    assert run._boxed_call
    x = torch.randn(4)
    args = [x]
    a, b = run(args)
    assert args == []
    assert torch.equal(a, x.sin() + 1)
    assert torch.equal(b, x.cos())


def test_boxed_marks_survive_disable() -> None:
    """What AOTAutograd wraps around a backward."""
    run = torch._dynamo.disable(compat.boxed(lambda args: (args.pop(),)))
    assert run._boxed_call
    assert run([1]) == (1,)


def test_a_joint_graph_is_cut_as_autograd_does_by_itself() -> None:
    """With another function in its place, forward and backward are the same."""

    def graphs(**how: Any) -> list[str]:
        found: list[str] = []

        def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            found.append(gm.code)
            return gm

        torch._dynamo.reset()
        run = torch.compile(lambda x: x.sin().tanh(), backend=aot_autograd(fw_compiler=keep, **how))
        run(torch.randn(4, requires_grad=True)).sum().backward()
        return found

    assert graphs(partition_fn=lambda *args, **kwargs: compat.partition_joint(*args, **kwargs)) == graphs()


def test_gradients_are_told_by_name() -> None:
    """Placeholders of a backward that stand for incoming gradients; all of them where no name tells."""
    found: list[tuple[list[int], list[str]]] = []

    def backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        found.append((compat.tangents(gm), names))
        return compat.boxed_module(gm)

    compiler = aot_autograd(fw_compiler=lambda gm, inputs: compat.boxed_module(gm), bw_compiler=backward)
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    first, second = torch.compile(lambda a, b: (a * b, a.sin()), backend=compiler)(a, b)
    (first + second).sum().backward()
    ((positions, names),) = found
    assert len(names) == 4  # two saved, two gradients
    assert [names[i] for i in positions] == ["tangents_1", "tangents_2"]
    nameless = torch.fx.symbolic_trace(lambda a, b: a + b)
    assert compat.tangents(nameless) == [0, 1]
    kept = weakref.ref(nameless)
    del nameless
    gc.collect()
    assert kept() is None, "a graph that was looked at lives on"


def test_a_forward_and_its_backward_know_of_each_other() -> None:
    """What is saved are the results after those of the program, and both compilations find one object."""
    seen: dict[str, Any] = {}

    def compiler(kind: str) -> Any:
        def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            names = {node.name for node in gm.graph.nodes if node.op == "placeholder"}
            results = len(gm.graph.output_node().args[0])
            seen[kind] = compat.joint_of(), compat.saved_results(gm), results, names
            return compat.boxed_module(gm)

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    compiled = torch.compile(lambda x: (x.sin().exp(), x.cos()), backend=backend)
    first, second = compiled(torch.randn(3, requires_grad=True))
    (first.sum() + second.sum()).backward()
    joint, saved, results, _ = seen["forward"]
    assert joint is not None
    assert not joint.plain
    assert seen["backward"][0] is joint
    assert set(saved) == set(range(2, results))
    assert set(saved.values()) <= seen["backward"][3], "the backward's inputs have these names"
    assert compat.joint_of() is None


def test_gradients_of_parameters_are_told_from_others() -> None:
    """Each has the shape of its parameter; those of other inputs are not among them."""
    seen: list[tuple[frozenset[int], list[Any]]] = []

    def backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        shapes = [getattr(r, "meta", {}).get("val") for r in gm.graph.output_node().args[0]]
        seen.append((compat.parameter_gradients(gm), [None if s is None else tuple(s.shape) for s in shapes]))
        return compat.boxed_module(gm)

    def forward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compat.boxed_module(gm)

    model = torch.nn.Linear(2, 5)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))
    compiled(torch.randn(7, 2, requires_grad=True)).sum().backward()
    ((positions, shapes),) = seen
    assert sorted(shapes[i] for i in positions) == [(5,), (5, 2)]
    assert (7, 2) in shapes
    assert compat.parameter_gradients(torch.fx.symbolic_trace(model)) == frozenset(), "no compilation"


def test_hooks_on_saved_tensors_are_seen() -> None:
    assert not compat.packed_by_others()
    with torch.autograd.graph.save_on_cpu():
        assert not compat.packed_by_others()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert compat.packed_by_others()
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.packed_by_others())
        return x.sin()

    torch.utils.checkpoint.checkpoint(fn, torch.randn(3, requires_grad=True), use_reentrant=False)
    assert seen == [False]


def test_memory_that_the_caller_keeps() -> None:
    """Parameters and buffers among a forward's inputs, and those of them that its backward gets."""
    found: dict[str, list[str]] = {}

    def compiler(kind: str) -> Any:
        def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            kept = compat.static_inputs(gm, kind == "backward")
            names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
            found[kind] = [names[i] for i in sorted(kept)]
            return compat.boxed_module(gm)

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    module = torch.nn.Linear(3, 3, bias=False)
    module.register_buffer("scale", torch.ones(3))
    run = torch.compile(lambda x: (module(x * 2) * module.scale).sum(), backend=backend)
    run(torch.randn(2, 3, requires_grad=True)).backward()
    assert len(found["forward"]) == 2
    assert found["backward"]
    assert set(found["backward"]) <= set(found["forward"])
    assert compat.static_inputs(traced(), False) == frozenset()


@pytest.mark.parametrize("eager", [False, True])
def test_a_backward_is_compiled_with_its_forward(eager: bool) -> None:
    compiled: list[str] = []

    def compiler(kind: str) -> Any:
        def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            compiled.append(kind)
            return compat.boxed_module(gm)

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    with compat.eager_backward() if eager else contextlib.nullcontext():
        result = torch.compile(lambda x: x.sin().sum(), backend=backend)(torch.randn(3, requires_grad=True))
    assert set(compiled) == ({"forward", "backward"} if eager else {"forward"})
    result.backward()
    assert set(compiled) == {"forward", "backward"}


def test_tokens_are_the_first_results() -> None:
    told: list[tuple[int, int]] = []

    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        told.append((compat.tokens(), len(gm.graph.output_node().args[0])))  # type: ignore[arg-type]
        return compat.boxed_module(gm)

    def fn(x: Tensor) -> Tensor:
        torch.ops.aten._print("")  # its effect is ordered
        return x + 1

    assert compat.tokens() == 0
    backend = aot_autograd(fw_compiler=compiler)
    for at_home in (False, True):  # as Inductor's front end has it
        torch._dynamo.reset()
        with torch._functorch.config.patch(unlift_effect_tokens=at_home):
            torch.compile(fn, backend=backend, fullgraph=True)(torch.ones(2))
    assert told == [(1, 2), (0, 1)]


def test_donated_inputs() -> None:
    """What a backward may overwrite stands in the tracing context, which the compiler of a part reads."""
    assert compat.donated_inputs() == ()
    with compat.donating([3]):
        assert compat.donated_inputs() == ()
    context = TracingContext(FakeTensorMode())
    with tracing(context):
        context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=[2, 4])  # type: ignore[assignment]
        assert compat.donated_inputs() == (2, 4)
        tag = torch.compiler.config.cache_key_tag
        with compat.donating([0]):
            assert get_donated_idxs() == [0]
            assert torch.compiler.config.cache_key_tag == f"{tag} donated [0]"
        assert get_donated_idxs() == [2, 4]
        assert torch.compiler.config.cache_key_tag == tag


def test_compiling_again() -> None:
    """Outside of any compilation, in the traced values' fake mode, whatever is in force around it."""
    gm = make_fx(lambda x: (x.sin() + 1,), tracing_mode="symbolic")(torch.randn(4, 3))
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    kept = compat.tracing([value for value in inputs if isinstance(value, Tensor)])
    assert kept.fake_mode is compat.fake_mode_of(inputs)
    assert kept.metadata is None
    size = next(value for value in inputs if isinstance(value, Tensor)).size(0)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    with torch.autocast("cpu"), torch.enable_grad():
        with compat.compiling_again(kept) as assumes_more:
            assert TracingContext.get().fake_mode is kept.fake_mode
            assert not torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
            torch.rand(3)
            assert not assumes_more()
            assert size > 3  # a guard
            assert assumes_more()
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert TracingContext.try_get() is None
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_frozen_shape_env_counts_what_it_ignores() -> None:
    """Once Dynamo has its guards, more of them only show in a counter."""
    gm = make_fx(lambda x: (x.sin(),), tracing_mode="symbolic")(torch.randn(4, 3))
    x = next(n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor))
    kept = compat.tracing([x])
    kept.fake_mode.shape_env.freeze()
    with compat.compiling_again(kept) as assumes_more:
        assert x.size(0) > 3
        assert assumes_more()


def test_tracing_keeps_a_copy_of_the_metadata() -> None:
    """Donated inputs are set in it for each part, and not in AOTAutograd's own."""
    context = TracingContext(FakeTensorMode())
    metadata = types.SimpleNamespace(bw_donated_idxs=[1])
    context.fw_metadata = metadata  # type: ignore[assignment]
    with tracing(context):
        kept = compat.tracing([])
    assert kept.fake_mode is context.fake_mode
    with compat.compiling_again(kept), compat.donating([0]):
        assert get_donated_idxs() == [0]
    assert metadata.bw_donated_idxs == [1]


# --- Inductor


@pytest.mark.usefixtures("inductor_cache")
def test_compile_inner_and_the_names_it_allocates_by() -> None:
    """Inductor's code for one graph is boxed, and its module's globals can be found."""
    gm = traced()
    fakes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    with torch._guards.tracing(TracingContext(compat.fake_mode_of(fakes))):
        compiled = compat.compile_graph(gm, fakes, {})
    args: list[Any] = [x := torch.randn(4)]
    out = compiled(args)
    assert args == []
    torch.testing.assert_close(list(out), [x.sin() + 1, x.cos()])
    (namespace,) = compat.generated_namespaces(compiled)
    assert {"empty_strided_cpu", "empty_strided_cuda", "extern_kernels", "reinterpret_tensor"} <= set(
        namespace
    )
    assert compat.generated_namespaces(functools.partial(lambda: None)) == []


@pytest.mark.usefixtures("inductor_cache")
def test_compile_model_calls_the_inner_compiler() -> None:
    """Forward and backward graphs come with the words that tell them apart."""
    seen: list[dict[str, Any]] = []

    def inner(gm: torch.fx.GraphModule, inputs: Any, *unused: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return compat.boxed_module(gm)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compat.compile_model(gm, inputs, inner, {}, lambda joint: None)

    x = torch.randn(4, requires_grad=True)
    torch.compile(lambda x: x.sin() * 2, backend=backend)(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos() * 2)
    assert [bool(k.get("is_backward")) for k in seen] == [False, True]
    assert "static_input_idxs" in seen[0]


@pytest.mark.usefixtures("inductor_cache")
@pytest.mark.parametrize("train", [False, True])
def test_joint_graphs_can_be_changed_after_inductors_passes(train: bool) -> None:
    """Ours comes last, behind the user's own; what it changes is compiled, attributes included."""
    heard: list[str] = []

    def ours(gm: torch.fx.GraphModule) -> None:
        heard.append("ours")
        for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
            with compat.real_values():
                gm.register_buffer("held", torch.full((4,), 2.0))
            with gm.graph.inserting_before(node):
                fresh = gm.graph.call_function(aten.lift_fresh_copy.default, (gm.graph.get_attr("held"),))
            fresh.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(fresh)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        settings = {"joint_custom_post_pass": lambda graph: heard.append("the user's")}
        return compat.compile_model(gm, inputs, inductor_compile, settings, ours)

    def inductor_compile(gm: torch.fx.GraphModule, inputs: Any, *unused: Any, **kwargs: Any) -> Any:
        return compat.compile_graph(gm, inputs, {}, **kwargs)

    compiled = torch.compile(lambda x: x.sin() * x, backend=backend)
    for _ in range(2):
        x = torch.randn(4, requires_grad=train)
        torch.testing.assert_close(compiled(x), 2 * x)
    assert heard == ["the user's", "ours"]


def test_passes_of_the_users_that_have_no_name_are_not_cached() -> None:
    """As with Inductor alone."""

    class Named(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "mine"

    def uuid(chosen: Any) -> Any:
        return compat.inductor._AfterJointPasses(chosen, lambda gm: None).uuid()

    assert uuid(None)
    assert uuid(Named())
    assert uuid(Named()) != uuid(None)
    assert uuid(lambda graph: None) is None
    assert uuid([Named(), lambda graph: None]) is None


def test_modes_come_without_cuda_graphs() -> None:
    assert compat.inductor_mode(None) == {}
    assert compat.inductor_mode("max-autotune")["max_autotune"] is True
    assert not any("cudagraph" in k for k in compat.inductor_mode("reduce-overhead"))


def test_partition_ops() -> None:
    assert compat.partition_ops() == set()
    with torch._inductor.config.patch(custom_should_partition_ops=["my::op"]):
        assert compat.partition_ops() == {"my::op"}


@torch.library.custom_op("pgraph_compat::fill_both", mutates_args=("a", "b"))
def fill_both(a: Tensor, b: Tensor) -> None:
    a.fill_(1)
    b.fill_(2)


def test_ops_that_write_into_their_arguments_are_unwrapped() -> None:
    """What AOTAutograd wraps, the op comes out of; a graph without any stays as it is."""
    found: list[tuple[bool, list[Any]]] = []

    def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        wrapped = any(node.target in compat.WRAPPED_MUTATIONS for node in gm.graph.nodes)
        compat.unwrap_mutations(gm)
        found.append((wrapped, [node.target for node in gm.graph.nodes if node.op == "call_function"]))
        return compat.boxed_module(gm)

    def fn(x: Tensor) -> Tensor:
        a, b = torch.empty_like(x), torch.empty_like(x)
        fill_both(a, b)
        return a + b * x

    run = torch.compile(fn, backend=aot_autograd(fw_compiler=compile_graph))
    assert run(torch.ones(3)).tolist() == [3, 3, 3]
    ((wrapped, targets),) = found
    assert wrapped
    assert torch.ops.pgraph_compat.fill_both.default in targets
    assert not set(targets) & set(compat.WRAPPED_MUTATIONS)


@pytest.mark.usefixtures("inductor_cache")
def test_the_function_that_inductor_generated() -> None:
    """It takes a list; what is compiled besides has none."""
    gm = traced()
    fakes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    compiled = compat.compile_graph(gm, fakes, {})
    code = compat.generated_code(compiled)
    assert code is not None
    function = code.__func__ if isinstance(code, types.MethodType) else code
    assert function.__globals__ is compat.generated_namespaces(compiled)[0]
    args = [x := torch.randn(4)]
    torch.testing.assert_close(list(code(args)), [x.sin() + 1, x.cos()])
    assert args == []
    assert compat.generated_code(compat.boxed_module(gm)) is None


def test_what_is_no_triton_kernel() -> None:
    """On a CPU there are none; `test_cuda_triton` has launchers made by Inductor's own code."""
    assert not compat.is_triton_kernel(torch.add)
    assert compat.launcher_of(types.SimpleNamespace(launchers=[])) is None
    assert compat.launcher_of(types.SimpleNamespace(launchers=[lambda: None])) is None
    assert compat.launcher_of(types.SimpleNamespace(launchers=[len, len])) is None
    assert compat.only_launcher(types.SimpleNamespace(launchers=[len])) is None


def test_propagate() -> None:
    """Values follow the strides that the inputs have today, and a view that they rule out becomes a copy."""
    gm = make_fx(lambda x: (aten.view.default(x + 1, [12]),), tracing_mode="fake")(torch.randn(4, 3))
    (x,) = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    with x.fake_mode:
        turned = torch.empty_strided((4, 3), (1, 4))
    compat.propagate(gm, [turned])
    added = next(node for node in gm.graph.nodes if node.target is aten.add.Tensor)
    assert added.meta["val"].stride() == (1, 4)


def test_output_strides(inductor_cache: Any) -> None:
    """Inductor's code tells the strides of its results, as text."""
    gm = make_fx(lambda x: (x.permute(1, 0) + 1, 3), tracing_mode="fake")(torch.randn(4, 3))
    gm.graph.output_node().meta["user_visible_output_idxs"] = [0]
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    compiled = compat.compile_graph(gm, inputs, {})
    assert compat.output_strides(compiled) == [("1", "3"), None]
    assert compat.output_strides(lambda args: args) is None
