"""The path sample-analytic estimator.

Shekhovtsov, Yanush, Flach. Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks.
NeurIPS 2020, algorithm 1 and, for the enhanced head, appendix B.3.
"""

from __future__ import annotations

from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flipgrad.affine import Affine, LinearMap
from flipgrad.errors import InputError
from flipgrad.estimators._base import LocalEstimator
from flipgrad.estimators._head import flipped_losses
from flipgrad.layers import LayerCall
from flipgrad.network import Sequential
from flipgrad.noise import Noise
from flipgrad.objectives import Objective, evaluate
from flipgrad.plan import Sample

HeadGradient = Literal["sampled", "enhanced"]


@final
class PSA(LocalEstimator):
    r"""Backpropagation with discrete derivatives in the binary states.

    With :math:`D_i h(x) = (h(x_i{=}{+}1) - h(x_i{=}{-}1))/2` and the conditional means :math:`m = 2F(a) - 1`,

    .. math::
        u^L_i = D_i f(x^L), \quad u^{k-1}_i = \sum_j D_i m_j(x^{k-1})\, u^k_j, \quad
        \hat g_{\theta^k} = \sum_j u^k_j\, \partial m_j / \partial \theta^k,

    which is the paper's algorithm with its signs cancelled; it needs no auxiliary variables and one backward pass.

    Biased in general, by the linearisation of a product of probabilities. Unbiased with one hidden layer, with one unit in
    every layer but the first, and for the last layer's own parameters in every network. (The paper says "but the last",
    which needs besides that the loss adds up over that layer's units: their joint probability is a product too.)

    Args:
        head: the gradient in the head's own parameters. "sampled" is that of the sampled loss; "enhanced" averages it over
            flips of the last layer's units with the paper's weight 1/n, unbiased with no larger variance. It needs the last
            binary layer right before the head.
        flip_head: whether the loss is evaluated at every flip of the last layer's units. A linear head does that fast, any
            other module is evaluated on all flipped states; False linearises the head instead, as ST does.
        tolerance: the relative error that is allowed in every layer's flip product; large layers then cost two or three
            ordinary products (:func:`flipgrad.flips.explain` tells). It is far below the noise of one draw.
        exact: never approximate.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=torch.nn.Linear(4, 2))
    >>> net(torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1])), estimator=fg.PSA()).mean().backward()
    """

    unbiased = False
    unbiased_in = "one hidden layer, the last layer's parameters"
    citation = "Shekhovtsov, Yanush, Flach 2020"

    def __init__(
        self,
        *,
        head: HeadGradient = "sampled",
        flip_head: bool = True,
        tolerance: float = 1e-3,
        exact: bool = False,
    ) -> None:
        if head not in ("sampled", "enhanced"):
            raise InputError(f"PSA(head={head!r}): choose 'sampled' or 'enhanced'")
        if head == "enhanced" and not flip_head:
            raise InputError(
                "PSA(head='enhanced', flip_head=False): the enhanced head averages over flips; leave flip_head=True"
            )
        if not 0 < tolerance < 1:
            raise InputError(f"PSA(tolerance={tolerance}): give a relative error between 0 and 1, e.g. 1e-3, or exact=True")
        self.tolerance = 0.0 if exact else tolerance
        self.head_gradient: HeadGradient = head
        self.flip_head = flip_head

    def passes(self, depth: int) -> int:
        return 1

    def states(self, call: LayerCall) -> Tensor:
        # Ordinary derivatives reach the parameters, and a real-valued input, through a; binary inputs get theirs by flips (and
        # through the statistics of a batch, where these are normalised with).
        a = call.affine.besides_flips(call.x) if call.binary else call.affine(call.x)
        flipped = call.x if call.binary else None
        weight = call.affine.parameter.detach()
        states: Tensor = _FlipStates.apply(  # type: ignore[no-untyped-call]
            a, flipped, weight, call.sample(a), call.affine, call.noise, self.tolerance
        )
        return states

    def head(self, net: Sequential, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        if not self.flip_head:
            return evaluate(objective, net.outputs(states))
        enhanced = self.head_gradient == "enhanced"
        if enhanced and not isinstance(net.plan().steps[-1], Sample):
            raise InputError("PSA(head='enhanced') needs a binary layer, not Concat, before the head; use head='sampled'")
        x = states.detach()
        readout = net.readout()
        outputs = readout(x)
        losses = evaluate(objective, outputs)
        with torch.set_grad_enabled(enhanced and torch.is_grad_enabled()):
            flipped = flipped_losses(readout, x, outputs, objective)
        if enhanced:
            correction = ((flipped - losses) * _opposite(last, x)).mean(0)
            losses = losses + (correction - correction.detach())
        discrete = (losses.detach() - flipped.detach()).t().reshape(x.shape) * x / 2
        attached: Tensor = _AttachGradient.apply(losses, states, discrete)  # type: ignore[no-untyped-call]
        return attached


def _opposite(last: LayerCall, x: Tensor) -> Tensor:
    """The probability [units, B] of every unit's other state: 1 - p(x_i), which is what the paper's pi means.

    Its printed formula has a sign slip.
    """
    with torch.no_grad():
        return last.noise.cdf(-x * last.affine(last.x)).flatten(1).t()


@final
class _FlipStates(torch.autograd.Function):
    """Sampled states; backward, 2F'(a) to the pre-activations and the flip product to the binary input."""

    @staticmethod
    def forward(
        a: Tensor, x: Tensor | None, weight: Tensor, states: Tensor, affine: Affine, noise: Noise, tolerance: float
    ) -> Tensor:
        return states.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, x, weight, _, ctx.affine, ctx.noise, ctx.tolerance = inputs
        ctx.save_for_backward(a, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, x, weight = ctx.saved_tensors
        grad_a = 2 * ctx.noise.pdf(a) * grad if ctx.needs_input_grad[0] else None
        flip = (x, a, grad, weight, ctx.noise, ctx.tolerance)
        grad_x = ctx.affine.flip_product(*flip) if ctx.needs_input_grad[1] else None
        return grad_a, grad_x, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        """Draws are one large batch where they share the weight, else evaluated one by one."""
        *tensors, affine, noise, tolerance = inputs
        leading: Any = [
            [None] * info.batch_size if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[:4], strict=True)
        ]
        apply: Any = _FlipStates.apply
        a, x, weight, states = leading
        if bool((weight == weight[:1]).all()):
            if isinstance(affine, LinearMap):
                # It takes any dimensions in front.
                return apply(a, x if isinstance(x, Tensor) else None, weight[0], states, affine, noise, tolerance), 0
            units = x.flatten(0, 1) if isinstance(x, Tensor) else None
            return apply(a.flatten(0, 1), units, weight[0], states.flatten(0, 1), affine, noise, tolerance).view_as(states), 0
        return torch.stack([apply(*each, affine, noise, tolerance) for each in zip(*leading, strict=True)]), 0


@final
class _AttachGradient(torch.autograd.Function):
    """The losses as they are; backward, the given gradient [B, ...] to the states besides."""

    generate_vmap_rule = True

    @staticmethod
    def forward(losses: Tensor, states: Tensor, gradient: Tensor) -> Tensor:
        return losses.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grad, gradient * grad.view(-1, *[1] * (gradient.dim() - 1)), None
