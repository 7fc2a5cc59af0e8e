# mypy: disable-error-code="assignment"
"""Tokens from logits in Triton: one pass over the logits, and a program a row for what is left of it.

Without limits ``best_tokens`` finds the best token of each group of GROUP tokens, and ``best_of_rows`` the best group.
With limits the first pass finds the largest logit of each group alone; ``chosen_groups`` infers from these a logit that
the threshold of the row is not below, and lists the groups that have one as large; ``limited_draw`` reads these again,
lists their tokens that are not below it either, searches the threshold among them by four bits at a time, and draws. Of
a peaked distribution few tokens are listed; if more are than LISTED, the draw goes through all chosen groups.

  groups   of a row, GROUPS; the last one may reach beyond VOCAB
  top      [rows, GROUPS], the order (``groups.ordered``) of the largest logit of a group
  mass     [rows, GROUPS], int32: with MASS the sum of its weights, see ``groups.group_masses``

All sums that decide anything are sums of integers: a token depends on no order of summation.
"""

import triton
import triton.language as tl

from tilewright.kernels.sampling.triton.groups import (
    EMPTY,
    FAR,
    GROUP,
    GROUP_UNIT,
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

VOCAB_UNITS = tl.constexpr(float(1 << 21))
"""Units of a row, more than one for each token."""

MARGIN = tl.constexpr(2.0**-14)
"""More than the relative error of a sum of masses."""

CHUNK = tl.constexpr(128)
"""Orders in memory that are compared with 16 thresholds at once."""

LISTED = tl.constexpr(1024)
"""Tokens that are listed of a row."""


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
def _masses(mass, order, top, slope):
    """The masses of groups as parts of that of the row, int64 in units of 1 / UNIT."""
    return (mass.to(tl.float32) * weight_of(order, top, slope) * GROUP_UNITS).to(tl.int64)


@triton.jit
def _units(order, top, slope):
    """Weights as integers, in units of 1 / UNIT."""
    return (weight_of(order, top, slope) * UNIT).to(tl.int64)


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
        total = tl.sum(_masses(tl.load(mass + at, mask=inside, other=0), order, largest, slope), 0)
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
def _thresholds(base, step):
    """The thresholds that have each of the 16 digits in the place of a step, of 8."""
    return base | (tl.arange(0, 16) << (28 - 4 * step)).to(tl.uint32)


@triton.jit
def _last_reaching(thresholds, sums, base, goal):
    """The largest threshold whose sum reaches a goal, or the base."""
    # Sums are rounded to float32 before they are compared, as in XLA.
    return tl.max(tl.where(tl.sum(sums, 1).to(tl.float32) >= goal, thresholds, base), 0)


@triton.jit
def _largest_reaching(orders, count, goal, top, slope, COUNTS: tl.constexpr):
    """The largest threshold at or above which the masses of orders in memory, or their number, sum up to a goal.

    Each warp sums for thresholds of its own, so that no partial sums are exchanged.
    """
    found = tl.full((), 0, tl.uint32)
    for step in range(8):
        thresholds = _thresholds(found, step)
        sums = tl.zeros((16, CHUNK), tl.int32 if COUNTS else tl.int64)
        for first in range(0, count, CHUNK):
            place = first + tl.arange(0, CHUNK)
            order = tl.load(orders + place, mask=place < count, other=0)[None, :]
            values = 1 if COUNTS else _units(order, top, slope)
            sums += tl.where(order >= thresholds[:, None], values, 0)
        found = _last_reaching(thresholds, sums, found, goal)
    return found


@triton.jit
def _bound_of_share(tops, mass, count, goal, top, slope):
    """A threshold whose tokens are sure to weigh a goal, from the largest logits of groups and their masses.

    goal     in units of 1 / UNIT

    It decides only what is listed, so float32 does, with a margin for all roundings.
    """
    # The units of a token are rounded down.
    goal = (goal + VOCAB_UNITS) * ((1.0 + MARGIN) / UNIT)
    found = tl.full((), 0, tl.uint32)
    for step in range(8):
        thresholds = _thresholds(found, step)
        # All others of a group are below the threshold, and there are less than GROUP of them.
        rest = weight_of(thresholds, top, slope)[:, None] * GROUP
        sums = tl.zeros((16, CHUNK), tl.float32)
        for first in range(0, count, CHUNK):
            place = first + tl.arange(0, CHUNK)
            order = tl.load(tops + place, mask=place < count, other=0)
            weight = weight_of(order, top, slope)
            masses = tl.load(mass + place, mask=place < count, other=0).to(tl.float32) * weight
            least = tl.maximum((masses * ((1.0 - MARGIN) / GROUP_UNIT))[None, :] - rest, 0.0)
            sums += tl.maximum(tl.where(order[None, :] >= thresholds[:, None], weight[None, :], 0.0), least)
        found = _last_reaching(thresholds, sums, found, goal)
    return found


@triton.jit
def chosen_groups(
    top, mass, temperature, top_k, top_p, min_p, chosen, count, largest, bound, goal,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_K: tl.constexpr,
    HAS_P: tl.constexpr, HAS_MIN_P: tl.constexpr, LOG_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the groups that may have tokens of a row that its limits keep, in order.

    The largest logits of groups are logits of so many tokens: if k of them are at or above a number, so many are of all
    tokens, and the threshold is not below that number. The same holds of a share of the mass (``_bound_of_share``).

    chosen   [rows, GROUPS], int32, of which the first ``count`` are written
    bound    [rows], the order that no kept token is below
    goal     [rows]: the mass that ``top_p`` keeps; −1 where ``top_k`` limits it, of what that keeps
    """
    row = tl.program_id(0)
    group = tl.arange(0, BLOCK)
    row_at = row.to(tl.int64) * GROUPS
    at, inside = row_at + group, group < GROUPS
    order = tl.load(top + at, mask=inside, other=0)
    highest = tl.max(order, 0)
    slope, is_greedy = slope_of(temperature, row, HAS_TEMPERATURE)
    least, has_k = tl.full((), 0, tl.uint32), highest == 0
    if HAS_K:
        k = tl.load(top_k + row)
        has_k = (k > 0) & (k < VOCAB)
        if has_k & (k <= GROUPS):
            least = _largest_reaching(top + row_at, GROUPS, k.to(tl.float32), highest, slope, True)
    if HAS_P:
        p, share = tl.load(top_p + row), -1.0
        if (p < 1.0) & (has_k == 0):
            masses = _masses(tl.load(mass + at, mask=inside, other=0), order, highest, slope)
            share = tl.maximum(p, 0.0) * tl.sum(masses, 0).to(tl.float32)
            least = _bound_of_share(top + row_at, mass + row_at, GROUPS, share, highest, slope)
        tl.store(goal + row, share)
    if LOG_PROBS == 0:
        least = tl.where(is_greedy, highest, least)
    least = tl.minimum(least, highest)
    is_chosen = (order >= least) & (order > EMPTY)
    if HAS_MIN_P:
        is_ruled_out = weight_of(order, highest, slope) < tl.minimum(tl.load(min_p + row), 1.0)
        if HAS_K and HAS_P:
            # These groups, too, have tokens that top_k keeps, and top_p is a share of the mass of them all.
            is_ruled_out = is_ruled_out & ((has_k & (p < 1.0)) == 0)
        is_chosen = is_chosen & (is_ruled_out == 0)
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen + row.to(tl.int64) * GROUPS + place, group, mask=is_chosen)
    tl.store(count + row, tl.sum(is_chosen.to(tl.int32), 0))
    tl.store(largest + row, highest)
    tl.store(bound + row, least)


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
def _is_kept(order, lower, smallest, top, slope, HAS_MIN_P: tl.constexpr):
    """True for logits above a threshold that ``min_p`` does not rule out."""
    is_kept = (order > lower) & (order > EMPTY)
    if HAS_MIN_P:
        is_kept = is_kept & ((weight_of(order, top, slope) < smallest) == 0)
    return is_kept


@triton.jit
def _list_tokens(
    logits, chosen, row, count, bound, orders, tokens, VOCAB: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Lists the tokens of the chosen groups that are not below a bound, and returns their number.

    Of more than LISTED the first are written.
    """
    number = 0
    for first in range(0, count, BLOCK):
        order, token = _chosen_tile(logits, chosen, row, first, count, VOCAB, GROUPS, BLOCK)
        is_listed = (order >= bound) & (order > EMPTY)
        in_group = tl.cumsum(is_listed.to(tl.int32), 1)
        of_group = tl.sum(is_listed.to(tl.int32), 1)
        place = number + (tl.cumsum(of_group, 0) - of_group)[:, None] + in_group - 1
        tl.store(orders + place, order, mask=is_listed & (place < LISTED))
        tl.store(tokens + place, token, mask=is_listed & (place < LISTED))
        number += tl.sum(of_group, 0)
    # What other threads of the program have listed is read next.
    tl.debug_barrier()
    return number


@triton.jit
def _best_of_list(order, token, is_kept, row_of_tops, first_word, second_word, top, slope, is_greedy):
    """``(token, logit)`` of the best listed token that is kept: bit for bit what ``best_of_groups`` finds of them."""
    group = token // GROUP
    # The largest logit of a group is kept if any of its tokens is.
    group_top = tl.load(row_of_tops + group, mask=is_kept, other=EMPTY)
    x = tl.where(is_kept, value_of(order), float("-inf"))
    is_largest = order == group_top
    noisy = tl.fma(
        tl.where(is_largest, 0.0, x - value_of(group_top)), slope, token_noise(token, first_word, second_word)
    )
    in_group = tl.where(is_greedy, tl.where(is_largest, 0.0, float("-inf")), noisy)
    score = tl.where(is_kept, score_of_groups(group_top, in_group, top, slope, is_greedy), float("-inf"))
    best_group = tl.min(tl.where(is_kept & (score == tl.max(score, 0)), group, FAR), 0)
    in_best = tl.where(is_kept & (group == best_group), in_group, float("-inf"))
    is_best = is_kept & (group == best_group) & (in_best == tl.max(in_best, 0))
    best = tl.min(tl.where(is_best, token, FAR), 0)
    return tl.where(best == FAR, 0, best), tl.max(tl.where(token == best, x, float("-inf")), 0)


@triton.jit
def _draw_from_list(
    group_tops, orders, listed, row, listed_number, has_k, k, has_p, p, share, smallest, first_word, second_word, top,
    slope, is_greedy, GROUPS: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
):  # fmt: skip
    """``(token, logit, mass of what is kept)`` of a row whose tokens are listed."""
    place = tl.arange(0, LISTED)
    order = tl.load(orders + place, mask=place < listed_number, other=0)
    token = tl.load(listed + place, mask=place < listed_number, other=0)
    units = _units(order, top, slope)
    least = tl.full((), 0, tl.uint32)
    if HAS_K and has_k:
        least = _largest_reaching(orders, listed_number, k.to(tl.float32), top, slope, True)
    if HAS_P and has_p:
        if has_k:
            share = tl.maximum(p, 0.0) * tl.sum(tl.where(order >= least, units, 0), 0).to(tl.float32)
        # The largest logit is kept whatever the goal is.
        least = tl.minimum(_largest_reaching(orders, listed_number, share, top, slope, False), top)
    is_kept = _is_kept(order, tl.maximum(least, 1) - 1, smallest, top, slope, HAS_MIN_P)
    row_of_tops = group_tops + row.to(tl.int64) * GROUPS
    drawn, logit = _best_of_list(order, token, is_kept, row_of_tops, first_word, second_word, top, slope, is_greedy)
    return drawn, logit, tl.sum(tl.where(is_kept, units, 0), 0)


@triton.jit
def _mass_above(
    logits, chosen, row, count, lower, smallest, top, slope,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mass of the tokens of chosen groups that are above a threshold and, with HAS_MIN_P, not ruled out by it."""
    sums = tl.zeros((BLOCK, GROUP), tl.int64)
    for first in range(0, count, BLOCK):
        order, _ = _chosen_tile(logits, chosen, row, first, count, VOCAB, GROUPS, BLOCK)
        is_kept = _is_kept(order, lower, smallest, top, slope, HAS_MIN_P)
        sums += tl.where(is_kept, _units(order, top, slope), 0)
    return tl.sum(_flat(sums), 0)


@triton.jit
def _best_above(
    logits, chosen, row, first, count, lower, smallest, first_word, second_word, top, slope, is_greedy,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``(score, token, order)`` of the best token above a threshold of each of BLOCK chosen groups, ``[BLOCK]``."""
    order, places = _chosen_tile(logits, chosen, row, first, count, VOCAB, GROUPS, BLOCK)
    is_kept = _is_kept(order, lower, smallest, top, slope, HAS_MIN_P)
    x = tl.where(is_kept, value_of(order), float("-inf"))
    noise = token_noise(places, first_word, second_word)
    tops, scores, drawn, logit = best_of_groups(x, places, noise, slope, is_greedy)
    scores = score_of_groups(tops, scores, top, slope, is_greedy)
    return tl.reshape(scores, (BLOCK,)), tl.reshape(drawn, (BLOCK,)), tl.reshape(ordered(logit), (BLOCK,))


@triton.jit
def _draw_from_groups(
    logits, chosen, row, number, bound, has_k, k, has_p, p, share, smallest, first_word, second_word, top, slope,
    is_greedy, orders, listed, scores,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    LOG_PROBS: tl.constexpr, BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """``(token, logit, mass of what is kept)`` of a row, the last one with LOG_PROBS; reads the chosen groups again.

    The best token of each group is drawn before it is known what ``top_p`` keeps: it keeps the best of all if what is
    above it is not the whole share, which one more pass tells. If it does not, its group draws again from what is
    above. Most rows need one such pass, where a search of the threshold needs 16.

    ``lower`` is known not to be kept, nor what is below it; ``upper`` is, with all that is above.
    """
    order, _ = _chosen_tile(logits, chosen, row, 0, number, VOCAB, GROUPS, BLOCK)
    lower, upper, total = tl.maximum(bound, 1) - 1, top, tl.full((), 0, tl.int64)
    if HAS_K and has_k:
        least = _threshold(order, k.to(tl.float32), logits, chosen, row, number, top, slope, VOCAB, GROUPS, BLOCK, True)
        lower = tl.maximum(least, 1) - 1
    if HAS_P and has_p:
        if has_k:
            kept_by_k = _mass_above(
                logits, chosen, row, number, lower, smallest, top, slope, VOCAB, GROUPS, False, BLOCK
            )
            share = tl.maximum(p, 0.0) * kept_by_k.to(tl.float32)
        if LOG_PROBS:
            found = _threshold(order, share, logits, chosen, row, number, top, slope, VOCAB, GROUPS, BLOCK, False)
            # The largest logit is kept whatever the goal is.
            upper = tl.minimum(found, top)
            lower = tl.maximum(upper, 1) - 1
    else:
        upper = lower + 1
    if LOG_PROBS:
        total = _mass_above(logits, chosen, row, number, lower, smallest, top, slope, VOCAB, GROUPS, HAS_MIN_P, BLOCK)
    for first in range(0, number, BLOCK):
        score, drawn, its_order = _best_above(
            logits, chosen, row, first, number, lower, smallest, first_word, second_word, top, slope, is_greedy,
            VOCAB, GROUPS, HAS_MIN_P, BLOCK,
        )  # fmt: skip
        place = first + tl.arange(0, BLOCK)
        tl.store(scores + place, score, mask=place < number)
        tl.store(listed + place, drawn, mask=place < number)
        tl.store(orders + place, its_order, mask=place < number)
    # What other threads of the program have stored is read next.
    tl.debug_barrier()
    place = tl.arange(0, ROW_BLOCK)
    score = tl.load(scores + place, mask=place < number, other=float("-inf"))
    drawn = tl.load(listed + place, mask=place < number, other=0)
    orders_of_best = tl.load(orders + place, mask=place < number, other=0)
    token, logit, is_open = 0, float("-inf"), number > 0
    while is_open:
        # Groups are in order, so that the first of equals is found.
        best = tl.min(tl.where(score == tl.max(score, 0), place, FAR), 0)
        its_order = tl.max(tl.where(place == best, orders_of_best, 0), 0)
        if (its_order > lower) & (its_order < upper):
            above = _mass_above(
                logits, chosen, row, number, its_order, smallest, top, slope, VOCAB, GROUPS, False, BLOCK
            )
            is_kept = above.to(tl.float32) < share
            upper = tl.where(is_kept, its_order, upper)
            lower = tl.where(is_kept, lower, its_order)
        if its_order >= upper:
            token = tl.max(tl.where(place == best, drawn, 0), 0)
            logit = value_of(its_order)
            is_open = number < 0
        else:
            more, another, higher = _best_above(
                logits, chosen, row, best, best + 1, lower, smallest, first_word, second_word, top, slope, is_greedy,
                VOCAB, GROUPS, HAS_MIN_P, 1,
            )  # fmt: skip
            score = tl.where(place == best, tl.max(more, 0), score)
            drawn = tl.where(place == best, tl.max(another, 0), drawn)
            orders_of_best = tl.where(place == best, tl.max(higher, 0), orders_of_best)
    return token, logit, total


@triton.jit
def limited_draw(
    logits, key, temperature, top_k, top_p, min_p, chosen, count, largest, bound, goal, group_tops,
    tokens, log_probs, listed_orders, listed_tokens, listed_scores,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_K: tl.constexpr,
    HAS_P: tl.constexpr, HAS_MIN_P: tl.constexpr, LOG_PROBS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr, SCRATCH: tl.constexpr,
):  # fmt: skip
    """Finds the threshold of a row in its chosen groups, and draws one of the tokens that are not below it.

    listed_*   [rows, SCRATCH]: what threads of a program tell each other
    """
    row = tl.program_id(0)
    listed_orders += row.to(tl.int64) * SCRATCH
    listed_tokens += row.to(tl.int64) * SCRATCH
    listed_scores += row.to(tl.int64) * SCRATCH
    number, top = tl.load(count + row), tl.load(largest + row)
    slope, is_greedy = slope_of(temperature, row, HAS_TEMPERATURE)
    first_word, second_word = tl.load(key + 2 * row), tl.load(key + 2 * row + 1)
    k, has_k, p, has_p, share, smallest = 0, number < 0, 1.0, number < 0, -1.0, 0.0
    if HAS_K:
        k = tl.load(top_k + row)
        has_k = (k > 0) & (k < VOCAB)
    if HAS_P:
        p, share = tl.load(top_p + row), tl.load(goal + row)
        has_p = p < 1.0
    if HAS_MIN_P:
        smallest = tl.minimum(tl.load(min_p + row), 1.0)
    listed = number * GROUP
    if HAS_K or HAS_P:
        listed = _list_tokens(
            logits, chosen, row, number, tl.load(bound + row), listed_orders, listed_tokens, VOCAB, GROUPS, BLOCK
        )
    if (HAS_K or HAS_P) and listed <= LISTED:
        token, logit, total = _draw_from_list(
            group_tops, listed_orders, listed_tokens, row, listed, has_k, k, has_p, p,
            share, smallest, first_word, second_word, top, slope, is_greedy, GROUPS, HAS_K, HAS_P, HAS_MIN_P,
        )  # fmt: skip
    else:
        token, logit, total = _draw_from_groups(
            logits, chosen, row, number, tl.load(bound + row), has_k, k, has_p, p, share, smallest, first_word,
            second_word, top, slope, is_greedy, listed_orders, listed_tokens, listed_scores, VOCAB, GROUPS, HAS_K,
            HAS_P, HAS_MIN_P, LOG_PROBS, BLOCK, ROW_BLOCK,
        )  # fmt: skip
    tl.store(tokens + row, token)
    if LOG_PROBS:
        _store_log_prob(log_probs + row, logit, total, top, slope)
