"""Models of gemma and Tunix, small and random, and what is computed with them."""

import collections
import dataclasses
import functools
import importlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH, LENGTH, CACHE, STEPS, VOCABULARY = 2, 24, 32, 4, 160
PADDED = 5
"""Tokens at the end of the second row that are padding, id 0."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with parameters.

    Attributes:
      params: in the dtype of the run, with values that bfloat16 can hold.
      logits: of parameters, for all tokens.
      loss: of parameters, of the next tokens.
      step: of parameters, new tokens, the place of the first and a cache: the logits and the next cache.
      cache: an empty one.
    """

    params: Any
    logits: Callable[[Any], jax.Array]
    loss: Callable[[Any], jax.Array]
    step: Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, Any]]
    cache: Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a library.

    Attributes:
      ops: what its edits replace, the loss included.
      build: the model in a dtype, and with or without our loss if the library has none of its own.
    """

    ops: tuple[str, ...]
    build: Callable[[Any, bool], Model]


def tokens() -> jax.Array:
    found = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 3, VOCABULARY)
    return found.at[1, LENGTH - PADDED :].set(0)


def causal(first: Any, length: int, keys: int) -> jax.Array:
    """``[batch, length, keys]``: a token sees those before it and itself."""
    mask = jnp.arange(keys) <= first + jnp.arange(length)[:, None]
    return jnp.broadcast_to(mask, (BATCH, length, keys))


def randomised(shapes: Any, dtype: Any) -> Any:
    """Random matrices, and vectors near 1; the same for a tree of the same names."""

    def leaf(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        noise = 0.1 * np.random.default_rng(seed).normal(size=x.shape)
        return jnp.asarray((noise if len(x.shape) > 1 else 1 + noise).astype(jnp.bfloat16), dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def decoded(model: Model) -> jax.Array:
    """The logits of a prompt and of single tokens behind it."""
    prompt, given, step = LENGTH - PADDED - STEPS, tokens(), jax.jit(model.step)
    found, cache = step(model.params, given[:, :prompt], jnp.int32(0), model.cache)
    rows = [found]
    for place in range(prompt, prompt + STEPS):
        found, cache = step(model.params, given[:, place : place + 1], jnp.int32(place), cache)
        rows.append(found)
    return jnp.concatenate(rows, axis=1)


def _gemma(name: str, module: str, **sizes: Any) -> Callable[[Any, bool], Model]:
    """A model class of gemma with smaller sizes."""

    def build(dtype: Any, ours: bool) -> Model:
        kind = getattr(importlib.import_module(module), name)
        config = dataclasses.replace(kind.config, vision_encoder=None, num_embed=VOCABULARY, **sizes)
        local = config.attention_types[0]
        pair = (local, next(each for each in config.attention_types if each != local))
        shared = getattr(config, "kv_cache_sharing_config", None)
        if shared is not None:  # the second pair reads the keys of the first
            shared = dataclasses.replace(shared, frac_shared_layers=0.5)
            config = dataclasses.replace(config, attention_types=pair * 2, kv_cache_sharing_config=shared)
        else:
            config = dataclasses.replace(config, attention_types=pair)
        model = kind(config=config)
        given = tokens()
        params = randomised(jax.eval_shape(model.init, jax.random.key(0), given)["params"], dtype)

        def run(params: Any, *args: Any, **options: Any) -> Any:
            return model.apply({"params": params}, *args, **options)

        def loss(params: Any) -> jax.Array:
            labels = jnp.where(given == 0, -100, given)[:, 1:]
            out = run(params, given, return_hidden_states=True)
            if not ours:
                return masked_cross_entropy(out.logits[:, :-1], labels)
            from tilewright.modules import linear_cross_entropy

            return linear_cross_entropy(
                out.hidden_states[:, :-1],
                params["embedder"]["input_embedding"],
                labels,
                vocab_first=True,
                logits_soft_cap=config.final_logit_softcap,
            )

        def step(params: Any, new: jax.Array, place: Any, cache: Any) -> tuple[jax.Array, Any]:
            positions = jnp.broadcast_to(place + jnp.arange(new.shape[1]), new.shape)
            mask = causal(place, new.shape[1], CACHE)
            out = run(params, new, positions=positions, cache=cache, attention_mask=mask)
            return out.logits, out.cache

        cache = config.init_cache(BATCH, dtype, cache_length=CACHE)
        return Model(params, lambda params: run(params, given).logits, loss, step, cache)

    return build


def masked_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over the tokens whose label is not −100, as programs have it."""
    import optax

    each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), jnp.maximum(labels, 0))
    return jnp.sum(each * (labels >= 0)) / jnp.sum(labels >= 0)


def _qwen3(**sizes: Any) -> Callable[[Any, bool], Model]:
    def build(dtype: Any, ours: bool) -> Model:
        del ours  # the loss is Tunix's, edited
        from flax import nnx

        library = importlib.import_module("tunix.models.qwen3.model")
        trainer = importlib.import_module("tunix.sft.peft_trainer")
        given, positions = tokens(), jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
        mask = causal(0, LENGTH, LENGTH) & (given != 0)[:, None]
        config = library.ModelConfig(
            num_layers=2, vocab_size=VOCABULARY, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=32,
            rope_theta=1_000_000, norm_eps=1e-6, dtype=dtype, param_dtype=dtype, **sizes,
        )  # fmt: skip
        graph, shapes = nnx.split(nnx.eval_shape(lambda: library.Qwen3(config, rngs=nnx.Rngs(0))))
        params = randomised(shapes, dtype)

        def loss(params: Any) -> jax.Array:
            return trainer._default_loss_fn(nnx.merge(graph, params), given, given != 0, positions, mask)

        def step(params: Any, new: jax.Array, place: Any, cache: Any) -> tuple[jax.Array, Any]:
            at = jnp.broadcast_to(place + jnp.arange(new.shape[1]), new.shape)
            return nnx.merge(graph, params)(new, at, cache, causal(place, new.shape[1], CACHE))

        def logits(params: Any) -> jax.Array:
            return nnx.merge(graph, params)(given, positions, None, mask)[0]

        return Model(params, logits, loss, step, nnx.merge(graph, params).init_cache(BATCH, CACHE, dtype))

    return build


_SIZES: Mapping[str, Any] = {"embed_dim": 64, "hidden_dim": 96, "head_dim": 32, "sliding_window_size": 7}
_DENSE = ("flash_attention", "rms_norm", "glu", "linear_cross_entropy")
_MOE = ("flash_attention", "rms_norm", "gated_grouped_matmul", "grouped_matmul", "linear_cross_entropy")
_GEMMA4: Mapping[str, Any] = {**_SIZES, "global_key_size": 64}
_gemma23 = functools.partial(_gemma, module="gemma.gm.nn._gemma")
_gemma4 = functools.partial(_gemma, module="gemma.gm.nn.gemma4._gemma4")

PROGRAMS: Mapping[str, Program] = {
    "gemma 2 2B": Program(_DENSE, _gemma23("Gemma2_2B", **_SIZES, num_heads=4, num_kv_heads=2)),
    "gemma 2 9B": Program(_DENSE, _gemma23("Gemma2_9B", **_SIZES, num_heads=4, num_kv_heads=4)),
    "gemma 3 1B": Program(_DENSE, _gemma23("Gemma3_1B", **_SIZES, num_heads=4, num_kv_heads=1)),
    "gemma 3n E2B": Program(
        tuple(op for op in _DENSE if op != "glu"),  # of its MLPs the first are sparse, which glu is not
        _gemma(
            "Gemma3n_E2B", "gemma.gm.nn.gemma3n._gemma3n", **_SIZES, num_heads=4, num_kv_heads=2, laurel_rank=8,
            per_layer_input_dim=16, activation_sparsity_pattern=(0.95, 0.95, 0.0, 0.0),
        ),
    ),
    "gemma 4 E2B": Program(
        _DENSE, _gemma4("Gemma4_E2B", **_GEMMA4, num_heads=4, num_kv_heads=1, per_layer_input_dim=16)
    ),
    "gemma 4 31B": Program(
        _DENSE, _gemma4("Gemma4_31B", **_GEMMA4, num_heads=8, num_kv_heads=4, num_global_kv_heads=2)
    ),
    "gemma 4 26B A4B": Program(
        (*_MOE, "glu"),
        _gemma4(
            "Gemma4_26B_A4B", **_GEMMA4, num_heads=4, num_kv_heads=2, num_global_kv_heads=1, num_experts=8,
            top_k_experts=3, expert_dim=48, moe_dense_hidden_dim=96,
        ),
    ),
    "tunix qwen3": Program(_DENSE, _qwen3(hidden_dim=96)),
    "tunix qwen3, tied": Program(_DENSE, _qwen3(hidden_dim=96, use_tied_embedding=True)),
    "tunix qwen3 MoE": Program(_MOE, _qwen3(hidden_dim=48, num_experts=8, num_experts_per_tok=3)),
}  # fmt: skip


def results(program: Program, dtype: Any, *, ours: bool) -> dict[str, np.ndarray]:
    """Logits, the loss, its gradients by the names of the parameters, and the logits of decoding, as float32."""
    model = program.build(dtype, ours)
    (loss, gradients), logits = jax.jit(lambda p: (jax.value_and_grad(model.loss)(p), model.logits(p)))(model.params)
    found = {"logits": logits, "loss": loss, "decoding": decoded(model)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        found[f"gradient {jax.tree_util.keystr(path)}"] = leaf
    return {name: np.asarray(array, np.float32) for name, array in found.items()}


def calls(program: Program) -> dict[str, int]:
    """How often a training step and a step of decoding call each op, by ``explain``: ``op direction``."""
    import tilewright

    model = program.build(jnp.float32, True)
    traced = (
        tilewright.explain(jax.grad(model.loss), model.params),
        tilewright.explain(model.step, model.params, tokens()[:, :1], jnp.int32(0), model.cache),
    )
    counts: collections.Counter[str] = collections.Counter()
    for calls, where in zip(traced, ("", " decoding"), strict=True):
        for call in calls:
            counts[f"{call.op} {call.direction}{where}"] += call.times
    return dict(counts)
