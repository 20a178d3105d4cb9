"""Latent-variable models with binary latents: autoencoders, and sigmoid belief networks with a recognition network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Generator, Tensor, nn

from flipgrad.bounds import multi_sample_bound
from flipgrad.contract import Batch, Estimator, LayerCall, Network, check_estimator
from flipgrad.errors import InputError
from flipgrad.guards import estimate, has_hooks, keeping_buffers
from flipgrad.latent.costs import Elbo, ElboHead, Entropy, Stage
from flipgrad.layers import BinaryConv2d, BinaryLayer, BinaryLinear
from flipgrad.network import StochasticModel, layers_by_number, noise_source
from flipgrad.noise import Logistic, sign
from flipgrad.objectives import AdditiveObjective, BernoulliLikelihood
from flipgrad.sampling import Draw, fresh
from flipgrad.steps import Apply, Sample, network

# Examples, copies included, that are evaluated at once to measure a bound.
EXAMPLES_AT_ONCE = 2**12
LOGISTIC = Logistic()


@final
class Variational(StochasticModel):
    r"""A model with layers of binary latents, trained by the evidence lower bound (ELBO) with any estimator.

    Recognition, the encoder, draws :math:`z^1 \sim q(\cdot | x)`, :math:`z^2 \sim q(\cdot | z^1)`, ...; the model generates
    :math:`z^L` from its prior, :math:`z^{k-1} \sim p(\cdot | z^k)` and x. ``model(x)`` gives negative ELBOs,

    .. math:: E_q \Big[\sum_k -H(q(\cdot | z^{k-1})) - \log p(z^{k-1} | z^k)\Big] - E_q \log p(z^L), \quad z^0 = x,

    with the gradient of an estimator. With one layer, a linear decoder and a likelihood that adds up over the data, PSA is
    unbiased and costs about one backward pass: it is the local expectation gradient, with the decoder's flips as a sum over
    flips (:mod:`flipgrad.flips.heads`). With several layers it is biased, as in every deep network.

    Args:
        encoder: any real-valued modules, then the layers that draw the latents, :class:`flipgrad.BinaryLinear` or
            :class:`flipgrad.BinaryConv2d`, with only reshaping or average pooling between them.
        decoder: a module for each of these layers. The first gives the outputs of the likelihood, the logits of x by default,
            from the flattened :math:`z^1`; a plain ``nn.Linear`` has fast flips. The others are ``nn.Linear`` and give the
            logits of the flattened :math:`z^{k-1}` from :math:`z^k`.
        prior: logits of the last layer's states: None for a parameter that starts at 0, an ``nn.Parameter`` to be learned from
            there, or a tensor that stays as it is.
        likelihood: makes the objective of data [B, K]: :class:`flipgrad.BernoulliLikelihood`, or for instance
            ``functools.partial(fg.GaussianLikelihood, scale=0.1)``.
        entropy: "analytic" takes the entropies of recognition, and the prior's cross-entropy with its last layer, in closed
            form; "sampled" samples them, as most of the literature does: the same mean, and in general more variance.

    >>> import torch, flipgrad as fg
    >>> x = torch.randint(2, (10, 784)).float()
    >>> model = fg.Variational([fg.BinaryLinear(784, 200)], [torch.nn.Linear(200, 784)])
    >>> model(x, estimator=fg.PSA()).mean().backward()
    >>> model.log_likelihood(x, samples=10).shape, model.sample(3).shape, model.reconstruct(x).shape
    (torch.Size([10]), torch.Size([3, 784]), torch.Size([10, 784]))
    """

    def __init__(
        self,
        encoder: Sequence[nn.Module],
        decoder: Sequence[nn.Module],
        prior: Tensor | None = None,
        *,
        likelihood: Callable[[Tensor], AdditiveObjective] = BernoulliLikelihood,
        entropy: Entropy = "analytic",
    ) -> None:
        super().__init__()
        if entropy not in ("analytic", "sampled"):
            raise InputError(f"Variational(entropy={entropy!r}): choose 'analytic' or 'sampled'")
        for name, modules in (("encoder", encoder), ("decoder", decoder)):
            if isinstance(modules, nn.Module) or not all(isinstance(module, nn.Module) for module in modules):
                raise InputError(f"Variational({name}=...): give a list of modules, e.g. [fg.BinaryLinear(784, 200)]")
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.likelihood, self.entropy = likelihood, entropy
        self._check_decoder(network(self.encoder, nn.Identity()).binary_layers)
        if prior is None or isinstance(prior, nn.Parameter):
            self.prior = nn.Parameter(self._zeros()) if prior is None else prior
        else:
            self.register_buffer("prior", prior.detach().clone())
        if self.prior.dim() != 1:
            raise InputError(f"Variational(prior=...): give logits [units], one for each; got shape {list(self.prior.shape)}")
        self.network()

    def parts(self) -> tuple[dict[str, nn.Module], str]:
        decoder = {f"decoder {k}": module for k, module in enumerate(self.decoder, 1)}
        prior = {"prior": nn.ParameterList([self.prior])} if isinstance(self.prior, nn.Parameter) else {}
        return {**layers_by_number(self), **decoder, **prior}, "front"

    def network(self, entropy: Entropy | None = None) -> Network:
        """What estimators evaluate. Made anew from the modules each time, so that replacing one is safe."""
        chain = network(self.encoder, nn.Identity())
        self._check_decoder(chain.binary_layers)
        if chain.tail:
            raise InputError(f"Variational: {chain.tail[0]} behind the last latent layer; put it in front of the decoder")
        shapes: dict[int, torch.Size] = {}
        stages: list[Stage] = []
        moves: list[Apply] = []
        depth = len(chain.binary_layers)
        for step in chain.steps:
            if isinstance(step, Apply):
                moves.append(step)
            elif isinstance(step, Sample) and isinstance(step.layer, BinaryLinear | BinaryConv2d):
                _check_layer(step.layer)
                stages.append(Stage(tuple(moves), step, len(stages), len(stages) + 1 == depth, shapes))
                moves = []
            else:
                raise InputError(
                    f"Variational: {type(step).__name__} in the encoder: latents are drawn by fg.BinaryLinear or "
                    "fg.BinaryConv2d, with only reshaping or average pooling between them"
                )
        head = ElboHead(tuple(self.decoder), self.prior, tuple(stages), entropy or self.entropy)
        front = (_Front(chain.real),) if chain.real else ()
        return Network(front, tuple(stages), (), head)

    def objective(self, x: Tensor, net: Network) -> Elbo:
        """The objective of the data ``x`` for the outputs of ``net``, as :meth:`network` gives it."""
        head = net.head
        if not isinstance(head, ElboHead):
            raise InputError("Variational.objective: give the network that model.network() made")
        stage = head.stages[0]

        def first() -> Tensor:
            return stage.affine()(net.front(x)).flatten(1)

        return Elbo(self.data_likelihood(x), first, head)

    def forward(
        self,
        x: Tensor,
        *,
        estimator: Estimator | None = None,
        generator: Generator | None = None,
        noise: Sequence[Tensor] | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """Negative ELBOs [B] that carry an estimator's gradient.

        Args:
            x: data [B, ...], for a Bernoulli likelihood from 0 to 1.
            estimator: how to differentiate the expectation; by default PSA.
            generator: the source of randomness.
            noise: Z of every latent layer in order, instead of drawing it.
            index: the examples' numbers in the data set, [B], for estimators that remember something of each.

        Returns:
            Their value is that of the sample (or of relaxed states), their gradient the estimator's.
        """
        if estimator is not None:
            check_estimator(estimator)
        if torch.is_autocast_enabled(x.device.type):
            raise InputError("Variational: costs are differences of logarithms, which need more digits than autocast leaves")
        net = self.network()
        rule = estimator or net.default_estimator()
        check_latent(rule, net)
        draw = noise_source(net, generator, noise)
        losses = rule.losses(net, Batch(x, self.objective(x, net), draw, index))
        return estimate(losses, twice=rule.second_derivatives)

    @torch.no_grad()
    def log_likelihood(self, x: Tensor, samples: int = 100, *, generator: Generator | None = None) -> Tensor:
        r"""The importance-weighted lower bound of log p(x) of every example, [B].

        Burda, Grosse, Salakhutdinov. Importance Weighted Autoencoders. ICLR 2016.

        .. math:: \log \frac1S \sum_s \frac{p(x, z_s)}{q(z_s | x)}, \quad z_s \sim q(\cdot | x)
        """
        if samples < 1:
            raise InputError(f"log_likelihood(samples={samples}): at least one sample is needed")
        losses: list[Tensor] = []
        copies = max(1, min(samples, EXAMPLES_AT_ONCE // max(1, len(x))))
        with keeping_buffers(self):
            for done in range(0, samples, copies):
                count = min(copies, samples - done)
                losses.append(self._sampled_losses(x.expand(count, *x.shape).flatten(0, 1), fresh(generator)).view(count, -1))
        return -multi_sample_bound(torch.cat(losses))

    def _sampled_losses(self, x: Tensor, draw: Draw) -> Tensor:
        """log q(z | x) - log p(x, z) of one draw, [B]."""
        net = self.network("sampled")
        objective = self.objective(x, net)
        return objective(net.outputs(net.run(net.front(x), _sampled, draw)))

    @torch.no_grad()
    def sample(self, count: int, *, generator: Generator | None = None) -> Tensor:
        """The means [count, K] of data that the model generates, given the latents that it drew: of bits, probabilities."""
        if count < 0:
            raise InputError(f"sample({count}): give the number of examples, at least 0")
        logits = self.prior.expand(count, -1)
        for module in reversed(self.decoder[1:]):
            logits = module(_drawn(logits, generator))
        return self._means(_drawn(logits, generator))

    @torch.no_grad()
    def reconstruct(self, x: Tensor, *, generator: Generator | None = None) -> Tensor:
        """The means of the data, in the shape of ``x``, given the first latents that were drawn for ``x``."""
        net = self.network()
        with keeping_buffers(self):
            states = net.run(net.front(x), _sampled, fresh(generator))
        if not isinstance(net.head, ElboHead):
            raise RuntimeError("the network of a Variational has no ElboHead")
        return self._means(net.head.split(states)[0]).view_as(x)

    def _means(self, z: Tensor) -> Tensor:
        outputs = self.decoder[0](z).flatten(1)
        return self.data_likelihood(torch.zeros_like(outputs)).means(outputs)

    def data_likelihood(self, x: Tensor) -> AdditiveObjective:
        """The likelihood's objective of the data ``x`` [B, ...]."""
        objective = self.likelihood(x.flatten(1))
        if not isinstance(objective, AdditiveObjective):
            raise InputError(
                f"Variational(likelihood=...): it gave {type(objective).__name__}; give fg.BernoulliLikelihood, "
                "fg.GaussianLikelihood, or a function that makes one of data [B, K]"
            )
        return objective

    def _check_decoder(self, layers: list[BinaryLayer]) -> None:
        if len(self.decoder) != len(layers):
            raise InputError(
                f"Variational: {len(self.decoder)} modules in the decoder for {len(layers)} latent layers; give one each, and "
                "put several of the first in an nn.Sequential"
            )
        for k, module in enumerate(self.decoder[1:], 2):
            if type(module) is not nn.Linear or has_hooks(module):
                hooked = " with hooks" if has_hooks(module) else ""
                raise InputError(
                    f"Variational: module {k} of the decoder is {type(module).__name__}{hooked}; those that generate latents "
                    "are nn.Linear and nothing besides, only the first may be any module"
                )
            for layer, size, number in ((layers[k - 1], module.in_features, k), (layers[k - 2], module.out_features, k - 1)):
                if isinstance(layer, BinaryLinear) and layer.out_features != size:
                    raise InputError(
                        f"Variational: module {k} of the decoder is for {size} units of layer {number}, which has "
                        f"{layer.out_features}"
                    )

    def _zeros(self) -> Tensor:
        """Logits of the last layer's states."""
        last, top = network(self.encoder, nn.Identity()).binary_layers[-1], self.decoder[-1]
        size = last.out_features if isinstance(last, BinaryLinear) else getattr(top, "in_features", None)
        if size is None:
            raise InputError(
                "Variational: how many units a convolution draws depends on its input; give prior=torch.nn.Parameter("
                "torch.zeros(units))"
            )
        return torch.zeros(size, dtype=last.weight.dtype, device=last.weight.device)


def check_latent(estimator: Estimator, net: Network) -> None:
    """Refuse an estimator that is not known to be right for a latent-variable model, and examples that are not alone."""
    net.check_examples_alone("Variational")
    estimator.check_latent(len(net.steps), sampled=isinstance(net.head, ElboHead) and net.head.entropy == "sampled")


class _Front(nn.Module):
    """The real-valued modules in front, evaluated once for the same batch: they may draw, or keep statistics."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.inner = nn.Sequential(*modules)
        self._known: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._known is None or self._known[0] is not x:
            self._known = x, self.inner(x)
        return self._known[1]


def _check_layer(layer: BinaryLinear | BinaryConv2d) -> None:
    if layer.weights == "binary":
        raise InputError(
            f"Variational: {type(layer).__name__}(weights='binary') is not known to be right where entropies are costs; use "
            "weights='real'"
        )


def _sampled(call: LayerCall) -> Tensor:
    return call.sample(call.affine(call.x))


def _drawn(logits: Tensor, generator: Generator | None) -> Tensor:
    """States ±1 with these ``logits``."""
    return sign(logits - LOGISTIC.sample_like(logits, generator=generator))
