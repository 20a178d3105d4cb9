"""The paper's model: real-valued modules, then stochastic binary layers, then a head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrize

from flipgrad.affine import called
from flipgrad.capture import capturing, check_exportable, refuse_scripting
from flipgrad.errors import InputError
from flipgrad.guards import estimate, keeping_buffers
from flipgrad.layers import UNDEFINED, BinaryConv2d, BinaryLayer, LayerCall, Visit, check_instance
from flipgrad.noise import Noise, sign
from flipgrad.norms import Norm, per_channel, whiten
from flipgrad.objectives import Objective
from flipgrad.plan import Apply, Plan, Sample, Step, plan
from flipgrad.priors import Prior
from flipgrad.sampling import Draw, Mirrored, fresh, given


@final
@dataclass(frozen=True)
class Batch:
    """What an estimate is made from.

    Attributes:
        x: inputs [B, ...].
        objective: maps outputs [..., B, K] to losses [..., B].
        draw: the source of noise.
        index: the examples' numbers in the data set, [B], for estimators that remember something of each of them.
    """

    x: Tensor
    objective: Objective
    draw: Draw
    index: Tensor | None = None


class LossRule(Protocol):
    """What a network asks of an estimator: losses [B] whose gradient is the estimator's."""

    def losses(self, net: Sequential, batch: Batch) -> Tensor: ...


@final
class Sequential(nn.Module):
    """A stochastic binary network: any differentiable modules, then binary layers, then a head.

    Before the first binary layer any modules may stand; their output is real-valued and never flipped. Between binary layers
    only what keeps the estimators right: reshaping, padding with 0 or ±1, average pooling (folded into the next layer's
    weight for flips) and concatenation (:class:`flipgrad.Concat`). The rest is refused by name. An empty batch gives an
    empty result.

    Args:
        modules: the layers in order.
        head: maps the last states to outputs [B, K], e.g. ``nn.Linear``.

    >>> import flipgrad as fg
    >>> net = Sequential(fg.BinaryLinear(2, 5), fg.BinaryLinear(5, 5), head=nn.Linear(5, 3))
    >>> x, y = torch.randn(10, 2), torch.randint(3, (10,))
    >>> net(x).shape
    torch.Size([10, 3])
    >>> net(x, fg.CrossEntropy(y), estimator=fg.PSA()).mean().backward()
    """

    def __init__(self, *modules: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = tuple(str(index) for index in range(len(modules)))
        for name, module in zip(self.body, modules, strict=True):
            self.add_module(name, module)
        self.head = head
        self.plan()

    def __len__(self) -> int:
        return len(self.body)

    def __getitem__(self, index: int) -> nn.Module:
        return self.get_submodule(self.body[index])

    def plan(self) -> Plan:
        """The steps of an evaluation. Made anew from the modules each time, so that replacing one is safe."""
        return plan(self.get_submodule(name) for name in self.body)

    @property
    def binary_layers(self) -> list[BinaryLayer]:
        """The binary layers in the order of evaluation."""
        return self.plan().layers()

    def forward(
        self,
        x: Tensor,
        objective: Objective | None = None,
        *,
        estimator: LossRule | None = None,
        generator: Generator | None = None,
        noise: Sequence[Tensor] | None = None,
        antithetic: bool = False,
        index: Tensor | None = None,
    ) -> Tensor:
        """Outputs of one sampled pass, or losses that carry an estimator's gradient.

        Args:
            x: inputs [B, ...], finite.
            objective: maps outputs [..., B, K] to losses [..., B]; without it the head's outputs are returned.
            estimator: how to differentiate the expected loss; by default the one given to :func:`flipgrad.use`, or PSA.
            generator: the source of randomness.
            noise: Z of every binary layer in order, instead of drawing it; each broadcasts to its pre-activations.
            antithetic: draw noise for the first half of the batch, and give the second half the opposite of it. Useful where
                the second half repeats the first, see :func:`flipgrad.bounds.mean_losses`.
            index: the examples' numbers in the data set, [B]; some estimators remember something of each example.

        Returns:
            Outputs [B, K], or losses [B]: their value is the sampled (or relaxed) loss, their gradient the estimator's.
        """
        _check_input(x)
        check_instance(estimator)
        draw = self._draw(generator, noise)
        if antithetic:
            if noise is not None or len(x) % 2:
                raise InputError("antithetic=True draws noise for pairs: give an even batch, and no noise")
            draw = Mirrored(draw)
        if objective is None:
            return self.outputs(self.run(self.front(x), _by_layer, draw))
        rule = estimator or self.default_estimator()
        losses = rule.losses(self, Batch(x, objective, draw, index))
        return estimate(losses, twice=getattr(rule, "second_derivatives", False))

    def __prepare_scriptable__(self) -> None:
        """What ``torch.jit.script`` asks first."""
        refuse_scripting("a sampled network")

    def front(self, x: Tensor) -> Tensor:
        """What the first binary layer sees of ``x``: the output of the real-valued modules before it."""
        for module in self.plan().front:
            x = module(x)
        return x

    def run(self, inputs: Tensor, visit: Visit, draw: Draw) -> Tensor:
        """The last states for ``inputs`` = :meth:`front` (x), where ``visit`` gives each layer's states in turn."""
        states, prior = _run(self.plan().steps, inputs, None, visit, draw)
        if prior is not None:
            prior.read()
        return states

    def outputs(self, states: Tensor) -> Tensor:
        """The head's outputs [..., K] for the last layer's states."""
        return self.readout()(states)

    def readout(self) -> Readout:
        """The head together with the modules between it and the last binary layer."""
        return Readout(self.plan().tail, self.head)

    @torch.no_grad()
    def predict(
        self,
        x: Tensor,
        samples: int = 10,
        *,
        generator: Generator | None = None,
        link: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The predictive probabilities E_Z[p(y | x)], [B, K], averaged over ``samples`` draws of all noises.

        In training mode too it only looks: running statistics of norms stay as they are.

        Args:
            x: inputs [B, ...].
            samples: how many draws to average.
            generator: the source of randomness.
            link: turns outputs into what is averaged; by default softmax, or the sigmoid for a head with one output.
        """
        if samples < 1:
            raise InputError(f"predict(samples={samples}): at least one sample is needed")
        link = link or probabilities
        with keeping_buffers(self):
            return torch.stack([link(self(x, generator=generator)) for _ in range(samples)]).mean(0)

    def deterministic(self, x: Tensor) -> Tensor:
        """The outputs [B, K] of the deterministic net: every noise replaced by its median; running statistics are kept."""
        medians = [x.new_tensor(layer.noise.median) for layer in self.binary_layers]
        with keeping_buffers(self):
            outputs: Tensor = self(x, noise=medians)
        return outputs

    @torch.no_grad()
    def member(self, x: Tensor, *, generator: Generator | None = None) -> Member:
        """One member of the ensemble: a draw of all noises, held fixed over inputs.

        Args:
            x: any inputs [B, ...], B >= 1, of the size that the member will see: they tell how many units there are.
            generator: the source of randomness.
        """
        _check_input(x)
        if not len(x):
            raise InputError("member(x) needs at least one example to know the shapes of the units")
        self.check_examples_alone("member")
        drawn: list[Tensor] = []

        def visit(call: LayerCall) -> Tensor:
            a = call.affine(call.x)
            drawn.append(call.draw(call.noise, a))
            return sign(a - drawn[-1])

        with keeping_buffers(self):
            self.run(self.front(x)[:1], visit, fresh(generator))
        return Member(self, tuple(drawn))

    @torch.no_grad()
    def initialize(self, batch: Tensor, *, moments: bool = False, generator: Generator | None = None) -> Sequential:
        """Rescale and shift every binary layer so that its pre-activations on ``batch`` have mean 0 and variance 1.

        The paper's data-dependent initialisation, with statistics per output channel over the batch and space. A layer
        without bias is only rescaled; a channel that is constant on the batch is only shifted. Where a layer has a norm, that
        is set in place of the weight and the bias: the scale and the shift of ``ScaleShift``, the running statistics of
        ``BatchNorm`` (whose own parameters come on top of the whitening, and are left).

        Args:
            batch: inputs [B, ...].
            moments: take the statistics from the means and variances of the units, as if these were independent, instead of
                one sampled pass. They have no sampling noise, which counts in small networks.
            generator: the source of randomness of the sampled pass.

        Returns:
            The network, changed in place.
        """
        _check_input(batch)
        norms = {layer: layer.norm for layer in self.binary_layers}
        rule = _whiten_moments if moments else _whiten
        try:
            # Statistics are those before the norm, so it is put aside while they are taken.
            for layer in norms:
                layer.norm = None
            self.run(self.front(batch), lambda call: rule(call, norms[call.layer]), fresh(generator))
        finally:
            for layer, norm in norms.items():
                layer.norm = norm
        return self

    def check_examples_alone(self, who: str) -> None:
        """Refuse, on behalf of ``who``, a network whose examples depend on each other through the statistics of a batch."""
        for layer in self.binary_layers:
            if layer.mixes_examples:
                raise InputError(
                    f"{who}: {layer.norm} of {type(layer).__name__} takes its statistics from the batch, so that examples "
                    "depend on each other; call net.eval() (or norm.eval() alone) to use the running statistics, or take "
                    "norm=fg.ScaleShift(channels)"
                )

    def _draw(self, generator: Generator | None, noise: Sequence[Tensor] | None) -> Draw:
        if noise is None:
            return fresh(generator or self.binary_layers[0].generator)
        layers = self.binary_layers
        if len(noise) != len(layers):
            raise InputError(f"noise: {len(noise)} tensors were handed in for {len(layers)} binary layers; give one each")
        remaining = iter(noise)

        def draw(distribution: Noise, a: Tensor) -> Tensor:
            z = next(remaining, None)
            if z is None:
                raise InputError("noise: this estimator draws more than once per layer, so it cannot replay handed-in noise")
            return given(z)(distribution, a)

        return draw

    def default_estimator(self) -> LossRule:
        """The estimator of who chooses none: the one given to :func:`flipgrad.use`, or PSA."""
        attached: Any = self.binary_layers[0].estimator
        if hasattr(attached, "losses"):
            rule: LossRule = attached
            return rule
        # The one upward reference: who does not choose gets the estimator that we recommend.
        from flipgrad.estimators.psa import PSA

        return PSA()


def check_sequential(net: object, who: str, *, wrapped: bool = False) -> None:
    """Refuse, on behalf of ``who``, what is no :class:`Sequential` (or no module that holds one, where ``wrapped`` will do)."""
    modules = net.modules() if wrapped and isinstance(net, nn.Module) else [net]
    if not any(isinstance(module, Sequential) for module in modules):
        raise InputError(
            f"{who} takes a flipgrad.Sequential, whose layers and head it knows one by one, got {type(net).__name__}: build "
            "the network as fg.Sequential(*layers, head=...); of one that is compiled or distributed, give what was wrapped"
        )


@final
@dataclass(frozen=True)
class Readout:
    """What follows the last binary layer: reshaping or pooling, and the head."""

    tail: tuple[nn.Module, ...]
    head: nn.Module

    def __call__(self, states: Tensor) -> Tensor:
        outputs: Tensor = self.head(called(self.tail, states))
        if outputs.dim() < 2 or outputs.shape[0] != states.shape[0]:
            raise InputError(
                f"the head must map states to outputs [batch, K], it gave {list(outputs.shape)} for {list(states.shape)}; one "
                "output still needs the last dimension: nn.Linear(n, 1)"
            )
        # Flips compare losses that differ little: half the digits would not do.
        half = outputs.dtype in (torch.bfloat16, torch.float16)
        return outputs.float() if half or torch.is_autocast_enabled(outputs.device.type) else outputs


@final
@dataclass(frozen=True)
class Member:
    """One deterministic network of the ensemble: ``member(x)`` gives its outputs [B, K]."""

    net: Sequential
    noise: tuple[Tensor, ...]

    def __call__(self, x: Tensor) -> Tensor:
        with keeping_buffers(self.net):
            outputs: Tensor = self.net(x, noise=self.noise)
        return outputs


def probabilities(outputs: Tensor) -> Tensor:
    """Class probabilities of outputs [..., K]: softmax, or the sigmoid where K = 1."""
    return outputs.sigmoid() if outputs.shape[-1] == 1 else outputs.softmax(-1)


def parameters_by_layer(net: Sequential) -> dict[str, dict[str, nn.Parameter]]:
    """The trainable parameters of "front", "layer 1", ..., "head" by name; those that several layers share belong to the first.

    >>> from flipgrad import BinaryLinear
    >>> list(parameters_by_layer(Sequential(BinaryLinear(2, 4), BinaryLinear(4, 4), head=nn.Linear(4, 2))))
    ['layer 1', 'layer 2', 'head']
    """
    layers = {f"layer {k}": layer for k, layer in enumerate(net.binary_layers, 1)}
    # Backwards, so that the first has the last word.
    named = reversed([*layers.items(), ("head", net.head)])
    owners = {id(parameter): name for name, module in named for parameter in module.parameters()}
    groups: dict[str, dict[str, nn.Parameter]] = {name: {} for name in ("front", *layers, "head")}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            groups[owners.get(id(parameter), "front")][name] = parameter
    return {name: group for name, group in groups.items() if group}


def _run(steps: Iterable[Step], x: Tensor, prior: Prior | None, visit: Visit, draw: Draw) -> tuple[Tensor, Prior | None]:
    for step in steps:
        if isinstance(step, Apply):
            x, prior = called([step.module], x), prior and prior.moved(step.module)
        elif isinstance(step, Sample):
            if prior is not None:
                prior.read()
            x, source = step.evaluate(x, visit, draw, prior)
            prior = source and Prior.of(source)
        else:
            chains = [_run(chain, x, prior, visit, draw) for chain in step.chains]
            x, priors = torch.cat([states for states, _ in chains], step.dim), [known for _, known in chains if known]
            prior = Prior.joined(priors, step.dim) if len(priors) == len(chains) else None
    return x, prior


def _by_layer(call: LayerCall) -> Tensor:
    """The states that the layer's own estimator gives."""
    rule = call.layer.estimator or UNDEFINED
    return estimate(rule.states(call), twice=getattr(rule, "second_derivatives", False))


def _whiten(call: LayerCall, norm: Norm | None) -> Tensor:
    """Whiten one layer's pre-activations, by the norm if there is one, and return its new states."""
    a = call.affine(call.x)
    return call.sample(_rescale(call.layer, norm, a, torch.zeros_like(a)))


def _whiten_moments(call: LayerCall, norm: Norm | None) -> Tensor:
    """Whiten one layer's pre-activations over the batch and the sampling, and return the new means of its units."""
    a = call.affine(call.x)
    variance = call.affine.variance(1 - call.x.square()) if call.binary else torch.zeros_like(a)
    return call.noise.mean_sign(_rescale(call.layer, norm, a, variance))


def _rescale(layer: BinaryLayer, norm: Norm | None, a: Tensor, within: Tensor) -> Tensor:
    """Make the layer's pre-activations, of means ``a`` and variances ``within``, whiten over the batch; the new means."""
    channel = 1 if isinstance(layer, BinaryConv2d) else a.dim() - 1
    others = [dim for dim in range(a.dim()) if dim != channel]
    if a.numel() < 2 * a.shape[channel]:
        raise InputError(f"initialize: pre-activations {list(a.shape)} have no variance; use a batch of at least two examples")
    between, mean = torch.var_mean(a, others, correction=0, keepdim=True)
    variance = between + within.mean(others, keepdim=True)
    # A channel is constant if it varies no more than by the rounding of the pre-activations.
    rounding = 4 * torch.finfo(a.dtype).eps * a.abs().max()
    variance = torch.where(variance > rounding**2, variance, 1)
    if norm is not None:
        scale, shift = (t.view_as(mean) for t in whiten(norm, mean.flatten(), variance.flatten()))
        return a * scale + shift
    scale = variance.rsqrt()
    _assign(layer, "weight", per_channel(layer.weight, scale))
    if layer.bias is None:
        mean = torch.zeros_like(mean)
    else:
        _assign(layer, "bias", (layer.bias - mean.flatten()) * scale.flatten())
    return (a - mean) * scale


def _assign(layer: BinaryLayer, name: str, value: Tensor) -> None:
    if not parametrize.is_parametrized(layer, name):
        if name not in layer._parameters:
            raise InputError(
                f"initialize: the {name} of {type(layer).__name__} is computed by a hook (prune, the old weight_norm), so it "
                "cannot be set; initialise before, or use torch.nn.utils.parametrizations"
            )
        getattr(layer, name).copy_(value)
        return
    parametrizations: Any = layer.parametrizations
    if not all(hasattr(step, "right_inverse") for step in parametrizations[name]):
        raise InputError(
            f"initialize: the parametrisation of {type(layer).__name__}.{name} has no right_inverse, so it cannot be set; add "
            "one, or initialise before parametrising"
        )
    setattr(layer, name, value)


def _check_input(x: Tensor) -> None:
    check_exportable()
    if capturing():
        return
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise InputError("the network's input holds NaN or inf; clean or normalise the data first")
