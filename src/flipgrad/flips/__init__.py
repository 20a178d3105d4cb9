r"""Flip products: the gradient in binary states, :math:`u_i = x_i \sum_j [F(a_j) - F(a_j - 2A_{ji}x_i)]\, g_j`.

The one hard operation of PSA. ``naive`` is its definition; ``vectorized`` is exact and works in bounded memory. The
functions here choose: every caller asks this module, never a particular implementation.
"""

from flipgrad.flips.vectorized import conv2d, linear

__all__ = ["conv2d", "linear"]
