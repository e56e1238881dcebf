"""The Triton kernel of `sampling_kernels.choose_by_triton`, in its own file because only GPU machines load Triton.

A gap is the distance of a score below the largest one, divided by the temperature, so e^-gap is proportional to the
token's probability. Gaps are not negative, so their bits, read as integers, are in the same order. `warping.py` says
the same in PyTorch and gives the sources.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

_LAST = tl.constexpr(0x7FFFFFFF)  # a key beyond those of all numbers
_ROUNDING = tl.constexpr(64 * 2.0**-23)
_LEAST = tl.constexpr(2.0**-126)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def choose(logits, scores, settings, out, gaps, ids, count, BLOCK: tl.constexpr, SAME: tl.constexpr):
    """Chooses the next token of one row of logits, in a few passes over the vocabulary and without sorting it.

    `settings` has the temperature (0 is greedy), top_p, min_p as float64, and top_k (0 is all) and the seed. `gaps` and
    `ids` are memory for the tokens that can be chosen. Stores the token, its lead over the second, the largest score,
    the logarithm of the sum of all e^logit, the token's logit, and whether all logits are finite (1 or 0), as float64.
    """
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    logits += row.to(tl.int64) * count
    scores += row.to(tl.int64) * count
    gaps += row.to(tl.int64) * count
    ids += row.to(tl.int64) * count
    most = tl.full((BLOCK,), _LOWEST, tl.float32)
    first, second = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    mass, which, wrong = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        token = start + lane
        inside = token < count
        logit = tl.load(logits + token, mask=inside, other=float("-inf"))
        score = logit
        if not SAME:
            score = tl.load(scores + token, mask=inside, other=float("-inf"))
        wrong |= (inside & (logit * 0 != 0)).to(tl.int32)
        higher = tl.maximum(most, logit)
        mass = mass * tl.exp(most - higher) + tl.exp(logit - higher)
        most = higher
        which = tl.where(score > first, token, which)
        second = tl.maximum(second, tl.minimum(first, score))
        first = tl.maximum(first, score)
    best, top = tl.max(first, axis=0), tl.max(most, axis=0)
    total = tl.sum((mass * tl.exp(most - top)).to(tl.float64), axis=0)
    chosen = tl.min(tl.where(first == best, which, count), axis=0)
    next_best = tl.max(tl.where((first == best) & (which == chosen), second, first), axis=0)
    lead = (best - next_best).to(tl.float64)
    requested = tl.load(settings + row * 6).to(tl.float64, bitcast=True)
    if requested > 0:
        temperature = tl.maximum(requested.to(tl.float32), _LEAST)
        chosen, lead = _drawn(
            scores, settings + row * 6, gaps, ids, count, best, (best - first) / temperature, temperature, BLOCK
        )
    chosen = tl.minimum(chosen, count - 1)  # if the scores are not numbers
    here = out + row * 6
    tl.store(here, chosen.to(tl.float64))
    tl.store(here + 1, lead)
    tl.store(here + 2, best.to(tl.float64))
    tl.store(here + 3, top.to(tl.float64) + tl.log(total))
    tl.store(here + 4, tl.load(logits + chosen).to(tl.float64))
    tl.store(here + 5, (tl.sum(wrong, axis=0) == 0).to(tl.float64))


@triton.jit
def _drawn(scores, settings, gaps, ids, count, best, lane_gaps, temperature, BLOCK: tl.constexpr):
    """The token that wins the race among those that top-k, top-p and min-p keep, and its lead."""
    lane = tl.arange(0, BLOCK)
    top_p = tl.load(settings + 1).to(tl.float64, bitcast=True)
    min_p = tl.load(settings + 2).to(tl.float64, bitcast=True)
    top_k, seed = tl.load(settings + 4), tl.load(settings + 5)
    limits = (top_k > 0) & (top_k < count)
    # No token with a larger gap than `bound` can be kept.
    bound = tl.full((), float("inf"), tl.float32)
    if limits:
        if top_k <= BLOCK:  # as many lanes have a token with a gap up to it
            bound = _key_reaching(_keys(lane_gaps), lane_gaps >= 0, top_k).to(tl.float32, bitcast=True)
    elif top_p < 1:
        bound = _bound_of_mass(scores, count, best, temperature, top_p, BLOCK)
    elif min_p > 0:
        bound = -tl.log(min_p).to(tl.float32)
    total = tl.zeros((), tl.float64)
    kept = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        token = start + lane
        gap = (best - tl.load(scores + token, mask=token < count, other=float("-inf"))) / temperature
        keeps = (token < count) & (gap <= bound) & (gap < float("inf"))
        at = kept + tl.cumsum(keeps.to(tl.int32), axis=0) - 1
        tl.store(gaps + at, gap, mask=keeps)
        tl.store(ids + at, token, mask=keeps)
        kept += tl.sum(keeps.to(tl.int32), axis=0)
        total += tl.sum(tl.exp(-gap).to(tl.float64), axis=0)
    tl.debug_barrier()
    key, last = tl.full((), _LAST, tl.int32), tl.zeros((), tl.int32) + count
    if limits:
        key, last = _end(gaps, ids, kept, top_k.to(tl.float64), key, last, BLOCK, False)
        total = _mass(gaps, ids, kept, key, last, BLOCK)
    if top_p < 1:
        target = tl.maximum((top_p - _ROUNDING) * total, _LEAST)
        key, last = _end(gaps, ids, kept, target, key, last, BLOCK, True)
    if min_p > 0:
        furthest = _keys(-tl.log(min_p).to(tl.float32))
        last = tl.where(furthest < key, count, last)
        key = tl.minimum(key, furthest)
    winner, lead = _race(gaps, ids, kept, key, last, seed, count, BLOCK)
    return winner, lead * temperature


@triton.jit
def _bound_of_mass(scores, count, best, temperature, top_p, BLOCK: tl.constexpr):
    """A gap that no token with a part in the mass `top_p` exceeds: 3, 6 or 9, or one that holds for all logits."""
    lane = tl.arange(0, BLOCK)
    mass, near = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    middle, far = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        token = start + lane
        gap = (best - tl.load(scores + token, mask=token < count, other=float("-inf"))) / temperature
        weight = tl.exp(-gap)
        mass += weight
        near += tl.where(gap <= 3, weight, 0.0)
        middle += tl.where(gap <= 6, weight, 0.0)
        far += tl.where(gap <= 9, weight, 0.0)
    target = (top_p.to(tl.float32) + 1e-4) * tl.sum(mass, axis=0)  # far above the rounding of these sums
    # All tokens beyond it together have less than 1 - p.
    bound = tl.log((tl.zeros((), tl.float64) + count) / (1 - top_p)).to(tl.float32) + 1e-3
    bound = tl.where(tl.sum(far, axis=0) >= target, tl.minimum(bound, 9.0), bound)
    bound = tl.where(tl.sum(middle, axis=0) >= target, tl.minimum(bound, 6.0), bound)
    return tl.where(tl.sum(near, axis=0) >= target, tl.minimum(bound, 3.0), bound)


@triton.jit
def _keys(gaps):
    return (gaps + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0


@triton.jit
def _key_reaching(keys, exists, target):
    """The smallest key such that as many of `keys` as `target` are not larger; the last key if there are fewer."""
    found = tl.zeros((), tl.int32)
    for place in range(31):
        trial = found + (1 << (30 - place))
        if tl.sum((exists & (keys < trial)).to(tl.int32), axis=0) < target:
            found = trial
    return found


@triton.jit
def _block(gaps, ids, kept, start, key, last, BLOCK: tl.constexpr):
    """The gaps, keys and ids of a block of tokens, and which of them come no later than the end (`key`, `last`)."""
    at = start + tl.arange(0, BLOCK)
    gap = tl.load(gaps + at, mask=at < kept, other=float("inf"))
    token = tl.load(ids + at, mask=at < kept, other=0)
    keys = _keys(gap)
    return gap, keys, token, (at < kept) & ((keys < key) | ((keys == key) & (token <= last)))


@triton.jit
def _weights_before(
    gaps, ids, kept, first, second, third, key, last, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr
):  # fmt: skip
    """The weights of the tokens up to the end (`key`, `last`) whose keys are less than each of three bounds.

    A token's weight is e^-gap if WEIGHTED, else 1.
    """
    before_first, before_second = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    before_third = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, kept, BLOCK):
        gap, keys, _, is_kept = _block(gaps, ids, kept, start, key, last, BLOCK)
        weight = is_kept.to(tl.float64)
        if WEIGHTED:
            weight = tl.where(is_kept, tl.exp(-gap), 0.0).to(tl.float64)
        before_first += tl.where(keys < first, weight, 0.0)
        before_second += tl.where(keys < second, weight, 0.0)
        before_third += tl.where(keys < third, weight, 0.0)
    return tl.sum(before_first, axis=0), tl.sum(before_second, axis=0), tl.sum(before_third, axis=0)


@triton.jit
def _mass(gaps, ids, kept, key, last, BLOCK: tl.constexpr):
    found = tl.zeros((), tl.float64)
    for start in range(0, kept, BLOCK):
        gap, _, _, is_kept = _block(gaps, ids, kept, start, key, last, BLOCK)
        found += tl.sum(tl.where(is_kept, tl.exp(-gap), 0.0).to(tl.float64), axis=0)
    return found


@triton.jit
def _end(gaps, ids, kept, target, key, last, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    """The key and id of the last of the fewest tokens, in ascending order of both, whose weights reach `target`.

    Only tokens up to the end (`key`, `last`) count; it is returned if their weights do not reach the target.
    """
    found = tl.zeros((), tl.int32)
    # The largest key such that the tokens before it do not reach the target: its first bit, then two bits at a time.
    for turn in range(16):
        step = 1 << (30 - 2 * turn)
        first = found + step
        second = tl.where(turn > 0, first + step, _LAST)
        third = tl.where(turn > 0, second + step, _LAST)
        below = _weights_before(gaps, ids, kept, first, second, third, key, last, BLOCK, WEIGHTED)
        if below[0] < target:
            found = first
        if (below[1] < target) & (turn > 0):
            found = second
        if (below[2] < target) & (turn > 0):
            found = third
    below = _weights_before(gaps, ids, kept, found, found, found, key, last, BLOCK, WEIGHTED)
    rest = target - below[0]
    each = tl.full((), 1.0, tl.float64)
    if WEIGHTED:
        each = tl.exp(-found.to(tl.float32, bitcast=True)).to(tl.float64)
    needed = tl.ceil(rest / each)  # of the tokens with this key
    seen, end = tl.zeros((), tl.float64), tl.full((), -1, tl.int32)
    for start in range(0, kept, BLOCK):
        _, keys, token, is_kept = _block(gaps, ids, kept, start, key, last, BLOCK)
        equals = is_kept & (keys == found)
        along = seen + tl.cumsum(equals.to(tl.int32), axis=0).to(tl.float64)
        end = tl.maximum(end, tl.max(tl.where(equals & (along <= needed), token, -1), axis=0))
        seen += tl.sum(equals.to(tl.float64), axis=0)
    reaches = end >= 0
    return tl.where(reaches, found, key), tl.where(reaches, end, last)


@triton.jit
def _mixed(x):
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _race(gaps, ids, kept, key, last, seed, count, BLOCK: tl.constexpr):
    """The token with the shortest time, and the lead of the logarithm of its time over the second."""
    first, second = tl.full((), float("inf"), tl.float64), tl.full((), float("inf"), tl.float64)
    winner = tl.zeros((), tl.int32)
    for start in range(0, kept, BLOCK):
        gap, _, token, runs = _block(gaps, ids, kept, start, key, last, BLOCK)
        bits = _mixed(seed.to(tl.uint64, bitcast=True) + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        number = ((bits >> 41).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23; 1 - number is exact
        # A time -log(1 - u) is at least u, so most tokens are known to be slower than the second.
        runs = runs & ~(number.to(tl.float64) > tl.exp(second) * 1.001 * tl.exp(-gap).to(tl.float64))
        if tl.sum(runs.to(tl.int32), axis=0) > 0:
            time = tl.log(-tl.log((1 - number).to(tl.float64))) + gap.to(tl.float64)
            time = tl.where(runs, time, float("inf"))
            shortest = tl.min(time, axis=0)
            fastest = tl.min(tl.where(time == shortest, token, count), axis=0)
            behind = tl.min(tl.where(token == fastest, float("inf"), time), axis=0)
            second = tl.minimum(tl.maximum(first, shortest), tl.where(shortest < first, behind, second))
            winner = tl.where(shortest < first, fastest, winner)
            first = tl.minimum(first, shortest)
    return winner, second - first
