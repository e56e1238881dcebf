"""The Triton kernels of `paged_kernels.attend_by_triton`, in their own file because only GPU machines load Triton."""

# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # scores are multiplied by it, because e^x takes longer than 2^x


@triton.jit(do_not_specialize=["table_width", "parts", "window"])
def attend(
    queries, keys, values, key_scales, value_scales, table, positions, tiles, slopes, sinks,
    out, tops, sums, sums_of_values, heads, kv_heads, table_width, parts, window, scale, cap,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, TILED: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """Attends from up to TOKENS consecutive tokens of a sequence to what they see, in HEADS heads with the same keys.

    If TILED, `tiles` has the first row, the number of tokens, the position of the first, and the row of `table`;
    otherwise token r is alone in row r, at ``positions[r]``. Vectors have GROUPS, COLUMNS and VALUE_COLUMNS entries
    (powers of two), of which the first HEADS, WIDTH and VALUE_WIDTH are used. GROUP heads share a key-value head.

    If SPLIT, the positions are split into `parts` programs, which store the largest score, the sum of
    e^(score - largest), and the values weighted by these.
    """
    number, first_head, part = tl.program_id(0), tl.program_id(1) * HEADS, tl.program_id(2)
    kv_head = first_head // GROUP
    member, column, value_column = tl.arange(0, TOKENS * GROUPS), tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    token, group = member // GROUPS, member % GROUPS
    row, sequence, count = number, number, 1
    if TILED:
        number = tl.num_programs(0) - 1 - number  # the last tiles of a prompt take longest, so they start first
        row, count = tl.load(tiles + number * 4), tl.load(tiles + number * 4 + 1)
        position, sequence = tl.load(tiles + number * 4 + 2), tl.load(tiles + number * 4 + 3)
    else:
        position = tl.load(positions + number)
    last = position + token
    exists = (token < count) & (group < HEADS)
    head = first_head + group
    at = (row + token).to(tl.int64) * heads + head
    query = tl.load(
        queries + at[:, None] * WIDTH + column[None, :], mask=exists[:, None] & (column < WIDTH)[None, :], other=0.0
    )
    # Tiles before the first token's position need no mask, because all tokens see them.
    SEEN_BY_ALL: tl.constexpr = TILED and not WINDOWED
    first = 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0)
    length = tl.cdiv(position + count - first, parts)
    begin = first + part * length
    end = tl.minimum(begin + length, position + count)
    top = tl.full((TOKENS * GROUPS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * GROUPS,), tl.float32)
    found = tl.zeros((TOKENS * GROUPS, VALUE_COLUMNS), tl.float32)
    if SLOPED:
        slope = tl.load(slopes + head, mask=group < HEADS, other=0.0).to(tl.float32) * LOG2E
    inner, sequence = tl.arange(0, TILE), table + sequence * table_width
    middle = begin
    if SEEN_BY_ALL:
        middle += tl.maximum(position + 1 - begin, 0) // TILE * TILE
    factor = scale
    if not CAPPED:
        factor *= LOG2E
    for masked in tl.static_range(0 if SEEN_BY_ALL else 1, 2):
        low, high = begin, middle
        if masked:
            low, high = middle, end
        # The blocks of a tile are looked up a tile ahead, so that Triton fetches its keys and values ahead, too.
        ahead = tl.load(sequence + tl.maximum(tl.minimum(low + inner, high - 1), 0) // SIZE)
        for start in range(low, high, TILE):
            # A place beyond the end reads the last one again: a number that is not finite there would pass any mask.
            place = start + inner
            read = tl.minimum(place, high - 1)
            entry = (ahead.to(tl.int64) * kv_heads + kv_head) * SIZE + read % SIZE
            ahead = tl.load(sequence + tl.minimum(place + TILE, high - 1) // SIZE)
            key = tl.load(keys + entry[None, :] * WIDTH + column[:, None], mask=(column < WIDTH)[:, None], other=0.0)
            value = tl.load(
                values + entry[:, None] * VALUE_WIDTH + value_column[None, :],
                mask=(value_column < VALUE_WIDTH)[None, :],
                other=0.0,
            )
            scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * factor
            if SCALED:
                scores *= tl.load(key_scales + entry)[None, :]
            if CAPPED:
                scores = cap * LOG2E * (2 * tl.sigmoid(2 * scores / cap) - 1)
            if SLOPED:
                scores -= slope[:, None] * (last[:, None] - place[None, :]).to(tl.float32)
            if masked:
                seen = (place < high)[None, :] & (place[None, :] <= last[:, None])
                if WINDOWED:
                    seen = seen & (place[None, :] > last[:, None] - window)
                scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # of a token that has seen nothing yet
            weights, fading = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
            top, total = higher, total * fading + tl.sum(weights, axis=1)
            if SCALED:
                weights *= tl.load(value_scales + entry)[None, :]
            weighted = tl.dot(weights.to(query.dtype), value.to(query.dtype), input_precision="ieee")
            found = found * fading[:, None] + weighted
    whole = exists[:, None] & (value_column < VALUE_WIDTH)[None, :]
    if SPLIT:
        here = at * parts + part
        tl.store(tops + here, top, mask=exists)
        tl.store(sums + here, total, mask=exists)
        tl.store(sums_of_values + here[:, None] * VALUE_WIDTH + value_column[None, :], found, mask=whole)
    else:
        if SUNK:  # a sink adds a score to the softmax, but no value
            sink = tl.load(sinks + head, mask=group < HEADS, other=0.0).to(tl.float32) * LOG2E
            higher = tl.maximum(top, sink)
            fading = tl.exp2(top - higher)
            found, total = found * fading[:, None], total * fading + tl.exp2(sink - higher)
        found = (found / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * VALUE_WIDTH + value_column[None, :], found, mask=whole)


@triton.jit(do_not_specialize=["parts"])
def combine(
    tops, sums, sums_of_values, sinks, out, heads, parts,
    VALUE_WIDTH: tl.constexpr, PARTS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """Combines what `attend` stored for the parts of one token and one head."""
    at, part, column = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, VALUE_COLUMNS)
    top = tl.load(tops + at * parts + part, mask=part < parts, other=float("-inf"))
    highest = tl.max(top, axis=0)
    if SUNK:
        sink = tl.load(sinks + at % heads).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    share = tl.exp2(top - highest)
    total = tl.sum(tl.load(sums + at * parts + part, mask=part < parts, other=0.0) * share, axis=0)
    if SUNK:
        total += tl.exp2(sink - highest)
    found = tl.load(
        sums_of_values + (at * parts + part)[:, None] * VALUE_WIDTH + column[None, :],
        mask=(part < parts)[:, None] & (column < VALUE_WIDTH)[None, :],
        other=0.0,
    )
    found = tl.sum(found * share[:, None], axis=0) / total
    tl.store(out + at * VALUE_WIDTH + column, found.to(out.dtype.element_ty), mask=column < VALUE_WIDTH)


@triton.jit
def store(
    new, blocks, offsets, stored, scales, read, of_token, of_head, heads,
    SCALED: tl.constexpr, LARGEST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores the keys or values of one token, whose strides are in elements, in its slot.

    HEADS and COLUMNS are `heads` and WIDTH, rounded up to powers of two. If SCALED, the largest number of a head is
    stored as LARGEST, beside a scale; `read` gets the numbers as they will be read.
    """
    token, head, column = tl.program_id(0), tl.arange(0, HEADS)[:, None], tl.arange(0, COLUMNS)[None, :]
    whole = (head < heads) & (column < WIDTH)
    x = tl.load(new + token.to(tl.int64) * of_token + head * of_head + column, mask=whole, other=0.0)
    entry = (tl.load(blocks + token) * heads + head) * SIZE + tl.load(offsets + token)
    if SCALED:
        x = x.to(tl.float32)
        # A maximum ignores NaN, a sum does not.
        top = tl.max(tl.abs(x), axis=1)[:, None] + tl.sum(x * 0, axis=1)[:, None]
        scale = tl.div_rn(tl.where(top < 1.1754943508222875e-38, 1.1754943508222875e-38, top), LARGEST)
        x = tl.div_rn(x, scale)
        if stored.dtype.element_ty == tl.int8:
            x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no bits left for fractions
        rounded = x.to(stored.dtype.element_ty)
        tl.store(scales + entry, scale, mask=head < heads)
        back = read + (token.to(tl.int64) * heads + head) * WIDTH + column
        tl.store(back, (rounded.to(tl.float32) * scale).to(read.dtype.element_ty), mask=whole)
        tl.store(stored + entry * WIDTH + column, rounded, mask=whole)
    else:
        tl.store(stored + entry * WIDTH + column, x.to(stored.dtype.element_ty), mask=whole)
