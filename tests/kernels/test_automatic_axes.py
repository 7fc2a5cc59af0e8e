"""Plain ``jit`` with NamedShardings on automatic axes: calls are split as the same types would split them."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.kernels.test_collectives import CALLS, Split
from tilewright.modules import (
    decode_attention,
    flash_attention,
    glu,
    grouped_matmul,
    linear_cross_entropy,
    linear_kl_divergence,
    matmul,
    moe_mlp,
    permute,
    rms_norm,
    rope,
    top_k_router,
    unpermute,
)
from tilewright.ops import Kernel, find_labels_in_lowered
from tilewright.ops.lowering import partitioned
from tilewright.ops.lowering.labels import is_call_label, parse_label
from tilewright.ops.lowering.partitioned import TARGET, decoded

MESH = {"data": 4, "model": 2}
BY_BOTH = P("data", None, "model")


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(kind,) * len(MESH))


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def placed(arrays: Any, specs: Any) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh_of(), spec)) for x, spec in zip(arrays, specs, strict=True)]


def with_gradients(function: Callable[..., Any], *operands: Any) -> Any:
    floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floats(*values: Any) -> Any:
        chosen = dict(zip(floats, values, strict=True))
        return function(*(chosen.get(i, x) for i, x in enumerate(operands)))

    out, pull = jax.vjp(of_floats, *(operands[i] for i in floats))
    return out, pull(jax.tree.map(lambda x: jnp.cos(jnp.where(jnp.isfinite(x), x, 0)), out))


BY_TYPES = {name: each for name, each in CALLS.items() if each.axis_type == AxisType.Explicit}
# XLA splits a scatter by itself, and finds the same.
NOT_OURS = ("`update_pages` | heads", "`update_pages` | new tokens by sequences, beside whole pages")
# The type of a whole key wants its gradient whole, too; here nobody says how to split it.
MOVES_LESS = ("`flash_attention` | batch, beside whole keys",)
ALIKE = [name for name in BY_TYPES if name not in NOT_OURS]


@dataclasses.dataclass(frozen=True)
class OnAutomaticAxes(Split):
    """A row of the table in a program whose shardings are those of its arguments alone."""

    def compiled(self, function: Callable[..., Any], gradients: tuple[P, ...] | None = None) -> str:
        mesh = jax.make_mesh((4,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        structs = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p)) for s, p in self.operands]
        structs += [jax.ShapeDtypeStruct(s, jnp.int32, sharding=NamedSharding(mesh, P())) for s in self.integers]
        text: str = jax.jit(function).lower(*structs).compile().as_text()
        return text


@pytest.mark.parametrize("name", ALIKE)
def test_the_same_collectives_as_by_types(name: str) -> None:
    row = BY_TYPES[name]
    automatic = OnAutomaticAxes(**{field.name: getattr(row, field.name) for field in dataclasses.fields(Split)})
    for backward in (False,) if row.inference else (False, True):
        found, by_types = automatic.counts(backward), row.counts(backward)
        if name in MOVES_LESS and backward:
            assert not found
            assert by_types
        else:
            assert found == by_types, "backward" if backward else "forward"


LABELS = np.arange(64) % 48
SIZES = np.array([10, 20, 14, 20], np.int32)
QKV = (normal(4, 32, 8, 16), normal(4, 32, 4, 16, seed=1), normal(4, 32, 4, 16, seed=2))
X, W = normal(64, 32), normal(32, 48)


def causal(*qkv: Any, **options: Any) -> Any:
    return flash_attention(*qkv, causal=True, **options)


VALUES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[P, ...]]] = {
    "batch and heads": (causal, QKV, (BY_BOTH,) * 3),
    "length of queries and keys": (causal, QKV, (P(None, "data"),) * 3),
    "length with a window": (lambda *x: causal(*x, sliding_window=5), QKV, (P(None, "data"), P(), P())),
    "length of keys": (lambda *x: causal(*x, causal_alignment="bottom_right"), QKV, (P(), *[P(None, "data")] * 2)),
    "length with ALiBi": (
        lambda *x: causal(*x, bias=tilewright.kernels.biases.AlibiBias(jnp.linspace(0.1, 1, 8))), QKV,
        (P(None, "data"), P(), P()),
    ),
    "one key head": (causal, (QKV[0], *(x[:, :, :1] for x in QKV[1:])), (BY_BOTH, P("data"), P("data"))),
    "more devices than key heads": (causal, QKV, (P(None, None, ("data", "model")), *[P(None, None, "data")] * 2)),
    "head_dim": (causal, QKV, (P(None, None, None, "model"),) * 3),
    "dropout": (lambda *x: causal(*x, dropout_prob=0.3, dropout_seed=3), QKV, (BY_BOTH,) * 3),
    "dropout by length": (lambda *x: causal(*x, dropout_prob=0.3, dropout_seed=3), QKV, (P(None, "data"),) * 3),
    "bias and sinks": (
        lambda q, k, v, b, s: causal(q, k, v, b, softmax_aux=s), (*QKV, normal(1, 8, 32, 32), normal(8)),
        (*(BY_BOTH,) * 3, P(), P()),
    ),
    "lengths": (
        lambda q, k, v, n: flash_attention(q, k, v, key_value_seq_lengths=n), (*QKV, np.array([32, 3, 0, 9])),
        (*(BY_BOTH,) * 3, P()),
    ),
    "no batch dimension": (lambda *x: causal(*x, return_lse=True), tuple(x[0] for x in QKV), (P(None, "model"),) * 3),
    "vmap": (
        jax.vmap(causal), tuple(jnp.stack([x, 2 * x]) for x in QKV), (P("model", "data"),) * 3,
    ),
    "vmap over queries alone": (
        jax.vmap(causal, in_axes=(0, None, None)), (jnp.stack([QKV[0]] * 2), *QKV[1:]),
        (P("model", "data"), P("data"), P("data")),
    ),
    "remat and scan": (
        lambda q, k, v: jax.lax.scan(jax.checkpoint(lambda c, _: (causal(c, k, v), None)), q, None, length=3)[0],
        QKV, (BY_BOTH,) * 3,
    ),
    "matmul by k over the minor axis alone": (matmul, (X, W), (P(None, "model"), P("model"))),
    "matmul by k over the major axis alone": (matmul, (X, W), (P(None, "data"), P("data"))),
    "matmul by rows and n": (matmul, (X, W), (P("data"), P(None, "model"))),
    "matmul by k": (matmul, (X, W), (P("data", "model"), P("model"))),
    "matmul, parameters over the rows' axis": (matmul, (X, W), (P("data"), P("data"))),
    "glu, both": (glu, (X, W, W + 1), (P("data"), P("data", "model"), P("data", "model"))),
    "norm by rows": (rms_norm, (normal(8, 16, 32), normal(32)), (P("data"), P())),
    "norm along d": (rms_norm, (normal(8, 16, 32), normal(32)), (P("data", None, "model"), P("model"))),
    "rotation by batch and heads": (lambda x: rope(x, np.arange(32)), QKV[:1], (BY_BOTH,)),
    "rotation by rows of positions": (rope, (QKV[0], np.arange(128).reshape(4, 32)), (P(), P("data", "model"))),
    "rotation along dim": (lambda x: rope(x, np.arange(32)), QKV[:1], (P("data", None, None, "model"),)),
    "router by tokens": (lambda x: top_k_router(x, 3)[0], (X,), (P("data"),)),
    "router along experts": (lambda x: top_k_router(x, 3)[0], (X,), (P("data", "model"),)),
    "permutation of tokens": (lambda x: permute(x, np.arange(128).reshape(64, 2) % 5, 4)[0], (X,), (P("data"),)),
    "sums of rows by tokens": (lambda x: unpermute(x, np.arange(64), x[:32, :2]), (X,), (P("data", "model"),)),
    "layer of experts by tokens": (
        lambda x, w, gate, down: moe_mlp(x, w, np.arange(128).reshape(64, 2) % 5, gate, gate + 1, down, capacity=20),
        (X, normal(64, 2), normal(4, 32, 48) / 6, normal(4, 48, 32) / 6), (P("data"), P("data"), P("data"), P("data")),
    ),
    "groups": (grouped_matmul, (X, normal(4, 32, 48), SIZES), (P(), P("data"), P())),
    "groups over the rows' axis": (grouped_matmul, (X, normal(4, 32, 48), SIZES), (P("data"), P("data"), P())),
    "rows of groups and n": (grouped_matmul, (X, normal(4, 32, 48), SIZES), (P("data"), P(None, None, "model"), P())),
    "loss by tokens": (linear_cross_entropy, (X, W, LABELS), (P("data"), P(), P("data"))),
    "loss, parameters over the tokens' axis": (linear_cross_entropy, (X, W, LABELS), (P("data"),) * 3),
    "loss by vocabulary": (linear_cross_entropy, (X, W, LABELS), (P("data"), P(None, "model"), P("data"))),
    "loss with all options": (
        lambda x, w, y, b, t: linear_cross_entropy(
            x, w, y, bias=b, token_weights=t, label_smoothing=0.1, z_loss=1e-3, logits_soft_cap=5.0
        ),
        (X, W, np.where(LABELS == 7, -100, LABELS), normal(48), jnp.abs(normal(64))),
        (P("data"), P("data", "model"), P("data"), P("model"), P("data")),
    ),
    "loss of each token": (
        lambda *x: linear_cross_entropy(*x, reduction="none", return_lse=True), (X, W, LABELS),
        (P("data"), P(None, "model"), P("data")),
    ),
    "a threshold of gradients": (
        lambda *x: linear_cross_entropy(*x, gradient_epsilon=1e-3), (X, W, LABELS),
        (P("data"), P(None, "model"), P("data")),
    ),
    "divergence by vocabulary": (
        linear_kl_divergence, (X, W, X + 1, W * 2), (P("data"), P(None, "model"), P("data"), P(None, "model")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_results_and_gradients_are_those_of_one_device(name: str) -> None:
    function, operands, specs = VALUES[name]
    operands = tuple(map(jnp.asarray, operands))

    def both(*operands: Any) -> Any:
        return with_gradients(function, *operands)

    split = placed(operands, specs)
    lowered = jax.jit(both).lower(*split)
    assert TARGET in lowered.as_text()
    got, want = lowered.compile()(*split), jax.jit(both)(*operands)
    for mine, whole in zip(jax.tree.leaves(got), map(np.asarray, jax.tree.leaves(want)), strict=True):
        for shard in mine.addressable_shards:  # of an array that all devices have, each has its own
            np.testing.assert_allclose(shard.data, whole[shard.index], atol=3e-5, rtol=3e-5)


def test_decoding_by_sequences_and_heads_moves_nothing() -> None:
    cache, query = normal(4, 16, 4, 16), normal(4, 8, 16, seed=1)
    lengths = np.array([16, 3, 1, 9], np.int32)
    specs = (P("data", "model"), BY_BOTH, BY_BOTH, P("data"))
    function = lambda q, k, v, n: decode_attention(q, k, v, lengths=n)
    split = placed((query, cache, cache + 1, lengths), specs)
    compiled = jax.jit(function).lower(*split).compile()
    assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all"))
    np.testing.assert_allclose(compiled(*split), function(query, cache, cache + 1, lengths), atol=1e-5)


H100 = "NVIDIA H100 80GB HBM3"
BF16: dict[str, tuple[Callable[..., Any], tuple[tuple[tuple[int, ...], P], ...], str]] = {
    "attention": (causal, (((8, 1024, 8, 128), BY_BOTH),) * 3, "bf16[2,1024,4,128]"),
    "matmul": (matmul, (((4096, 1024), P("data")), ((1024, 2048), P(None, "model"))), "bf16[1024,1024]"),
    "glu": (
        glu, (((4096, 1024), P("data")), *[((1024, 2048), P("data", "model"))] * 2), "bf16[1024,1024]×3",
    ),
    "norm": (rms_norm, (((8, 1024, 1024), P("data")), ((1024,), P())), "bf16[2,1024,1024]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BF16)
def test_configs_are_chosen_for_a_device_s_part(name: str) -> None:
    """On devices that are not here, forward and backward, as `explain` and `tune` see them."""
    function, operands, part = BF16[name]
    with tilewright.target_device(H100, count=8) as target:
        mesh = target.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 2)
        structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p)) for s, p in operands]
        calls = tilewright.explain(
            jax.grad(lambda *x: (function(*x).astype(jnp.float32) ** 2).sum(), argnums=(0, 1)), *structs
        )
    assert {call.direction for call in calls} == {"forward", "backward"}
    assert all(call.arguments.startswith(part) for call in calls), str(calls)
    assert all(call.split for call in calls)
    assert {str(call.config).partition("(")[0] for call in calls} <= {"hopper", "triton", "xla"}


def test_what_is_gathered_is_explained_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    split = placed(QKV, (P(None, None, None, "model"),) * 3)
    (call,) = tilewright.explain(causal, *split)
    assert call.gathered == tuple(f"{name} along dimension 3" for name in ("query", "key", "value"))
    assert "gathered on each device: query along dimension 3" in str(call)
    partitioned._warn.cache_clear()
    with caplog.at_level(logging.WARNING, "tilewright"):
        for _ in range(2):
            jax.jit(lambda *x: causal(*x)).lower(*split).compile()
    (said,) = [record.getMessage() for record in caplog.records if "gathers" in record.getMessage()]
    assert said.startswith("flash_attention forward f32[4,32,8,16]")
    assert "query along dimension 3" in said


def test_parameters_over_the_axis_of_the_rows_are_gathered_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    split = placed((X, W), (P("data"), P("data")))
    with caplog.at_level(logging.WARNING, "tilewright"):
        jax.jit(lambda x, w: matmul(x, w)).lower(*split).compile()
    assert not caplog.records


def lowered_for(device: str, function: Callable[..., Any]) -> Any:
    """Attention by batch and heads on eight devices that are not here."""
    with tilewright.target_device(device, count=8) as target:
        mesh = target.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 2)
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, BY_BOTH)) for x in QKV]
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.jit(function).trace(*structs).lower(lowering_platforms=(target.known.platform,))


def test_on_tpus_xla_splits_its_own_operations() -> None:
    """libtpu compiles no operation that another splits (``tests/aot_tpu/test_meshes.py`` compiles these)."""
    function = functools.partial(with_gradients, causal)
    assert TARGET in lowered_for("NVIDIA H100 80GB HBM3", function).as_text()
    lowered = lowered_for("TPU v6e", function)
    assert TARGET not in lowered.as_text()
    labels = [parse_label(text) for text in find_labels_in_lowered(lowered) if is_call_label(text)]
    assert [(label.direction, label.config.backend) for label in labels] == [("forward", "xla"), ("backward", "xla")]


def test_a_kernel_alone_on_automatic_axes_of_tpus_is_an_error() -> None:
    with pytest.raises((TypeError, tilewright.UnsupportedError), match="flash_attention"):
        lowered_for("TPU v6e", functools.partial(causal, platform="pallas"))


def test_one_device_of_several_runs_an_unsplit_call() -> None:
    lowered = jax.jit(causal).lower(*QKV)
    assert TARGET not in lowered.as_text()


def test_types_and_shard_map_split_calls_as_before() -> None:
    explicit = mesh_of(AxisType.Explicit)
    with jax.set_mesh(explicit):
        arrays = [jax.device_put(x, NamedSharding(explicit, P())) for x in QKV]
        assert TARGET not in jax.jit(causal).lower(*arrays).as_text()
    mapped = jax.shard_map(causal, mesh=mesh_of(), in_specs=BY_BOTH, out_specs=BY_BOTH)
    assert TARGET not in jax.jit(mapped).lower(*placed(QKV, (BY_BOTH,) * 3)).as_text()


def test_a_kernel_that_cannot_say_how_it_is_split_is_left_to_xla() -> None:
    class Doubled(Kernel[None, jax.Array]):
        def __init__(self) -> None:
            super().__init__("doubled_on_automatic_axes", version="1")

        def run(self, x: jax.Array, *, cfg: None) -> jax.Array:
            return 2 * x

        def heuristic_cfg(self, inv: Any) -> None:
            return None

    (x,) = placed((X,), (P("data"),))
    kernel = Doubled()
    lowered = jax.jit(lambda x: kernel(x)).lower(x)
    assert TARGET not in lowered.as_text()
    assert lowered.compile()(x).sharding.spec == P("data")


@given(st.data())
def test_any_split_over_any_mesh_is_read_back(data: st.DataObject) -> None:
    """Shardings as XLA holds them, of meshes whose sizes are any, with axes in any order and dimension."""
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    names = [f"m{i}" for i in range(len(sizes))]
    mesh = jax.sharding.AbstractMesh(tuple(sizes), tuple(names))

    def spec() -> P:
        order = data.draw(st.permutations(names))
        used = order[: data.draw(st.integers(0, len(order)))]
        cut = data.draw(st.integers(0, len(used)))
        return P(tuple(used[:cut]) or None, tuple(used[cut:]) or None)

    shardings = [NamedSharding(mesh, spec()) for _ in range(data.draw(st.integers(1, 3)))]
    hlo = [sharding._to_xla_hlo_sharding(2) for sharding in shardings]
    found_mesh, specs = decoded([partitioned._tiling(each) for each in hlo], [2] * len(hlo), mesh.size)
    shape = (128 * 27, 128 * 27)  # every size of a mesh divides it
    for sharding, found in zip(shardings, specs, strict=True):
        again = NamedSharding(found_mesh, found)
        assert again.shard_shape(shape) == sharding.shard_shape(shape)
        assert again._to_xla_hlo_sharding(2) == sharding._to_xla_hlo_sharding(2)
