"""Graphs that torch captures: compiled, exported or traced. Values cannot be looked at then, and gradients may get lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flipgrad.errors import InputError

_without_compiler: Callable[..., Tensor] | None = None


def capturing() -> bool:
    """Whether torch is writing down operations to run them later, so that nothing may depend on values."""
    return torch.compiler.is_compiling() or bool(torch._C._get_tracing_state())


def cannot_look() -> bool:
    """Whether values cannot be looked at, to check them: while torch captures, and under transforms of ``torch.func``."""
    return capturing() or torch._C._functorch.maybe_current_level() is not None


def check_exportable() -> None:
    """Refuse to be exported or traced with gradients: only ``torch.compile`` keeps those that estimators make."""
    exporting = capturing() and not torch.compiler.is_dynamo_compiling()
    if exporting and torch.is_grad_enabled():
        raise InputError(
            "an exported or traced network samples, but would silently have no gradient of any estimator: export it under "
            "torch.no_grad(), to predict with it; to train in one graph, use torch.compile"
        )


def check_record() -> None:
    """Refuse to be part of one compiled graph where autograd's record has to be read: while a graph is made there is none.

    Where the graph may have breaks, torch takes the error for one, and runs the functions around it as they are.
    """
    if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        raise InputError(
            "binary layers in a graph written by hand read autograd's record of their inputs, so they cannot be one compiled "
            "graph: compile without fullgraph=True, and they run as they are; or build fg.Sequential, which compiles whole"
        )


def uncompiled(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The ``function`` of ``arguments``; with gradients it runs as it is, with all that it calls, whoever is compiled."""
    global _without_compiler
    # The compiler is slow to import, and who has not imported it compiles nothing.
    if not torch.is_grad_enabled() or "torch._dynamo" not in sys.modules:
        return function(*arguments)
    if _without_compiler is None:
        _without_compiler = torch.compiler.disable(_call)
    return _without_compiler(function, *arguments)


def _call(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)


def refuse_scripting(who: str) -> None:
    """Refuse ``torch.jit.script``, which reads source code."""
    raise InputError(
        f"torch.jit.script cannot express {who}: capture it under torch.no_grad() with torch.export.export(net, (x,)) or "
        "torch.jit.trace(net, x, check_trace=False)"
    )
