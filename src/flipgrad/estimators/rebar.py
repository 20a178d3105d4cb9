"""REINFORCE with a concrete control variate.

Tucker, Mnih, Maddison, Lawson, Sohl-Dickstein. REBAR: Low-variance, unbiased gradient estimates for discrete latent variable
models. NeurIPS 2017.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from flipgrad.contract import LayerCall
from flipgrad.estimators._draws import conditional, positive
from flipgrad.estimators._paths import Path, per_example, value_and_slope
from flipgrad.estimators._tuned import TunedEstimator


class REBAR(TunedEstimator):
    r"""The score function, with the loss of a relaxed network as control variate, at every layer.

    With the noise Z of a layer and its states x, a second noise :math:`\tilde Z` drawn given x, temperature t, scale
    :math:`\eta`, and f the loss as a function of the layer's states,

    .. math:: \partial/\partial a = \big(f(x) - \eta f(\tilde s)\big) \frac{\partial}{\partial a} \log p(x \mid a)
        + \eta \frac{\partial}{\partial a} \big(f(s) - f(\tilde s)\big),
        \quad s = 2\sigma\Big(\frac{a - Z}{t}\Big) - 1, \quad \tilde s = 2\sigma\Big(\frac{a - \tilde Z}{t}\Big) - 1,

    where :math:`\tilde Z = x F^{-1}(v F(x a))`, v uniform, is differentiated at fixed x and v. On relaxed states f continues
    through the later layers relaxed in the same way, and always with the path's noise there, so that as t goes to 0 it becomes
    f(x). Unbiased in every net, with every noise that has a smooth or piecewise smooth F: for each fixed noise of the later
    layers, f of the relaxed states is a smooth function of them, and its mean does not depend on how it is differentiated.
    With :class:`flipgrad.Uniform` noise, outside the support a state is certain, its score is 0 and so is the mean of the
    rest. The head must be differentiable and treat the examples separately. One path and two relaxed passes for every layer.

    The logarithms of t and :math:`\eta`, the same for all layers, are parameters. Going backward through the mean loss gives
    them the gradient of the estimate's variance, relative to its size; give them to an optimizer, or freeze them with
    ``requires_grad_(False)``. ``variance_loss`` gives the plain one from a draw of its own.

    Args:
        temperature: t at the start, positive.
        scale: :math:`\eta` at the start, positive.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> x, objective, rebar = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), fg.REBAR()
    >>> optimizer = torch.optim.Adam([*net.parameters(), *rebar.parameters()])
    >>> net(x, objective, estimator=rebar).mean().backward()
    >>> optimizer.step()
    """

    tails = 2
    citation = "Tucker et al. 2017"

    def __init__(self, temperature: float = 0.5, scale: float = 1.0) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(positive(self, "temperature", temperature))))
        self.log_scale = nn.Parameter(torch.tensor(math.log(positive(self, "scale", scale))))

    def argument(self, name: str) -> Any:
        # As it is now: both are learned.
        learned = {"temperature": self.log_temperature, "scale": self.log_scale}
        return round(learned[name].exp().item(), 6) if name in learned else super().argument(name)

    def gradient(self, path: Path, k: int) -> Tensor:
        a, x, noise = path.a[k].detach(), path.states[k], path.noises[k]
        new = path.batch.draw(noise, a)

        def tied(t: Tensor) -> Tensor:
            return t - conditional(noise, t, x, new)

        _, slope = self._control_and_slope(path, k, a - path.z[k])
        control, tied_slope = self._control_and_slope(path, k, tied(a))
        learning = per_example(path.losses.detach() - control, a) * noise.score(x, a)
        return learning + slope - tied_slope * value_and_slope(tied, a)[1].detach()

    def _control_and_slope(self, path: Path, k: int, zeta: Tensor) -> tuple[Tensor, Tensor]:
        """The control variate c [B] and its derivative in ``zeta``, differentiable in the own parameters."""
        half = 0.5 * torch.exp(-self.log_temperature)

        def relaxed(call: LayerCall, z: Tensor) -> Tensor:
            # tanh(t / 2) = 2 sigmoid(t) - 1.
            return torch.tanh((call.affine(call.x) - z) * half)

        def control(zeta: Tensor) -> Tensor:
            states = torch.tanh(zeta * half)
            return self.control(k, states, torch.exp(self.log_scale) * path.continued_with_noise(k, states, relaxed))

        return value_and_slope(control, zeta)

    def control(self, k: int, states: Tensor, scaled: Tensor) -> Tensor:
        r"""The control variate c [B] of layer ``k``, from its relaxed states s and the ``scaled`` loss :math:`\eta f(s)`.

        The estimate is unbiased for any smooth function c of the states, as the two ways to differentiate E[c] agree.
        """
        return scaled
