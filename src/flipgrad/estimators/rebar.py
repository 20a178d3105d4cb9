"""REINFORCE with a control variate of relaxed states: a concrete one, and a learned one.

REBAR: Tucker, Mnih, Maddison, Lawson, Sohl-Dickstein. REBAR: Low-variance, unbiased gradient estimates for discrete latent
variable models. NeurIPS 2017.
RELAX: Grathwohl, Choi, Wu, Roeder, Duvenaud. Backpropagation through the Void: Optimizing control variates for black-box
gradient estimation. ICLR 2018.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from flipgrad.contract import LayerCall
from flipgrad.errors import InputError
from flipgrad.estimators._draws import conditional, positive
from flipgrad.estimators._paths import Path, per_example, value_and_slope
from flipgrad.estimators._tuned import TunedEstimator

# Hidden units of the surrogates that RELAX builds.
HIDDEN = 16


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

    unbiased = True
    tails = 2
    citation = "Tucker et al. 2017"

    def __init__(self, temperature: float = 0.5, scale: float = 1.0) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(positive(self, "temperature", temperature))))
        self.log_scale = nn.Parameter(torch.tensor(math.log(positive(self, "scale", scale))))

    def estimate(self, path: Path) -> list[Tensor]:
        return [self._layer(path, k) for k in range(len(path.a))]

    def _layer(self, path: Path, k: int) -> Tensor:
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


@final
class RELAX(REBAR):
    r"""REBAR with a free-form network added to its control variate, at every layer.

    The control variate of layer k is, in the notation of :class:`flipgrad.REBAR`,

    .. math:: c_k(s) = \eta f(s) + r_k(s),

    with :math:`r_k` any differentiable network on the layer's flattened relaxed states; it is used just as
    :math:`\eta f` is there. Unbiased for the same reason, whatever the networks. One path and two relaxed passes for every
    layer.

    The networks and the logarithms of temperature and scale are parameters, trained as those of REBAR. Surrogates that are
    not given are built when the first estimate, or ``load_state_dict``, tells the layers' sizes: make the optimizer after it.
    They have one hidden layer and start at 0, where this is REBAR.

    Args:
        surrogate: a module for every binary layer in order, or the module of the only one, from [B, units] to [B] or
            [B, 1] in the network's dtype; it treats the examples separately. By default built here.
        temperature: at the start, positive.
        scale: :math:`\eta` at the start, positive.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))
    >>> relax = fg.RELAX(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    >>> net(x, objective, estimator=relax).mean().backward()
    >>> relax.variance_loss(net, x, objective).backward()
    """

    citation = "Grathwohl et al. 2018"

    def __init__(
        self, surrogate: nn.Module | Sequence[nn.Module] | None = None, temperature: float = 0.5, scale: float = 1.0
    ) -> None:
        super().__init__(temperature, scale)
        given = [surrogate] if isinstance(surrogate, nn.Module) else surrogate
        if given is not None and not given:
            raise InputError("RELAX(surrogate=[]): give one module for every binary layer, or None to have them built")
        self.surrogates = nn.ModuleList(given)

    def estimate(self, path: Path) -> list[Tensor]:
        if not self.surrogates:
            self.surrogates.extend(_network(a.flatten(1).shape[1]).to(a) for a in path.a)
        if len(self.surrogates) != len(path.a):
            raise InputError(
                f"RELAX has {len(self.surrogates)} surrogates for {len(path.a)} binary layers; give one each, and use an "
                "estimator of its own for every network"
            )
        return super().estimate(path)

    def control(self, k: int, states: Tensor, scaled: Tensor) -> Tensor:
        units = states.flatten(1).shape[1]
        try:
            values: Tensor = self.surrogates[k](states.flatten(1))
        except RuntimeError as error:
            raise InputError(
                f"RELAX: surrogate {k} fails on the {units} {states.dtype} units of layer {k + 1} ({error}); use an "
                "estimator of its own for every network, in the network's dtype and on its device"
            ) from error
        if values.shape not in ((len(states),), (len(states), 1)):
            raise InputError(
                f"RELAX: surrogate {k} gave {list(values.shape)} for states {list(states.flatten(1).shape)}; it must give one "
                "value for each example, [B] or [B, 1]"
            )
        return scaled + values.flatten()

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        first = [f"{prefix}surrogates.{k}.0.weight" for k in range(len(state_dict))]
        if not self.surrogates:
            saved = [state_dict[name] for name in first if name in state_dict]
            self.surrogates.extend(_network(weight.shape[1]).to(weight) for weight in saved)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _network(units: int) -> nn.Module:
    last = nn.Linear(HIDDEN, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(units, HIDDEN), nn.Tanh(), last)
