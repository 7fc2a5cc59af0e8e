"""The models of ``benchmarks.steps``: stacks of transformer layers as their authors configure them.

Parameters are float32 and cast where they are used, as Flax does with ``dtype=bfloat16``. A model is made of `Ops`, so
that one after another can be taken from this package.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.modules import (
    flash_attention,
    gated_grouped_matmul,
    glu,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    moe_mlp,
    rms_norm,
    rope,
    top_k_router,
)

type Arrays = dict[str, Any]

POLICIES = jax.checkpoint_policies
COMPUTE = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Ops:
    """The ops of a model.

    Attributes:
      attention: of ``[batch, length, heads, head_dim]``, with ``causal``, ``window`` (keys to the left) and ``cap``.
      rms: of rows, a scale, to which ``offset`` is added, and what is added to the rows first, or ``None``; returns the
        normalised rows and the sum.
      layer: the same with a shift in place of the offset.
      rope: the rotary embedding of ``[batch, length, heads, head_dim]``, whose positions count from 0.
      mlp: both matmuls of a gated MLP and its activation, of rows and matrices.
      experts: a mixture of gated MLPs with SiLU, of rows ``[tokens, d]``, the router's logits ``[tokens, experts]`` in
        float32, gate and up ``[experts, d, ff]``, down ``[experts, ff, d]``, and the experts of a token.
      loss: the mean cross-entropy of rows, a head ``[d, vocab]``, or ``[vocab, d]``, and labels, with ``cap``.
    """

    attention: Callable[..., jax.Array]
    rms: Callable[..., tuple[jax.Array, jax.Array]]
    layer: Callable[..., tuple[jax.Array, jax.Array]]
    rope: Callable[[jax.Array], jax.Array]
    mlp: Callable[..., jax.Array]
    experts: Callable[..., jax.Array]
    loss: Callable[..., jax.Array]


def plain_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool, window: int | None, cap: float | None
) -> jax.Array:
    """``jax.nn.dot_product_attention``; with a soft cap, which that lacks, the formula as in Gemma's code.

    By cuDNN, for whose gradients JAX wants even lengths.
    """
    even = query.shape[1] % 2 == 0 and key.shape[1] % 2 == 0
    on: Any = "cudnn" if even and jax.default_backend() == "gpu" else "xla"
    if cap is None:
        local = None if window is None else (window, 0)
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, local_window_size=local, implementation=on
        )
    groups = query.shape[2] // key.shape[2]
    queries = query.reshape(*query.shape[:2], key.shape[2], groups, query.shape[3])
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", queries, key, preferred_element_type=jnp.float32)
    scores = cap * jnp.tanh(scores * query.shape[3] ** -0.5 / cap)
    rows, columns = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    visible = (columns <= rows) & (True if window is None else rows - columns <= window)
    weights = jax.nn.softmax(jnp.where(visible, scores, -2.3e38), -1).astype(value.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value).reshape(query.shape)


def our_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool, window: int | None, cap: float | None
) -> jax.Array:
    local = None if window is None else (window, 0)
    return flash_attention(query, key, value, causal=causal, sliding_window=local, logits_soft_cap=cap)


def plain_rms(x: jax.Array, scale: jax.Array, offset: float, residual: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    x = x if residual is None else x + residual
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (normed * (scale + offset)).astype(x.dtype), x


def our_rms(x: jax.Array, scale: jax.Array, offset: float, residual: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    if residual is None:
        return rms_norm(x, scale, weight_offset=offset), x
    return rms_norm(x, scale, residual=residual, weight_offset=offset)


def plain_layer(
    x: jax.Array, scale: jax.Array, shift: jax.Array, residual: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    x = x if residual is None else x + residual
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    normed = (wide - mean) * lax.rsqrt(jnp.mean((wide - mean) ** 2, -1, keepdims=True) + 1e-6)
    return (normed * scale + shift).astype(x.dtype), x


def our_layer(
    x: jax.Array, scale: jax.Array, shift: jax.Array, residual: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    if residual is None:
        return layer_norm(x, scale, shift), x
    return layer_norm(x, scale, shift, residual=residual)


def plain_rope(x: jax.Array) -> jax.Array:
    """Rotary embedding of halves, in float32."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def our_rope(x: jax.Array) -> jax.Array:
    return rope(x, jnp.arange(x.shape[1]))


def plain_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    act = jax.nn.silu if activation == "silu" else jax.nn.gelu
    return act(x @ gate) * (x @ up)


def plain_loss(x: jax.Array, head: jax.Array, labels: jax.Array, *, vocab_first: bool, cap: float | None) -> jax.Array:
    logits = jnp.einsum("...d,vd->...v" if vocab_first else "...d,dv->...v", x, head).astype(jnp.float32)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    own = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - own)


def our_loss(x: jax.Array, head: jax.Array, labels: jax.Array, *, vocab_first: bool, cap: float | None) -> jax.Array:
    return linear_cross_entropy(x, head, labels, vocab_first=vocab_first, logits_soft_cap=cap)


def plain_experts(
    x: jax.Array, logits: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, k: int
) -> jax.Array:
    """By ``jax.lax.ragged_dot`` over sorted rows, with the derivative of each line by JAX."""
    weights, experts = lax.top_k(jax.nn.softmax(logits), k)
    weights = weights / weights.sum(-1, keepdims=True)
    order = jnp.argsort(experts.ravel())
    sizes = jnp.bincount(experts.ravel(), length=logits.shape[-1])
    rows = x[order // k]
    hidden = jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
    out = lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)].reshape(*experts.shape, -1)
    return (weights[..., None] * out).sum(1).astype(x.dtype)


@jax.custom_vjp
def reordered(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    return rows[order]


reordered.defvjp(
    lambda rows, order, inverse: (rows[order], inverse),
    lambda inverse, gradient: (gradient[inverse], None, None),
)


def experts_of_today(
    x: jax.Array, logits: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, k: int
) -> jax.Array:
    """Our matmuls and router, with tokens moved by hand: one op for all of it is measured against this."""
    return experts_by_hand(x, *top_k_router(logits, k), gate, up, down)


def experts_by_hand(
    x: jax.Array, weights: jax.Array, chosen: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Rows go to experts and back by gathers in both directions, and are summed in float32."""
    order = jnp.argsort(chosen.ravel(), stable=True)
    inverse = jnp.argsort(order)
    sizes = jnp.diff(jnp.searchsorted(chosen.ravel()[order], jnp.arange(gate.shape[0] + 1)))
    copies = jnp.repeat(x.astype(jnp.float32), chosen.shape[1], axis=0).astype(x.dtype)
    hidden = gated_grouped_matmul(reordered(copies, order, inverse), gate, up, sizes)
    out = reordered(grouped_matmul(hidden, down, sizes), inverse, order).reshape(*chosen.shape, -1)
    return (weights[..., None] * out).sum(1).astype(x.dtype)


def our_experts(x: jax.Array, logits: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, k: int) -> jax.Array:
    weights, chosen = top_k_router(logits, k)
    found: jax.Array = moe_mlp(x, weights, chosen, gate, up, down)
    return found


def our_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    return glu(x, gate, up, activation="silu" if activation == "silu" else "gelu_tanh")


PLAIN = Ops(plain_attention, plain_rms, plain_layer, plain_rope, plain_mlp, plain_experts, plain_loss)
OURS = Ops(our_attention, our_rms, our_layer, our_rope, our_mlp, our_experts, our_loss)
TODAY = dataclasses.replace(OURS, experts=experts_of_today)
SWAPS: dict[str, tuple[Ops, tuple[str, ...]]] = {
    "attention": (OURS, ("attention",)),
    "norms": (OURS, ("rms", "layer")),
    "rope": (OURS, ("rope",)),
    "mlp": (OURS, ("mlp",)),
    "experts_today": (TODAY, ("experts",)),
    "experts": (OURS, ("experts",)),
    "loss": (OURS, ("loss",)),
}
"""The ops of this package that a swap takes some from, and the fields that it takes."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers of one kind, which run as a scan.

    Attributes:
      gate: the activation of a gated MLP; ``None`` is GELU without a gate.
      windows: of the layers in turn; ``None`` is no window.
      crosses: layers attend to another stack's output, too.
      norms_after: each half of a layer ends with a norm, too (Gemma 2).
      policy: of ``jax.checkpoint``, which layers are under unless it is "off"; ``None`` keeps nothing.
      experts: of a layer, each a gated MLP with SiLU; ``None`` is one MLP for all tokens.
      top: the experts of a token.
    """

    layers: int
    d: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    gate: str | None = None
    norm: str = "layer"
    rope: bool = False
    causal: bool = True
    windows: tuple[int | None, ...] = (None,)
    cap: float | None = None
    crosses: bool = False
    norms_after: bool = False
    policy: Any = "off"
    experts: int | None = None
    top: int = 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, q, kv = self.d, self.heads * self.head_dim, self.kv_heads * self.head_dim
        attentions = ("self", "cross") if self.crosses else ("self",)
        found: dict[str, tuple[int, ...]] = {}
        for name in attentions:
            found |= {f"{name}_q": (d, q), f"{name}_k": (d, kv), f"{name}_v": (d, kv), f"{name}_o": (q, d)}
        each = () if self.experts is None else (self.experts,)
        found |= {"up": (*each, d, self.ff), "down": (*each, self.ff, d)}
        found |= {} if self.gate is None else {"gate": (*each, d, self.ff)}
        found |= {"router": (d, *each)} if each else {}
        halves = (*attentions, "mlp")
        norms = (*halves, *(f"{each}_after" for each in halves)) if self.norms_after else halves
        return found | {f"{each}_norm": (d,) for each in norms} | {"up_bias": (self.ff,), "down_bias": (d,)}

    def flops(self, rows: int, length: int, keys: int | None = None) -> float:
        """FLOPs of the forward pass's matmuls."""
        share = {1: 0.0, 2: 1.0, 3: self.top / (self.experts or 1)}
        matrices = sum(math.prod(shape) * share[len(shape)] for shape in self.shapes().values())
        total = 2.0 * rows * matrices * self.layers
        for i in range(self.layers):
            window = self.windows[i % len(self.windows)]
            seen = length / 2 if self.causal else length
            total += 4.0 * rows * min(seen, window or seen) * self.heads * self.head_dim
        return total + (4.0 * rows * (keys or 0) * self.heads * self.head_dim * self.layers if self.crosses else 0.0)

    def keeping_attention(self) -> "Stack":
        """The same, with a policy that keeps the results of attention, too."""
        if self.policy == "off":
            return self
        names = POLICIES.save_only_these_names("flash_attention_out", "flash_attention_residuals")
        return dataclasses.replace(self, policy=POLICIES.save_from_both_policies(self.policy, names))

    def run(self, ops: Ops, parameters: Arrays, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        turns = len(self.windows)
        stacked = {name: each.reshape(-1, turns, *each.shape[1:]) for name, each in parameters.items()}

        def layers(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
            for i, window in enumerate(self.windows):
                x = self._layer(ops, {name: each[i] for name, each in w.items()}, x, memory, window)
            return x, None

        body = layers if self.policy == "off" else jax.checkpoint(layers, policy=self.policy, prevent_cse=False)
        return lax.scan(body, x, stacked)[0]

    def _layer(self, ops: Ops, w: Arrays, x: jax.Array, memory: jax.Array | None, window: int | None) -> jax.Array:
        norm = functools.partial(self.norm_of, ops, w)

        def attended(name: str, queries: jax.Array, keys: jax.Array, causal: bool) -> jax.Array:
            q, k, v = (
                (rows @ w[f"{name}_{which}"].astype(COMPUTE)).reshape(*rows.shape[:2], -1, self.head_dim)
                for which, rows in (("q", queries), ("k", keys), ("v", keys))
            )
            if self.rope:
                q, k = ops.rope(q), ops.rope(k)
            out = ops.attention(q, k, v, causal=causal, window=window, cap=self.cap)
            return out.reshape(*queries.shape[:2], -1) @ w[f"{name}_o"].astype(COMPUTE)

        after = (lambda name, y: norm(f"{name}_after", y)[0]) if self.norms_after else lambda _, y: y
        y, _ = norm("self", x)
        found = after("self", attended("self", y, y, self.causal))
        if memory is not None:
            y, x = norm("cross", found, x)
            found = attended("cross", y, memory, causal=False)
        y, x = norm("mlp", found, x)
        up, down = w["up"].astype(COMPUTE), w["down"].astype(COMPUTE)
        if self.experts is not None:
            rows = y.reshape(-1, self.d)
            logits = jnp.matmul(rows, w["router"].astype(COMPUTE), preferred_element_type=jnp.float32)
            out = ops.experts(rows, logits, w["gate"].astype(COMPUTE), up, down, self.top)
            return x + after("mlp", out.reshape(x.shape))
        if self.gate is not None:
            return x + after("mlp", ops.mlp(y, w["gate"].astype(COMPUTE), up, self.gate) @ down)
        hidden = jax.nn.gelu(y @ up + w["up_bias"].astype(COMPUTE))
        return x + hidden @ down + w["down_bias"].astype(COMPUTE)

    def norm_of(
        self, ops: Ops, w: Arrays, name: str, x: jax.Array, residual: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The normalised rows, after a residual was added, and the sum."""
        scale = w[f"{name}_norm"]
        if self.norm == "layer":
            return ops.layer(x, scale, jnp.zeros_like(scale), residual)
        return ops.rms(x, scale, 1.0 if self.norms_after else 0.0, residual)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with the batch that it trains on.

    Attributes:
      source: whose configuration it is.
      vocab: classes of the loss.
      stack: of the rows that have labels.
      encoder: of an encoder-decoder, with its length.
      tied: the head is the embedding of the tokens.
      pooled: the loss is of one row of each sequence, whose inputs are patches in place of tokens.
      held_back: looked at only at the end of a piece of work.
    """

    source: str
    batch: int
    length: int
    vocab: int
    stack: Stack
    encoder: tuple[Stack, int] | None = None
    tied: bool = True
    pooled: bool = False
    cap: float | None = None
    held_back: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * (self.length + (self.encoder[1] if self.encoder else 0))

    def parameters(self, key: jax.Array) -> Arrays:
        """Normal matrices of unit gain, and norms of one (of zero with an offset)."""
        d, stacks = self.stack.d, {"stack": self.stack} | ({"encoder": self.encoder[0]} if self.encoder else {})

        def drawn(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jax.random.normal(key, shape) * shape[-2] ** -0.5

        def layers(key: jax.Array, stack: Stack) -> Arrays:
            found = {}
            for i, (name, shape) in enumerate(stack.shapes().items()):
                whole = (stack.layers, *shape)
                scale = 0.0 if "bias" in name or stack.norms_after else 1.0
                vector = len(shape) == 1
                found[name] = jnp.full(whole, scale) if vector else drawn(jax.random.fold_in(key, i), whole)
            return found

        found: Arrays = {
            name: layers(jax.random.fold_in(key, i), each) for i, (name, each) in enumerate(stacks.items())
        }
        found["final"] = jnp.full((d,), 0.0 if self.stack.norms_after else 1.0)
        if self.pooled:
            found["patches"] = drawn(key, (768, d))
        else:
            found["embedding"] = 0.02 * jax.random.normal(key, (self.vocab, d))
        if not self.stack.rope:
            found["positions"] = 0.02 * jax.random.normal(key, (self.length, d))
        if not self.tied or self.pooled:
            found["head"] = drawn(key, (d, self.vocab))
        if self.encoder is not None:
            found["frames"] = drawn(key, (128, d))
        return found

    def inputs(self, key: jax.Array) -> Arrays:
        labels = jax.random.randint(key, (self.batch,) if self.pooled else (self.batch, self.length), 0, self.vocab)
        found: Arrays = {"labels": labels}
        if self.pooled:
            found["patches"] = jax.random.normal(key, (self.batch, self.length, 768), COMPUTE)
        else:
            found["tokens"] = jnp.roll(labels, 1, 1)
        if self.encoder is not None:
            found["frames"] = jax.random.normal(key, (self.batch, self.encoder[1], 128), COMPUTE)
        return found

    def loss(self, ops: Ops, w: Arrays, inputs: Arrays) -> jax.Array:
        if self.pooled:
            x = inputs["patches"] @ w["patches"].astype(COMPUTE)
        else:
            x = w["embedding"].astype(COMPUTE)[inputs["tokens"]]
        if "positions" in w:
            x = x + w["positions"].astype(COMPUTE)
        memory = None
        if self.encoder is not None:
            memory = self.encoder[0].run(ops, w["encoder"], inputs["frames"] @ w["frames"].astype(COMPUTE))
        x = self.stack.run(ops, w["stack"], x, memory)
        x = x[:, 0] if self.pooled else x
        x, _ = self.stack.norm_of(ops, {"final_norm": w["final"]}, "final", x)
        of_embedding = "head" not in w
        head = w["embedding"] if of_embedding else w["head"]
        return ops.loss(x, head.astype(COMPUTE), inputs["labels"], vocab_first=of_embedding, cap=self.cap)

    def flops(self) -> float:
        """FLOPs of a step's matmuls, three times those forward, without what is computed again."""
        memory = self.encoder[1] if self.encoder else None
        forward = self.stack.flops(self.batch * self.length, self.length, memory)
        if self.encoder is not None:
            forward += self.encoder[0].flops(self.batch * self.encoder[1], self.encoder[1])
        rows = self.batch * (1 if self.pooled else self.length)
        return 3.0 * (forward + 2.0 * rows * self.stack.d * self.vocab)


MODELS = {
    "llama_1b": Model(
        "Llama 3.2 1B", 2, 8192, 128256,
        Stack(16, 2048, 32, 8, 64, 8192, "silu", "rms", rope=True, policy=POLICIES.dots_with_no_batch_dims_saveable),
    ),
    "gpt2": Model("GPT-2 124M (nanoGPT)", 16, 1024, 50257, Stack(12, 768, 12, 12, 64, 3072)),
    "gemma": Model(
        "Gemma 2 2B, 10 of its 26 layers", 1, 8192, 256000,
        Stack(10, 2304, 8, 4, 256, 9216, "gelu", "rms", rope=True, windows=(4095, None), cap=50.0, norms_after=True,
              policy=POLICIES.nothing_saveable),
        cap=30.0,
    ),
    "vit_l16": Model(
        "ViT-L/16 at 384 pixels", 32, 577, 1000, Stack(24, 1024, 16, 16, 64, 4096, causal=False), pooled=True,
        held_back=True,
    ),
    "whisper": Model(
        "Whisper small", 16, 448, 51865, Stack(12, 768, 12, 12, 64, 3072, crosses=True),
        encoder=(Stack(12, 768, 12, 12, 64, 3072, causal=False), 1500), held_back=True,
    ),
    "moe_small_experts": Model(
        "64 experts of 768 with 8 of each token, as Qwen3-MoE has them, 8 layers", 2, 8192, 32768,
        Stack(8, 2048, 16, 8, 128, 768, "silu", "rms", rope=True, experts=64, top=8,
              policy=POLICIES.dots_with_no_batch_dims_saveable),
    ),
    "moe_large_experts": Model(
        "Mixtral 8x7B, 2 of its 32 layers", 2, 4096, 32000,
        Stack(2, 4096, 32, 8, 128, 14336, "silu", "rms", rope=True, experts=8, top=2,
              policy=POLICIES.dots_with_no_batch_dims_saveable),
        tied=False,
    ),
}  # fmt: skip
"""Those that are looked at while work goes on, of which two are mixtures of experts, and two held back."""
