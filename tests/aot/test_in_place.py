"""What kernels update in place in a loop, in programs for an H100: nothing is lost, and pools are not copied."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiler import lower_as_there, missing_packages
from tilewright.modules import flash_attention, linear_attention_step, mla_decode, rope_update_pages

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages())

LAYERS, PAGES, TOKENS, HEAD_DIM = 3, 8, 4, 128
POOL = (PAGES, 16, 8, HEAD_DIM)


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


NEW = (
    struct(TOKENS, 32, HEAD_DIM),
    struct(TOKENS, 8, HEAD_DIM),
    struct(TOKENS, 8, HEAD_DIM),
    struct(TOKENS, 2, dtype=jnp.int32),
    struct(TOKENS, dtype=jnp.int32),
)
"""Query, key, value, page table and lengths."""


def stacked_pages(query: Any, key: Any, value: Any, table: Any, lengths: Any, *pools: Any) -> Any:
    def layer(query: Any, pages: Any) -> Any:
        query, *pages = rope_update_pages(query, *pages, key, value, table, lengths, platform="triton")
        return query, pages

    return jax.lax.scan(layer, query, pools)


def carried_pool(query: Any, key: Any, value: Any, table: Any, lengths: Any, *pools: Any) -> Any:
    def layer(number: Any, carry: Any) -> Any:
        offset = number * PAGES
        return rope_update_pages(*carry, key, value, table, lengths, page_offset=offset, platform="triton")

    return jax.lax.fori_loop(0, LAYERS, layer, (query, *pools))


STATES = (16, 8, HEAD_DIM, HEAD_DIM)
OF_HEADS = struct(TOKENS, 8, HEAD_DIM)


def state_step(value: Any, pool: Any) -> Any:
    slots = jnp.arange(TOKENS, dtype=jnp.int32)[::-1]
    strength = jnp.ones(value.shape[:2])
    return linear_attention_step(
        value, value, value, pool, beta=strength, log_decay=-strength, state_indices=slots, platform="triton"
    )


def stacked_states(value: Any, pools: Any) -> Any:
    return jax.lax.scan(state_step, value, pools)


def carried_states(value: Any, pool: Any) -> Any:
    return jax.lax.fori_loop(0, LAYERS, lambda _, carry: state_step(*carry), (value, pool))


def latents(query: Any, pages: Any, table: Any, lengths: Any) -> Any:
    return jax.lax.map(lambda query: mla_decode(query, pages, table, lengths, platform="pallas"), query)


def gradients(query: Any, key: Any, value: Any) -> Any:
    def loss(*operands: Any) -> Any:
        return flash_attention(*operands, causal=True, platform="pallas").astype(jnp.float32).sum()

    return jax.lax.map(lambda operands: jax.grad(loss, (0, 1, 2))(*operands), (query, key, value))


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "pages": (stacked_pages, (*NEW, *[struct(LAYERS, *POOL)] * 2)),
    "states": (stacked_states, (OF_HEADS, struct(LAYERS, *STATES, dtype=jnp.float32))),
    "latents": (
        latents,
        (struct(3, 2, 64, 576), struct(8, 64, 576), struct(2, 2, dtype=jnp.int32), struct(2, dtype=jnp.int32)),
    ),
    "gradients": (gradients, (struct(3, 2, 1024, 8, 64), *[struct(3, 2, 1024, 2, 64)] * 2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_slice_of_a_stack_is_not_updated_elsewhere(name: str) -> None:
    """A dynamic-slice fusion forgets that a call updates its operand, and gives the result a buffer of its own."""
    function, arguments = CALLS[name]
    program = lower_as_there(function, *arguments).compile().as_text()
    in_place = [computation for computation in program.split("\n\n") if "output_to_operand_aliasing" in computation]
    assert in_place
    fused = [each.lstrip().split(" ", 1)[0] for each in in_place if each.lstrip().startswith("%dynamic-slice-fusion")]
    assert not fused


def test_a_pool_that_a_loop_carries_is_not_copied() -> None:
    pools = [struct(LAYERS * PAGES, *POOL[1:])] * 2
    lowered = lower_as_there(carried_pool, *NEW, *pools)
    program = lowered.compile().as_text()
    shape = re.escape(f"bf16[{LAYERS * PAGES},16,8,{HEAD_DIM}]")
    copies = re.findall(rf"= {shape}\S* copy\(", program)
    # The pools are no operands of the program that it may keep, so each is copied once, before the loop.
    assert len(copies) == 2


def test_a_pool_of_states_that_a_loop_carries_is_not_copied() -> None:
    program = lower_as_there(carried_states, OF_HEADS, struct(*STATES, dtype=jnp.float32)).compile().as_text()
    shape = re.escape(f"f32[{','.join(map(str, STATES))}]")
    # It is no operand of the program that it may keep, so it is copied once, before the loop.
    assert len(re.findall(rf"= {shape}\S* copy\(", program)) == 1
