"""Guards against silent errors: second derivatives, checkpoints that draw anew, captured graphs, hooks, changed statistics.

Torch captures a graph when it compiles, exports or traces: it writes operations down to run them later. Values cannot be looked
at then, and gradients may get lost.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, wraps
from types import CodeType, FrameType
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.checkpoint import CheckpointFunction

from flipgrad.errors import InputError

Backward = Callable[..., tuple[Tensor | None, ...]]

# Tensors that are no more than that.
_PLAIN = (Tensor, nn.Parameter)
# Where nn.Module and torch keep hooks that run when a module is called.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_without_compiler: Callable[..., Tensor] | None = None


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply`` of ``arguments``, for a function whose ``forward`` does without a context.

    Torch finds out at every call how such a ``forward`` takes its arguments, which takes longer than a layer of a few units.
    That is for transforms and captured graphs alone: where there are none, a twin with a context is applied.
    """
    return (function if cannot_look() else _with_context(function)).apply(*arguments)


@lru_cache(maxsize=64)
def _with_context(function: Any) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *arguments: Any) -> Any:
        output = function.forward(*arguments)
        function.setup_context(ctx, arguments, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(function.backward), "__doc__": function.__doc__}
    return type(function.__name__, (torch.autograd.Function,), methods)


def estimate(values: Tensor, *, twice: bool = False) -> Tensor:
    """States or losses that carry an estimator's gradient, guarded.

    An estimate of a gradient is no function whose derivative estimates the second derivative, so that to differentiate it
    again is an error, unless ``twice``: of an ordinary function of the parameters (a relaxation) the second derivatives are
    right. And ``torch.utils.checkpoint``, which computes ``values`` again on the way back, must come to the same draw: of a
    generator that was handed in it does not put back the state.
    """
    if torch.compiler.is_compiling() or not values.requires_grad:
        # Compiled code cannot be differentiated twice, by torch's own error.
        return values
    checkpointed = _is_checkpointed()
    if twice and not checkpointed:
        return values
    guarded: Tensor = applied(_Estimate, values, twice, checkpointed)
    return guarded


@final
class _Estimate(torch.autograd.Function):
    """Values as they are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, twice: bool, checkpointed: bool) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, ctx.twice, checkpointed = inputs
        ctx.first = _fingerprint(values) if checkpointed else None
        ctx.save_for_backward(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        if ctx.first is not None and ctx.first != _fingerprint(values):
            raise RuntimeError(
                "the checkpoint drew other noise when it computed a binary layer again, so that its gradient would be of "
                "another draw: hand in no generator (torch's own is put back), hand in the noise itself, or do not checkpoint"
            )
        if not ctx.twice and torch.is_grad_enabled():
            grad = applied(_Once, grad, values)
        return grad, None, None


def once(backward: Backward) -> Backward:
    """Make a function's derivative one that cannot be differentiated again, also under transforms of ``torch.func``.

    There ``torch.autograd.function.once_differentiable`` drops the dependence without a word.
    """

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results
        known = [grad for grad in grads if grad is not None]
        return tuple(result if result is None else applied(_Once, result, *known) for result in results)

    return guarded


@final
class _Once(torch.autograd.Function):
    """A gradient as it is, whose own derivative is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, *depends_on: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "cannot differentiate twice: the derivative of a gradient estimate does not estimate the second derivative. For a "
            "gradient penalty use estimator=fg.Exact() (small networks), or a relaxation such as fg.Concrete() or fg.Tanh()"
        )


def _fingerprint(values: Tensor) -> float:
    """A number that other states or losses would not have."""
    flat = values.detach().flatten().double()
    return float(flat @ torch.arange(1, len(flat) + 1, dtype=flat.dtype, device=flat.device).cos())


def checkpoint_at_work() -> object:
    """What tells one ``torch.utils.checkpoint`` (not reentrant) from another, or None; torch has no public way to ask."""
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = ask(True) if ask is not None else None
    return hooks[0] if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" else None


def _is_checkpointed() -> bool:
    return checkpoint_at_work() is not None


def check_not_checkpointed() -> None:
    """Refuse, for estimators that differentiate inside, what torch's transforms cannot do."""
    if _is_checkpointed():
        raise InputError(
            "MuProp, REBAR, RELAX and DoubleCV cannot be checkpointed, as they differentiate inside: checkpoint real-valued "
            "modules only, or use another estimator"
        )


def check_not_redrawn(generator: torch.Generator | None) -> None:
    """Refuse to draw anew where ``torch.utils.checkpoint`` (reentrant) computes a part of a network again.

    It puts back the state of torch's own generators, and that alone, unless it is told not to. Of another draw than the loss
    the gradient would be wrong.
    """
    frame = None if capturing() else _caller(CheckpointFunction.backward.__code__)
    if frame is not None and (generator is not None or not frame.f_locals["ctx"].preserve_rng_state):
        raise InputError(
            "the checkpoint computes a binary layer again, and would draw other noise than before: hand in no generator "
            "(torch's own is put back, with preserve_rng_state=True), hand in the noise itself, or do not checkpoint"
        )


def check_same_checkpoint(before: object, recording: bool) -> None:
    """Refuse a checkpoint around a part of a model that :class:`flipgrad.Graph` evaluates.

    ``before`` is what :func:`checkpoint_at_work` said when the evaluation began, and ``recording`` whether autograd recorded.
    A part would be computed again on the way back, when the evaluation is over, with other noise and estimators.
    """
    reentrant = recording and not torch.is_grad_enabled() and _caller(CheckpointFunction.forward.__code__) is not None
    if not capturing() and (reentrant or checkpoint_at_work() is not before):
        raise InputError(
            "a checkpoint around a part of a model in fg.Graph would compute that part again with other noise: checkpoint the "
            "whole, torch.utils.checkpoint.checkpoint(net, x, objective, use_reentrant=False), or train the model with "
            "fg.use(model, estimator)"
        )


def _caller(code: CodeType) -> FrameType | None:
    """The frame of the function with this ``code`` that the present one is called from, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def capturing() -> bool:
    """Whether torch captures a graph, so that nothing may depend on values."""
    return torch.compiler.is_compiling() or bool(torch._C._get_tracing_state())


def exporting() -> bool:
    """Whether torch captures a graph that is to stand alone, by ``torch.export`` or ``torch.jit.trace``."""
    return capturing() and not torch.compiler.is_dynamo_compiling()


def cannot_look() -> bool:
    """Whether values cannot be looked at, to check them: while torch captures, and under transforms of ``torch.func``."""
    return capturing() or torch._C._are_functorch_transforms_active()


def own(states: Tensor) -> Tensor:
    """States that go through an autograd function, as its output: themselves, or a copy where they cannot be given away."""
    return states.clone() if cannot_look() else states


def give_away(ctx: Any, states: Tensor) -> None:
    """Say that an autograd function has :func:`own` states: nobody else is to use them afterwards."""
    if not cannot_look():
        ctx.mark_dirty(states)


def only_computes(tensors: Sequence[Tensor]) -> bool:
    """Whether torch does nothing with ``tensors`` but to compute: it neither captures nor transforms, records nor watches.

    Then what an operator of torch does may be called as it is, which spares small tensors more than their arithmetic.
    """
    if cannot_look() or torch._C._len_torch_dispatch_stack():
        return False
    recorded = torch.is_grad_enabled()
    return all(type(t) in _PLAIN and not t.is_meta and not (recorded and t.requires_grad) for t in tensors)


def hides_record(x: Tensor) -> bool:
    """Whether autograd recorded how ``x`` was computed behind ``torch.vmap``, where that cannot be read."""
    # Torch cannot compile the question, and asks no transform while it compiles.
    inner = x
    while (
        not torch.compiler.is_dynamo_compiling()
        and x.grad_fn is None
        and torch._C._functorch.is_functorch_wrapped_tensor(inner)
    ):
        inner = torch._C._functorch.get_unwrapped(inner)
        if inner.grad_fn is not None:
            return True
    return False


def unwrapped(t: Tensor) -> Tensor:
    """The numbers of a tensor under transforms of ``torch.func``: under ``torch.vmap``, those of all draws together."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def without_transforms() -> AbstractContextManager[None]:
    """Computes as if no transform of ``torch.func`` were at work, on tensors that are :func:`unwrapped`."""
    context: AbstractContextManager[None] = torch._C._DisableFuncTorch()
    return context


def check_exportable() -> None:
    """Refuse to be exported or traced with gradients: only ``torch.compile`` keeps those that estimators make."""
    if exporting() and torch.is_grad_enabled():
        raise InputError(
            "an exported or traced network samples, but would silently have no gradient of any estimator: export it under "
            "torch.no_grad(), to predict with it, or export the plain module fg.export.deterministic(net), "
            "fg.export.member(net.member(x)) or fg.export.sampled(net); to train in one graph, use torch.compile"
        )


def uncompiled(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The ``function`` of ``arguments``, which reads autograd's record; with gradients it runs as it is, whoever is compiled.

    While a graph is compiled there is no record, and that is an error. Where the graph may have breaks, torch takes the error
    for one, and runs the functions around it as they are.
    """
    if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        raise InputError(
            "binary layers in a graph written by hand read autograd's record of their inputs, so they cannot be one compiled "
            "graph: compile without fullgraph=True, and they run as they are; or build fg.Sequential, which compiles whole"
        )
    return run_uncompiled(function, *arguments) if torch.is_grad_enabled() else function(*arguments)


def run_uncompiled(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The ``function`` of ``arguments``, run as it is, with all that it calls."""
    global _without_compiler
    # The compiler is slow to import, and nothing is compiled before it was.
    if "torch._dynamo" not in sys.modules:
        return function(*arguments)
    if _without_compiler is None:
        _without_compiler = torch.compiler.disable(lambda function, *arguments: function(*arguments))
    return _without_compiler(function, *arguments)


def refuse_scripting(module: nn.Module) -> NoReturn:
    """Refuse ``torch.jit.script``, which reads source code: what it asks first, as a method ``__prepare_scriptable__``."""
    raise InputError(
        f"torch.jit.script cannot express the sampled states of {type(module).__name__}: capture it under torch.no_grad() with "
        "torch.export.export(net, (x,)) or torch.jit.trace(net, x, check_trace=False), or a plain module of fg.export"
    )


def has_hooks(module: nn.Module, *, anywhere: bool = True) -> bool:
    """Whether calling the module runs more than its class's ``forward``: hooks of its own or, ``anywhere``, of all modules."""
    own = any(getattr(module, name) for name in _HOOKS) or "forward" in vars(module)
    return own or (anywhere and any(getattr(modules, f"_global{name}") for name in _HOOKS))


def check_unchanged(module: nn.Module, what: str, before: Tensor, after: object) -> None:
    """Refuse a hook of ``module`` that changed ``what`` from ``before`` to ``after``."""
    if after is before or (isinstance(after, Tensor) and after.shape == before.shape and torch.equal(after, before)):
        return
    raise InputError(
        f"a hook of {type(module).__name__} changes its {what}, behind the estimator's back: hooks in fg.Sequential may look, "
        "not change; remove it, or write the network by hand with fg.use(model, estimator)"
    )


@contextmanager
def keeping_buffers(net: nn.Module) -> Iterator[None]:
    """Whatever is evaluated inside, the buffers of modules in training mode (running statistics) are as before afterwards."""
    owners = [module for module in net.modules() if module.training and module._buffers]
    before = [dict(module._buffers) for module in owners]
    try:
        # Copies are changed in place of the buffers themselves, which a graph to be differentiated may still hold.
        for module in owners:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for module, buffers in zip(owners, before, strict=True):
            module._buffers.update(buffers)


@contextmanager
def in_eval_mode(net: nn.Module) -> Iterator[None]:
    """Inside, all modules are in eval mode; afterwards each is as it was."""
    training = [module for module in net.modules() if module.training]
    net.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def without_derivative(latent: Tensor, states: Tensor) -> Tensor:
    """States sign(latent - Z), or weights, whose derivative nobody has chosen: an error on the way back."""
    result: Tensor = applied(_UndefinedGradient, latent, states)
    return result


@final
class _UndefinedGradient(torch.autograd.Function):
    """A sampled sign, whose derivative nobody has chosen."""

    @staticmethod
    def forward(a: Tensor, states: Tensor) -> Tensor:
        return states.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # An operator: torch.compile looks at the way back, too, before anyone has asked to go it.
        return torch.ops.flipgrad.refuse_backward(grads[0]), None


def _refuse_backward(grad: Tensor) -> Tensor:
    raise RuntimeError(
        "backward() through sampled binary states without an estimator: call net(x, objective, estimator=fg.PSA()), or "
        "fg.use(model, fg.PSA()) before model(x); or evaluate under torch.no_grad()"
    )


torch.library.define("flipgrad::refuse_backward", "(Tensor grad) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.impl("flipgrad::refuse_backward", "default", _refuse_backward)
torch.library.register_fake("flipgrad::refuse_backward", torch.empty_like)
