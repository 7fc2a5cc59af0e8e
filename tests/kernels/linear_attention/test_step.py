"""Decoding steps of linear attention against a float64 recurrence in NumPy, a token of a head at a time."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.conftest import A100, H100
from tilewright.kernels import kernel
from tilewright.kernels.linear_attention.step_cases import StepCase
from tilewright.kernels.linear_attention.triton.step import TritonLinearAttentionStep, TritonStepParams
from tilewright.kernels.linear_attention.xla.step import XlaLinearAttentionStep
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.modules import linear_attention_step
from tilewright.ops.utils.datacarrier import FwdParams

OP = kernel("linear_attention_step")
GATES: dict[str, dict[str, Any]] = {
    "plain": {"gate": "none", "update": "add"},
    "retention": {"gate": "head", "update": "add"},
    "gated": {"gate": "channel", "update": "add", "scale": 0.75},
    "delta": {"gate": "none", "qk_l2norm": True},
    "gated delta": {"qk_l2norm": True, "l2norm_eps": 0.5},
    "channel delta": {"gate": "channel"},
    "removal": {"gate": "channel", "update": "removal"},
    "removal without decay": {"gate": "none", "update": "removal"},
    "bonus": {"gate": "channel", "update": "bonus"},
    "bonus of heads": {"gate": "head", "update": "bonus", "qk_l2norm": True},
}
SIZES: dict[str, dict[str, Any]] = {
    "one": {"batch": 3, "key_dim": 8, "value_dim": 16, "slots": 5},
    "grouped": {"batch": 2, "value_heads": 6, "key_dim": 16, "value_dim": 8},
    "odd": {"batch": 2, "heads": 1, "value_heads": 2, "key_dim": 5, "value_dim": 11, "slots": 3},
    "tokens": {"batch": 2, "tokens": 4, "value_heads": 4, "key_dim": 8, "value_dim": 8, "slots": 4},
    "odd tokens": {"batch": 1, "tokens": 3, "heads": 1, "value_heads": 3, "key_dim": 7, "value_dim": 6},
}
CALLS = [
    (gates, list(SIZES)[(i + j) % len(SIZES)], "kv" if j % 2 else "vk")
    for i, gates in enumerate(GATES)
    for j in range(3)
]
"""Each with sizes of three kinds, each kind with most of the gates, both with either layout."""


def case(gates: str, size: str, **fields: Any) -> StepCase:
    return StepCase("", **{"heads": 2, "value_heads": 2} | GATES[gates] | SIZES[size] | fields)


def by_xla(*args: Any, **options: Any) -> Any:
    inputs = OP.prepare(*args, **options)
    return OP.outputs(inputs, jax.jit(lambda inputs: XlaLinearAttentionStep().forward(inputs, FwdParams()))(inputs))


def by_triton(*args: Any, **options: Any) -> Any:
    """By the interpreter, with several programs for the values of a head."""
    inputs = OP.prepare(*args, **options)
    assert not TritonLinearAttentionStep().not_supported_reasons(inputs.structs, H100, "forward")
    with interpret_triton():
        run = jax.jit(lambda inputs: TritonLinearAttentionStep().forward(inputs, TritonStepParams(4, 1)))
        return OP.outputs(inputs, jax.block_until_ready(run(inputs)))


every_backend = pytest.mark.parametrize("run", [by_xla, by_triton])


def recurrence(query: Any, key: Any, value: Any, state_pool: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and pool in float64, from the definitions of the models and for each token, head and row on its own."""
    q, k, v, pool = (np.array(x, np.float64) for x in (query, key, value, state_pool))
    single = v.ndim == 3
    if single:
        q, k, v = q[:, None], k[:, None], v[:, None]
    batch, tokens, heads, _ = v.shape
    vk = options.get("state_layout") == "vk"

    def of(name: str, rank: int) -> Any:
        x = options.get(name)
        return None if x is None else np.asarray(x, np.float64)[:, None] if single and np.ndim(x) == rank - 1 else (
            np.asarray(x, np.float64)
        )  # fmt: skip

    decay, beta = options.get("log_decay"), of("beta", 3)
    if decay is not None:
        decay = np.asarray(decay, np.float64)
        if decay.ndim == 1:
            decay = np.broadcast_to(decay, (batch, tokens, heads))
        elif single:
            decay = decay[:, None]
    a, b = (None, None) if options.get("removal") is None else (
        np.asarray(x, np.float64).reshape(batch, tokens, heads, -1) for x in options["removal"]
    )  # fmt: skip
    scale = options.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    read = options.get("state_indices")
    read = np.arange(batch) if read is None else np.asarray(read)
    write = options.get("write_indices")
    write = read if write is None else np.asarray(write)
    out, new = np.zeros(v.shape), pool.copy()
    for row, head in itertools.product(range(batch), range(heads)):
        if not 0 <= read[row] < len(pool):
            continue
        state = pool[read[row], head].T if vk else pool[read[row], head]
        for t in range(tokens):
            of_key = head // (heads // k.shape[2])
            q_t, k_t, v_t = q[row, t, of_key], k[row, t, of_key], v[row, t, head]
            if options.get("qk_l2norm"):
                eps = options.get("l2norm_eps", 1e-6)
                q_t, k_t = (x / np.sqrt(x @ x + eps) for x in (q_t, k_t))
            factor = np.ones(len(k_t)) if decay is None else np.exp(decay[row, t, head]) * np.ones(len(k_t))
            if options.get("bonus") is not None:
                u = np.asarray(options["bonus"], np.float64)[head]
                out[row, t, head] = scale * (state + np.diag(u) @ np.outer(k_t, v_t)).T @ q_t
                state = np.diag(factor) @ state + np.outer(k_t, v_t)
                continue
            if a is not None:
                state = np.diag(factor) @ state + np.outer(b[row, t, head], a[row, t, head] @ state)
                state = state + np.outer(k_t, v_t)
            else:
                state = np.diag(factor) @ state
                if beta is not None:
                    rate = beta[row, t, head]
                    state = (np.eye(len(k_t)) - rate * np.outer(k_t, k_t)) @ state + rate * np.outer(k_t, v_t)
                else:
                    state = state + np.outer(k_t, v_t)
            out[row, t, head] = scale * state.T @ q_t
        if 0 <= write[row] < len(pool):
            new[write[row], head] = state.T if vk else state
    return out[:, 0] if single else out, new


def check(got: Any, want: Any, slack: float = 3e-6) -> None:
    for ours, exact in zip(got, want, strict=True):
        assert ours.shape == exact.shape
        near = max(float(jnp.finfo(ours.dtype).eps) * 0.51, slack)
        error = np.abs(np.asarray(ours, np.float64) - exact)
        assert np.all(error <= near * np.abs(exact) + slack * np.abs(exact).max()), error.max()


@every_backend
@pytest.mark.parametrize(("gates", "size", "layout"), CALLS)
def test_a_recurrence_in_float64(run: Callable[..., Any], gates: str, size: str, layout: Any):
    args, options = case(gates, size, state_layout=layout).arguments()
    check(run(*args, **options), recurrence(*args, **options))


@every_backend
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float32"])
def test_each_result_is_rounded_once(run: Callable[..., Any], dtype: str, pool_dtype: str):
    args, options = case("gated delta", "tokens", dtype=dtype, pool_dtype=pool_dtype).arguments()
    options["beta"] = options["beta"].astype(dtype)
    got = run(*args, **options)
    assert (got[0].dtype, got[1].dtype) == (dtype, pool_dtype)
    check(got, recurrence(*args, **options))


def test_the_reference_is_the_recurrence():
    for gates, size in (("gated delta", "one"), ("removal", "tokens"), ("bonus", "odd tokens"), ("retention", "odd")):
        args, options = case(gates, size, state_layout="vk").arguments()
        check(OP.reference(OP.prepare(*args, **options)), recurrence(*args, **options))


def test_float64():
    with jax.enable_x64(True):
        args, options = case("channel delta", "tokens", dtype="float64").arguments()
        got = linear_attention_step(*args, **options)
        assert got[0].dtype == got[1].dtype == np.float64
        check(got, recurrence(*args, **options), 1e-14)


@every_backend
@pytest.mark.parametrize("gates", ["gated delta", "removal", "bonus"])
def test_tokens_are_steps(run: Callable[..., Any], gates: str):
    (query, key, value, pool), options = case(gates, "tokens").arguments()
    together, after = run(query, key, value, pool, **options)
    by_token = {"log_decay", "beta", "removal"} & options.keys()
    for t in range(value.shape[1]):
        at = {name: jax.tree.map(lambda x, t=t: x[:, t], options[name]) for name in by_token}
        out, pool = run(query[:, t], key[:, t], value[:, t], pool, **options | at)
        np.testing.assert_allclose(out, together[:, t], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(pool, after, rtol=1e-4, atol=1e-6)


@every_backend
@pytest.mark.parametrize(("layout", "pool_dtype"), [("kv", "float32"), ("vk", "bfloat16")])
def test_slots_that_no_row_writes_stay(run: Callable[..., Any], layout: Any, pool_dtype: str):
    """Also NaN in them, and what padding has in its arrays."""
    (query, key, value, pool), options = case(
        "gated delta", "tokens", batch=5, slots=9, state_layout=layout, pool_dtype=pool_dtype
    ).arguments()
    pool = pool.at[jnp.array([0, 2])].set(jnp.nan).at[6].set(jnp.inf)
    indices = np.array([3, -1, 8, 9, -(2**31)])
    padding = np.array([1, 3, 4])
    query, key, value = (x.at[padding].set(jnp.nan) for x in (query, key, value))
    options |= {"log_decay": options["log_decay"].at[padding].set(jnp.inf), "beta": options["beta"].at[1].set(jnp.nan)}
    options["state_indices"] = indices
    out, after = run(query, key, value, pool, **options)
    assert not np.any(np.asarray(out[padding], np.float32))
    kept = np.array([0, 1, 2, 4, 5, 6, 7])
    np.testing.assert_array_equal(*(np.asarray(x[kept]).view(np.uint8) for x in (after, pool)))
    here = np.array([0, 2])
    alone = {name: options[name][here] for name in ("log_decay", "beta")}
    want = recurrence(
        query[here], key[here], value[here], pool[indices[here]], **options | alone | {"state_indices": None}
    )
    check((out[here], after[indices[here]]), want)


@every_backend
def test_states_that_go_to_other_slots(run: Callable[..., Any]):
    """Two rows may read one slot, as when a sequence is forked; a write to no slot is left out."""
    args, options = case("gated delta", "one", batch=4, slots=7).arguments()
    options |= {"state_indices": np.array([2, 2, 5, -1]), "write_indices": np.array([0, 6, -1, 3])}
    got = run(*args, **options)
    check(got, recurrence(*args, **options))
    kept = np.array([1, 2, 3, 4, 5])
    np.testing.assert_array_equal(got[1][kept], args[3][kept])


@every_backend
def test_writes_of_rows_that_read_their_own_slot(run: Callable[..., Any]):
    args, options = case("removal", "grouped").arguments()
    options["write_indices"] = np.array([-1, 1])
    got = run(*args, **options)
    check(got, recurrence(*args, **options))
    np.testing.assert_array_equal(got[1][0], args[3][0])


@every_backend
def test_decays_to_nothing_and_of_nothing(run: Callable[..., Any]):
    args, options = case("gated", "one", tokens=3).arguments()
    decay = np.zeros(options["log_decay"].shape, np.float32)
    decay[:, 1, 0] = -1000.0
    decay[:, 1, 1, ::2] = -np.inf
    decay[:, 2, 0] = -1e-6
    got = run(*args, **options | {"log_decay": decay})
    check(got, recurrence(*args, **options | {"log_decay": decay}))


@every_backend
@pytest.mark.parametrize("gates", ["gated delta", "removal"])
def test_decays_of_heads_to_nothing(run: Callable[..., Any], gates: str):
    """Of one token, of two together, and by small steps: no factor of a state leaves the range of float32."""
    args, options = case(gates, "one", tokens=5, batch=1).arguments()
    decay = np.full((1, 5, 2), -1e-3, np.float32)
    decay[0, 1, 0], decay[0, 3, 0] = -1000.0, -np.inf
    decay[0, :, 1] = -12.0
    got = run(*args, **options | {"log_decay": decay})
    check(got, recurrence(*args, **options | {"log_decay": decay}))


@every_backend
def test_keys_without_a_length(run: Callable[..., Any]):
    args, options = case("gated delta", "one").arguments()
    args = (args[0], jnp.zeros_like(args[1]), *args[2:])
    got = run(*args, **options)
    check(got, recurrence(*args, **options))


def test_associative_memory():
    """Orthonormal keys with beta of 1 replace what they find: each reads the last value that was written to it."""
    dim, random = 8, np.random.default_rng(0)
    keys = np.linalg.qr(random.standard_normal((dim, dim)))[0].astype(np.float32)
    pool = jnp.asarray(random.standard_normal((1, 1, dim, 4)), jnp.float32)
    last = {}
    for number in random.integers(0, dim, 40).tolist():
        last[number] = random.standard_normal(4).astype(np.float32)
        key = jnp.asarray(keys[number])[None, None]
        _, pool = linear_attention_step(key, key, last[number][None, None], pool, beta=np.ones((1, 1), np.float32))
    for number, value in last.items():
        query = jnp.asarray(keys[number])[None, None]
        none = jnp.zeros_like(query)
        out, _ = linear_attention_step(query, none, value[None, None], pool, scale=1.0)
        np.testing.assert_allclose(out[0, 0], value, atol=1e-5)


def test_a_removal_of_the_decayed_key_is_the_delta_rule():
    args, options = case("channel delta", "tokens").arguments()
    key, beta = np.asarray(args[1]).repeat(2, axis=2), np.asarray(options.pop("beta"))[..., None]
    a = np.exp(np.asarray(options["log_decay"])) * key
    want = linear_attention_step(*args, **options, beta=beta[..., 0])
    # The value is scaled by beta in place of the key that writes it.
    got = linear_attention_step(*args[:2], beta * args[2], args[3], **options, removal=(a, -beta * key))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_drift_of_bfloat16_pools():
    """Rounded to nearest, the state stays within a few of the errors of one rounding, as old ones decay."""
    random, steps, dim = np.random.default_rng(1), 300, 16
    k, q, v = (jnp.asarray(random.standard_normal((steps, 1, 1, dim)), jnp.float32) for _ in range(3))
    pools = {dtype: jnp.zeros((1, 1, dim, dim), dtype) for dtype in ("bfloat16", "float32")}
    gates = {"log_decay": jnp.full((1, 1), -0.1), "beta": jnp.full((1, 1), 0.7), "qk_l2norm": True}
    step = jax.jit(lambda pool, x: linear_attention_step(*x, pool, **gates)[::-1])
    outs = {dtype: np.asarray(jax.lax.scan(step, pool, (q, k, v))[1], np.float64) for dtype, pool in pools.items()}
    error = outs["bfloat16"] - outs["float32"]
    assert np.sqrt(np.mean(error**2) / np.mean(outs["float32"] ** 2)) < 0.01


@every_backend
@pytest.mark.parametrize("mapped", ["everything", "queries", "parameters"])
def test_maps(run: Callable[..., Any], mapped: str):
    """With several pools, slots are those of each; what all share is read once."""
    args, options = case("bonus of heads", "one").arguments()
    others, more = case("bonus of heads", "one").arguments(seed=1)
    names = ["log_decay", "bonus"] + (["state_indices"] if mapped == "everything" else [])
    count = {"everything": 4, "queries": 1, "parameters": 0}[mapped]
    if mapped == "queries":
        names = []
    stacked = [jnp.stack(pair) for pair in zip(args[:count], others[:count], strict=True)]
    named = {name: jnp.stack([options[name], more[name]]) for name in names}
    call = lambda stacked, named: run(*stacked, *args[count:], **options | named)
    got = jax.vmap(call)(stacked, named)
    for i, each in enumerate(((args, options), (others, more))):
        want = recurrence(*each[0][:count], *args[count:], **options | {name: each[1][name] for name in names})
        check([x[i] for x in got], want)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"tokens": 0}, {"value_heads": 0}, {"value_dim": 0}])
def test_nothing_to_compute(sizes: dict[str, int]):
    args, options = case("gated delta", "one", **sizes).arguments()
    for run in (by_xla, by_triton, linear_attention_step):
        out, pool = run(*args, **options)
        assert out.shape == args[2].shape
        np.testing.assert_array_equal(pool, args[3])


def test_a_donated_pool_is_updated_in_place():
    args, options = case("gated delta", "one").arguments()
    step = jax.jit(lambda pool, *new: linear_attention_step(*new, pool, **options), donate_argnums=0)
    text = step.lower(args[3], *args[:3]).compile().as_text()
    assert "input_output_alias={ {1}: (0, {}" in text
    pool = args[3] + 0
    address = pool.unsafe_buffer_pointer()
    assert step(pool, *args[:3])[1].unsafe_buffer_pointer() == address


def test_one_triton_kernel_that_updates_the_pool():
    from tilewright.kernels.triton import recorded_launches

    args, options = case("gated delta", "tokens").arguments()
    inputs = OP.prepare(*args, **options)
    with recorded_launches() as launches:
        jax.eval_shape(lambda inputs: TritonLinearAttentionStep().forward(inputs, TritonStepParams(8, 1)), inputs)
    (launch,) = launches
    assert [x.shape for x in launch.fresh] == [args[2].shape]
    assert [launch.inputs[index].shape for index in launch.in_place] == [args[3].shape]


@pytest.mark.parametrize(("heads", "axes"), [(2, (None, "x")), (1, (None, "x")), (2, ("x", None)), (2, ("y", "x"))])
def test_split_arrays(heads: int, axes: tuple[Any, Any]):
    rows, of_heads = axes
    has_slots = rows is None
    args, options = case("gated delta", "one", batch=4, heads=heads, slots=6 if has_slots else None).arguments()
    options["log_decay"] = options["log_decay"][0]
    want = linear_attention_step(*args, **options)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])

    def put(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    with jax.set_mesh(mesh):
        shared = of_heads if heads > 1 else None
        query, key = (put(x, rows, shared) for x in args[:2])
        options = {name: put(x) if isinstance(x, jax.Array) else x for name, x in options.items()}
        call = (query, key, put(args[2], rows, of_heads), put(args[3], rows, of_heads))
        got = jax.jit(lambda *call: linear_attention_step(*call, **options))(*call)
        assert jax.typeof(got[1]).sharding.spec[:2] == (rows, of_heads)
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
        with pytest.raises(ValueError, match="split by heads alone, and alike"):
            linear_attention_step(query, key, put(args[2], rows, of_heads), put(args[3], None, None, "x"), **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": np.zeros((3, 2, 4))}, ValueError, "query and key must be"),
        ({"query": np.zeros((3, 16))}, ValueError, r"query and key must be \[batch, heads, key_dim\]"),
        ({"value": np.zeros((3, 2, 16), np.int32)}, ValueError, "one floating-point dtype"),
        ({"value": np.zeros((3, 1, 2, 16), np.float32)}, ValueError, "with tokens behind batch"),
        ({"value": np.zeros((3, 3, 16), np.float32)}, ValueError, "value_heads must be a multiple of heads"),
        ({"value": np.zeros((2, 2, 16), np.float32)}, ValueError, "the same batch and tokens"),
        ({"state_pool": np.zeros((5, 2, 16, 8))}, ValueError, r"here \[slots, 2, 8, 16\]"),
        ({"state_pool": np.zeros((5, 2, 8, 16), np.float16)}, TypeError, "state_pool must have one of the dtypes"),
        ({"state_layout": "kk"}, ValueError, "state_layout must be one of"),
        ({"log_decay": np.zeros((3, 2, 7))}, ValueError, r"\[2\] or \[3, 2\] or \[3, 2, 8\], got \[3, 2, 7\]"),
        ({"log_decay": np.zeros((3, 2), int)}, TypeError, "log_decay must be floating-point"),
        ({"beta": np.zeros((3, 1, 2))}, ValueError, r"beta must have the shape \[3, 2\]"),
        ({"removal": (np.zeros((3, 2, 8)),) * 2}, ValueError, "different updates"),
        ({"removal": np.zeros((3, 2, 8)), "beta": None}, ValueError, "a pair of arrays"),
        ({"bonus": np.zeros((2, 8))}, ValueError, "different updates"),
        ({"bonus": np.zeros(2), "beta": None}, ValueError, r"bonus must have the shape \[2, 8\]"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"l2norm_eps": -1.0}, ValueError, "must not be negative"),
        ({"qk_l2norm": 1}, TypeError, "qk_l2norm must be True or False"),
        ({"state_indices": np.arange(4)}, ValueError, "state_indices must have the shape"),
        ({"state_indices": None}, ValueError, "without state_indices"),
        ({"state_indices": np.array([3, 1, 3])}, ValueError, r"state_indices\[2\] = 3 is the slot of an earlier row"),
        ({"write_indices": np.array([0, 0, -1])}, ValueError, r"write_indices\[1\] = 0 is the slot of an earlier row"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str):
    args, options = case("gated delta", "one").arguments()
    call = dict(zip(("query", "key", "value", "state_pool"), args, strict=True)) | options | changes
    with pytest.raises(error, match=message):
        linear_attention_step(**call)


def test_more_tokens_than_a_step_has():
    args, options = case("plain", "one", tokens=9).arguments()
    with pytest.raises(ValueError, match="up to 8 tokens, got 9; linear_attention reads a prompt"):
        linear_attention_step(*args, **options)


def test_no_gradient():
    args, options = case("plain", "one").arguments()
    with pytest.raises(TypeError, match="for inference and has no gradient"):
        jax.grad(lambda value: linear_attention_step(*args[:2], value, args[3], **options)[0].sum())(args[2])


def test_padding_slots_are_no_duplicates():
    args, options = case("plain", "one").arguments()
    out, _ = linear_attention_step(*args, **options | {"state_indices": np.array([-1, -1, 9])})
    assert not np.any(out)


def test_reasons_and_params():
    backend = TritonLinearAttentionStep()

    def inputs(**fields: Any) -> Any:
        args, options = StepCase("", **{"batch": 2, "heads": 1, "value_heads": 2} | fields).arguments()
        return OP.prepare(*args, **options)

    assert not backend.not_supported_reasons(inputs(), H100, "forward")
    assert not backend.not_supported_reasons(inputs(), A100, "forward")
    assert backend.not_supported_reasons(inputs(), H100, "backward")
    assert "key_dim=2049" in backend.forward_reasons(inputs(key_dim=2049, value_dim=1), H100)[0]
    with jax.enable_x64(True):
        wide = backend.forward_reasons(inputs(dtype="float64"), H100)
    assert len(wide) == 6
    assert "state_pool must have one of" in wide[3]
    assert "do not fit" in backend.config_reasons(
        inputs(key_dim=128), H100, "forward", TritonStepParams(64, 1)
    )[0]  # fmt: skip
    for fields in itertools.product(
        (1, 96, 128, 2048), (1, 100, 256), ("kv", "vk"), ("float32", "bfloat16"), (1, 300)
    ):  # fmt: skip
        names = ("key_dim", "value_dim", "state_layout", "pool_dtype", "batch")
        args, options = StepCase("", **dict(zip(names, fields, strict=True))).abstract_arguments()
        call = OP.prepare(*args, **options)
        listed = list(backend.candidates(call, H100, "forward"))
        assert listed[0] == backend.heuristic(call, H100, "forward")
        assert len(set(listed)) == len(listed)
        assert not [each for params in listed for each in backend.config_reasons(call, H100, "forward", params)]
    for wrong in ((3, 1), (4, 32), (0, 1), (4, True)):
        with pytest.raises(ValueError, match="power of two"):
            TritonStepParams(*wrong)
