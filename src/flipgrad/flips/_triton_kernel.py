r"""The kernel of :mod:`flipgrad.flips.triton`, in a file of its own because it cannot be imported without triton.

With d = 2w, A = \|a\|, s the sign of a, and w and a divided by the noise's scale, the tanh form of the flip product becomes

.. math:: u_i = \sum_j \frac{g_j F(A_j)\, T_{ji}}{R_{ji} + s_j x_i T_{ji}}, \quad T = \tanh w, \quad
    R_{ji} = \frac{1 + e^{A_j}}{1 + e^{s_j x_i d_{ji}}},

where nothing cancels: where x and s make the second term of the denominator negative, R is above 1, and above twice its size.
The two factors of R are kept as a mantissa and an exponent of two, so that neither overflows, and their product does so only
where the term is 0.

With b = ya and s = 2xyw the log ratio is

.. math:: \log r_i = \sum_j \min(\max(b_j, 0) - s_{ji}, \max(-b_j, 0)) - \log\big(F(|b_j|) (1 + e^{-|b_j - s_{ji}|})\big),

where the argument of the logarithm is between 1/2 and 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flip_terms(a, grad, scale, table, table_size, weights, down):
    """The terms of the flip product, [places, outputs, inputs]; ``down`` says where x is -1, ``weights`` which there are."""
    # The bound only keeps infinite pre-activations from giving inf - inf.
    size = tl.minimum(tl.abs(a) / scale, 1e30)
    small = 1.0 + tl.exp(-size)
    # The mantissa and the exponent of 1 + exp(A). Of the two parts of ln 2 the first has few bits: its multiples are exact.
    exponent = tl.floor(size * 1.4426950408889634)
    rest = (size - exponent * 0.693359375) + exponent * 2.1219444005469058e-4
    # The rest is between 0 and ln 2, but for pre-activations so large that their rounding is larger.
    mantissa = tl.exp(tl.minimum(tl.maximum(rest, -1.0), 1.0)) * small
    t = tl.load(table, weights, 0.0)
    same_mantissa = tl.load(table + table_size, weights, 1.0)
    same_exponent = tl.load(table + 2 * table_size, weights, 0.0)
    other_mantissa = tl.load(table + 3 * table_size, weights, 1.0)
    other_exponent = tl.load(table + 4 * table_size, weights, 0.0)
    # Where x and a have different signs.
    opposite = (a < 0)[:, :, None] != down[:, None, :]
    mantissa_w = tl.where(opposite, other_mantissa[None, :, :], same_mantissa[None, :, :])
    exponent_w = tl.where(opposite, other_exponent[None, :, :], same_exponent[None, :, :])
    ratio = mantissa[:, :, None] * mantissa_w * tl.exp2(exponent[:, :, None] + exponent_w)
    return (grad / small)[:, :, None] * (t[None, :, :] / (ratio + tl.where(opposite, -t[None, :, :], t[None, :, :])))


@triton.jit
def ratio_terms(a, y, scale, table, weights, down):
    """The terms of the log ratio; an output y = 0, which is no unit, has terms 0."""
    b = y * a / scale
    step = y[:, :, None] * tl.load(table, weights, 0.0)[None, :, :]
    s = tl.where(down[:, None, :], -step, step)
    least = tl.minimum(tl.maximum(b, 0.0)[:, :, None] - s, tl.maximum(-b, 0.0)[:, :, None])
    kept = 1.0 / (1.0 + tl.exp(-tl.abs(b)))
    return least - tl.log(kept[:, :, None] * (1.0 + tl.exp(-tl.abs(b[:, :, None] - s))))


@triton.jit
def places_of(
    program, inputs, height, width,
    GROUPS: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PLACES: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Of a program: its channels and their group, the phase of its places, and their examples, rows and columns.

    The phase of a place are its coordinates modulo the stride; rows and columns are counted in steps of the stride.
    """
    rows = tl.cdiv(height, STRIDE_H)
    columns = tl.cdiv(width, STRIDE_W)
    tiles = tl.cdiv(inputs, INPUTS)
    channel = (program % tiles) * INPUTS + tl.arange(0, INPUTS)
    group = program // tiles % GROUPS
    phase = program // (tiles * GROUPS) % (STRIDE_H * STRIDE_W)
    place = program // (tiles * GROUPS * STRIDE_H * STRIDE_W) * PLACES + tl.arange(0, PLACES)
    example = place // (rows * columns)
    return channel, group, phase // STRIDE_W, phase % STRIDE_W, example, place // columns % rows, place % columns


@triton.jit
def add_terms(
    total, a, given, scale, tables, table_size, place, out_places,
    seen, channel, inputs, outputs, down, OUTPUTS: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """``total`` and the terms of all outputs of one position of the kernel, OUTPUTS at a time.

    ``a`` and ``given`` point to the first output of the group and ``tables`` to the position's part; ``place`` is where the
    outputs are that are ``seen``, and ``out_places`` the distance between channels.
    """
    inside = channel < inputs
    for first in range(0, outputs, OUTPUTS):
        output = first + tl.arange(0, OUTPUTS)
        valid = seen[:, None] & (output < outputs)[None, :]
        at = place[:, None] + output[None, :] * out_places
        a_here = tl.load(a + at, valid, 0.0)
        given_here = tl.load(given + at, valid, 0.0)
        weights = (output < outputs)[:, None] & inside[None, :]
        table = tables + output[:, None] * inputs + channel[None, :]
        if RATIO:
            term = ratio_terms(a_here, given_here, scale, table, weights, down)
        else:
            term = flip_terms(a_here, given_here, scale, table, table_size, weights, down)
        total += tl.sum(term, axis=1)
    return total


@triton.jit
def flip_kernel(
    x, a, given, u, tables, scales,
    batch, inputs, outputs, height, width, out_height, out_width,
    GROUPS: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PLACES: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """A tile [PLACES, INPUTS] of u: sums over the kernel's positions and over the outputs. All tensors are contiguous.

    The sums are those of the log ratio, with the output states ``given``, or of the flip product, with the gradient in them.
    ``inputs`` and ``outputs`` count a group's channels; ``tables`` is [1 or 5, GROUPS, KERNEL_H, KERNEL_W, outputs, inputs].
    All places of a program have the same phase, because then they have the same positions of the kernel: none of the work is
    for positions that the stride skips.
    """
    program = tl.program_id(0).to(tl.int64)
    channel, group, phase_h, phase_w, example, row, column = places_of(
        program, inputs, height, width, GROUPS, STRIDE_H, STRIDE_W, PLACES, INPUTS
    )
    h, w = row * STRIDE_H + phase_h, column * STRIDE_W + phase_w
    here = (example < batch) & (h < height) & (w < width)
    unit = ((example * GROUPS + group)[:, None] * inputs + channel[None, :]) * height * width + (h * width + w)[:, None]
    mask = here[:, None] & (channel < inputs)[None, :]
    state = tl.load(x + unit, mask, 0.0)
    total = tl.zeros([PLACES, INPUTS], dtype=u.dtype.element_ty)
    for position in range(KERNEL_H * KERNEL_W):
        # The first place of the phase is at this row and column of the output, in steps of the stride.
        top = phase_h + PADDING_H - position // KERNEL_W * DILATION_H
        left = phase_w + PADDING_W - position % KERNEL_W * DILATION_W
        if (top % STRIDE_H == 0) & (left % STRIDE_W == 0):
            r, c = row + top // STRIDE_H, column + left // STRIDE_W
            seen = here & (r >= 0) & (r < out_height) & (c >= 0) & (c < out_width)
            place = ((example * GROUPS + group) * outputs * out_height + r) * out_width + c
            table = tables + (group * KERNEL_H * KERNEL_W + position) * outputs * inputs
            size = GROUPS * KERNEL_H * KERNEL_W * outputs * inputs
            total = add_terms(
                total, a, given, tl.load(scales), table, size, place, out_height * out_width,
                seen, channel, inputs, outputs, state < 0, OUTPUTS, RATIO,
            )  # fmt: skip
    tl.store(u + unit, tl.where(state == 0, 0.0, total), mask)
