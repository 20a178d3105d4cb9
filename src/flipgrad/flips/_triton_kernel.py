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
def outputs_of(a, grad, scale):
    """Of the outputs: g F(A), the mantissa and the exponent of 1 + exp(A), and whether a is negative."""
    # The bound only keeps infinite pre-activations from giving inf - inf.
    size = tl.minimum(tl.abs(a) / scale, 1e30)
    small = 1.0 + tl.exp(-size)
    exponent = tl.floor(size * 1.4426950408889634)
    # ln 2 in two parts, the first with so few bits that its multiples are exact.
    rest = (size - exponent * 0.693359375) + exponent * 2.1219444005469058e-4
    # The rest is between 0 and ln 2, but for pre-activations so large that their rounding is larger.
    rest = tl.minimum(tl.maximum(rest, -1.0), 1.0)
    return grad / small, tl.exp(rest) * small, exponent, a < 0


@triton.jit
def flip_terms(a, grad, scale, table, table_size, weights, down):
    """The terms of the flip product, [places, outputs, inputs]; ``down`` says where x is -1, ``weights`` which there are."""
    coefficient, mantissa, exponent, negative = outputs_of(a, grad, scale)
    t = tl.load(table, weights, 0.0)
    same_mantissa = tl.load(table + table_size, weights, 1.0)
    same_exponent = tl.load(table + 2 * table_size, weights, 0.0)
    other_mantissa = tl.load(table + 3 * table_size, weights, 1.0)
    other_exponent = tl.load(table + 4 * table_size, weights, 0.0)
    # Where x and a have different signs.
    opposite = negative[:, :, None] != down[:, None, :]
    mantissa_w = tl.where(opposite, other_mantissa[None, :, :], same_mantissa[None, :, :])
    exponent_w = tl.where(opposite, other_exponent[None, :, :], same_exponent[None, :, :])
    ratio = mantissa[:, :, None] * mantissa_w * tl.exp2(exponent[:, :, None] + exponent_w)
    return coefficient[:, :, None] * (t[None, :, :] / (ratio + tl.where(opposite, -t[None, :, :], t[None, :, :])))


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
def flip_kernel(
    x,
    a,
    grad,
    u,
    tables,
    scales,
    batch,
    inputs,
    outputs,
    height,
    width,
    out_height,
    out_width,
    x_n,
    x_c,
    x_h,
    x_w,
    a_n,
    a_c,
    a_h,
    a_w,
    grad_n,
    grad_c,
    grad_h,
    grad_w,
    u_n,
    u_c,
    u_h,
    u_w,
    table_size,
    GROUPS: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    PLACES: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RATIO: tl.constexpr,
):
    """A tile [PLACES, INPUTS] of u: sums over the kernel's positions and over the outputs, OUTPUTS at a time.

    The sums are those of the log ratio, with the output states as ``grad``, or else of the flip product. ``inputs`` and
    ``outputs`` are the channels of one group; ``tables`` is [1 or 5, GROUPS, KERNEL_H, KERNEL_W, outputs, inputs].
    All places of a program have the same phase, their coordinates modulo the stride, because then they have the same positions
    of the kernel: none of the work is for positions that the stride skips.
    """
    rows = tl.cdiv(height, STRIDE_H)
    columns = tl.cdiv(width, STRIDE_W)
    tiles = tl.cdiv(inputs, INPUTS)
    program = tl.program_id(0).to(tl.int64)
    channel = (program % tiles) * INPUTS + tl.arange(0, INPUTS)
    group = program // tiles % GROUPS
    phase = program // (tiles * GROUPS) % (STRIDE_H * STRIDE_W)
    phase_h = phase // STRIDE_W
    phase_w = phase % STRIDE_W
    place = program // (tiles * GROUPS * STRIDE_H * STRIDE_W) * PLACES + tl.arange(0, PLACES)
    example = place // (rows * columns)
    row = place // columns % rows
    column = place % columns
    h = row * STRIDE_H + phase_h
    w = column * STRIDE_W + phase_w
    here = (example < batch) & (h < height) & (w < width)
    inside = channel < inputs

    unit = example * x_n + h * x_h + w * x_w
    state = tl.load(x + unit[:, None] + (group * inputs + channel)[None, :] * x_c, here[:, None] & inside[None, :], 0.0)
    down = state < 0
    total = tl.zeros([PLACES, INPUTS], dtype=u.dtype.element_ty)
    for position in range(KERNEL_H * KERNEL_W):
        # The first place of the phase is at this row and column of the output, in steps of the stride.
        top = phase_h + PADDING_H - position // KERNEL_W * DILATION_H
        left = phase_w + PADDING_W - position % KERNEL_W * DILATION_W
        if (top % STRIDE_H == 0) & (left % STRIDE_W == 0):
            out_row = row + top // STRIDE_H
            out_column = column + left // STRIDE_W
            seen = here & (out_row >= 0) & (out_row < out_height) & (out_column >= 0) & (out_column < out_width)
            for first in range(0, outputs, OUTPUTS):
                output = first + tl.arange(0, OUTPUTS)
                valid = seen[:, None] & (output < outputs)[None, :]
                out_channel = (group * outputs + output)[None, :]
                at = example * a_n + out_row * a_h + out_column * a_w
                grad_at = example * grad_n + out_row * grad_h + out_column * grad_w
                a_here = tl.load(a + at[:, None] + out_channel * a_c, valid, 0.0)
                grad_here = tl.load(grad + grad_at[:, None] + out_channel * grad_c, valid, 0.0)
                weights = (output < outputs)[:, None] & inside[None, :]
                line = (group * KERNEL_H * KERNEL_W + position) * outputs + output
                table = tables + line[:, None] * inputs + channel[None, :]
                if RATIO:
                    term = ratio_terms(a_here, grad_here, tl.load(scales), table, weights, down)
                else:
                    term = flip_terms(a_here, grad_here, tl.load(scales), table, table_size, weights, down)
                total += tl.sum(term, axis=1)
    address = u + (example * u_n + h * u_h + w * u_w)[:, None] + (group * inputs + channel)[None, :] * u_c
    tl.store(address, tl.where(state == 0, 0.0, total), here[:, None] & inside[None, :])
