# mypy: disable-error-code="assignment"
"""Tokens from logits in Triton: one pass over the logits, and a program a row for what is left of it.

Without limits ``best_tokens`` finds the best token of each group of GROUP tokens, and ``best_of_rows`` the best group.
With limits the first pass finds the largest logit of each group alone; ``chosen_groups`` infers from these a logit that
the threshold of the row is not below, and lists the groups that have one as large; ``limited_draw`` reads these again,
searches the threshold by two bits at a time, and draws. A row whose distribution is peaked has few such groups, which
stay in registers; of a flat one all may be read 16 times from the L2 cache.

  groups   of a row, GROUPS; the last one may reach beyond VOCAB
  top      [rows, GROUPS], the order (``groups.ordered``) of the largest logit of a group
  mass     [rows, GROUPS], int32: with MASS the sum of its weights, see ``groups.group_masses``

All sums that decide anything are sums of integers: a token depends on no order of summation.
"""

import triton
import triton.language as tl

from tilewright.kernels.sampling.triton.groups import (
    EMPTY,
    GROUP,
    GROUP_UNITS,
    MEANINGS,  # noqa: F401 - the interpreter looks for it in the module of a kernel
    UNIT,
    best_of_groups,
    group_masses,
    gumbel,
    ordered,
    score_of_groups,
    slope_of,
    token_noise,
    value_of,
    weight_of,
    words_of,
)

COUNT_BITS = tl.constexpr(21)
"""Bits of a count, of which three are summed as one integer."""

COUNT_MASK = tl.constexpr((1 << 21) - 1)


@triton.jit
def _tile(logits, row, first, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The logits of BLOCK groups of a row from group ``first`` on, and their tokens."""
    tokens = (first + tl.arange(0, BLOCK))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row.to(tl.int64) * VOCAB + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("-inf"), x), tokens


@triton.jit
def best_tokens(
    logits, key, temperature, chunks, top, score, token, logit, mass,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, DRAWS: tl.constexpr, MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the largest logit of each of BLOCK groups of a row, and with DRAWS the best token; all [rows, GROUPS]."""
    row, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * BLOCK
    x, tokens = _tile(logits, row, first, VOCAB, BLOCK)
    slope, is_greedy = slope_of(temperature, row, HAS_TEMPERATURE)
    group = first + tl.arange(0, BLOCK)[:, None]
    at, inside = row.to(tl.int64) * GROUPS + group, group < GROUPS
    if DRAWS:
        # Two neighbours share a call of the generator.
        pair = group.to(tl.uint32) * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :].to(tl.uint32)
        left, right = words_of(pair, tl.load(key + 2 * row), tl.load(key + 2 * row + 1))
        noise = gumbel(tl.interleave(left, right))
        largest, best, drawn, its_logit = best_of_groups(x, tokens, noise, slope, is_greedy)
        tl.store(score + at, best, mask=inside)
        tl.store(token + at, drawn, mask=inside)
        tl.store(logit + at, its_logit, mask=inside)
    else:
        largest = tl.max(ordered(x), 1, keep_dims=True)
    tl.store(top + at, largest, mask=inside)
    if MASS:
        tl.store(mass + at, group_masses(x, largest, slope), mask=inside)


@triton.jit
def _total(mass, order, top, slope):
    """The mass of a row, int64 in units of 1 / UNIT, from those of its groups."""
    return tl.sum((mass.to(tl.float32) * weight_of(order, top, slope) * GROUP_UNITS).to(tl.int64), 0)


@triton.jit
def best_of_rows(
    top, score, token, logit, mass, temperature, tokens, log_probs,
    GROUPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, LOG_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the best group of a row."""
    row = tl.program_id(0)
    group = tl.arange(0, BLOCK)
    at, inside = row.to(tl.int64) * GROUPS + group, group < GROUPS
    order = tl.load(top + at, mask=inside, other=0)
    largest = tl.max(order, 0)
    slope, is_greedy = slope_of(temperature, row, HAS_TEMPERATURE)
    scores = score_of_groups(order, tl.load(score + at, mask=inside, other=float("-inf")), largest, slope, is_greedy)
    scores = tl.where(inside, scores, float("-inf"))
    best = tl.min(tl.where(scores == tl.max(scores, 0), group, BLOCK), 0)
    place = row.to(tl.int64) * GROUPS + best
    is_empty = largest == EMPTY
    # A row without any logit above −∞ may have any best token: its token is 0.
    tl.store(tokens + row, tl.where(is_empty, 0, tl.load(token + place)))
    if LOG_PROBS:
        total = _total(tl.load(mass + at, mask=inside, other=0), order, largest, slope)
        _store_log_prob(log_probs + row, tl.load(logit + place), total, largest, slope)


@triton.jit
def _store_log_prob(pointer, logit, total, top, slope):
    """Stores the log-probability of a token, in a row of that total mass."""
    largest = value_of(top)
    distance = tl.where(logit == largest, 0.0, logit - largest) * slope
    found = distance - tl.log(total.to(tl.float32) * (1.0 / UNIT))
    tl.store(pointer, tl.where(top == EMPTY, float("-inf"), found))


@triton.jit
def _above(order, values, base, shift, COUNTS: tl.constexpr):
    """The sums of values, or with COUNTS their numbers, at or above each of three thresholds, int64."""
    first = base | (1 << shift).to(tl.uint32)
    second = base | (2 << shift).to(tl.uint32)
    third = base | (3 << shift).to(tl.uint32)
    if COUNTS:
        numbers = (order >= first).to(tl.int64) + ((order >= second).to(tl.int64) << COUNT_BITS)
        packed = tl.sum(_flat(numbers + ((order >= third).to(tl.int64) << (2 * COUNT_BITS))), 0)
        one, two, three = packed & COUNT_MASK, (packed >> COUNT_BITS) & COUNT_MASK, packed >> (2 * COUNT_BITS)
    else:
        one = tl.sum(_flat(tl.where(order >= first, values, 0)), 0)
        two = tl.sum(_flat(tl.where(order >= second, values, 0)), 0)
        three = tl.sum(_flat(tl.where(order >= third, values, 0)), 0)
    return one, two, three


@triton.jit
def _flat(x):
    return tl.reshape(x, (x.numel,))


@triton.jit
def _next_digit(one, two, three, goal, shift):
    """The two bits of the largest threshold whose sum reaches a goal, in their place."""
    # Sums are rounded to float32 before they are compared, as in XLA.
    digit = (one.to(tl.float32) >= goal).to(tl.uint32) + (two.to(tl.float32) >= goal).to(tl.uint32)
    return (digit + (three.to(tl.float32) >= goal).to(tl.uint32)) << shift.to(tl.uint32)


@triton.jit
def _largest_reaching(order, values, goal, COUNTS: tl.constexpr):
    """The largest threshold at or above which values, or their number, sum up to a goal."""
    found = tl.full((), 0, tl.uint32)
    for step in range(16):
        shift = 30 - 2 * step
        one, two, three = _above(order, values, found, shift, COUNTS)
        found |= _next_digit(one, two, three, goal, shift)
    return found


@triton.jit
def chosen_groups(
    top, mass, temperature, top_k, top_p, min_p, chosen, count, largest, goal,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_K: tl.constexpr,
    HAS_P: tl.constexpr, HAS_MIN_P: tl.constexpr, LOG_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the groups that may have tokens of a row that its limits keep, in order.

    The largest logits of groups are logits of so many tokens: if k of them are at or above a number, or a share of the
    mass, then so many are of all tokens, and the threshold is not below that number.

    chosen   [rows, GROUPS], int32, of which the first ``count`` are written
    goal     [rows]: the mass that ``top_p`` keeps; −1 where ``top_k`` limits it, of what that keeps
    """
    row = tl.program_id(0)
    group = tl.arange(0, BLOCK)
    at, inside = row.to(tl.int64) * GROUPS + group, group < GROUPS
    order = tl.load(top + at, mask=inside, other=0)
    highest = tl.max(order, 0)
    slope, is_greedy = slope_of(temperature, row, HAS_TEMPERATURE)
    weight = weight_of(order, highest, slope)
    least, has_k = tl.full((), 0, tl.uint32), highest == 0
    if HAS_K:
        k = tl.load(top_k + row)
        has_k = (k > 0) & (k < VOCAB)
        if has_k & (k <= GROUPS):
            least = _largest_reaching(order, 0, k.to(tl.float32), True)
    if HAS_P:
        p, share = tl.load(top_p + row), -1.0
        if (p < 1.0) & (has_k == 0):
            share = tl.maximum(p, 0.0) * _total(tl.load(mass + at, mask=inside, other=0), order, highest, slope).to(
                tl.float32
            )
            least = _largest_reaching(order, (weight * UNIT).to(tl.int64), share, False)
        tl.store(goal + row, share)
    if LOG_PROBS == 0:
        least = tl.where(is_greedy, highest, least)
    is_chosen = (order >= tl.minimum(least, highest)) & (order > EMPTY)
    if HAS_MIN_P:
        is_ruled_out = weight < tl.minimum(tl.load(min_p + row), 1.0)
        if HAS_K and HAS_P:
            # These groups, too, have tokens that top_k keeps, and top_p is a share of the mass of them all.
            is_ruled_out = is_ruled_out & ((has_k & (p < 1.0)) == 0)
        is_chosen = is_chosen & (is_ruled_out == 0)
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen + row.to(tl.int64) * GROUPS + place, group, mask=is_chosen)
    tl.store(count + row, tl.sum(is_chosen.to(tl.int32), 0))
    tl.store(largest + row, highest)


@triton.jit
def _chosen_tile(logits, chosen, row, first, count, VOCAB: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """``(order, tokens)`` of BLOCK of the chosen groups; 0 in place of what there is not."""
    place = first + tl.arange(0, BLOCK)
    group = tl.load(chosen + row.to(tl.int64) * GROUPS + place, mask=place < count, other=0)
    tokens = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (place < count)[:, None] & (tokens < VOCAB)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(inside, ordered(tl.where(x != x, float("-inf"), x)), 0), tokens


@triton.jit
def _units(order, top, slope):
    """Weights as integers, in units of 1 / UNIT."""
    return (weight_of(order, top, slope) * UNIT).to(tl.int64)


@triton.jit
def _threshold(
    order, goal, logits, chosen, row, count, top, slope,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """`_largest_reaching` of all chosen groups; ``order`` is that of the first BLOCK, which may be all."""
    found = tl.full((), 0, tl.uint32)
    values = _units(order, top, slope)
    for step in range(16):
        shift = 30 - 2 * step
        one, two, three = _above(order, values, found, shift, COUNTS)
        for first in range(BLOCK, count, BLOCK):
            more, _ = _chosen_tile(logits, chosen, row, first, count, VOCAB, GROUPS, BLOCK)
            parts = _above(more, _units(more, top, slope), found, shift, COUNTS)
            one, two, three = one + parts[0], two + parts[1], three + parts[2]
        found |= _next_digit(one, two, three, goal, shift)
    return found


@triton.jit
def limited_draw(
    logits, key, temperature, top_k, top_p, min_p, chosen, count, largest, goal, tokens, log_probs,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_K: tl.constexpr,
    HAS_P: tl.constexpr, HAS_MIN_P: tl.constexpr, LOG_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the threshold of a row in its chosen groups, and draws one of the tokens that are not below it."""
    row = tl.program_id(0)
    number, top = tl.load(count + row), tl.load(largest + row)
    slope, is_greedy = slope_of(temperature, row, HAS_TEMPERATURE)
    order, _ = _chosen_tile(logits, chosen, row, 0, number, VOCAB, GROUPS, BLOCK)
    least, has_k = tl.full((), 0, tl.uint32), number < 0
    if HAS_K:
        k = tl.load(top_k + row)
        has_k = (k > 0) & (k < VOCAB)
        if has_k:
            least = _threshold(
                order, k.to(tl.float32), logits, chosen, row, number, top, slope, VOCAB, GROUPS, BLOCK, True
            )
    if HAS_P:
        p = tl.load(top_p + row)
        if p < 1.0:
            share = tl.load(goal + row)
            if has_k:
                total = tl.sum(_flat(tl.where(order >= least, _units(order, top, slope), 0)), 0)
                for first in range(BLOCK, number, BLOCK):
                    more, _ = _chosen_tile(logits, chosen, row, first, number, VOCAB, GROUPS, BLOCK)
                    total += tl.sum(_flat(tl.where(more >= least, _units(more, top, slope), 0)), 0)
                share = tl.maximum(p, 0.0) * total.to(tl.float32)
            found = _threshold(order, share, logits, chosen, row, number, top, slope, VOCAB, GROUPS, BLOCK, False)
            # The largest logit is kept whatever the goal is.
            least = tl.minimum(found, top)
    first_word, second_word = tl.load(key + 2 * row), tl.load(key + 2 * row + 1)
    best, token, logit = float("-inf"), 0, float("-inf")
    total = tl.full((), 0, tl.int64)
    for first in range(0, number, BLOCK):
        order, places = _chosen_tile(logits, chosen, row, first, number, VOCAB, GROUPS, BLOCK)
        weight = weight_of(order, top, slope)
        is_kept = (order >= least) & (order > EMPTY)
        if HAS_MIN_P:
            is_kept = is_kept & ((weight < tl.minimum(tl.load(min_p + row), 1.0)) == 0)
        x = tl.where(is_kept, value_of(order), float("-inf"))
        noise = token_noise(places, first_word, second_word)
        tops, scores, drawn, its_logit = best_of_groups(x, places, noise, slope, is_greedy)
        scores = score_of_groups(tops, scores, top, slope, is_greedy)
        score = tl.max(_flat(scores), 0)
        # Groups are in order, so that the first of equals stays.
        if score > best:
            best = score
            token = tl.min(_flat(tl.where(scores == score, drawn, 1 << 30)), 0)
            logit = tl.max(_flat(tl.where(drawn == token, its_logit, float("-inf"))), 0)
        if LOG_PROBS:
            total += tl.sum(_flat(tl.where(is_kept, (weight * UNIT).to(tl.int64), 0)), 0)
    tl.store(tokens + row, token)
    if LOG_PROBS:
        _store_log_prob(log_probs + row, logit, total, top, slope)
