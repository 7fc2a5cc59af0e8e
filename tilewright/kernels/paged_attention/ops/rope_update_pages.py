"""Rotary embedding of new queries and keys, and writing keys and values into pages, in one pass."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array

from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.cases import Arguments
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import InferenceKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost
from tilewright.kernels.op.sharding import Partitioning, explicit_mesh, typed_axes
from tilewright.kernels.op.signatures import results
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.cases import STORED_OPTIONS, ServingCase, serving_cases
from tilewright.kernels.paged_attention.reference import write_reference
from tilewright.kernels.paged_attention.rotating import Rotated, RotateInputs
from tilewright.kernels.paged_attention.sampling import Draw
from tilewright.kernels.rope.cases import SCALINGS, ScalingName
from tilewright.kernels.rope.inputs import RopeInputs, rope_reference
from tilewright.kernels.rope.op import FRACTION, positions_array, rotation_options
from tilewright.kernels.rope.scaling import RopeScaling
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@dataclasses.dataclass(frozen=True, slots=True)
class RopeUpdateCase(ServingCase):
    """A call that rotates and writes the last tokens of each sequence, with ``positions`` at any."""

    positions: bool = False
    base: float = RopeInputs.base
    scaling: ScalingName | None = None
    interleaved: bool = False
    fraction: float = 1.0

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        query, cache = drawn.query(), drawn.pages()
        key, value = drawn.new()
        positional = (
            query, cache.key, cache.value, key, value, drawn.table(), drawn.lengths(), drawn.boundaries()
        )  # fmt: skip
        keywords = self.scales(cache) | {name: getattr(self, name) for name in ("base", "interleaved", "fraction")}
        if self.scaling is not None:
            keywords["scaling"] = SCALINGS[self.scaling]
        if self.positions:
            keywords["positions"] = jnp.asarray(drawn.generator.integers(-5, 5000, query.shape[0]), jnp.int32)
        return positional, keywords


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **STORED_OPTIONS,
    "value head_dim of its own": {"value_dim": 128},
    "`positions`": {"positions": True},
    "`base`": {"base": 500000.0},
    "`scaling`": {"scaling": "yarn"},
    "`interleaved`": {"interleaved": True},
    "`fraction`": {"fraction": 0.5},
}


@stable_id("tilewright/rope_update_pages.RopeUpdatePages")
class RopeUpdatePages(InferenceKernel[RotateInputs, Rotated]):
    """Rotates packed queries and keys, and writes keys and values; see ``rope_update_pages`` for the arguments."""

    cases = serving_cases(RopeUpdateCase, packed=True, options=_OPTIONS)

    def __init__(self) -> None:
        super().__init__(
            "rope_update_pages",
            version="1",
            backends=(
                "tilewright.kernels.paged_attention.triton.rotating:TritonRopeUpdatePages",
                "tilewright.kernels.paged_attention.xla.rotating:XlaRopeUpdatePages",
            ),
        )

    def prepare(
        self,
        query: ArrayLike,
        key_pages: ArrayLike,
        value_pages: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        page_table: ArrayLike,
        kv_lengths: ArrayLike,
        cum_q_lens: ArrayLike | None = None,
        *,
        positions: ArrayLike | None = None,
        base: float = RopeInputs.base,
        scaling: RopeScaling | Mapping[str, Any] | None = None,
        interleaved: bool = False,
        fraction: float = FRACTION,
        key_scale: ArrayLike | None = None,
        value_scale: ArrayLike | None = None,
        page_offset: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: Any = None,
    ) -> RotateInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.page_arrays(key_pages, value_pages)
        tokens, _, head_dim = queries.shape
        if keys.shape[3] != head_dim:
            raise ValueError(f"query and key_pages must have the same head dim, got {queries.shape=}, {keys.shape=}")
        new_key, new_value = arguments.new_tokens(key, value, keys, values, tokens)
        given = tokens if cum_q_lens is None else None
        lengths = arguments.lengths_array("kv_lengths", kv_lengths, given)
        table, cum = arguments.places_to_write(self.name, page_table, page_offset, lengths, cum_q_lens, keys, tokens)
        return RotateInputs(
            queries,
            keys,
            values,
            key_scale=arguments.scale_array("key_scale", key_scale, keys),
            value_scale=arguments.scale_array("value_scale", value_scale, values),
            key=new_key,
            value=new_value,
            page_table=table,
            kv_lengths=lengths,
            cum_q_lens=cum,
            positions=None if positions is None else positions_array(positions, queries),
            **rotation_options(head_dim, base, scaling, interleaved, fraction),
            kv_dtype=keys.dtype.name,
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: RotateInputs) -> Any:
        """The query and the cache in their shapes and dtypes."""
        cache = inputs.write(inputs.key).cache
        return struct_like(inputs.query), *(None if array is None else struct_like(array) for array in cache)

    def outputs(self, inputs: RotateInputs, results: Rotated) -> Any:
        """The query and the arrays of the cache that exist."""
        return tuple(array for array in results if array is not None)

    def reference(self, inputs: RotateInputs) -> Any:
        positions = inputs.all_positions()
        query, key = (rope_reference(inputs.rotation(x, positions)).astype(x.dtype) for x in (inputs.query, inputs.key))
        return self.outputs(inputs, (query, *write_reference(inputs.write(key))))

    def sampled(self, inputs: RotateInputs, key: jax.Array) -> RotateInputs:
        """Normal arrays, a table of distinct pages if there are enough, lengths of at least half."""
        draw, sequences = Draw(key), inputs.kv_lengths.shape[0]
        counts = draw.counts(inputs.key.shape[0], sequences)
        capacity = inputs.page_table.shape[1] * inputs.key_pages.shape[1]
        lengths = jnp.maximum(draw.lengths(capacity, sequences), counts).astype(jnp.int32)
        return inputs.replace(
            query=draw.floats(inputs.query),
            key_pages=draw.cache(inputs.key_pages),
            value_pages=draw.cache(inputs.value_pages),
            key_scale=draw.scale(inputs.key_scale, inputs.key_pages),
            value_scale=draw.scale(inputs.value_scale, inputs.value_pages),
            key=draw.floats(inputs.key),
            value=draw.floats(inputs.value),
            page_table=draw.table(inputs.page_table, inputs.key_pages.shape[0]),
            kv_lengths=lengths,
            cum_q_lens=None if inputs.cum_q_lens is None else jnp.append(0, jnp.cumsum(counts)).astype(jnp.int32),
            positions=None if inputs.positions is None else jnp.arange(len(inputs.key), dtype=jnp.int32)[:, None],
        )

    def partitioning(self, inputs: RotateInputs) -> Partitioning | None:
        """Splits by heads, as in the types of query, pages and new tokens.

        Raises:
          ValueError: something else is split, or they are split differently.
        """
        arrays = {name: inputs.arrays[name] for name in ("query", "key_pages", "value_pages", "key", "value")}
        mesh = explicit_mesh(*arrays.values())
        if mesh is None:
            return None
        specs = {name: typed_axes(array) for name, array in arrays.items()}
        axis = {name: 2 if name.endswith("pages") else 1 for name in arrays}
        heads, kv_heads = specs["query"][1], specs["key_pages"][2]
        others = any(axes is not None for name, spec in specs.items() for i, axes in enumerate(spec) if i != axis[name])
        differ = any(specs[name][axis[name]] != kv_heads for name in arrays if name != "query")
        shared = kv_heads is None and inputs.key.shape[1] == 1
        if others or differ or not (shared or heads == kv_heads):
            text = ", ".join(f"{name}: {P(*spec)}" for name, spec in specs.items())
            raise ValueError(
                f"query, pages and new tokens can be split by heads alone, and alike ({text}); reshard them first, or "
                "give each device its own sequences and pages by jax.shard_map"
            )
        pages, rows = P(None, None, kv_heads), P(None, kv_heads)

        def scale(array: Any) -> Any:
            return None if array is None else P(None, None, kv_heads if array.shape[2] > 1 else None)

        cache = {
            "key_pages": pages, "value_pages": pages, "key_scale": scale(inputs.key_scale),
            "value_scale": scale(inputs.value_scale),
        }  # fmt: skip
        return Partitioning(
            mesh=mesh,
            inputs=inputs.replace(
                query=P(None, heads),
                **cache,
                key=rows,
                value=rows,
                page_table=P(),
                kv_lengths=P(),
                cum_q_lens=None if inputs.cum_q_lens is None else P(),
                positions=None if inputs.positions is None else P(),
            ),
            results=(P(None, heads), *cache.values()),
            gradients={},
        )

    def split_alike(self, inputs: RotateInputs) -> Sequence[Mapping[str, int]]:
        """All heads, unless all queries share one of the keys."""
        if inputs.key.shape[1] == 1:
            return []
        return [{"query": 1, "key": 1, "value": 1, "key_pages": 2, "value_pages": 2}]

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """Bytes of queries and new tokens, read once and written once."""
        inputs = self.inputs_of(inv)
        moved = 2 * inputs.query.size * inputs.query.dtype.itemsize
        stored = inputs.key_pages.dtype.itemsize
        moved += sum(new.size * (new.dtype.itemsize + stored) for new in (inputs.key, inputs.value))
        return Cost(0.0, float(moved))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The cost if all tokens are dropped, and the pages donated: reading and writing the query."""
        query = self.inputs_of(inv).query
        return Cost(0.0, float(2 * query.size * query.dtype.itemsize))


_ROPE_UPDATE_PAGES = RopeUpdatePages()
_WRITTEN: Mapping[str, Any] = {
    "": tuple[Array, Array, Array],
    "key_scale value_scale": tuple[Array, Array, Array, Array, Array],
}


@public_function(RopeUpdatePages.prepare)
@results(_WRITTEN)
def rope_update_pages(*args: Any, **kwargs: Any) -> Any:
    """Rotates new queries and keys, and writes keys and values into pages: ``rope`` and ``update_pages`` in one pass.

    Queries, keys and values are read once, and rotated queries and pages written once. The results are those of
    ``rope`` of query and key and then ``update_pages``, with the rotated key rounded to its dtype between.

    Args:
      query: ``[tokens, heads, head_dim]``, packed; float16, bfloat16, float32 or float64.
      key_pages: ``[num_pages, page_size, kv_heads, head_dim]``, floating-point or int8. Donate pages to the ``jit``
        around, or they are copied.
      value_pages: ``[num_pages, page_size, kv_heads, value_dim]`` in the same dtype.
      key: ``[tokens, kv_heads, head_dim]``.
      value: ``[tokens, kv_heads, value_dim]``; values are not rotated.
      page_table: ``[sequences, pages_per_sequence]`` integers.
      kv_lengths: ``[sequences]`` integers: tokens in the cache when this is done; the new ones are the last of them.
      cum_q_lens: ``[sequences + 1]`` integers: where the sequences' tokens begin and end; by default each has one.
      positions: ``[tokens]`` integers by which queries and keys are rotated, such as depths in a tree of drafts; by
        default a token's place in the cache.
      base: the frequency of pair i is ``base ** (-2i / dim)`` radians a position.
      scaling: as in ``rope``: a ``RopeScaling``, or ``rope_scaling`` of a model's ``config.json``.
      interleaved: pairs are neighbours; else element i and element ``i + dim / 2``.
      fraction: the first ``int(fraction · dim)`` elements are rotated, and the others stay.
      key_scale: as in ``update_pages``: where it has a scale for each token, those of the new tokens are computed of
        the rotated keys and stored; else it is what they are divided by.
      value_scale: likewise.
      page_offset: added to the pages of the table that are not negative: an integer or a scalar array, such as the
        first page of a layer in a pool of all layers' pages.
      platform: None or "auto" takes the best that can serve the call; a name (or several, in order of preference) is
        strict.
      cfg: a config to use instead of the selected one.

    Returns:
      The rotated query in its shape and dtype, new pages of keys and of values, and their scales if there are any. A
      token whose page does not exist is not written, and its query is rotated like the others; if several tokens have
      the same page and row, the last one stays. A token without a sequence has position 0 by default.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _ROPE_UPDATE_PAGES(*args, **kwargs)
