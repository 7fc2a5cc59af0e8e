"""A step of linear attention in Triton: a program has a block of values of one head and row, in registers."""

import triton
import triton.language as tl

LEAST_FACTOR = tl.constexpr(2.0**-32)
"""The decays of a state by which it is multiplied at once: what is divided by them stays far from infinity."""


@triton.jit
def _by_key(x, values_first: tl.constexpr):
    """A vector over the key dimension, to multiply a tile of the state by."""
    if values_first:
        x = x[None, :]
    else:
        x = x[:, None]
    return x


@triton.jit
def _by_value(x, values_first: tl.constexpr):
    """A vector over the value dimension, to multiply a tile of the state by."""
    if values_first:
        x = x[:, None]
    else:
        x = x[None, :]
    return x


@triton.jit
def _read(state, by, values_first: tl.constexpr):
    """``stateᵀ by`` of a tile: a sum over the key dimension."""
    return tl.sum(state * _by_key(by, values_first), 1 if values_first else 0)


@triton.jit
def _token(
    query, key, value, log_decay, beta, removal_read, removal_write, at, head, key_head, k, v, in_k, in_v,
    heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    gate: tl.constexpr, has_beta: tl.constexpr, has_removal: tl.constexpr,
):  # fmt: skip
    """Loads what one token of a head has; what the call does not have is 0."""
    of_keys, of_head = (at * heads + key_head) * key_dim, at * value_heads + head
    q_t = tl.load(query + of_keys + k, mask=in_k, other=0.0).to(tl.float32)
    k_t = tl.load(key + of_keys + k, mask=in_k, other=0.0).to(tl.float32)
    v_t = tl.load(value + of_head * value_dim + v, mask=in_v, other=0.0).to(tl.float32)
    g_t, beta_t, a_t, b_t = 0.0, 0.0, 0.0, 0.0
    if gate == "token":
        g_t = tl.load(log_decay + of_head).to(tl.float32)
    elif gate == "channel":
        g_t = tl.load(log_decay + of_head * key_dim + k, mask=in_k, other=0.0).to(tl.float32)
    if has_beta:
        beta_t = tl.load(beta + of_head).to(tl.float32)
    if has_removal:
        a_t = tl.load(removal_read + of_head * key_dim + k, mask=in_k, other=0.0).to(tl.float32)
        b_t = tl.load(removal_write + of_head * key_dim + k, mask=in_k, other=0.0).to(tl.float32)
    return q_t, k_t, v_t, g_t, beta_t, a_t, b_t


@triton.jit
def step(
    query, key, value, log_decay, beta, removal_read, removal_write, bonus, state_indices, write_indices, pool, slots,
    rows_each, out,
    tokens: tl.constexpr, heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr,
    value_dim: tl.constexpr, scale: tl.constexpr, eps: tl.constexpr, gate: tl.constexpr, has_beta: tl.constexpr,
    has_removal: tl.constexpr, has_bonus: tl.constexpr, has_state_indices: tl.constexpr,
    has_write_indices: tl.constexpr, l2norm: tl.constexpr, values_first: tl.constexpr, repeated: tl.constexpr,
    block_k: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Reads a tile of a state once, has the tokens of its row read and update it, and writes it once.

    Args:
      query, key: [rows, tokens, heads, key_dim].
      value, out: [rows, tokens, value_heads, value_dim].
      log_decay: [value_heads], or [rows, tokens, value_heads] with ``key_dim`` behind it where ``gate`` "channel".
      beta: [rows, tokens, value_heads].
      removal_read, removal_write: [rows, tokens, value_heads, key_dim].
      bonus: [value_heads, key_dim].
      state_indices, write_indices: [rows].
      pool: [slots, value_heads, key_dim, value_dim], updated in place; with ``values_first`` the last two exchanged.
      rows_each: with ``repeated`` there are a ``log_decay`` of heads and a bonus for so many rows each.
    """
    blocks: tl.constexpr = (value_dim + block_v - 1) // block_v
    program = tl.program_id(0)
    head = (program // blocks) % value_heads
    row = (program // (blocks * value_heads)).to(tl.int64)
    key_head = head // (value_heads // heads)
    k, v = tl.arange(0, block_k), (program % blocks) * block_v + tl.arange(0, block_v)
    in_k, in_v = k < key_dim, v < value_dim
    read, write = row, row
    if has_state_indices:
        read = tl.load(state_indices + row).to(tl.int64)
        write = read
    if has_write_indices:
        write = tl.load(write_indices + row).to(tl.int64)
    if (read < 0) | (read >= slots):
        for t in tl.static_range(tokens):
            at = (row * tokens + t) * value_heads + head
            tl.store(out + at * value_dim + v, tl.zeros([block_v], out.dtype.element_ty), mask=in_v)
    else:
        if values_first:
            offsets = v[:, None] * key_dim + k[None, :]
            inside = in_v[:, None] & in_k[None, :]
        else:
            # Of a thread, four at most: with eight bfloat16 there would be twice the sums over threads.
            offsets = k[:, None] * value_dim + tl.max_contiguous(v, 4)[None, :]
            inside = in_k[:, None] & in_v[None, :]
        state_size: tl.constexpr = key_dim * value_dim
        state = tl.load(pool + (read * value_heads + head) * state_size + offsets, mask=inside, other=0.0)
        state = state.to(tl.float32)
        parameters = head
        if repeated:
            parameters += (row // rows_each) * value_heads
        if has_bonus:
            u = tl.load(bonus + parameters * key_dim + k, mask=in_k, other=0.0).to(tl.float32)
        if gate == "head":
            decay = tl.exp(tl.load(log_decay + parameters).to(tl.float32))
        following = _token(
            query, key, value, log_decay, beta, removal_read, removal_write, row * tokens, head, key_head, k, v, in_k,
            in_v, heads, value_heads, key_dim, value_dim, gate, has_beta, has_removal,
        )  # fmt: skip
        # The state is factor · state: a multiplication of each element by each token's decay would be a fifth of all.
        lazy: tl.constexpr = tokens > 1 and (gate == "token" or gate == "head")
        factor = tl.full([], 1.0, tl.float32)
        for t in tl.range(tokens, num_stages=1):
            q_t, k_t, v_t, g_t, beta_t, a_t, b_t = following
            if tokens > 1:
                # Before the sums of this token, whose barriers a load cannot pass; behind the last it is read again.
                following = _token(
                    query, key, value, log_decay, beta, removal_read, removal_write,
                    row * tokens + tl.minimum(t + 1, tokens - 1), head, key_head, k, v, in_k, in_v, heads, value_heads,
                    key_dim, value_dim, gate, has_beta, has_removal,
                )  # fmt: skip
            if l2norm:
                q_t = q_t * tl.rsqrt(tl.sum(q_t * q_t, 0) + eps)
                k_t = k_t * tl.rsqrt(tl.sum(k_t * k_t, 0) + eps)
            if has_bonus:
                result = factor * _read(state, q_t, values_first) + tl.sum(q_t * u * k_t, 0) * v_t
            if has_removal:
                removed = factor * _read(state, a_t, values_first)
            if gate == "token":
                decay = tl.exp(g_t)
            if gate == "channel":
                state = state * _by_key(tl.exp(g_t), values_first)
            elif lazy:
                factor *= decay
                if factor < LEAST_FACTOR:
                    state *= factor
                    factor = tl.full([], 1.0, tl.float32)
            elif gate != "none":
                state = state * decay
            if has_beta:
                v_t = beta_t * (v_t - factor * _read(state, k_t, values_first))
            if not has_bonus:
                # Of the state before the write, so that no sum over the state waits for another one.
                result = factor * _read(state, q_t, values_first) + tl.sum(q_t * k_t, 0) * v_t
                if has_removal:
                    result += tl.sum(q_t * b_t, 0) * removed
            if has_removal:
                state += _by_key(b_t, values_first) * _by_value(removed / factor, values_first)
            state += _by_key(k_t, values_first) * _by_value(v_t / factor, values_first)
            at = (row * tokens + t) * value_heads + head
            tl.store(out + at * value_dim + v, (scale * result).to(out.dtype.element_ty), mask=in_v)
        if lazy:
            state *= factor
        if (write >= 0) & (write < slots):
            target = pool + (write * value_heads + head) * state_size + offsets
            tl.store(target, state.to(pool.dtype.element_ty), mask=inside)
