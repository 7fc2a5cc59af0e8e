"""What has no meaning over several devices is one error, before any work."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import tilewright
from tests.kernels.context_parallel.calls import mesh_of


def attend(length: int = 8, heads: int = 8, kv_heads: int = 4, batch: int = 2, **options: Any) -> Any:
    """Traces a call over four devices, each with ``length`` rows."""
    arrays = [jax.ShapeDtypeStruct((batch, 4 * length, h, 16), jnp.float32) for h in (heads, kv_heads, kv_heads)]

    def on_device(*qkv: Any) -> Any:
        return tilewright.context_parallel_attention(*qkv, axis_name="s", **options)

    rows = P(None, "s")
    return jax.eval_shape(jax.shard_map(on_device, mesh=mesh_of(), in_specs=(rows,) * 3, out_specs=rows), *arrays)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "zigzag", "length": 7}, r"odd number of rows on each device: 7 of the query, 7 of the keys"),
        ({"strategy": "ulysses", "kv_heads": 2}, r"4 devices must divide .* key heads, got 8 and 2"),
        ({"strategy": "ulysses", "heads": 6, "kv_heads": 6}, r"4 devices must divide .*, got 6 and 6"),
        ({"bias": jnp.zeros((32, 32))}, r"takes no bias"),
        ({"mask": jnp.ones((32, 32), bool)}, r"takes no mask"),
        ({"dropout_prob": 0.1, "dropout_seed": 0}, r"takes no dropout_prob"),
        ({"strategy": "tree"}, r"strategy='tree' must be one of 'auto', 'ring', 'all_gather', 'ulysses'"),
        ({"layout": "striped"}, r"layout='striped' must be 'zigzag' or 'contiguous'"),
        ({"causal_alignment": "left"}, r"causal_alignment='left'"),
        ({"logits_soft_cap": -1.0}, r"logits_soft_cap must be positive"),
        ({"sliding_window": -1}, r"sliding_window must not be negative"),
        ({"platform": "abacus"}, r"platform='abacus'"),
        ({"q_segment_ids": jnp.zeros((2, 8), int)}, r"belong together, got kv_segment_ids=None"),
        ({"q_segment_ids": jnp.zeros((2, 32), int), "kv_segment_ids": jnp.zeros((2, 8), int)}, r"shape \(2, 8\)"),
        ({"query_seq_lengths": jnp.zeros(3, int)}, r"query_seq_lengths must have the shape \(2,\)"),
        ({"cum_seqlens_q": jnp.array([0, 8]), "cum_seqlens_k": jnp.array([0, 8])}, r"all sequences in one row"),
        (
            {"batch": 1, "cum_seqlens_q": jnp.array([0, 8]), "cum_seqlens_k": jnp.array([0, 8]),
             "key_value_seq_lengths": jnp.array([8])},
            r"already say where each sequence begins",
        ),
    ],
)  # fmt: skip
def test_a_wrong_call_is_a_value_error_that_names_the_function(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^context_parallel_attention: .*{message}"):
        attend(**options)


def test_a_wrong_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"^context_parallel_attention: causal must be True or False"):
        attend(causal=1)
    with pytest.raises(TypeError, match=r"sliding_windows"):
        attend(sliding_windows=3)


def test_outside_of_shard_map_the_error_says_where_to_call_it() -> None:
    x = jnp.ones((1, 8, 2, 16))
    with pytest.raises(ValueError, match=r"axis_name='s' is no axis of a surrounding jax.shard_map"):
        tilewright.context_parallel_attention(x, x, x, axis_name="s")


def test_a_dropout_of_zero_is_none() -> None:
    assert attend(dropout_prob=0.0, dropout_seed=jnp.zeros(2, jnp.uint32)).shape == (2, 32, 8, 16)
