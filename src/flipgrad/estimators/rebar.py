"""REINFORCE with a concrete control variate.

Tucker, Mnih, Maddison, Lawson, Sohl-Dickstein. REBAR: Low-variance, unbiased gradient estimates for discrete latent variable
models. NeurIPS 2017.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from flipgrad.estimators._control import ConcreteControl
from flipgrad.estimators._paths import Path


@final
class REBAR(ConcreteControl):
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

    unbiased = True
    citation = "Tucker et al. 2017"

    def __init__(self, temperature: float = 0.5, scale: float = 1.0) -> None:
        super().__init__(temperature, scale)

    def prepare(self, path: Path) -> None:
        """Nothing here depends on the network."""

    def added(self, k: int, states: Tensor) -> Tensor | None:
        return None
