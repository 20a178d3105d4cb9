"""The rule of ``torch.vmap`` for sums over flips: many draws of a layer's units are evaluated as one layer."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from flipgrad.flips.ordinary import Geometry
from flipgrad.guards import applied, capturing

# A sum over flips of the layer's tensors, the weight last, and its geometry.
Evaluate = Callable[[Sequence[Tensor], Geometry | None], Tensor]


def over_draws(
    evaluate: Evaluate,
    draws: int,
    in_dims: Sequence[int | None],
    tensors: Sequence[Tensor],
    geometry: Geometry | None,
    *,
    per_weight: bool,
) -> tuple[Tensor, int]:
    """The sums over flips of ``draws`` draws, and the dimension of the draws in them.

    Where all draws have the same weight they are one large batch, else groups of one convolution. The weight is the same if
    it has no dimension of draws, or one that was expanded, which has stride 0, or the same numbers in all draws: a weight that
    is computed from expanded parameters, such as one with a norm folded into it. A sum with one number per weight sums over
    the batch, so there draws are always groups.

    ``evaluate`` is the sum for one layer. For every one of the ``tensors``, the weight last, ``in_dims`` has the dimension of
    the draws, or None if all draws share the tensor.
    """
    pairs = zip(tensors, in_dims, strict=True)
    *units, weight = (t.expand(draws, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in pairs)
    if per_weight or not _is_same(weight):
        return _as_groups(evaluate, units, weight, geometry, per_weight)
    if geometry is not None:
        u = evaluate([*(t.flatten(0, 1) for t in units), weight[0]], geometry)
        return u.unflatten(0, units[0].shape[:2]), 0
    if units[0].stride(-1) != 1:
        # Examples lie side by side in memory: they are places of a convolution, as they are.
        places = (t.transpose(1, 2)[..., None] for t in units)
        return evaluate([*places, weight[0, :, :, None, None]], Geometry())[..., 0].transpose(1, 2), 0
    u = evaluate([*(t.reshape(-1, t.shape[-1]) for t in units), weight[0]], None)
    return u.reshape(units[0].shape), 0


def _is_same(weight: Tensor) -> bool:
    """Whether all draws have the same ``weight`` [draws, ...], as far as can be seen."""
    if weight.stride(0) == 0:
        return True
    # Numbers cannot be looked at while torch captures a graph, and where these are draws within draws.
    hidden = capturing() or torch._C._functorch.is_functorch_wrapped_tensor(weight)
    return not hidden and torch.equal(weight, weight[:1].expand_as(weight))


def _as_groups(
    evaluate: Evaluate, units: list[Tensor], weight: Tensor, geometry: Geometry | None, per_weight: bool
) -> tuple[Tensor, int]:
    """Draws as groups of a convolution: of the one that they are, or of one place for a fully connected layer."""
    tensors = [*(t.transpose(0, 1).flatten(1, 2) for t in units), weight.flatten(0, 1)]
    if geometry is None:
        tensors = [t[..., None, None] for t in tensors]
    convolution = geometry or Geometry()
    result = evaluate(tensors, convolution._replace(groups=len(weight) * convolution.groups))
    dim, shape = (0, weight.shape[:2]) if per_weight else (1, (len(weight), units[0].shape[2]))
    return (result[..., 0, 0] if geometry is None else result).unflatten(dim, shape), dim


@final
class WithoutGradient(torch.autograd.Function):
    """A sum over flips that is no operator of torch, with the same rule for draws and without a gradient."""

    @staticmethod
    def forward(evaluate: Evaluate, geometry: Geometry | None, per_weight: bool, *tensors: Tensor) -> Tensor:
        return evaluate(tensors, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], evaluate: Evaluate, geometry: Any, per_weight: bool, *tensors: Tensor) -> Any:
        def again(tensors: Sequence[Tensor], geometry: Geometry | None) -> Any:
            return applied(WithoutGradient, evaluate, geometry, per_weight, *tensors)

        return over_draws(again, info.batch_size, in_dims[3:], tensors, geometry, per_weight=per_weight)
