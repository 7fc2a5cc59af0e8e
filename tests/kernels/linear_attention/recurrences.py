"""The recurrences of linear attention and state-space models, token by token in float64: oracles of the functions.

Each is written from the paper of its model, in NumPy, and shares nothing with the functions but the arguments' names.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

type Arrays = dict[str, Any]


def outer(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x[:, :, None] * y[:, None, :]


def read(state: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``Sᵀ x`` of each head."""
    return np.einsum("hkv,hk->hv", state, x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0.0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(-x, 0.0))


def normed(x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


# A step takes the state and one token of each array, [heads, ...], and returns the unscaled output and the new state.


def gated_delta_rule(S, q, k, v, g, beta):
    erased = S - beta[:, None, None] * outer(k, read(S, k))
    S = np.exp(g)[:, None, None] * erased + beta[:, None, None] * outer(k, v)
    return read(S, q), S


def kimi_delta_attention(S, q, k, v, g, beta):
    S = np.exp(g)[:, :, None] * S
    S = S - beta[:, None, None] * outer(k, read(S, k)) + beta[:, None, None] * outer(k, v)
    return read(S, q), S


def delta_rule(S, q, k, v, beta):
    S = S - beta[:, None, None] * outer(k, read(S, k)) + beta[:, None, None] * outer(k, v)
    return read(S, q), S


def gated_linear_attention(S, q, k, v, g):
    S = np.exp(g)[:, :, None] * S + outer(k, v)
    return read(S, q), S


def retention(S, q, k, v, slopes):
    S = np.exp(-slopes)[:, None, None] * S + outer(k, v)
    return read(S, q), S


def rwkv6(S, r, k, v, w, u):
    out = read(S + u[:, :, None] * outer(k, v), r)
    return out, np.exp(w)[:, :, None] * S + outer(k, v)


def rwkv7(S, r, w, k, v, a, b):
    S = np.exp(w)[:, :, None] * S + outer(b, read(S, a)) + outer(k, v)
    return read(S, r), S


STEPS: Mapping[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "gated_delta_rule": gated_delta_rule,
    "kimi_delta_attention": kimi_delta_attention,
    "delta_rule": delta_rule,
    "gated_linear_attention": gated_linear_attention,
    "retention": retention,
    "lightning_attention": retention,
    "rwkv6": rwkv6,
    "rwkv7": rwkv7,
}

NAMES = (*STEPS, "ssd")

CONSTANT = frozenset({"slopes", "u", "A", "D", "dt_bias", "A_log"})
"""Arguments that are the same for every token."""


def of_tokens(name: str, value: Any) -> bool:
    """True for arrays of ``[batch, length, ...]``; others are parameters, flags and limits."""
    return isinstance(value, np.ndarray | jax.Array) and name not in CONSTANT


def as_float64(value: Any) -> Any:
    return np.asarray(value, np.float64) if isinstance(value, np.ndarray | jax.Array) else value


SCALED = frozenset({"gated_delta_rule", "kimi_delta_attention", "delta_rule", "gated_linear_attention", "retention",
                    "rwkv6"})  # fmt: skip
"""The functions whose scale is ``key_dim ** -0.5`` by default, and else 1."""


def of_sequence(name: str, arrays: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One sequence, ``[length, heads, ...]``, from a state on."""
    if name == "ssd":
        return _ssd(state, **arrays)
    step = STEPS[name]
    heads = state.shape[0]
    length, key_dim = arrays["k"].shape[0], arrays["k"].shape[-1]
    scale = key_dim**-0.5 if name in SCALED else 1.0
    outs = np.zeros((length, heads, state.shape[-1]))
    for t in range(length):
        token = {key: value if key in CONSTANT else value[t] for key, value in arrays.items()}
        for key in {"q", "k", "r"} & token.keys():
            token[key] = np.repeat(token[key], heads // token[key].shape[0], axis=0)
        out, state = step(state, **token)
        outs[t] = scale * out
    return outs, state


def _ssd(h, x, dt, A, B, C, D=None, z=None, dt_bias=0.0, dt_softplus=False, dt_limit=(0.0, np.inf)):
    """Of Mamba-2: ``h`` is ``[heads, head_dim, state_dim]``."""
    delta = dt + dt_bias
    delta = np.clip(softplus(delta) if dt_softplus else delta, *dt_limit)
    outs = np.zeros(x.shape)
    group = x.shape[1] // B.shape[1]
    for t in range(x.shape[0]):
        b, c = (np.repeat(each[t], group, axis=0) for each in (B, C))
        h = np.exp(delta[t] * A)[:, None, None] * h + outer(delta[t][:, None] * x[t], b)
        outs[t] = np.einsum("hpn,hn->hp", h, c)
        if D is not None:
            outs[t] += np.reshape(D, (x.shape[1], -1)) * x[t]
        if z is not None:
            outs[t] *= z[t] * sigmoid(z[t])
    return outs, h


def state_shape(name: str, arrays: Arrays) -> tuple[int, int, int]:
    if name == "ssd":
        return (*arrays["x"].shape[2:], arrays["B"].shape[-1])
    return (arrays["v"].shape[2], arrays["k"].shape[-1], arrays["v"].shape[-1])


def spans(arrays: Arrays, packing: Arrays) -> Iterator[tuple[int, int, slice]]:
    """The row, the number and the tokens of each sequence, which is numbered as its state is."""
    batch, length = next(value.shape[:2] for key, value in arrays.items() if key in ("x", "v"))
    if "cum_seqlens" in packing:
        bounds = [int(each) for each in packing["cum_seqlens"]]
        yield from ((0, n, slice(*bounds[n : n + 2])) for n in range(len(bounds) - 1))
    elif "seq_lengths" in packing:
        yield from ((row, row, slice(0, int(n))) for row, n in enumerate(packing["seq_lengths"]))
    elif "segment_ids" in packing:
        for row, ids in enumerate(np.asarray(packing["segment_ids"])):
            edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), length]
            parts = (slice(*edges[n : n + 2]) for n in range(len(edges) - 1))
            yield from ((row, -1, part) for part in parts if ids[part.start] >= 0)
    else:
        yield from ((row, row, slice(0, length)) for row in range(batch))


def oracle(
    name: str, arrays: Arrays, packing: Arrays | None = None, initial_state: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The output and the final states of a call; zeros for tokens without a sequence."""
    packing = packing or {}
    arrays = {key: as_float64(value) for key, value in arrays.items()}
    shape = state_shape(name, arrays)
    values = arrays["x" if name == "ssd" else "v"]
    sequences = len(packing["cum_seqlens"]) - 1 if "cum_seqlens" in packing else values.shape[0]
    states = np.zeros((sequences, *shape)) if initial_state is None else np.array(initial_state, np.float64)
    outs = np.zeros(values.shape)
    for row, number, tokens in spans(arrays, packing):
        own = {key: value[row, tokens] if of_tokens(key, value) else value for key, value in arrays.items()}
        state = np.zeros(shape) if number < 0 else states[number]
        outs[row, tokens], state = of_sequence(name, own, state)
        if number >= 0:
            states[number] = state
    return outs, states


def draw(
    name: str,
    seed: int = 0,
    *,
    batch: int = 2,
    length: int = 37,
    heads: int = 1,
    value_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 6,
) -> Arrays:
    """Arguments of a function by name, in float64: keys of delta rules have a norm of 1, decays are of every size."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape)

    def log_decay(*shape: int) -> np.ndarray:
        return -np.exp(random.uniform(-7, 1.5, shape))

    tokens = (batch, length)
    if name == "ssd":
        return {
            "x": normal(*tokens, value_heads, value_dim), "dt": normal(*tokens, value_heads) - 1.0,
            "A": log_decay(value_heads), "B": normal(*tokens, heads, key_dim), "C": normal(*tokens, heads, key_dim),
            "D": normal(value_heads), "z": normal(*tokens, value_heads, value_dim), "dt_bias": normal(value_heads),
            "dt_softplus": True,
        }  # fmt: skip
    query = normal(*tokens, heads, key_dim)
    key = normal(*tokens, heads, key_dim)
    value = normal(*tokens, value_heads, value_dim)
    of_channels, of_heads = (*tokens, value_heads, key_dim), (*tokens, value_heads)
    beta = random.uniform(0, 1, of_heads)
    if name == "gated_delta_rule":
        return {"q": query, "k": normed(key), "v": value, "g": log_decay(*of_heads), "beta": beta}
    if name == "kimi_delta_attention":
        return {"q": query, "k": normed(key), "v": value, "g": log_decay(*of_channels), "beta": beta}
    if name == "delta_rule":
        return {"q": query, "k": normed(key), "v": value, "beta": 2 * beta}
    if name == "gated_linear_attention":
        return {"q": query, "k": key, "v": value, "g": log_decay(*of_channels)}
    if name in ("retention", "lightning_attention"):
        return {"q": query, "k": key, "v": value, "slopes": -log_decay(value_heads)}
    if name == "rwkv6":
        bonus = normal(value_heads, key_dim)
        return {"r": query, "k": key, "v": value, "w": log_decay(*of_channels), "u": bonus}
    erased = normed(normal(*of_channels))
    decay = -0.6065 * random.uniform(0, 1, of_channels)
    rate = random.uniform(0, 1, of_channels)
    return {"r": query, "w": decay, "k": key, "v": value, "a": -erased, "b": erased * rate}


def relative_rms(found: Any, wanted: np.ndarray) -> float:
    error = np.asarray(found, np.float64) - wanted
    assert np.isfinite(error).all(), "not finite"
    return float(np.sqrt((error**2).mean()) / max(np.sqrt((wanted**2).mean()), 1e-300))
