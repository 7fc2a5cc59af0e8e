"""What ``prepare`` makes of each argument, and what it says of a wrong one."""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.draws import zeros
from tilewright.kernels.flash_attention.cases import CPU_CASES, HOPPER_CASES, AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention, flash_attention
from tilewright.kernels.masks import AndMask, CausalMask, ExplicitMask, LengthMask, SegmentMask, WindowMask
from tilewright.kernels.op.choice import Platform
from tilewright.ops.kernel.kernel import Invocation

KERNEL = FlashAttention()
Q, K, V = zeros((2, 8, 4, 16)), zeros((2, 12, 2, 16)), zeros((2, 12, 2, 24))
PACKED = zeros((1, 8, 4, 16)), zeros((1, 12, 2, 16)), zeros((1, 12, 2, 16))


def prepare(*arrays: Any, **kwargs: Any) -> AttentionInputs:
    return KERNEL.prepare(*(arrays or (Q, K, V)), **kwargs)


def test_plain_arrays_are_handed_on():
    inputs = prepare()
    assert (inputs.query is Q, inputs.key is K, inputs.value is V) == (True, True, True)
    given = {name for name, array in inputs.arrays.items() if array is not None}
    assert given == {"query", "key", "value"}


def test_keys_of_plain_calls():
    """No option at its default may be added to the key of every call, nor to that which tables and lock files have."""
    inputs = prepare()
    args, options = inputs.described
    assert args == (Q, K, V)
    assert options == {"softmax_scale": 0.25}
    [(args, options)] = KERNEL.former_descriptions((inputs,), {})
    assert args == (Q, K, V, None, None, None)
    assert options == {
        "dropout_seed": None,
        "softmax_scale": 0.25,
        "logits_soft_cap": None,
        "dropout_prob": 0.0,
        "precision": None,
        "return_lse": False,
        "unbatched": False,
        "platform": None,
    }


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({"causal": True}, CausalMask(0)),
        ({"causal": True, "causal_alignment": "bottom_right"}, CausalMask(4)),
        ({"sliding_window": 3}, WindowMask(3, 3)),
        ({"sliding_window": 0}, WindowMask(0, 0)),
        ({"sliding_window": (3, None)}, WindowMask(3, None)),
        ({"sliding_window": [1, 2], "causal_alignment": "bottom_right"}, WindowMask(1, 2, 4)),
        ({"sliding_window": np.int64(3), "causal": True}, WindowMask(3, 0)),
        ({"sliding_window": (3, 9), "causal": True}, WindowMask(3, 0)),
        ({"sliding_window": (None, 9), "causal": True}, WindowMask(None, 0)),
        ({"sliding_window": (None, None)}, None),
        ({"causal_alignment": "bottom_right"}, None),
    ],
    ids=str,
)
def test_static_masks(options: dict[str, Any], mask: Any):
    assert prepare(**options).mask == mask


def test_masks_combine():
    explicit = np.ones((12,), bool)
    mask = prepare(
        causal=True,
        mask=explicit,
        q_segment_ids=zeros((2, 8), jnp.uint8),
        kv_segment_ids=np.zeros((2, 12), np.int32),
        query_seq_lengths=[3, 8],
    ).mask
    assert isinstance(mask, AndMask)
    kinds = {type(part): part for part in mask.masks}
    assert set(kinds) == {SegmentMask, LengthMask, CausalMask, ExplicitMask}
    assert kinds[ExplicitMask].array.shape == (1, 1, 1, 12)
    assert kinds[SegmentMask].q_segment_ids.dtype == jnp.int32
    assert kinds[LengthMask].kv_lengths is None


def test_mask_object_is_kept():
    mask = CausalMask(3) | WindowMask(1, 1)
    assert prepare(mask=mask).mask == mask
    assert prepare(mask=mask, causal=True).mask == CausalMask(0) & mask


def test_bottom_right_follows_the_lengths():
    mask = prepare(
        causal=True, causal_alignment="bottom_right", query_seq_lengths=[2, 8], key_value_seq_lengths=[7, 5]
    ).mask
    full = np.asarray(jnp.broadcast_to(mask.materialise(8, 12), (2, 1, 8, 12)))[:, 0]
    for b, (rows, columns) in enumerate([(2, 7), (8, 5)]):
        assert full[b, rows - 1, :columns].all(), "the last query sees every key"
        assert full[b].sum() == sum(max(0, columns - rows + 1 + i) for i in range(rows))


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_packed(alignment: str):
    q_bounds, kv_bounds = [0, 3, 3, 7], [1, 2, 5, 11]
    mask = prepare(
        *PACKED, causal=True, causal_alignment=alignment, cum_seqlens_q=q_bounds, cum_seqlens_k=kv_bounds
    ).mask
    want = np.zeros((8, 12), bool)
    for n in range(3):
        for i in range(q_bounds[n], q_bounds[n + 1]):
            for j in range(kv_bounds[n], kv_bounds[n + 1]):
                ends = (
                    (kv_bounds[n + 1], q_bounds[n + 1]) if alignment == "bottom_right" else (kv_bounds[n], q_bounds[n])
                )
                want[i, j] = j - ends[0] <= i - ends[1]
    np.testing.assert_array_equal(np.asarray(mask.materialise(8, 12))[0, 0], want)


def test_packed_self_attention_needs_no_positions():
    bounds = jnp.asarray([0, 3, 8])
    query, _, _ = PACKED
    mask = prepare(query, query, query, causal=True, cum_seqlens_q=bounds, cum_seqlens_k=bounds).mask
    assert mask.masks[1] == CausalMask(0)


def test_unbatched():
    inputs = prepare(
        Q[0], K[0], V[0], zeros((4, 8, 12)), q_segment_ids=np.zeros(8, int), kv_segment_ids=np.zeros(12, int),
        query_seq_lengths=3, return_lse=True,
    )  # fmt: skip
    assert inputs.unbatched
    assert inputs.query.shape == (1, 8, 4, 16)
    assert inputs.bias is not None
    assert inputs.bias.shape == (1, 4, 8, 12)
    out, lse = KERNEL.reference(inputs)
    assert (out.shape, lse.shape) == ((8, 4, 24), (4, 8))
    d_out, d_lse = KERNEL.cotangents(inputs, (out, lse), (out, lse))
    assert d_lse is not None
    assert (d_out.shape, d_lse.shape) == ((1, 8, 4, 24), (1, 4, 8))


def test_numpy_and_lists():
    inputs = prepare(np.zeros((2, 8, 4, 16)), np.zeros((2, 12, 2, 16)), np.zeros((2, 12, 2, 24)))
    assert inputs.query.dtype == jnp.float32
    for given, shape in (((4,), (4, 1)), ((4, 3), (4, 3))):
        sinks = prepare(softmax_aux=np.zeros(given)).softmax_aux
        assert sinks is not None
        assert sinks.shape == shape


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (3, [0, 3]),
        (-1, [0xFFFFFFFF, 0xFFFFFFFF]),
        (5 << 40, [5 << 8, 0]),
        (np.int64(7), [0, 7]),
        (jnp.int32(7), [0, 7]),
        (jnp.int32(-1), [0xFFFFFFFF, 0xFFFFFFFF]),
        (jnp.uint32(0xFFFFFFFF), [0, 0xFFFFFFFF]),
        (np.array([1, 2], np.uint32), [1, 2]),
        (jax.random.key(9), [0, 9]),
        (jax.random.PRNGKey(9), [0, 9]),
        (jax.random.key(9, impl="rbg"), [0, 9]),
    ],
    ids=str,
)
def test_dropout_seeds(seed: Any, words: list[int]):
    prepared = prepare(dropout_prob=0.5, dropout_seed=seed).dropout_seed
    assert prepared.dtype == np.uint32
    assert np.asarray(prepared).tolist() == words


def test_a_seed_without_dropout_is_dropped():
    assert prepare(dropout_seed=3).dropout_seed is None


@pytest.mark.parametrize(
    ("platform", "canonical"),
    [(None, None), ("auto", None), ("xla", (Platform.XLA,)), (Platform.CUDA, (Platform.CUDA,)),
     (["cuda", "xla"], (Platform.CUDA, Platform.XLA))],
)  # fmt: skip
def test_platforms(platform: Any, canonical: Any):
    assert prepare(platform=platform).platform == canonical


def test_precision():
    assert prepare(precision="highest").precision is jax.lax.Precision.HIGHEST
    assert prepare(precision="BF16_BF16_F32").precision is jax.lax.DotAlgorithmPreset.BF16_BF16_F32


F32 = jnp.float32
WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "query.shape=(8, 16)", {"query": zeros((8, 16))}),
    (ValueError, "key.shape=(12, 2, 16)", {"key": K[0]}),
    (TypeError, "query.dtype=dtype('int32')", {"query": Q.astype(int), "key": K.astype(int), "value": V.astype(int)}),
    (TypeError, "value.dtype=dtype(bfloat16)", {"value": V.astype(jnp.bfloat16)}),
    (TypeError, "query must be an array, got 'x'", {"query": "x"}),
    (TypeError, "key must be an array, got None", {"key": None}),
    (ValueError, "value.shape=(2, 11, 2, 24)", {"value": V[:, :11]}),
    (ValueError, "value.shape=(2, 12, 1, 24)", {"value": V[:, :, :1]}),
    (ValueError, "key.shape=(1, 12, 2, 16)", {"key": K[:1]}),
    (ValueError, "key.shape=(2, 12, 2, 8)", {"key": K[..., :8]}),
    (ValueError, "query.shape=(2, 8, 3, 16)", {"query": Q[:, :, :3]}),
    (ValueError, "key.shape=(2, 12, 0, 16)", {"key": K[:, :, :0], "value": V[:, :, :0]}),
    (ValueError, "value.shape=(2, 12, 2, 0)", {"value": V[..., :0]}),
    (ValueError, "bias.shape=(3, 8, 12)", {"bias": zeros((3, 8, 12))}),
    (ValueError, "bias.shape=(1, 2, 4, 8, 12)", {"bias": zeros((1, 2, 4, 8, 12))}),
    (TypeError, "bias.dtype=dtype('bool')", {"bias": zeros((8, 12), bool)}),
    (ValueError, "mask.shape=(8, 11)", {"mask": zeros((8, 11), bool)}),
    (TypeError, "array.dtype=dtype('float32')", {"mask": zeros((8, 12))}),
    (ValueError, "shape=(1, 1, 5, 12)", {"mask": ExplicitMask(zeros((1, 1, 5, 12), bool))}),
    (TypeError, "causal must be True or False, known while tracing, got 'yes'", {"causal": "yes"}),
    (ValueError, "causal_alignment='centre'", {"causal_alignment": "centre"}),
    (ValueError, "sliding_window=-1", {"sliding_window": -1}),
    (ValueError, "sliding_window=(3, -2)", {"sliding_window": (3, -2)}),
    (TypeError, "sliding_window=(1, 2, 3)", {"sliding_window": (1, 2, 3)}),
    (TypeError, "sliding_window=2.5", {"sliding_window": 2.5}),
    (TypeError, "sliding_window=True", {"sliding_window": True}),
    (ValueError, "logits_soft_cap=0", {"logits_soft_cap": 0}),
    (ValueError, "logits_soft_cap=-2.0", {"logits_soft_cap": -2.0}),
    (TypeError, "logits_soft_cap must be a number, got '3'", {"logits_soft_cap": "3"}),
    (ValueError, "softmax_scale=nan", {"softmax_scale": float("nan")}),
    (TypeError, "softmax_scale must be a number", {"softmax_scale": jnp.ones(2)}),
    (ValueError, "shape=(3,)", {"softmax_aux": zeros(3)}),
    (ValueError, "shape=(4, 0)", {"softmax_aux": zeros((4, 0))}),
    (TypeError, "softmax_aux.dtype=dtype('int32')", {"softmax_aux": zeros(4, int)}),
    (ValueError, "dropout_prob=1.0", {"dropout_prob": 1.0, "dropout_seed": 0}),
    (ValueError, "dropout_prob=-0.1", {"dropout_prob": -0.1, "dropout_seed": 0}),
    (ValueError, "dropout_seed is needed with dropout_prob=0.1", {"dropout_prob": 0.1}),
    (TypeError, "dropout_seed must be an integer", {"dropout_prob": 0.1, "dropout_seed": 0.5}),
    (TypeError, "got True", {"dropout_prob": 0.1, "dropout_seed": True}),
    (ValueError, "seed.shape=(3,)", {"dropout_prob": 0.1, "dropout_seed": zeros(3, jnp.uint32)}),
    (ValueError, "seed.shape=(2,)", {"dropout_prob": 0.1, "dropout_seed": jax.random.split(jax.random.key(0))}),
    (ValueError, "must fit in 64 bits", {"dropout_prob": 0.1, "dropout_seed": 1 << 64}),
    (ValueError, "kv_segment_ids=None", {"q_segment_ids": zeros((2, 8), int)}),
    (ValueError, "q_segment_ids=None", {"kv_segment_ids": zeros((2, 12), int)}),
    (
        ValueError,
        "kv_segment_ids.shape=(2, 8)",
        {"q_segment_ids": zeros((2, 8), int), "kv_segment_ids": zeros((2, 8), int)},
    ),
    (
        TypeError,
        "q_segment_ids.dtype=float32",
        {"q_segment_ids": zeros((2, 8)), "kv_segment_ids": zeros((2, 12))},
    ),
    (ValueError, "query_seq_lengths.shape=(3,)", {"query_seq_lengths": [1, 2, 3]}),
    (ValueError, "query_seq_lengths.shape=()", {"query_seq_lengths": 3}),
    (TypeError, "key_value_seq_lengths.dtype=float32", {"key_value_seq_lengths": [1.0, 2.0]}),
    (ValueError, "cum_seqlens_k=None", {"cum_seqlens_q": [0, 8]}),
    (ValueError, "got batch=2", {"cum_seqlens_q": [0, 8], "cum_seqlens_k": [0, 12]}),
    (ValueError, "precision=3", {"precision": 3}),
    (ValueError, "precision='exact'", {"precision": "exact"}),
    (TypeError, "return_lse must be True or False, known while tracing, got 1", {"return_lse": 1}),
    (ValueError, "platform='metal'", {"platform": "metal"}),
    (ValueError, "platform=('xla', 'metal')", {"platform": ("xla", "metal")}),
    (ValueError, "platform=()", {"platform": ()}),
    (ValueError, "platform=3", {"platform": 3}),
    (TypeError, "unexpected keyword argument 'window'", {"window": 3}),
]


@pytest.mark.parametrize(("kind", "message", "options"), WRONG)
def test_wrong_arguments(kind: type[Exception], message: str, options: dict[str, Any]):
    with pytest.raises(kind, match=re.escape(message)):
        KERNEL.prepare(**({"query": Q, "key": K, "value": V} | options))


PACKED_WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "leave out", {"q_segment_ids": zeros((1, 8), int), "kv_segment_ids": zeros((1, 12), int)}),
    (ValueError, "leave out", {"query_seq_lengths": [3]}),
    (ValueError, "cum_seqlens_q.shape=(2,), cum_seqlens_k.shape=(3,)", {"cum_seqlens_k": [0, 3, 12]}),
    (ValueError, "cum_seqlens_q.shape=(1,)", {"cum_seqlens_q": [0], "cum_seqlens_k": [0]}),
    (TypeError, "cum_seqlens_k.dtype=float32", {"cum_seqlens_k": [0.0, 12.0]}),
]


@pytest.mark.parametrize(("kind", "message", "options"), PACKED_WRONG)
def test_wrong_packed_arguments(kind: type[Exception], message: str, options: dict[str, Any]):
    with pytest.raises(kind, match=re.escape(message)):
        KERNEL.prepare(*PACKED, **({"cum_seqlens_q": [0, 8], "cum_seqlens_k": [0, 12]} | options))


@pytest.mark.parametrize("name", ["logits_soft_cap", "dropout_prob", "causal", "return_lse", "sliding_window"])
def test_traced_options_say_so(name: str):
    with pytest.raises(TypeError, match=f"{name} must be .* known while tracing"):
        jax.jit(lambda x: prepare(**{name: x}).query)(0.5)


EVERYTHING = AttentionCase(
    "", batch=2, q_length=8, kv_length=12, heads=4, kv_heads=2, head_dim=16, bias="hqk", mask="bk", sinks=2,
    segments=True, lengths=True, dropout_prob=0.1, causal=True, causal_alignment="bottom_right", sliding_window=3,
)  # fmt: skip


def everything() -> tuple[Any, dict[str, Any]]:
    arrays, kwargs = EVERYTHING.arguments()
    return arrays, kwargs | {"dropout_seed": jax.random.key(1)}


def test_traceable_with_every_array():
    """Under ``jit`` and by shapes alone, the same as eagerly."""
    arrays, kwargs = everything()
    traced = {name: kwargs.pop(name) for name in list(kwargs) if isinstance(kwargs[name], jax.Array)}
    eager = KERNEL.prepare(*arrays, **kwargs, **traced)

    def arrays_of(arrays, traced):
        return KERNEL.prepare(*arrays, **kwargs, **traced)

    under_jit = jax.jit(arrays_of)(arrays, traced)
    jax.tree.map(np.testing.assert_array_equal, under_jit, eager)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays, traced))
    by_shape = arrays_of(*structs)
    assert jax.tree.map(lambda x: (x.shape, str(x.dtype)), by_shape) == jax.tree.map(
        lambda x: (x.shape, str(x.dtype)), under_jit
    )


@pytest.mark.parametrize("packed", [False, True])
def test_sampled_inputs_fit_and_are_not_degenerate(packed: bool):
    arrays, kwargs = everything()
    if packed:
        case = AttentionCase("", q_length=40, kv_length=64, heads=2, head_dim=8, packed=True, causal=True)
        arrays, kwargs = case.arguments()
    inputs = KERNEL.prepare(*arrays, **kwargs)
    drawn = KERNEL.sampled(inputs.structs, jax.random.key(3))
    got, want = ((jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)])
                 for tree in (drawn, inputs))  # fmt: skip
    assert got == want
    mask = drawn.mask.materialise(inputs.q_length, inputs.kv_length)
    share = float(jnp.mean(mask))
    assert 0.02 < share < 0.98
    out = KERNEL.reference(drawn)
    assert bool(jnp.all(jnp.isfinite(out)))
    ((again,), _) = KERNEL.sample_inputs(Invocation(KERNEL, (inputs.structs,)), jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, again, drawn)


def test_cost():
    def cost(direction="forward", **options):
        case = AttentionCase("", batch=2, q_length=1024, heads=4, kv_heads=2, head_dim=64, dtype="bfloat16", **options)
        arrays, kwargs = case.arguments()
        return KERNEL.cost(Invocation(KERNEL, (KERNEL.prepare(*arrays, **kwargs),), direction=direction))

    full = 4 * 2 * 4 * 1024 * 1024 * 64
    assert cost().flops == full
    assert cost("backward").flops == 2.5 * full
    assert cost(causal=True).flops == pytest.approx(full / 2, rel=0.1)
    assert cost(causal=True, sliding_window=63).flops == pytest.approx(full * 96 / 1024, rel=0.5)
    assert cost(lengths=True).flops == full
    elements = 2 * 1024 * 64 * (4 + 2 + 2 + 4)
    assert cost().bytes == 2 * elements + 4 * 2 * 4 * 1024
    assert cost("backward").bytes == 4 * elements + 4 * 2 * 4 * 1024


@pytest.mark.parametrize("case", [*CPU_CASES.values(), *HOPPER_CASES.values()], ids=lambda case: case.name)
def test_named_cases_prepare(case: AttentionCase):
    smaller = AttentionCase(
        **{field: getattr(case, field) for field in AttentionCase.__dataclass_fields__}
        | {"q_length": min(case.q_length, 16), "kv_length": 16}
    )
    arrays, kwargs = smaller.arguments()
    inputs = KERNEL.prepare(*arrays, **kwargs)
    assert (inputs.heads, inputs.head_dim) == (case.heads, case.head_dim)


def test_argument_list_covers_jax():
    names = set(inspect.signature(jax.nn.dot_product_attention).parameters)
    renamed = {"scale": "softmax_scale", "is_causal": "causal", "local_window_size": "sliding_window",
               "implementation": "platform", "return_residual": "return_lse"}  # fmt: skip
    ours = set(inspect.signature(flash_attention).parameters)
    assert {renamed.get(name, name) for name in names} <= ours
