"""Triton kernels of passes without gradients; this module is imported only on a GPU."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def rotate_heads(
    x, cos, sin, weight, y, heads, tokens, of_row, of_head, of_token, angle_of_row, angle_of_token, eps, added,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one token: pairs (i, i + HALF) of the first 2 HALF of WIDTH columns; the rest stays.

    `x` and the angles have strides, in elements; `y` (rows, heads, tokens, WIDTH) has none. HEADS, COLUMNS and HALVES
    are `heads`, WIDTH and HALF, rounded up to powers of two. If NORMED, each head is first divided by its root mean
    square and multiplied by ``weight + added``, and rounded.
    """
    row, token = tl.program_id(0) // tokens, tl.program_id(0) % tokens
    head, pair, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALVES)[None, :], tl.arange(0, COLUMNS)[None, :]
    angle = row * angle_of_row + token * angle_of_token + pair
    c = tl.load(cos + angle, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=pair < HALF, other=0.0).to(tl.float32)
    source = x + row.to(tl.int64) * of_row + head * of_head + token * of_token
    target = y + ((row.to(tl.int64) * heads + head) * tokens + token) * WIDTH
    inside = (head < heads) & (pair < HALF)
    first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    outside = (head < heads) & (column >= 2 * HALF) & (column < WIDTH)
    rest = tl.load(source + column, mask=outside, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / WIDTH + eps)[:, None]
        first *= scale * (tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32) + added)
        second *= scale * (tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32) + added)
        rest *= scale * (tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + added)
        first, second = first.to(x.dtype.element_ty).to(tl.float32), second.to(x.dtype.element_ty).to(tl.float32)
    tl.store(target + pair, (first * c - second * s).to(y.dtype.element_ty), mask=inside)
    tl.store(target + HALF + pair, (second * c + first * s).to(y.dtype.element_ty), mask=inside)
    if 2 * HALF < WIDTH:
        tl.store(target + column, rest.to(y.dtype.element_ty), mask=outside)


@triton.jit
def add_and_normalise(
    x, found, found_weight, weight, total, y, width, found_eps, found_added, eps, added,
    COLUMNS: tl.constexpr, FOUND_NORMED: tl.constexpr,
):  # fmt: skip
    """Computes ``total = x + found`` and ``y = norm(total)`` for one row of `width` numbers; both are rounded.

    A norm divides by the root mean square and multiplies by ``weight + added``. If FOUND_NORMED, `found` is replaced
    by its own norm first. COLUMNS is `width`, rounded up to a power of two.
    """
    column = tl.arange(0, COLUMNS)
    inside, at = column < width, tl.program_id(0).to(tl.int64) * width + column
    more = tl.load(found + at, mask=inside, other=0.0).to(tl.float32)
    if FOUND_NORMED:
        scale = tl.load(found_weight + column, mask=inside, other=0.0).to(tl.float32) + found_added
        more = (more * tl.rsqrt(tl.sum(more * more, 0) / width + found_eps) * scale).to(x.dtype.element_ty)
        more = more.to(tl.float32)
    found_total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + more
    found_total = found_total.to(x.dtype.element_ty)
    tl.store(total + at, found_total, mask=inside)
    exact = found_total.to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + added
    exact *= tl.rsqrt(tl.sum(exact * exact, 0) / width + eps) * scale
    tl.store(y + at, exact.to(y.dtype.element_ty), mask=inside)


@triton.jit
def multiply_by_silu(gate, up, y, width, of_gate, of_up, BLOCK: tl.constexpr):
    """Computes ``y = silu(gate) up``, with silu(gate) rounded to its data type, for a block of a row of `width`.

    Rows of `gate` and `up` are as many numbers apart as their strides say.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * of_gate + column, mask=column < width, other=0.0)
    u = tl.load(up + row * of_up + column, mask=column < width, other=0.0).to(tl.float32)
    activated = (g.to(tl.float32) * tl.sigmoid(g.to(tl.float32))).to(g.dtype).to(tl.float32)
    tl.store(y + row * width + column, (activated * u).to(y.dtype.element_ty), mask=column < width)
