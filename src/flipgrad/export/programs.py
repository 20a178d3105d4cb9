"""Plain modules as graphs that stand alone, by ``torch.export``."""

from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from flipgrad.errors import InputError
from flipgrad.export.plain import FixedNet, SampledNet

# Sizes of a batch that tell what depends on it. With one example torch would take its size for a constant.
SIZES = (2, 3)


def program(module: FixedNet | SampledNet, x: Tensor, *, batch_size: int | None = None) -> ExportedProgram:
    """A plain module as a ``torch.export`` program: ``program(...).module()(x)`` gives the module's outputs.

    That of a :class:`SampledNet` takes noise, too: ``.module()(x, noise, weight_noise)``.

    Args:
        module: what :func:`flipgrad.export.deterministic`, ``member`` or ``sampled`` gave.
        x: inputs [B, ...], B >= 1; their values do not matter, their size does.
        batch_size: the only size of a batch that it takes; by default, any.

    Raises:
        InputError: if it is no such module, there is no example, or the module is for one size of a batch only.
    """
    arguments, shapes = captured_arguments(module, x, batch_size)
    try:
        with torch.no_grad():
            return torch.export.export(module, arguments, dynamic_shapes=shapes)
    except torch._dynamo.exc.UserError as error:
        if batch_size is not None or "batch" not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise InputError(
            f"a module of the network does other things for batches of other sizes, so that no one graph does for all "
            f"({reason:.300}): give batch_size=, the one it is for"
        ) from None


def captured_arguments(
    module: FixedNet | SampledNet, x: Tensor, batch_size: int | None = None
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """Arguments of the module like ``x``, and which of their dimensions change with the batch; None if none may."""
    if not isinstance(module, FixedNet | SampledNet):
        raise InputError(
            f"fg.export takes a plain module, got {type(module).__name__}: give fg.export.deterministic(net), "
            "fg.export.member(net.member(x)) or fg.export.sampled(net)"
        )
    if not isinstance(x, Tensor) or not x.dim() or not len(x):
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"fg.export needs at least one example [B, ...] to know the size of inputs, got {got}")
    if batch_size is not None:
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size}: give at least 1, or None for batches of any size")
        return _arguments(module, x, batch_size), None
    few, more = (_arguments(module, x, size) for size in SIZES)
    names = ("x", "noise", "weight_noise")[: len(few)]
    noise = {name: _changing(*pair) for name, *pair in zip(names[1:], few[1:], more[1:], strict=True)}
    return few, {"x": {0: Dim("batch")}, **noise}


def _arguments(module: FixedNet | SampledNet, x: Tensor, size: int) -> tuple[Any, ...]:
    batch = x.detach()[:1].repeat(size, *[1] * (x.dim() - 1))
    if isinstance(module, FixedNet):
        return (batch,)
    # Not torch's own generator: nobody is to notice that noise was drawn.
    return (batch, *module.draw(batch, generator=torch.Generator(x.device).manual_seed(0)))


def _changing(few: list[Tensor], more: list[Tensor]) -> list[dict[int, Any]]:
    """Of tensors for batches of two sizes, the dimensions that differ."""
    return [
        {dim: Dim.AUTO for dim, sizes in enumerate(zip(one.shape, other.shape, strict=True)) if len({*sizes}) > 1}
        for one, other in zip(few, more, strict=True)
    ]
