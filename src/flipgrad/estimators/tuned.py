"""Estimators with parameters of their own that are trained to lower the variance.

An unbiased estimate g of a gradient has the same mean whatever the estimator's parameters are. So the gradient of its
variance in them is that of E[g^2], and the one draw's d(g^2) is an unbiased estimate of it (Ruiz, Titsias, Blei 2016; Tucker
et al. 2017).

REBAR, with a concrete control variate: Tucker, Mnih, Maddison, Lawson, Sohl-Dickstein. REBAR: Low-variance, unbiased gradient
estimates for discrete latent variable models. NeurIPS 2017.
RELAX, with a learned one: Grathwohl, Choi, Wu, Roeder, Duvenaud. Backpropagation through the Void: Optimizing control variates
for black-box gradient estimation. ICLR 2018.
DoubleCV, leave-one-out REINFORCE with two: Titsias, Shi. Double Control Variates for Gradient Estimation in Discrete Latent
Variable Models. AISTATS 2022.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Generator, Tensor, nn

from flipgrad.contract import Batch, LayerCall
from flipgrad.errors import InputError
from flipgrad.estimators._draws import conditional, positive
from flipgrad.estimators._paths import Path, PathEstimator, per_example, value_and_slope
from flipgrad.network import Sequential, check_sequential
from flipgrad.noise import sign
from flipgrad.objectives import Objective
from flipgrad.sampling import fresh

# The weight of the past in the running average of the squared length.
MEMORY = 0.99
# How fast the own parameters learn at the learning rate of the network: a scale that is driven to 0 does not come back.
PACE = 0.1
# Hidden units of the surrogates that RELAX builds.
HIDDEN = 16


class TunedEstimator(PathEstimator, nn.Module):
    """An unbiased estimator of path gradients that has parameters of its own.

    They are trained along: after going backward through the batch's mean loss their gradient is that of the estimate's
    squared length (:meth:`variance_loss`, from the same draw), times PACE and divided by a running average of that square
    (or by the draw's own, where it is larger), so that a learning rate means the same for losses of any size.
    Frozen, ``requires_grad_(False)``, they cost nothing.
    """

    unbiased = True
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self._learned: tuple[Tensor, Tensor] | None = None

    def estimate(self, path: Path) -> Sequence[Tensor]:
        """The gradients in every layer's pre-activations, differentiable in the estimator's own parameters."""
        return super().gradients(path)

    @final
    def gradients(self, path: Path) -> Sequence[Tensor]:
        tune = torch.is_grad_enabled() and len(path.losses) > 0 and any(p.requires_grad for p in self.parameters())
        with torch.set_grad_enabled(tune):
            gradients = self.estimate(path)
        self._learned = self._learn(gradients) if tune else None
        return gradients

    @final
    def extra(self, path: Path) -> Tensor | None:
        if self._learned is None:
            return None
        (square, carrier), self._learned = self._learned, None
        mixed = MEMORY * self.level + (1 - MEMORY) * square
        self.level.copy_(torch.where(self.level > 0, mixed, square))
        # A draw far above the average counts no more than in proportion to itself, so that an outlier is no leap.
        size = torch.maximum(self.level, square.to(self.level)).clamp(min=torch.finfo(self.level.dtype).tiny)
        return (PACE * carrier / size).expand_as(path.losses)

    @final
    @torch.enable_grad()
    def variance_loss(self, net: Sequential, x: Tensor, objective: Objective, *, generator: Generator | None = None) -> Tensor:
        """One draw of the estimate's squared length, whose gradient trains the estimator's own parameters.

        The length is that of the gradient in all pre-activations; its mean is their total variance plus a constant. Going
        backward through it leaves the network's parameters without a gradient.

        Args:
            net: the network.
            x: inputs [B, ...].
            objective: as for the network.
            generator: the source of randomness.

        Returns:
            The mean over the batch, a scalar.
        """
        name = f"{type(self).__name__}.variance_loss"
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise InputError(f"{name}: every parameter of the estimator is frozen; call requires_grad_() on some")
        check_sequential(net, name)
        square, carrier = self._learn(self.estimate(Path.sample(net.network(), Batch(x, objective, fresh(generator)))))
        return square + carrier

    def _learn(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The mean squared length, without a gradient, and a 0 that carries its gradient to the own parameters alone."""
        square = torch.stack([g.flatten(1).square().sum(1).mean() for g in gradients]).sum()
        own = [parameter for parameter in self.parameters() if parameter.requires_grad]
        slopes = torch.autograd.grad(square, own, materialize_grads=True)
        # A slope that overflowed is no direction, and must not make the loss NaN.
        finite = [slope.nan_to_num(0.0, 0.0, 0.0) for slope in slopes]
        carriers = [((p - p.detach()) * slope).sum().to(square) for p, slope in zip(own, finite, strict=True)]
        return square.detach(), torch.stack(carriers).sum()


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

    def estimate(self, path: Path) -> Sequence[Tensor]:
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


@final
class DoubleCV(TunedEstimator):
    r"""Leave-one-out REINFORCE with K states of every layer, and a first-order Taylor term in the loss and in the baseline.

    With independent states :math:`x_1, \dots, x_K` of a layer with mean m(a),

    .. math:: \partial/\partial a = \frac1K \sum_k \Big(f(x_k) + b_k - \frac{1}{K-1} \sum_{j \ne k} \big(f(x_j) + b_j\big)\Big)
        \frac{\partial}{\partial a} \log p(x_k \mid a) - \alpha \frac{\partial m}{\partial a} \frac1K \sum_k \nabla f(x_k),

    .. math:: b_k = \alpha \, \Big(\frac{1}{K-1} \sum_{j \ne k} \nabla f(x_j)\Big) \cdot (x_k - m).

    Unbiased: the gradients in :math:`b_k` do not depend on :math:`x_k`, so :math:`E[b_k\, \partial \log p(x_k)]` is what the
    last term takes off, and the other :math:`b_j` have mean zero given :math:`x_k`. The paper has one layer. In a deep net f
    continues with the path's noise in the later layers, the same for all K states, and :math:`\nabla f` is the
    straight-through gradient of that continuation: the argument holds for each fixed noise, and for any function in place of
    :math:`\nabla f`, so this is unbiased as well. The head must be differentiable and treat the examples separately. One path
    and K differentiated tails for every layer.

    :math:`\alpha` is a parameter, trained as those of :class:`flipgrad.REBAR`. At -1 the variance of a linear loss is
    removed wholly, at 0 this is leave-one-out REINFORCE.

    Args:
        samples: K, at least 2.
        alpha: at the start.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.DoubleCV()).mean().backward()
    """

    citation = "Titsias, Shi 2022"

    def __init__(self, samples: int = 2, alpha: float = -1.0) -> None:
        super().__init__()
        if samples < 2:
            raise InputError(f"DoubleCV(samples={samples}): leaving one out needs at least two samples")
        if not math.isfinite(alpha):
            raise InputError(f"DoubleCV(alpha={alpha}): alpha must be finite, e.g. -1.0")
        self.samples = self.tails = samples
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))

    def gradient(self, path: Path, k: int) -> Tensor:
        a, noise, others = path.a[k].detach(), path.noises[k], self.samples - 1
        new = [sign(a - path.batch.draw(noise, a)) for _ in range(others)]
        states = torch.stack([path.states[k], *new])

        def loss(x: Tensor) -> Tensor:
            return path.continued_with_noise(k, x, _straight_through)

        taylor = zip(*[value_and_slope(loss, x) for x in states], strict=True)
        f, slopes = (torch.stack(parts).detach() for parts in taylor)
        left_out = (slopes.sum(0) - slopes) / others
        b = self.alpha * (left_out * (states - noise.mean_sign(a))).flatten(2).sum(2)
        total = f + b
        advantage = total - (total.sum(0) - total) / others
        terms = [per_example(w, a) * noise.score(x, a) for w, x in zip(advantage, states, strict=True)]
        return torch.stack(terms).mean(0) - self.alpha * 2 * noise.pdf(a) * slopes.mean(0)


def _straight_through(call: LayerCall, z: Tensor) -> Tensor:
    """The states sampled with the noise ``z``, with the gradient of their mean."""
    a = call.affine(call.x)
    m = call.noise.mean_sign(a)
    return sign(a.detach() - z) + (m - m.detach())
