"""The programs of the engine: a step of all slots, and one in which a draft model looks ahead."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from engine.models import Model
from tilewright.modules import page_attention, ragged_page_attention, rope_update_pages, sample, update_pages


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine has room for.

    Attributes:
      slots: requests that run at the same time.
      page_size: tokens in a page.
      num_pages: of each layer, for all requests.
      longest: tokens of prompt and answer of one request.
      chunk: tokens of a step in which prompts are read; other steps have one for each slot.
      max_waiting: requests that may wait while all slots are taken.
      proposals: tokens that the draft, if there is one, looks ahead.
    """

    slots: int = 8
    page_size: int = 16
    num_pages: int = 320
    longest: int = 1024
    chunk: int = 128
    max_waiting: int = 1000
    proposals: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")
        if self.chunk <= self.slots:
            raise ValueError(f"a step must have a token for each slot and one more: {self.chunk=}, {self.slots=}")
        if self.num_pages < self.columns:
            raise ValueError(f"one request may need {self.columns} pages, there are {self.num_pages=}")

    @property
    def places(self) -> int:
        """Of a slot's text: proposals may go beyond the last token that a request can have."""
        return self.longest + self.proposals + 1

    @property
    def columns(self) -> int:
        return math.ceil(self.places / self.page_size)


class Pages(NamedTuple):
    """The pages of a model's layers, one layer after the other: ``[layers · num_pages, page_size, kv_heads, d]``."""

    keys: jax.Array
    values: jax.Array


class State(NamedTuple):
    """What stays on the device between steps.

    Attributes:
      text: ``[slots, places]``: the tokens of each slot, those that the host has not read yet included.
      pages: of the model and, if there is one, of the draft.
    """

    text: jax.Array
    pages: tuple[Pages, ...]


class Slots(NamedTuple):
    """What the host says of every slot in a step; all but the tables are ``[slots]``.

    Attributes:
      cached: tokens in the cache before the step.
      counts: tokens of the step, 0 for slots that have no part in it.
      draws: whether a token is drawn after the slot's last one of the step.
      tables: ``[slots, columns]``: pages, −1 for none.
    """

    cached: Any
    counts: Any
    draws: Any
    tables: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any


class Drawn(NamedTuple):
    """Tokens and their log-probabilities, ``[slots, n]``, and how many of each row count."""

    tokens: jax.Array
    log_probs: jax.Array
    counts: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepCache:
    """The pages of one model in a step.

    Attributes:
      bounds: ``[slots + 1]``: where the tokens of the slots begin and end; None if each has one at most, in its place.
    """

    pages: Pages
    slots: Slots
    bounds: jax.Array | None
    num_pages: int = dataclasses.field(metadata={"static": True})

    def attend(
        self,
        layer: Any,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        rope_scaling: Mapping[str, Any] | None = None,
        sliding_window: int | None = None,
    ) -> tuple[jax.Array, "StepCache"]:
        lengths = jnp.where(self.slots.counts > 0, self.slots.cached + self.slots.counts, 0)
        tables, bounds, offset = self.slots.tables, self.bounds, layer * self.num_pages
        keys, values = self.pages
        if rope_scaling is None:
            keys, values = update_pages(keys, values, key, value, tables, lengths, bounds, page_offset=offset)
        else:
            query, keys, values = rope_update_pages(
                query, keys, values, key, value, tables, lengths, bounds, scaling=rope_scaling, page_offset=offset
            )
        options: Any = {"page_offset": offset, "sliding_window": sliding_window}
        if bounds is None:
            out = page_attention(query, keys, values, tables, lengths, **options)
        else:
            out = ragged_page_attention(query, keys, values, tables, lengths, bounds, **options)
        return out, dataclasses.replace(self, pages=Pages(keys, values))


def empty_state(models: Sequence[Model], config: EngineConfig) -> State:
    """Empty slots, and pages of zeros for each model."""

    def pages(model: Model) -> Pages:
        shape = (model.layers * config.num_pages, config.page_size, model.kv_heads, model.head_dim)
        return Pages(jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype))

    return State(jnp.zeros((config.slots, config.places), jnp.int32), tuple(map(pages, models)))


@functools.partial(jax.jit, donate_argnames="state")
def place(state: State, slot: Any, row: Any) -> State:
    """Puts a request's text, padded to the length of a row, into a slot."""
    return state._replace(text=state.text.at[slot].set(row))


def _rows(
    model: Model, parameters: Any, text: jax.Array, pages: Pages, slots: Slots, tokens: int, config: EngineConfig
) -> tuple[jax.Array, Pages]:
    """The rows of a step's tokens, packed, or one for each slot if there are as many; and the pages with them."""
    if tokens == config.slots:
        bounds, slot, position = None, jnp.arange(tokens), slots.cached
    else:
        bounds = jnp.pad(jnp.cumsum(slots.counts), (1, 0))
        slot = jnp.minimum(jnp.searchsorted(bounds[1:], jnp.arange(tokens), side="right"), config.slots - 1)
        position = jnp.clip(slots.cached[slot] + jnp.arange(tokens) - bounds[slot], 0, config.places - 1)

    def before(back: int) -> jax.Array:
        return jnp.where(position >= back, text[slot, jnp.maximum(position - back, 0)], 0)

    earlier = [before(back) for back in range(1, model.history + 1)]
    cache = StepCache(pages, slots, bounds, config.num_pages)
    rows, cache = model.features(parameters, text[slot, position], earlier, position, cache)
    return rows, cache.pages


def _draw(logits: jax.Array, slots: Slots, positions: jax.Array, limited: bool) -> tuple[jax.Array, jax.Array]:
    """A token for each row: the noise is of the request's seed and the token's position alone.

    Args:
      positions: ``[slots]`` or ``[slots, n]``, as the rows.
      limited: some request has top_k, top_p or min_p.
    """

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x.reshape(-1, *[1] * (positions.ndim - 1)), positions.shape)

    def key(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.key(seed), position))

    keys = jax.vmap(key)(by_row(slots.seed).ravel(), positions.ravel()).reshape(*positions.shape, -1)
    names = ("temperature", "top_k", "top_p", "min_p") if limited else ("temperature",)
    options: dict[str, Any] = {name: by_row(getattr(slots, name)) for name in names}
    return sample(logits, keys, **options, return_log_probs=True)


STATIC = ("models", "config", "tokens", "limited")


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames="state")
def step(
    parameters: tuple[Any, ...],
    state: State,
    slots: Slots,
    *,
    models: tuple[Model, ...],
    config: EngineConfig,
    tokens: int,
    limited: bool,
) -> tuple[State, Drawn]:
    """Reads the step's tokens of every slot, by all models, and draws the next token where one is wanted.

    Args:
      tokens: room in the step: ``config.slots`` if no slot has more than one, else ``config.chunk``.
    """
    (rows, first), *others = (
        _rows(model, own, state.text, pages, slots, tokens, config)
        for model, own, pages in zip(models, parameters, state.pages, strict=True)
    )
    last = rows if tokens == config.slots else rows[jnp.maximum(jnp.cumsum(slots.counts) - 1, 0)]
    length = slots.cached + slots.counts
    drawn, log_probs = _draw(models[0].logits(parameters[0], last), slots, length, limited)
    text = state.text.at[jnp.arange(config.slots), _written(length, slots, config)].set(drawn, mode="drop")
    pages = (first, *(each for _, each in others))
    return State(text, pages), Drawn(drawn[:, None], log_probs[:, None], slots.draws.astype(jnp.int32))


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames="state")
def speculate(
    parameters: tuple[Any, Any],
    state: State,
    slots: Slots,
    *,
    models: tuple[Model, Model],
    config: EngineConfig,
    tokens: int,
    limited: bool,
) -> tuple[State, Drawn]:
    """Several tokens for every slot that draws: the draft proposes, and the model draws at all places at once.

    The tokens are those of ``step``, token by token: both models draw with the same noise, and a proposal counts as
    long as the model draws the same. Where they differ, the model's token stands and those after it are forgotten.

    Args:
      slots: with counts of 1.
      tokens: ``slots`` times (proposals + 1).
    """
    (text, (own, drafts)), n = state, config.proposals
    rows = jnp.arange(config.slots)
    for i in range(n + 1):  # the last one only reads its token
        at = slots._replace(cached=slots.cached + i)
        hidden, drafts = _rows(models[1], parameters[1], text, drafts, at, config.slots, config)
        if i < n:
            proposal, _ = _draw(models[1].logits(parameters[1], hidden), slots, at.cached + 1, limited)
            text = text.at[rows, _written(at.cached + 1, slots, config)].set(proposal, mode="drop")
    wide = slots._replace(counts=slots.counts * (n + 1))
    hidden, own = _rows(models[0], parameters[0], text, own, wide, tokens, config)
    bounds = jnp.cumsum(wide.counts) - wide.counts
    index = jnp.minimum(bounds[:, None] + jnp.arange(n + 1), tokens - 1)
    places = slots.cached[:, None] + 1 + jnp.arange(n + 1)
    logits = models[0].logits(parameters[0], hidden[index.ravel()]).reshape(*index.shape, -1)
    drawn, log_probs = _draw(logits, slots, places, limited)
    proposed = text[rows[:, None], places[:, :-1]]
    count = 1 + jnp.cumprod(proposed == drawn[:, :-1], axis=1).sum(1)
    text = text.at[rows[:, None], _written(places, slots, config)].set(drawn, mode="drop")
    return State(text, (own, drafts)), Drawn(drawn, log_probs, jnp.where(slots.draws, count, 0))


def _written(places: jax.Array, slots: Slots, config: EngineConfig) -> jax.Array:
    """Places in the text of slots that draw; out of bounds for the others."""
    draws = slots.draws.reshape(-1, *[1] * (places.ndim - 1))
    return jnp.where(draws, places, config.places)
