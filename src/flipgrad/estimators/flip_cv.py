"""One flipped unit per layer, with the straight-through slope and a learned curvature as control variates.

Local expectation gradients (Titsias, Lázaro-Gredilla. Local Expectation Gradients for Black Box Variational Inference. NeurIPS
2015) of few coordinates. A discrete derivative of every unit that is only nearly right is corrected by the true ones of some.
"""

from typing import final

import torch
from torch import Tensor, nn

from flipgrad.errors import InputError
from flipgrad.estimators._paths import Path, PathEstimator, straight_through, value_and_slope
from flipgrad.guards import cannot_look

# The weight of the past in the running averages of curvatures, and the share of draws that are uniform over the units.
MEMORY, UNIFORM = 0.995, 0.1


@final
class FlipCV(PathEstimator, nn.Module):
    r"""The linearised loss in all units of a layer, corrected by the true difference that a few random ones make.

    With the discrete derivative :math:`D_i f = \tfrac12 (f(x_{i=+1}) - f(x_{i=-1}))`, the units' means m(a), the slope g of the
    loss in the states, and numbers :math:`c_i` from earlier batches,

    .. math:: \partial/\partial a_i = m'(a_i) \Big[\hat D_i + \frac{n_i}{K \pi_i} (D_i f - \hat D_i)\Big], \quad
        \hat D_i = g_i - x_i c_i,

    where for every example K units are drawn, i with the probability :math:`\pi_i` and :math:`n_i` times, and their flips are
    evaluated. Unbiased, whatever :math:`\hat D` is: :math:`n_i` is drawn independently of the states and has the mean
    :math:`K \pi_i`, and :math:`m'(a_i) D_i f` is the derivative of the expectation over unit i given all else. The slope is
    straight-through's, of the continuation with the path's noise; :math:`c_i` is the running mean of :math:`x_i (g_i - D_i f)`,
    the curvature in a unit, which is positive where losses are convex. One path, a differentiated tail and K tails for every
    layer.

    Where flips of all units are dear, as behind a nonlinear decoder, this takes most of their gain at the price of one: 200
    latents between two hidden layers each, after 1,500 updates: the variance of the gradient is 3.9 times that of flips of all
    units, DisARM's 98 times, that of one flip alone (BitFlip) 240 times.

    The averages are buffers, made at the first estimate, or by ``load_state_dict``. In evaluation mode, and under
    ``torch.no_grad()``, they are not updated.

    Args:
        flips: K, at least 1.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.FlipCV()).mean().backward()
    """

    unbiased = True
    units_only = "its control variate is differentiated in every weight for each example"
    citation = "here; Titsias, Lázaro-Gredilla 2015"

    def __init__(self, flips: int = 1) -> None:
        super().__init__()
        if not isinstance(flips, int) or flips < 1:
            raise InputError(f"FlipCV(flips={flips}): give the number of units to flip, at least 1")
        self.flips = flips
        self.tails = 1 + flips

    def gradient(self, path: Path, k: int) -> Tensor:
        units = path.units(k)
        a, x = units.a, units.states
        _, slope = value_and_slope(lambda states: path.continued_with_noise(k, states, straight_through), x)
        # Under autocast pre-activations have half the digits of losses.
        slope, flat, losses = slope.detach().flatten(1).to(path.losses), x.flatten(1).to(path.losses), path.losses.detach()
        sums, counts = self._averages(k, a)
        known = slope - flat * (sums / counts.clamp(min=1e-9)).to(flat)
        slopes = 2 * units.noise.pdf(a.to(losses)).flatten(1)
        share = slopes / slopes.sum(1, keepdim=True).clamp(min=torch.finfo(losses.dtype).tiny)
        share = (1 - UNIFORM) * share + UNIFORM / a.flatten(1).shape[1]
        result, observed = known.clone(), []
        for chosen in self._chosen(units.uniform(losses.new_empty(len(a), 1)), share):
            mask = torch.zeros_like(flat).scatter(1, chosen, 1.0)
            change = losses - units.replayed((flat * (1 - 2 * mask)).to(x).view(1, *x.shape))[0]
            discrete = change[:, None] * flat.gather(1, chosen) / 2
            weight = 1 / (self.flips * share.gather(1, chosen))
            result = result.scatter_add(1, chosen, weight * (discrete - known.gather(1, chosen)))
            observed.append((chosen, flat.gather(1, chosen) * (slope.gather(1, chosen) - discrete)))
        # Without a gradient nothing is trained; and what is evaluated anew on the way back must not have learned from itself.
        if self.training and torch.is_grad_enabled() and not cannot_look():
            self._learn(sums, counts, observed)
        return (slopes * result).view_as(a)

    def _chosen(self, u: Tensor, share: Tensor) -> list[Tensor]:
        """For every example the numbers [B, 1] of units drawn with these probabilities, at evenly spaced places."""
        ends, last = share.cumsum(1), share.shape[1] - 1
        places = [(u + k) / self.flips for k in range(self.flips)]
        return [(ends <= place * ends[:, -1:]).sum(1, keepdim=True).clamp(max=last) for place in places]

    def _averages(self, k: int, a: Tensor) -> tuple[Tensor, Tensor]:
        """The sums and the counts of layer ``k``, each [units], made if they are not there."""
        names, size = (f"sums_{k}", f"counts_{k}"), a.flatten(1).shape[1]
        for name in names:
            if not hasattr(self, name):
                self.register_buffer(name, torch.zeros(size, device=a.device))
        sums, counts = (getattr(self, name) for name in names)
        if sums.shape != (size,):
            raise InputError(
                f"FlipCV knows layer {k + 1} with {len(sums)} units, and here it has {size}: use an estimator of its own for "
                "every network"
            )
        return sums, counts

    @torch.no_grad()
    def _learn(self, sums: Tensor, counts: Tensor, observed: list[tuple[Tensor, Tensor]]) -> None:
        sums.mul_(MEMORY)
        counts.mul_(MEMORY)
        for chosen, values in observed:
            sums.index_add_(0, chosen.flatten(), values.flatten().to(sums))
            counts.index_add_(0, chosen.flatten(), torch.ones_like(values.flatten().to(counts)))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        for key, value in state_dict.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name.partition("_")[0] in ("sums", "counts"):
                self.register_buffer(name, torch.zeros_like(value))
        super()._load_from_state_dict(state_dict, prefix, *args)
