"""The Triton kernel of `paged_kernels.attend_by_triton`, in its own file because only GPU machines load Triton."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def attend(
    queries, keys, values, key_scales, value_scales, table, first_positions, last_positions, slopes,
    tops, sums, sums_of_values, kv_heads, table_width, parts, scale, cap,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TILE: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    IN_INT8: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Attends from token r to one part of the positions that it sees, in the GROUP query heads of key-value head k.

    Vectors have GROUPS, COLUMNS and VALUE_COLUMNS entries (powers of two), of which the first GROUP, WIDTH and
    VALUE_WIDTH are used. Stores the largest score, the sum of e^(score - largest), and the values weighted by these.
    """
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, column, value_column = tl.arange(0, GROUPS), tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    heads = row * kv_heads * GROUP + kv_head * GROUP + group
    whole = (group < GROUP)[:, None] & (column < WIDTH)[None, :]
    query = tl.load(queries + heads[:, None] * WIDTH + column[None, :], mask=whole, other=0.0).to(tl.float32)
    first, last = tl.load(first_positions + row), tl.load(last_positions + row)
    length = tl.cdiv(last + 1 - first, parts)
    begin = first + part * length
    end = tl.minimum(begin + length, last + 1)
    top = tl.full((GROUPS,), float("-inf"), tl.float32)
    total = tl.zeros((GROUPS,), tl.float32)
    found = tl.zeros((GROUPS, VALUE_COLUMNS), tl.float32)
    if SLOPED:
        slope = tl.load(slopes + kv_head * GROUP + group, mask=group < GROUP, other=0.0)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        block = tl.load(table + row * table_width + position // SIZE, mask=seen, other=0)
        entry = (block * kv_heads + kv_head) * SIZE + position % SIZE
        at = keys + entry[:, None] * WIDTH + column[None, :]
        key = tl.load(at, mask=seen[:, None] & (column < WIDTH)[None, :], other=0).to(tl.float32)
        scores = tl.sum(query[:, None, :] * key[None, :, :], axis=2) * scale
        if IN_INT8:
            scores *= tl.load(key_scales + entry, mask=seen, other=0.0)[None, :]
        if CAPPED:
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
        if SLOPED:
            scores -= slope[:, None] * (last - position).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights, fading = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        top, total = higher, total * fading + tl.sum(weights, axis=1)
        at = values + entry[:, None] * VALUE_WIDTH + value_column[None, :]
        value = tl.load(at, mask=seen[:, None] & (value_column < VALUE_WIDTH)[None, :], other=0).to(tl.float32)
        if IN_INT8:
            value *= tl.load(value_scales + entry, mask=seen, other=0.0)[:, None]
        found = found * fading[:, None] + tl.sum(weights[:, :, None] * value[None, :, :], axis=1)
    here = heads * parts + part
    tl.store(tops + here, top, mask=group < GROUP)
    tl.store(sums + here, total, mask=group < GROUP)
    whole = (group < GROUP)[:, None] & (value_column < VALUE_WIDTH)[None, :]
    tl.store(sums_of_values + here[:, None] * VALUE_WIDTH + value_column[None, :], found, mask=whole)
