"""Every op answers alike: to scalars, remat by name, ``jax.export``, explicit axes, ``explain`` and wrong calls."""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.every_op.matrix import OpCall, call_of, every_op, large_call_of
from tilewright.errors import UnsupportedError
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.lowering.labels import find_labels_in_lowered, is_call_label, parse_label

every = pytest.mark.parametrize("op", every_op())

SCALARS: dict[str, Any] = {
    "sliding_window": 7,
    "window_size": (7, 3),
    "softmax_scale": 0.25,
    "dropout_prob": 0.0,
    "kv_lora_rank": 512,
    "label_smoothing": 0.1,
    "axis": -1,
    "fraction": 0.5,
    "capacity": 1,
    "group": 32,
    "num_groups": 2,
    "top_groups": 1,
    "transpose_lhs": False,
    "transpose_rhs": False,
}
"""A value for every option of a public function that is a number, where that of its type does not do."""
OF_TYPE = {"bool": True, "int": 7, "float": 4.0}
AS_NUMPY = {bool: np.bool_, int: np.int64, float: np.float64}


def takes_operands_alone(call: OpCall) -> bool:
    """True if the backward pass needs nothing of the forward pass, which ``jax.checkpoint`` therefore never repeats."""
    inv, _ = prepared(call.kernel, tuple(call.args), dict(call.kwargs))
    return not jax.tree.leaves(call.kernel.residuals(call.kernel.results(call.kernel.inputs_of(inv))))


def scalar_options(op: str) -> dict[str, Any]:
    """The values of an op's options that are numbers."""
    parameters = inspect.signature(call_of(op).function).parameters.values()
    number = re.compile(r"\b(bool|int|float)\b")
    wanted = {
        p.name: found[0]
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
        and (found := number.search(str(p.annotation)))
        and "ndarray" not in str(p.annotation)
        and not str(p.annotation).startswith("tuple")
    }
    if "softmax_scale" in {p.name for p in parameters}:  # which may be an array, too
        wanted["softmax_scale"] = "float"
    return {name: SCALARS.get(name, OF_TYPE[kind]) for name, kind in wanted.items()}


def equal(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), ours, theirs)


@every
def test_numpys_scalars_are_static_as_pythons_are(op):
    options = scalar_options(op)
    as_numpys = jax.tree.map(lambda value: AS_NUMPY[type(value)](value), options)
    call = call_of(op)
    call = OpCall(op, call.args, {k: v for k, v in call.kwargs.items() if k not in options})
    function, arrays = call.on_arrays(**options)
    other, _ = call.on_arrays(**as_numpys)
    wanted = function(*arrays)
    equal(other(*arrays), wanted)
    equal(jax.jit(other)(*arrays), wanted)
    if "softmax_scale" in options:
        traced = jax.jit(lambda scale, *xs: call.on_arrays(**options | {"softmax_scale": scale})[0](*xs))
        equal(traced(jnp.float32(0.25), *arrays), wanted)


@every
def test_a_policy_by_name_saves_the_forward_pass(op):
    call = call_of(op)
    policy = jax.checkpoint_policies.save_only_these_names(f"{op}_out", f"{op}_residuals")
    function, arrays = call.on_arrays()
    if not call.differentiable:
        assert f"name={op}_out" in str(jax.make_jaxpr(function)(*arrays))
        return

    def directions(wrapped: Any) -> list[str]:
        loss = lambda *xs: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(wrapped(*xs)))
        floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
        lowered = jax.jit(jax.value_and_grad(loss, argnums=floating)).lower(*arrays)
        return sorted(parse_label(t).direction for t in find_labels_in_lowered(lowered) if is_call_label(t))

    def forwards(wrapped: Any) -> int:
        loss = lambda *xs: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(wrapped(*xs)))
        text = str(jax.make_jaxpr(jax.grad(loss))(*arrays))
        return text.count(".forward ") + text.count(".run ") + text.count(".forward\n") + text.count(".run\n")

    assert directions(jax.checkpoint(function, policy=policy)) == ["backward", "forward"]
    assert forwards(jax.checkpoint(function, policy=policy)) == forwards(function)
    repeated = forwards(jax.checkpoint(function)) - forwards(function)
    assert repeated == 0 if takes_operands_alone(call) else repeated > 0


def symbolic(op: str, small: list[Any], large: list[Any]) -> list[Any]:
    """Arrays whose sizes that differ between two calls are symbols; a size that is one more than another says so."""
    names: dict[tuple[int, int], str] = {}
    scope = export.SymbolicScope()
    shapes = []
    if op == "unpermute":  # its rows are two for each token
        tokens = small[1].shape[0], large[1].shape[0]
        names = {tokens: "n", (2 * tokens[0], 2 * tokens[1]): "2*n"}
    for a, b in zip(small, large, strict=True):
        sizes = []
        for pair in zip(a.shape, b.shape, strict=True):
            before = names.get((pair[0] - 1, pair[1] - 1))
            if pair[0] != pair[1] and pair not in names:
                names[pair] = f"{before}+1" if before else f"n{len(names)}"
            sizes.append(names[pair] if pair in names else str(pair[0]))
        shapes.append(", ".join(sizes))
    return [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), x.dtype)
        for shape, x in zip(shapes, small, strict=True)
    ]


@every
def test_an_exported_program_serves_other_sizes(op):
    small, large = call_of(op), large_call_of(op)
    function, arrays = small.training()
    other, others = large.training()
    shapes = symbolic(op, sorted_by_sequences(arrays), sorted_by_sequences(others))
    order = places(arrays)
    exported = export.export(jax.jit(lambda *xs: function(*[xs[i] for i in order])))(*shapes)
    for run, given in ((function, arrays), (other, others)):
        wanted = run(*given)
        got = exported.call(*sorted_by_sequences(given))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, wanted)


def sorted_by_sequences(arrays: list[Any]) -> list[Any]:
    """The arrays, those of few dimensions first, so that ``sequences`` has its name before ``sequences + 1``."""
    return sorted(arrays, key=lambda x: (x.ndim, x.shape))


def places(arrays: list[Any]) -> list[int]:
    """The position of each array in ``sorted_by_sequences``."""
    order = sorted(range(len(arrays)), key=lambda i: (arrays[i].ndim, arrays[i].shape))
    return [order.index(i) for i in range(len(arrays))]


@every
def test_other_platforms_say_why_they_take_no_symbolic_dimensions(op, without_builds):
    small = call_of(op, "bfloat16")
    function, arrays = small.on_arrays(platform=("pallas", "triton", "cuda"))
    _, others = large_call_of(op).on_arrays()
    shapes, order = symbolic(op, sorted_by_sequences(arrays), sorted_by_sequences(others)), places(arrays)
    with tilewright.target_device("NVIDIA H100 80GB HBM3"), pytest.raises(UnsupportedError) as refused:
        export.export(jax.jit(lambda *xs: function(*[xs[i] for i in order])), platforms=["cuda"])(*shapes)
    assert small.platforms == {"xla"} or "symbolic dimensions of jax.export" in str(refused.value)
    assert op in str(refused.value)


@every
def test_a_program_is_exported(op):
    function, arrays = call_of(op).training()
    blob = export.export(jax.jit(function))(*arrays).serialize()
    equal(export.deserialize(blob).call(*arrays), jax.jit(function)(*arrays))


SPLIT_BY_ROWS = (
    "matmul",
    "glu",
    "gated_grouped_matmul",
    "moe_mlp",
    "linear_attention",
    "causal_conv1d",
    "selective_scan",
    "quantize",
)
"""Ops with a partitioning of their own whose first operand is split by its rows here."""

WHOLE = ("permute", "unpermute")
"""Ops of whole arrays: rows of any token may be those of any expert."""

STATES = ("linear_attention_step",)
"""Ops whose fourth argument is a pool of states, the heads of which stand behind its slots."""


def split_spec(call: OpCall, array: Any, first: Any) -> P:
    """How an array of a call may be split: by heads, or along what an op's arguments share."""
    if call.op in STATES and array is call.args[3]:
        return P(None, "tensor")
    if call.kernel.core_dims or call.op in SPLIT_BY_ROWS:
        return P("tensor") if array.shape[:1] == first.shape[:1] and array.ndim == first.ndim else P()
    return P(*[None] * (array.ndim - 2), "tensor") if array.ndim > 2 and array.shape[-2] > 1 else P()


@every
def test_heads_or_batch_are_split_over_explicit_axes(op):
    call = call_of(op)
    function, arrays = call.training()
    wanted = function(*arrays)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, split_spec(call, x, arrays[0]))) for x in arrays]
        if op in WHOLE:
            with pytest.raises(ValueError, match=r"must be whole .*; reshard it first"):
                jax.jit(function)(*placed)
            return
        got = jax.jit(function)(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, wanted)
    assert any("tensor" in x.sharding.spec for x in jax.tree.leaves(got))


@every
def test_one_operand_alone_may_differ_between_the_devices_of_a_shard_map(op):
    """With checked types: a backend's loops have one type, and gradients of what is the same are sums over devices."""
    call = call_of(op)
    function, arrays = call.training()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def is_varying(x: Any) -> bool:
        return bool(jax.typeof(x).manual_axis_type.varying)

    for differs in range(len(arrays)):

        def on_device(*given: Any, differs: int = differs) -> Any:
            operands = [jax.lax.pcast(x, "x", to="varying") if i == differs else x for i, x in enumerate(given)]
            found = function(*operands)
            assert is_varying(jax.tree.leaves(found)[0])
            if call.differentiable:
                floating = [i for i, x in enumerate(given) if jnp.issubdtype(x.dtype, jnp.floating)]
                assert [i for i, x in zip(floating, found[1], strict=True) if is_varying(x)] == [
                    i for i in floating if i == differs
                ]
            return jax.tree.map(lambda x: jnp.sum(x.astype(jnp.float32))[None], found)

        split = jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P("x"))
        jax.jit(split).lower(*arrays)


@every
def test_explain_says_what_runs_and_why_nothing_else_does(op):
    call = call_of(op)
    function, arrays = call.training()
    explanation = tilewright.explain(jax.jit(function), *arrays)
    directions = ("forward", "backward") if call.differentiable else ("forward",)
    assert [(each.op, each.direction) for each in explanation] == [(op, direction) for direction in directions]
    for each in explanation:
        reasons = call.kernel.reasons(call.invocation(each.direction))
        assert each.choice.config.backend in reasons
        for name in reasons.keys() - {each.choice.config.backend}:
            assert (name in str(explanation)) != any(why.startswith("needs a TPU") for why in reasons[name])


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "an unknown option": (lambda f, xs: f(*xs, is_casual=True), TypeError, r"{op}\(\) has no argument 'is_casual'"),
    "an option with a typing error": (lambda f, xs: f(*xs, platfrom="xla"), TypeError, "did you mean 'platform'"),
    "no arrays": (lambda f, xs: f(), TypeError, "{op}.*{first}"),
    "a string for an array": (lambda f, xs: f("query", *xs[1:]), TypeError, "{op}: {first} must be an array"),
    "an array of another rank": (lambda f, xs: f(xs[0].ravel()[0], *xs[1:]), ValueError, "{op}: .*{first}"),
    "an unknown platform": (lambda f, xs: f(*xs, platform="cude"), ValueError, "{op}: .*cude.*cuda"),
    "a platform that is not here": (lambda f, xs: f(*xs, platform="triton"), UnsupportedError, "{op}"),
}


@every
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_call_is_one_error_that_names_the_function_and_its_argument(op, mistake):
    make, error, message = WRONG[mistake]
    call = call_of(op)
    first = next(iter(inspect.signature(call.function).parameters))
    options = {name: value for name, value in call.kwargs.items() if value is not None}

    def function(*arrays: Any, **wrong: Any) -> Any:
        return call.function(*arrays, **options | wrong)

    with pytest.raises(error, match=message.format(op=op, first=first)):
        make(function, call.args)
