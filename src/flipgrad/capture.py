"""Graphs that torch captures: compiled, exported or traced. Values cannot be looked at then, and gradients may get lost."""

from __future__ import annotations

import torch

from flipgrad.errors import InputError


def capturing() -> bool:
    """Whether torch is writing down operations to run them later, so that nothing may depend on values."""
    return torch.compiler.is_compiling() or bool(torch._C._get_tracing_state())


def check_exportable() -> None:
    """Refuse to be exported or traced with gradients: only ``torch.compile`` keeps those that estimators make."""
    exporting = capturing() and not torch.compiler.is_dynamo_compiling()
    if exporting and torch.is_grad_enabled():
        raise InputError(
            "an exported or traced network samples, but would silently have no gradient of any estimator: export it under "
            "torch.no_grad(), to predict with it; to train in one graph, use torch.compile"
        )


def refuse_scripting(who: str) -> None:
    """Refuse ``torch.jit.script``, which reads source code."""
    raise InputError(
        f"torch.jit.script cannot express {who}: capture it under torch.no_grad() with torch.export.export(net, (x,)) or "
        "torch.jit.trace(net, x, check_trace=False)"
    )
