"""Attention over split sequences beside the definition: every strategy, layout and option, forward and backward."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tilewright
from tests.kernels.context_parallel.calls import (
    CALLS,
    LENGTH,
    ROWS,
    SHARDS,
    assert_as_expected,
    expected,
    mesh_of,
    operands,
    split_results,
)

STRATEGIES, LAYOUTS = ("ring", "all_gather", "ulysses"), ("zigzag", "contiguous")


@pytest.mark.parametrize(
    ("call", "strategy", "layout"),
    list(itertools.product(CALLS, STRATEGIES, LAYOUTS)),
)
def test_results_and_gradients_are_those_of_the_definition(call: str, strategy: str, layout: str) -> None:
    assert_as_expected(call, split_results(call, strategy, layout))


@pytest.mark.parametrize(
    ("strategy", "check_vma", "kind"),
    list(itertools.product(STRATEGIES, (True, False), (AxisType.Auto, AxisType.Explicit))),
)
def test_types_of_axes_change_nothing(strategy: str, check_vma: bool, kind: AxisType) -> None:
    call = "soft cap, sinks"
    assert_as_expected(call, split_results(call, strategy, "zigzag", check_vma=check_vma, kind=kind))


@pytest.mark.parametrize(
    ("call", "layout"),
    [
        ("segments", "zigzag"),
        ("packed", "contiguous"),
        ("full", "zigzag"),
    ],
)
def test_eight_devices_of_which_like_steps_are_a_loop(call: str, layout: str) -> None:
    assert_as_expected(call, split_results(call, "ring", layout, shards=8))


@pytest.mark.parametrize(("strategy", "call"), [("ring", "segments"), ("ulysses", "lengths")])
def test_x64_changes_nothing(strategy: str, call: str) -> None:
    with jax.enable_x64(True):
        results = split_results(call, strategy, "zigzag")
    assert {each.dtype for each in results.values()} == {np.dtype(np.float32)}
    assert_as_expected(call, results)


def test_float64_is_computed_in_float64() -> None:
    with jax.enable_x64(True):
        results = split_results("segments alone", "ring", "contiguous", dtype=jnp.float64)
    assert {each.dtype for each in results.values()} == {np.dtype(np.float64)}
    assert_as_expected("segments alone", results, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_sums_over_devices_are_float32(strategy: str) -> None:
    """bfloat16 over four devices is as near as bfloat16 on one, for the same rounded inputs."""
    call = "causal"
    one = [x.astype(jnp.bfloat16) for x in operands(call)]

    def attend(*qkv: Any) -> Any:
        return tilewright.modules.flash_attention(*qkv, causal=True, return_lse=True)

    (out, lse), pull = jax.vjp(attend, *one[:3])
    whole = dict(zip(("query", "key", "value"), pull((one[4], one[5].astype(lse.dtype))), strict=True), out=out)
    split = split_results(call, strategy, "zigzag", dtype=jnp.bfloat16)
    for name, each in whole.items():
        wanted = getattr(expected(call), name)
        alone, together = (np.abs(np.asarray(x, np.float64) - wanted).max() for x in (each, split[name]))
        assert together <= 1.5 * alone + 1e-3, name


def test_a_whole_row_of_devices_without_visible_keys() -> None:
    """Zeros and −inf, and zero gradients: no device has a key for any query."""
    results = _unbatched({"sliding_window": (0, 0), "causal_alignment": "bottom_right"}, kv_length=4)
    np.testing.assert_array_equal(results[0][: LENGTH - 4], 0.0)
    assert np.isneginf(results[1][:, : LENGTH - 4]).all()
    assert not np.isnan(np.concatenate([x.ravel() for x in results])).any()


def _unbatched(options: dict[str, Any], kv_length: int = LENGTH) -> list[np.ndarray]:
    """out, lse and d_query of a ring without a batch dimension."""
    query, key, value, _, d_out, _ = (x[0] if x.ndim > 2 else x for x in operands("causal"))

    def on_device(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        (out, lse), pull = jax.vjp(
            lambda q: tilewright.context_parallel_attention(
                q, key, value, axis_name="s", strategy="ring", layout="contiguous", return_lse=True, **options
            ),
            query,
        )
        return out, lse, pull((d_out, jnp.zeros_like(lse)))[0]

    rows = P("s")
    run = jax.shard_map(on_device, mesh=mesh_of(), in_specs=(rows,) * 4, out_specs=(rows, P(None, "s"), rows))
    return [np.asarray(x) for x in jax.jit(run)(query, key[:kv_length], value[:kv_length], d_out)]


def test_a_call_without_a_batch_dimension() -> None:
    out, lse, d_query = _unbatched({"causal": True})
    wanted = expected("causal")
    np.testing.assert_allclose(out, wanted.out[0], atol=2e-5)
    np.testing.assert_allclose(lse, wanted.lse[0], atol=2e-5)
    assert d_query.shape == (*out.shape[:2], operands("causal")[0].shape[-1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_over_two_axes_of_a_mesh(strategy: str) -> None:
    mesh = jax.make_mesh((2, 2), ("host", "device"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rows = P(None, ("host", "device"))

    def attend(*qkv: Any) -> Any:
        return tilewright.context_parallel_attention(
            *qkv, axis_name=("host", "device"), strategy=strategy, layout="contiguous", causal=True
        )

    split = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows))
    np.testing.assert_allclose(split(*operands("causal")[:3]), expected("causal").out, atol=2e-5)


def test_a_scale_that_is_an_array_has_a_gradient() -> None:
    query, key, value, _, d_out, _ = operands("causal")

    def loss(scale: Any, query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out = tilewright.context_parallel_attention(
            query, key, value, axis_name="s", strategy="ring", layout="contiguous", causal=True, softmax_scale=scale
        )
        return jax.lax.psum(jnp.sum(out * d_out), "s")

    split = jax.shard_map(loss, mesh=mesh_of(), in_specs=(P(), ROWS, ROWS, ROWS, ROWS), out_specs=P())
    gradient = jax.jit(jax.grad(split))(jnp.float32(0.25), query, key, value, d_out)
    _, pull = jax.vjp(
        lambda scale: tilewright.modules.flash_attention(query, key, value, causal=True, softmax_scale=scale),
        jnp.float32(0.25),
    )
    np.testing.assert_allclose(gradient, pull(d_out)[0], rtol=1e-4)


def test_under_vmap_checkpoint_and_a_loop() -> None:
    query, key, value, _, _, _ = operands("causal")
    names = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_residuals")

    def layers(x: Any, key: Any, value: Any) -> Any:
        @functools.partial(jax.checkpoint, policy=names)
        def layer(x: Any, _: Any) -> Any:
            attend = jax.vmap(
                lambda q, k, v: tilewright.context_parallel_attention(
                    q, k, v, axis_name="s", strategy="ring", layout="zigzag", causal=True
                )
            )
            return x + jnp.pad(attend(x, key, value), ((0, 0),) * 3 + ((0, 8),)), None

        return jax.lax.scan(layer, x, None, length=2)[0]

    def loss(x: Any, key: Any, value: Any) -> Any:
        return jax.lax.psum(jnp.sum(jnp.sin(layers(x, key, value))), "s")

    split = jax.shard_map(loss, mesh=mesh_of(), in_specs=(ROWS,) * 3, out_specs=P())
    got = jax.jit(jax.grad(split))(*(tilewright.zigzag(x, 1, SHARDS) for x in (query, key, value)))

    def whole(x: Any) -> Any:
        for _ in range(2):
            out = tilewright.modules.flash_attention(x, key, value, causal=True)
            x = x + jnp.pad(out, ((0, 0),) * 3 + ((0, 8),))
        return jnp.sum(jnp.sin(x))

    np.testing.assert_allclose(tilewright.unzigzag(got, 1, SHARDS), jax.grad(whole)(query), atol=5e-5)
