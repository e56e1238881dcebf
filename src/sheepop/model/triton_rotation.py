"""The Triton kernel of `positions.rotate` where no gradient is needed; this module is imported only on a GPU."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def rotate_heads(
    x, cos, sin, y, heads, tokens, of_row, of_head, of_token, angle_of_row, angle_of_token,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one token: pairs (i, i + HALF) of the first 2 HALF of WIDTH columns; the rest stays.

    `x` and the angles have strides, in elements; `y` (rows, heads, tokens, WIDTH) has none. HEADS, COLUMNS and HALVES
    are `heads`, WIDTH and HALF, rounded up to powers of two.
    """
    row, token = tl.program_id(0) // tokens, tl.program_id(0) % tokens
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALVES)[None, :]
    angle = row * angle_of_row + token * angle_of_token + pair
    c = tl.load(cos + angle, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=pair < HALF, other=0.0).to(tl.float32)
    source = x + row.to(tl.int64) * of_row + head * of_head + token * of_token
    target = y + ((row.to(tl.int64) * heads + head) * tokens + token) * WIDTH
    inside = (head < heads) & (pair < HALF)
    first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + pair, (first * c - second * s).to(y.dtype.element_ty), mask=inside)
    tl.store(target + HALF + pair, (second * c + first * s).to(y.dtype.element_ty), mask=inside)
    if 2 * HALF < WIDTH:
        column = tl.arange(0, COLUMNS)[None, :]
        outside = (head < heads) & (column >= 2 * HALF) & (column < WIDTH)
        tl.store(target + column, tl.load(source + column, mask=outside, other=0.0), mask=outside)
