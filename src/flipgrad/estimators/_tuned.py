"""Estimators with parameters of their own that are trained to lower the variance.

An unbiased estimate g of a gradient has the same mean whatever the estimator's parameters are. So the gradient of its
variance in them is that of E[g^2], and the one draw's d(g^2) is an unbiased estimate of it (Ruiz, Titsias, Blei 2016; Tucker
et al. 2017).
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Generator, Tensor, nn

from flipgrad.contract import Batch
from flipgrad.errors import InputError
from flipgrad.estimators._paths import Path, PathEstimator
from flipgrad.network import BinaryNetwork, check_network
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
    Frozen, ``requires_grad_(False)``, they cost nothing. Binary weights, which all examples share, are refused.
    """

    unbiased = True
    units_only = "its control variate is differentiated in every weight for each example"
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
    def variance_loss(
        self, net: BinaryNetwork, x: Tensor, objective: Objective, *, generator: Generator | None = None
    ) -> Tensor:
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
        check_network(net, name)
        network = net.network()
        self.check_weights(network)
        square, carrier = self._learn(self.estimate(Path.sample(network, Batch(x, objective, fresh(generator)))))
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
