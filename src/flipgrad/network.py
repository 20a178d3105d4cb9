"""Stochastic binary networks: what all have in common, and the paper's model, a chain of layers and a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Generator, Tensor, nn

from flipgrad.contract import Batch, Estimator, LayerCall, Network, Visit, check_estimator
from flipgrad.errors import InputError
from flipgrad.guards import capturing, check_exportable, estimate, keeping_buffers, refuse_scripting
from flipgrad.layers import BinaryLayer, estimated
from flipgrad.noise import Noise
from flipgrad.norms import whiten_layers
from flipgrad.objectives import Objective
from flipgrad.sampling import Apart, Draw, Mirrored, fresh, given
from flipgrad.steps import network

NetT = TypeVar("NetT", bound="BinaryNetwork")


class StochasticModel(nn.Module, ABC):
    """What has a gradient to be estimated: a :class:`BinaryNetwork`, or a latent-variable model."""

    __prepare_scriptable__ = refuse_scripting

    @abstractmethod
    def network(self) -> Network:
        """What is evaluated. Made anew from the modules each time, so that replacing one is safe."""

    @property
    def binary_layers(self) -> list[BinaryLayer]:
        """The binary layers in the order of evaluation."""
        return self.network().binary_layers

    @abstractmethod
    def parts(self) -> tuple[dict[str, nn.Module], str]:
        """By name, the modules whose parameters are looked at together; and what those of no such module are called."""


class BinaryNetwork(StochasticModel):
    """What :class:`Sequential` and :class:`flipgrad.Graph` share: sampling, estimates, predictions, members, initialisation."""

    def parts(self) -> tuple[dict[str, nn.Module], str]:
        return layers_by_number(self), "others"

    def forward(
        self,
        x: Tensor,
        objective: Objective | None = None,
        *,
        estimator: Estimator | None = None,
        generator: Generator | None = None,
        noise: Sequence[Tensor] | None = None,
        weight_noise: Sequence[Tensor] | None = None,
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
            weight_noise: Z of the weights of every layer that draws these, in order; each broadcasts to its weight.
            antithetic: draw noise for the first half of the batch, and give the second half the opposite of it. Useful where
                the second half repeats the first, see :func:`flipgrad.bounds.mean_losses`.
            index: the examples' numbers in the data set, [B]; some estimators remember something of each example.

        Returns:
            Outputs [B, K] or, with an objective, losses [B]. Their value is the sampled (or relaxed) loss, their gradient the
            estimator's.
        """
        _check_input(x)
        if estimator is not None:
            check_estimator(estimator)
        net = self.network()
        draw = noise_source(net, generator or net.binary_layers[0].generator, noise, weight_noise)
        if antithetic:
            if noise is not None or len(x) % 2:
                raise InputError("antithetic=True draws noise for pairs: give an even batch, and no noise")
            draw = Mirrored(draw)
        if objective is None:
            return net.outputs(net.run(net.front(x), _by_layer, draw))
        rule = estimator or net.default_estimator()
        losses = rule.losses(net, Batch(x, objective, draw, index))
        return estimate(losses, twice=rule.second_derivatives)

    def front(self, x: Tensor) -> Tensor:
        """What the first binary layer sees of ``x``: the output of the real-valued modules before it."""
        return self.network().front(x)

    def run(self, inputs: Tensor, visit: Visit, draw: Draw) -> Tensor:
        """The last states for ``inputs`` = :meth:`front` (x), where ``visit`` gives each layer's states in turn."""
        return self.network().run(inputs, visit, draw)

    def outputs(self, states: Tensor) -> Tensor:
        """The head's outputs [..., K] for the last states, as :meth:`run` gives them."""
        return self.network().outputs(states)

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
        layers = self.binary_layers
        medians = tuple(x.new_tensor(layer.noise.median) for layer in layers)
        return Member(self, medians, tuple(x.new_tensor(noise.median) for noise in _weight_noises(layers)))(x)

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
        net = self.network()
        net.check_examples_alone("member")
        kept: tuple[list[Tensor], list[Tensor]] = ([], [])

        def keeping(noise: list[Tensor]) -> Draw:
            def draw(distribution: Noise, a: Tensor) -> Tensor:
                noise.append(distribution.sample_like(a, generator=generator))
                return noise[-1]

            return draw

        with keeping_buffers(self):
            draw = Apart(*map(keeping, kept))
            net.run(net.front(x)[:1], lambda call: call.sample(call.affine(call.x)), draw)
        return Member(self, *map(tuple, kept))

    @torch.no_grad()
    def initialize(self: NetT, batch: Tensor, *, moments: bool = False, generator: Generator | None = None) -> NetT:
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
        whiten_layers(self.network(), batch, fresh(generator), moments=moments)
        return self


@final
class Sequential(BinaryNetwork):
    """A stochastic binary network: any differentiable modules, then binary layers, then a head.

    Before the first binary layer any modules may stand; their output is real-valued and never flipped. Between binary layers
    only what keeps the estimators right: reshaping, padding with 0 or ±1, average pooling (folded into the next layer's
    weight for flips), max-pooling whose windows do not overlap (see :mod:`flipgrad.max_pooling`) and concatenation
    (:class:`flipgrad.Concat`). Residual blocks (:class:`flipgrad.Residual`) stand behind real-valued modules and each other.
    The rest is refused by name. An empty batch gives an empty result.

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
        self.network()

    def __len__(self) -> int:
        return len(self.body)

    def __getitem__(self, index: int) -> nn.Module:
        return self.get_submodule(self.body[index])

    def parts(self) -> tuple[dict[str, nn.Module], str]:
        return {**layers_by_number(self), "head": self.head}, "front"

    def network(self) -> Network:
        return network((self.get_submodule(name) for name in self.body), self.head)


def check_network(net: object, who: str, *, wrapped: bool = False) -> None:
    """Refuse, on behalf of ``who``, what is no :class:`BinaryNetwork` (or holds none, where ``wrapped`` will do)."""
    modules = net.modules() if wrapped and isinstance(net, nn.Module) else [net]
    if not any(isinstance(module, BinaryNetwork) for module in modules):
        raise InputError(
            f"{who} takes a flipgrad.Sequential or a flipgrad.Graph, got {type(net).__name__}: give a model written by hand as "
            "fg.Graph(model, x); of a network that is compiled or distributed, give what was wrapped"
        )


def check_sequential(net: object, who: str) -> None:
    """Refuse, on behalf of ``who``, what is no :class:`Sequential`."""
    if not isinstance(net, Sequential):
        raise InputError(
            f"{who} takes a flipgrad.Sequential, whose layers and head it knows one by one, got {type(net).__name__}: build "
            "the network as fg.Sequential(*layers, head=...); of one that is compiled or distributed, give what was wrapped"
        )


@final
@dataclass(frozen=True)
class Member:
    """One deterministic network of the ensemble: ``member(x)`` gives its outputs [B, K]."""

    net: BinaryNetwork
    noise: tuple[Tensor, ...]
    weight_noise: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        with keeping_buffers(self.net):
            outputs: Tensor = self.net(x, noise=self.noise, weight_noise=self.weight_noise)
        return outputs


def probabilities(outputs: Tensor) -> Tensor:
    """Class probabilities of outputs [..., K]: softmax, or the sigmoid where K = 1."""
    return outputs.sigmoid() if outputs.shape[-1] == 1 else outputs.softmax(-1)


def layers_by_number(net: StochasticModel) -> dict[str, nn.Module]:
    """The binary layers as "layer 1", "layer 2", ..."""
    return {f"layer {k}": layer for k, layer in enumerate(net.binary_layers, 1)}


def parameters_by_layer(net: StochasticModel) -> dict[str, dict[str, nn.Parameter]]:
    """The trainable parameters of "front", "layer 1", ..., "head" by name; those that several layers share belong to the first.

    Of a model written by hand, it is not known where in it the others are: those of no binary layer are "others".

    >>> from flipgrad import BinaryLinear
    >>> list(parameters_by_layer(Sequential(BinaryLinear(2, 4), BinaryLinear(4, 4), head=nn.Linear(4, 2))))
    ['layer 1', 'layer 2', 'head']
    """
    parts, rest = net.parts()
    # Backwards, so that the first has the last word.
    named = reversed(parts.items())
    owners = {id(parameter): name for name, module in named for parameter in module.parameters()}
    order = (rest, *parts) if rest == "front" else (*parts, rest)
    groups: dict[str, dict[str, nn.Parameter]] = {name: {} for name in order}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            groups[owners.get(id(parameter), rest)][name] = parameter
    return {name: group for name, group in groups.items() if group}


def layers_with_binary_weights(net: StochasticModel) -> dict[str, BinaryLayer]:
    """These layers, by the names that :func:`parameters_by_layer` has for them."""
    return {f"layer {k}": layer for k, layer in enumerate(net.binary_layers, 1) if layer.weights == "binary"}


def sample_weight_noise(net: BinaryNetwork, generator: Generator | None = None) -> list[Tensor]:
    """Z of the weights of every layer that draws these, in order, to be handed in: ``net(x, ..., weight_noise=...)``.

    Processes that train together draw the same binary weights if each draws this from a generator with the same seed.

    >>> from flipgrad import BinaryLinear, Logistic
    >>> first = BinaryLinear(2, 4)
    >>> second = BinaryLinear(4, 3, weights="binary", weight_noise=Logistic(0.1))
    >>> [list(z.shape) for z in sample_weight_noise(Sequential(first, second, head=nn.Linear(3, 2)))]
    [[3, 4]]
    """
    drawn = [(layer.weight_noise, layer.weight.detach()) for layer in net.binary_layers if layer.weight_noise is not None]
    return [noise.sample_like(latent, generator=generator) for noise, latent in drawn]


def _weight_noises(layers: Sequence[BinaryLayer]) -> list[Noise]:
    """The noise of the weights of every layer that draws these."""
    return [layer.weight_noise for layer in layers if layer.weight_noise is not None]


def noise_source(
    net: Network,
    generator: Generator | None,
    noise: Sequence[Tensor] | None,
    weight_noise: Sequence[Tensor] | None = None,
) -> Draw:
    """New noise, and what is handed in of it, of units and of weights."""
    layers = net.binary_layers
    drawn = fresh(generator)
    wanted = (len(layers), len(_weight_noises(layers)))
    units = drawn if noise is None else _handed_in_units(noise, wanted[0])
    if weight_noise is None:
        return units if units is drawn else Apart(units, drawn)
    return Apart(units, _handed_in_weights(weight_noise, wanted[1]))


def given_noise(noise: Sequence[Tensor], weight_noise: Sequence[Tensor], wanted: tuple[int, int]) -> Draw:
    """A source of noise that is handed in, of units and of weights; ``wanted`` are the numbers of tensors of both."""
    return Apart(_handed_in_units(noise, wanted[0]), _handed_in_weights(weight_noise, wanted[1]))


def _handed_in_units(noise: Sequence[Tensor], wanted: int) -> Draw:
    return _handed_in(noise, wanted, "noise", "binary layers", "pre-activations")


def _handed_in_weights(noise: Sequence[Tensor], wanted: int) -> Draw:
    return _handed_in(noise, wanted, "weight_noise", "layers that draw their weights", "weights")


def _handed_in(noise: Sequence[Tensor], layers: int, name: str, of: str, to: str) -> Draw:
    """A source that gives each of the ``layers`` its own tensor of ``noise``, in order."""
    if len(noise) != layers:
        raise InputError(f"{name}: {len(noise)} tensors were handed in for {layers} {of}; give one each")
    remaining = iter(noise)

    def draw(distribution: Noise, a: Tensor) -> Tensor:
        z = next(remaining, None)
        if z is None:
            raise InputError(f"{name}: this estimator draws more than once per layer, so it cannot replay handed-in noise")
        return given(z, to)(distribution, a)

    return draw


def _by_layer(call: LayerCall) -> Tensor:
    """The states that the layer's own estimator gives."""
    return estimated(call.layer.estimator)(call)


def _check_input(x: Tensor) -> None:
    check_exportable()
    if not capturing() and x.is_floating_point() and not all_finite(x):
        raise InputError("the network's input holds NaN or inf; clean or normalise the data first")


def all_finite(x: Tensor) -> bool:
    """Whether no number is NaN or infinite: the extremes tell, in a tenth of the time that all take one by one."""
    return not x.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(x.detach()))).all())
