"""Estimators with parameters of their own that are trained to lower the variance, and the concrete control variate.

An unbiased estimate g of a gradient has the same mean whatever the estimator's parameters are. So the gradient of its
variance in them is that of E[g^2], and the one draw's d(g^2) is an unbiased estimate of it (Ruiz, Titsias, Blei 2016; Tucker
et al. 2017).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Generator, Tensor, nn

from flipgrad.contract import Batch
from flipgrad.errors import InputError
from flipgrad.estimators._draws import conditional
from flipgrad.estimators._paths import Path, PathEstimator, per_example, value_and_slope
from flipgrad.estimators._tails import continued_with
from flipgrad.network import Sequential, check_sequential
from flipgrad.noise import Noise
from flipgrad.objectives import Objective
from flipgrad.sampling import fresh

# The weight of the past in the running average of the squared length.
MEMORY = 0.99
# How fast the own parameters learn at the learning rate of the network: a scale that is driven to 0 does not come back.
PACE = 0.1


class TunedEstimator(PathEstimator, nn.Module):
    """An unbiased estimator of path gradients that has parameters of its own.

    They are trained along: after going backward through the batch's mean loss their gradient is that of the estimate's
    squared length (:meth:`variance_loss`, from the same draw), times PACE and divided by a running average of that square
    (or by the draw's own, where it is larger), so that a learning rate means the same for losses of any size.
    Frozen, ``requires_grad_(False)``, they cost nothing.
    """

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self._learned: tuple[Tensor, list[Tensor]] | None = None

    @final
    def gradients(self, path: Path) -> list[Tensor]:
        tune = torch.is_grad_enabled() and len(path.losses) > 0 and any(p.requires_grad for p in self.parameters())
        gradients = self.estimate(path, tune=tune)
        self._learned = self._learn(gradients) if tune else None
        return gradients

    @final
    def extra(self, path: Path) -> Tensor | None:
        if self._learned is None:
            return None
        square, carriers = self._learned
        self._learned = None
        mixed = MEMORY * self.level + (1 - MEMORY) * square
        self.level.copy_(torch.where(self.level > 0, mixed, square))
        # A draw far above the average counts no more than in proportion to itself, so that an outlier is no leap.
        size = torch.maximum(self.level, square.to(self.level)).clamp(min=torch.finfo(self.level.dtype).tiny)
        return (PACE * torch.stack(carriers).sum() / size).expand_as(path.losses)

    @abstractmethod
    def estimate(self, path: Path, *, tune: bool) -> list[Tensor]:
        """The gradients in every layer's pre-activations; if ``tune``, differentiable in the estimator's own parameters."""

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
        if not any(parameter.requires_grad for parameter in self.parameters()):
            name = type(self).__name__
            raise InputError(f"{name}.variance_loss: every parameter of the estimator is frozen; call requires_grad_() on some")
        check_sequential(net, f"{type(self).__name__}.variance_loss")
        path = Path.sample(net.network(), Batch(x, objective, fresh(generator)))
        square, carriers = self._learn(self.estimate(path, tune=True))
        return square + torch.stack(carriers).sum()

    def _learn(self, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The mean squared length, without a gradient, and for every own parameter a 0 that carries its gradient alone."""
        square = torch.stack([g.flatten(1).square().sum(1).mean() for g in gradients]).sum()
        own = [parameter for parameter in self.parameters() if parameter.requires_grad]
        slopes = torch.autograd.grad(square, own, materialize_grads=True)
        # A slope that overflowed is no direction, and must not make the loss NaN.
        finite = [slope.nan_to_num(0.0, 0.0, 0.0) for slope in slopes]
        return square.detach(), [((p - p.detach()) * slope).sum().to(square) for p, slope in zip(own, finite, strict=True)]


class ConcreteControl(TunedEstimator):
    r"""What REBAR and RELAX share: a control variate on the relaxed states of one layer at a time.

    With :math:`\zeta = a - Z`, the state x = sign(:math:`\zeta`), and :math:`\tilde\zeta` a new draw of :math:`\zeta` given x,

    .. math:: \partial/\partial a = \big(f(x) - c(\tilde\zeta)\big) \frac{\partial}{\partial a} \log p(x \mid a)
        + \frac{\partial}{\partial a} c(\zeta) - \frac{\partial}{\partial a} c(\tilde\zeta),

    where :math:`\tilde\zeta = a - x F^{-1}\big(v F(x a)\big)` with v uniform is differentiated at fixed x and v. Unbiased for
    any smooth function c, as the two ways to differentiate E[c] agree.
    """

    def __init__(self, temperature: float, scale: float) -> None:
        super().__init__()
        for name, value in (("temperature", temperature), ("scale", scale)):
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{type(self).__name__}({name}={value}): the {name} must be positive and finite, e.g. 1.0")
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    @final
    def passes(self, depth: int) -> int:
        return 1 + 2 * depth

    @final
    def estimate(self, path: Path, *, tune: bool) -> list[Tensor]:
        self.prepare(path)
        return [self._layer(path, k, tune) for k in range(len(path.a))]

    @abstractmethod
    def prepare(self, path: Path) -> None:
        """Build, or check, what depends on the network."""

    @abstractmethod
    def added(self, k: int, states: Tensor) -> Tensor | None:
        """What is added to the control variate of layer ``k``, [B], as a function of its relaxed states."""

    def _layer(self, path: Path, k: int, tune: bool) -> Tensor:
        a, x, noise = path.a[k].detach(), path.states[k], path.noises[k]
        new = path.batch.draw(noise, a)

        def tied(t: Tensor) -> Tensor:
            return t - conditional(noise, t, x, new)

        _, slope = self._control(path, k, a - path.z[k], tune)
        control, tied_slope = self._control(path, k, tied(a), tune)
        learning = per_example(path.losses.detach() - control, a) * noise.score(x, a)
        return learning + slope - tied_slope * derivative(tied, a)

    def _control(self, path: Path, k: int, zeta: Tensor, tune: bool) -> tuple[Tensor, Tensor]:
        """The control variate c [B] and its derivative in ``zeta``, differentiable in the own parameters if ``tune``."""
        half = 0.5 * torch.exp(-self.log_temperature)

        def relaxed(noise: Noise, a: Tensor, z: Tensor) -> Tensor:
            # tanh(t / 2) = 2 sigmoid(t) - 1.
            return torch.tanh((a - z) * half)

        def control(zeta: Tensor) -> Tensor:
            states = torch.tanh(zeta * half)
            c = torch.exp(self.log_scale) * continued_with(path, k, states, relaxed)
            added = self.added(k, states)
            return c if added is None else c + added

        c, slope = value_and_slope(control, zeta)
        return (c, slope) if tune else (c.detach(), slope.detach())


def derivative(function: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    """The derivative of an elementwise ``function`` at ``a``, without a gradient."""
    return value_and_slope(function, a)[1].detach()
