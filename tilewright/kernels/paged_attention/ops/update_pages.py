"""Writing new keys and values into pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption, as_array, reshape
from tilewright.kernels.op.cases import Arguments
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import InferenceKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost
from tilewright.kernels.op.signatures import results
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.cases import ServingCase, serving_cases
from tilewright.kernels.paged_attention.reference import write_reference
from tilewright.kernels.paged_attention.results import PAGES
from tilewright.kernels.paged_attention.sampling import Draw
from tilewright.kernels.paged_attention.writing import Cache, WriteInputs, check_split_by_heads
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateCase(ServingCase):
    """A call that writes the last tokens of each sequence."""

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (cache.key, cache.value, *drawn.new(), drawn.table(), drawn.lengths(), drawn.boundaries())
        return positional, self.scales(cache)


@stable_id("tilewright/update_pages.UpdatePages", formerly=("tilewright.kernels.update_pages.op:UpdatePages",))
class UpdatePages(InferenceKernel[WriteInputs, Cache]):
    """Writes packed tokens into pages; see ``update_pages`` for the arguments."""

    cases = serving_cases(UpdateCase, packed=True)

    def __init__(self) -> None:
        super().__init__(
            "update_pages",
            version="1",
            backends=("tilewright.kernels.paged_attention.xla.update_pages:XlaUpdatePages",),
        )

    def prepare(
        self,
        key_pages: ArrayLike,
        value_pages: ArrayLike | None,
        key: ArrayLike,
        value: ArrayLike | None,
        page_table: ArrayLike,
        kv_lengths: ArrayLike,
        cum_q_lens: ArrayLike | None = None,
        *,
        key_scale: ArrayLike | None = None,
        value_scale: ArrayLike | None = None,
        page_offset: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: Any = None,
    ) -> WriteInputs:
        """Checks a call; adds a head axis to pages of latents."""
        pages, new = as_array("key_pages", key_pages), as_array("key", key)
        # Latents have one head for all: backends see an axis of size 1, which `outputs` removes.
        headless = len(pages.shape) == 3
        if headless:
            if value_pages is not None:
                raise ValueError(f"pages of latents, of rank 3, have no pages of values beside them: {pages.shape=}")
            pages = reshape(pages, (*pages.shape[:2], 1, pages.shape[2]))
            new = reshape(new, (new.shape[0], 1, *new.shape[1:])) if len(new.shape) == 2 else new
        layout = "[num_pages, page_size, kv_heads, head_dim]"
        keys, values = arguments.cache_arrays(pages, value_pages, layout, ("key_pages", "value_pages"), rows=True)
        if not isinstance(keys, jax.ShapeDtypeStruct):
            check_split_by_heads(keys)
        lengths = arguments.lengths_array("kv_lengths", kv_lengths, None)
        sequences = lengths.shape[0]
        new, new_value = arguments.new_tokens(new, value, keys, values, sequences if cum_q_lens is None else None)
        table, cum = arguments.places_to_write(
            self.name, page_table, page_offset, lengths, cum_q_lens, keys, new.shape[0]
        )
        return WriteInputs(
            keys,
            value_pages=values,
            key_scale=arguments.scale_array("key_scale", key_scale, keys),
            value_scale=arguments.scale_array("value_scale", value_scale, values),
            key=new,
            value=new_value,
            page_table=table,
            kv_lengths=lengths,
            cum_q_lens=cum,
            kv_dtype=keys.dtype.name,
            headless=headless,
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: WriteInputs) -> Any:
        """The cache in its shapes and dtypes."""
        return tuple(None if array is None else struct_like(array) for array in inputs.cache)

    def outputs(self, inputs: WriteInputs, results: Cache) -> Any:
        """The arrays of the cache that exist, in the caller's shapes."""
        key, *others = results
        if inputs.headless:
            key = key.reshape(*key.shape[:2], key.shape[3])
        found = (key, *(array for array in others if array is not None))
        return found if len(found) > 1 else key

    def reference(self, inputs: WriteInputs) -> Any:
        return self.outputs(inputs, write_reference(inputs))

    def sampled(self, inputs: WriteInputs, key: jax.Array) -> WriteInputs:
        """Normal arrays, a table of distinct pages if there are enough, lengths of at least half."""
        draw, sequences = Draw(key), inputs.kv_lengths.shape[0]
        counts = draw.counts(inputs.key.shape[0], sequences)
        capacity = inputs.page_table.shape[1] * inputs.key_pages.shape[1]
        return inputs.replace(
            key_pages=draw.cache(inputs.key_pages),
            value_pages=draw.cache(inputs.value_pages),
            key_scale=draw.scale(inputs.key_scale, inputs.key_pages),
            value_scale=draw.scale(inputs.value_scale, inputs.value_pages),
            key=draw.cache(inputs.key),
            value=draw.floats(inputs.value),
            page_table=draw.table(inputs.page_table, inputs.key_pages.shape[0]),
            kv_lengths=jnp.maximum(draw.lengths(capacity, sequences), counts).astype(jnp.int32),
            cum_q_lens=None if inputs.cum_q_lens is None else jnp.append(0, jnp.cumsum(counts)).astype(jnp.int32),
        )

    # No core_dims: a scatter follows the types of the pages, and the new tokens are split likewise.

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Bytes of the new tokens, read once and written once."""
        inputs = self.inputs_of(inv)
        tokens = [new for new in (inputs.key, inputs.value) if new is not None]
        stored = inputs.key_pages.dtype.itemsize
        return Cost(0.0, float(sum(new.size * (new.dtype.itemsize + stored) for new in tokens)))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Zero: all tokens may be dropped, and the pages donated."""
        return Cost(0.0, 0.0)


_UPDATE_PAGES = UpdatePages()


@public_function(UpdatePages.prepare)
@results(PAGES)
def update_pages(*args: Any, **kwargs: Any) -> Any:
    """Writes new keys and values into pages, quantised if those are.

    Args:
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]``; latents may be ``[num_pages, page_size, head_dim]``.
        Floating-point, int8, or uint8 rows of latents, of 656 bytes. Donate them to the ``jit`` around, or they are
        copied.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]`` in the same dtype; None where there are no values.
      key: ``[tokens, kv_heads, head_dim]``, packed, without heads if the pages have none. Rows of latents are written
        as ``quantize_latents`` gives them.
      value: ``[tokens, kv_heads, value_dim]``; None where there are no values.
      page_table: ``[sequences, pages_per_sequence]`` integers.
      kv_lengths: ``[sequences]`` integers: tokens in the cache when this is done; the new ones are the last of them.
      cum_q_lens: ``[sequences + 1]`` integers: where the sequences' tokens begin and end; by default each has one.
      key_scale: a number, or broadcastable to ``[num_pages, page_size, kv_heads]`` with rank 3. Where it has a scale
        for each token, those of the new tokens are computed and stored; else it is what tokens are divided by.
      value_scale: likewise.
      page_offset: added to the pages of the table that are not negative: an integer or a scalar array, such as the
        first page of a layer in a pool of all layers' pages.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      New pages of keys, of values if there are any, and their scales if there are any. A token whose page does not
      exist is dropped; if several tokens have the same page and row, the last one stays.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _UPDATE_PAGES(*args, **kwargs)
