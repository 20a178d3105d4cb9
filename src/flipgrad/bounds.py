"""Sampled losses of a network, the bounds on its marginal loss that they give, and losses to train with many draws.

With S draws of all noises and losses f_s, the mean estimates the expected loss (paper, eq. A.1) and
-log mean_s exp(-f_s) is the S-sample bound (Raiko et al. 2015): between the expected loss and the marginal loss
-log E_Z[exp(-f)] (paper, eq. A.2) in expectation, and the tighter the larger S.

:func:`mean_losses` and :func:`bound_losses` carry gradients, those of any estimator.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import cast, final

import torch
from torch import Generator, Tensor, nn

from flipgrad.contract import Batch, Estimator, LayerCall, LocalEstimator, Network, WeightCall, check_estimator
from flipgrad.errors import InputError
from flipgrad.guards import keeping_buffers
from flipgrad.network import BinaryNetwork, check_network
from flipgrad.objectives import Objective, evaluate, of_copies
from flipgrad.sampling import Mirrored
from flipgrad.steps import Apply, PoolStates, Sample


@torch.no_grad()
def sampled_losses(
    net: BinaryNetwork, x: Tensor, objective: Objective, samples: int, *, generator: Generator | None = None
) -> Tensor:
    """Losses of ``samples`` independent draws, [samples, B], without a gradient; running statistics are kept."""
    _check_samples(samples)
    check_network(net, "bounds", wrapped=True)
    with keeping_buffers(net):
        return torch.stack([evaluate(objective, net(x, generator=generator)) for _ in range(samples)])


def expected_loss(
    net: BinaryNetwork, x: Tensor, objective: Objective, samples: int = 10, *, generator: Generator | None = None
) -> Tensor:
    """The expected loss of every example, estimated from ``samples`` draws, [B]."""
    return sampled_losses(net, x, objective, samples, generator=generator).mean(0)


def marginal_loss(
    net: BinaryNetwork, x: Tensor, objective: Objective, samples: int = 10, *, generator: Generator | None = None
) -> Tensor:
    """The ``samples``-sample bound on the marginal loss of every example, [B]."""
    return multi_sample_bound(sampled_losses(net, x, objective, samples, generator=generator))


def multi_sample_bound(losses: Tensor) -> Tensor:
    """-log mean_s exp(-f_s) over the first dimension of ``losses`` [S, ...].

    >>> multi_sample_bound(torch.tensor([[1.0], [1.0]]))
    tensor([1.])
    """
    return math.log(len(losses)) - torch.logsumexp(-losses, 0)


def mean_losses(
    net: nn.Module,
    x: Tensor,
    objective: Objective,
    samples: int,
    *,
    estimator: Estimator | None = None,
    generator: Generator | None = None,
    noise: Sequence[Tensor] | None = None,
    weight_noise: Sequence[Tensor] | None = None,
    antithetic: bool = False,
    shared: int = 0,
    index: Tensor | None = None,
) -> Tensor:
    """Losses [B] with the mean of ``samples`` estimates, value and gradient, of the expected loss.

    As biased as the estimator, with its variance divided by ``samples``; that of binary weights that are drawn is not, as all
    draws share them. The batch is evaluated once, repeated: with
    10 draws, 1.4 times as fast as a loop for convolutional networks and 6 times for tiny ones. It takes no more memory, as a
    loop holds all draws for the way back too.

    Args:
        net: a :class:`~flipgrad.Sequential` or :class:`~flipgrad.Graph`, or what wraps one and is called like it.
        x: inputs [B, ...].
        objective: maps outputs [..., B, K] to losses [..., B].
        samples: the number of draws S.
        estimator: any, as for the network.
        generator: the source of randomness.
        noise: Z of every binary layer instead of drawing it, for S x B examples: the whole batch for the first draw first.
        weight_noise: Z of the weights of every layer that draws these, instead of drawing it; all S draws share it.
        antithetic: make half of the draws, and of each a second one with -Z in place of Z, instead of independent ones. The
            mean is the same, and in nearly all networks the variance is lower, up to three times in deep layers at the start
            of training (``docs/results/beyond.md``).
        shared: of how many binary layers, from the first on, all draws have the same states: only the layers behind them are
            drawn, and evaluated, S times. Every draw is an ordinary one of the whole network, so that the mean is the same. It
            pays where the upper layers are cheap, as fully connected ones behind convolutions (``docs/choose/samples.md``). For
            a chain of layers, and estimators such as PSA and ST; the ``noise`` of shared layers is then for B examples.
        index: the examples' numbers in the data set, [B].

    >>> import flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=nn.Linear(4, 2))
    >>> x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))
    >>> mean_losses(net, x, objective, 10, estimator=fg.PSA()).mean().backward()
    """
    check_network(net, "bounds", wrapped=True)
    if antithetic and noise is not None:
        raise InputError("antithetic=True draws noise for pairs: give an even batch, and no noise")
    rule = MeanOfDraws(estimator, samples, antithetic=antithetic, shared=shared)
    given = {"noise": noise, "weight_noise": weight_noise}
    return cast(Tensor, net(x, objective, estimator=rule, generator=generator, index=index, **given))


def bound_losses(
    net: nn.Module,
    x: Tensor,
    objective: Objective,
    samples: int,
    *,
    estimator: Estimator | None = None,
    generator: Generator | None = None,
    noise: Sequence[Tensor] | None = None,
    weight_noise: Sequence[Tensor] | None = None,
    index: Tensor | None = None,
) -> Tensor:
    r"""The S-sample bounds [B] on the marginal losses, to train with: their gradient is made by any estimator.

    Raiko, Berglund, Alain, Dinh. Techniques for Learning Binary Stochastic Feedforward Neural Networks. ICLR 2015. Tang,
    Salakhutdinov. Learning Stochastic Feedforward Neural Networks. NeurIPS 2013. The baselines are those of Mnih, Rezende.
    Variational Inference for Monte Carlo Objectives. ICML 2016.

    In expectation, with the losses :math:`f_s` of S independent copies of the network,

    .. math:: E\Big[-\log \frac1S \sum_s e^{-f_s}\Big], \qquad
        h_s(f) = -\log \frac1S \Big(e^{-f} + \sum_{t \ne s} e^{-f_t}\Big) - v_s.

    Its gradient is the sum over s of the gradients of :math:`E[h_s(f_s)]` in copy s alone, given the others' losses: an
    expected loss, with the objective :math:`h_s`. As copies are independent, the others' losses may come from the very pass
    that the estimate for copy s is made from, so that one estimate for S x B examples is all it costs. The constant
    :math:`v_s`, the bound with :math:`f_s` replaced by the mean of the others' losses, changes no expected gradient; it
    makes the objective small, which estimators by the score function need.

    Binary weights that are drawn are the same in all copies: the bound is then that of a network with these weights, and its
    mean over weights lies above that of :func:`marginal_loss`, which draws weights for every sample.

    Unbiased if the estimator is, and biased like it if it is not. With one sample it is the estimate of the expected loss.
    A baseline learns to predict :math:`S h_s`, whose mean is close to 0; a constant one is of no use here.

    Args:
        net, x, estimator, generator, noise, weight_noise, index: as for :func:`mean_losses`.
        objective: maps outputs [..., B, K] to losses [..., B], negative logarithms of likelihoods.
        samples: S.

    Returns:
        The bounds; their value is :func:`multi_sample_bound` of the copies' sampled (or relaxed) losses.

    >>> import flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=nn.Linear(4, 2))
    >>> x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))
    >>> bound_losses(net, x, objective, 10, estimator=fg.PSA()).mean().backward()
    """
    check_network(net, "bounds", wrapped=True)
    rule = _BoundOfDraws(estimator, samples)
    given = {"noise": noise, "weight_noise": weight_noise}
    return cast(Tensor, net(x, objective, estimator=rule, generator=generator, index=index, **given))


class _ManyDraws(Estimator):
    """An estimator that makes S = ``samples`` estimates by another one: of the batch, repeated, one copy after the other.

    The other one is ``rule``; None for the network's own.
    """

    unbiased = False
    citation = "Raiko, Berglund, Alain, Dinh 2015"

    def __init__(self, rule: Estimator | None, samples: int) -> None:
        _check_samples(samples)
        if rule is not None:
            check_estimator(rule)
        self.rule, self.samples = rule, samples

    @final
    def check_latent(self, depth: int, *, sampled: bool) -> None:
        raise InputError("a latent-variable model takes single draws: give more examples, or the estimator itself")

    @final
    def passes(self, depth: int) -> int:
        return self.samples * (1 if self.rule is None else self.rule.passes(depth))

    @final
    def losses(self, net: Network, batch: Batch) -> Tensor:
        rule = self.rule or net.default_estimator()
        self.second_derivatives = rule.second_derivatives
        return rule.losses(net, batch) if self.samples == 1 else self._losses(net, rule, batch)

    @final
    def _copies(self, batch: Batch) -> tuple[Batch, tuple[int, int]]:
        """The whole batch S times, flattened, with the objective of one; and the shape S, B."""
        index = None if batch.index is None else repeated(batch.index, self.samples)
        return replace(batch, x=repeated(batch.x, self.samples), index=index), (self.samples, len(batch.x))

    @abstractmethod
    def _losses(self, net: Network, rule: Estimator, batch: Batch) -> Tensor:
        """Losses [B] of several draws."""


def repeated(t: Tensor, times: int) -> Tensor:
    """[times * B, ...] of ``t`` [B, ...]: all of it, then all of it again."""
    return t.expand(times, *t.shape).flatten(0, 1)


@final
class MeanOfDraws(_ManyDraws):
    """What :func:`mean_losses` asks of a network: the mean of ``samples`` estimates."""

    def __init__(self, rule: Estimator | None, samples: int, *, antithetic: bool = False, shared: int = 0) -> None:
        super().__init__(rule, samples)
        if antithetic and samples % 2:
            raise InputError(f"samples={samples}: antithetic draws come in pairs; give an even number")
        if shared < 0 or (shared and samples < 2):
            raise InputError(
                f"shared={shared}: several draws may share the states of the first layers; give the number of these layers, "
                "and samples=2 or more"
            )
        self.antithetic, self.shared = antithetic, shared

    def check_shared(self, net: Network, rule: Estimator) -> None:
        """Refuse networks and estimators whose draws cannot have the first layers in common."""
        if not self.shared:
            return
        if not isinstance(rule, LocalEstimator):
            raise InputError(
                f"shared={self.shared}: {type(rule).__name__} looks at whole paths, whose layers are drawn together; use "
                "fg.PSA() or fg.ST(), or leave shared out"
            )
        if not all(isinstance(step, Sample | Apply | PoolStates) for step in net.steps):
            raise InputError(
                f"shared={self.shared}: draws of the upper layers alone are for a chain, fg.Sequential without fg.Concat, "
                "residual blocks and graphs written by hand; leave shared out"
            )
        layers = len(net.binary_layers)
        if self.shared >= layers:
            raise InputError(
                f"shared={self.shared}: of the {layers} binary layers of the network the last is drawn anew for every draw; "
                f"share at most {layers - 1}"
            )

    def _losses(self, net: Network, rule: Estimator, batch: Batch) -> Tensor:
        self.check_shared(net, rule)
        if self.shared and isinstance(rule, LocalEstimator):
            return _UpperDraws(rule, self).losses(net, batch)
        copies, shape = self._copies(batch)
        objective = of_copies(copies.objective, *shape)
        draw = Mirrored(copies.draw) if self.antithetic else copies.draw
        losses: Tensor = rule.losses(net, replace(copies, objective=objective, draw=draw)).unflatten(0, shape)
        return losses.mean(0)


@final
class _UpperDraws(LocalEstimator):
    """One estimate by the ``rule``, of S copies behind the first layers, which they share; made anew for every batch.

    Each copy is one draw of the whole network. What a layer's weights take for averaged inputs is given that copy's states
    alone, so that it belongs to the same copy's signals.
    """

    unbiased = False
    citation = _ManyDraws.citation

    def __init__(self, rule: LocalEstimator, of: MeanOfDraws) -> None:
        self.rule, self.of, self.visited = rule, of, 0

    def weights(self, call: WeightCall) -> Tensor:
        return self.rule.weights(call)

    def states(self, call: LayerCall) -> Tensor:
        if self.visited == self.of.shared:
            call.x = repeated(call.x, self.of.samples)
            prior = call.prior
            if prior is not None:
                call.prior = replace(prior, log_odds=lambda: repeated(prior.log_odds(), self.of.samples))
        if self.visited >= self.of.shared and self.of.antithetic:
            call.draw = Mirrored(call.draw)
        self.visited += 1
        return self.rule.states(call)

    def head(self, net: Network, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        shape = (self.of.samples, len(states) // self.of.samples)
        losses: Tensor = self.rule.head(net, last, states, of_copies(objective, *shape)).unflatten(0, shape)
        return losses.mean(0)


@final
class _BoundOfDraws(_ManyDraws):
    """What :func:`bound_losses` asks of a network."""

    def _losses(self, net: Network, rule: Estimator, batch: Batch) -> Tensor:
        copies, shape = self._copies(batch)
        drawn = any(layer.weight_noise is not None for layer in net.binary_layers)
        if drawn and not isinstance(rule, LocalEstimator):
            # What other weights would do to one copy they would do to all, whose losses are taken for known here.
            raise InputError(
                "bound_losses: the copies share one draw of the binary weights, which "
                f"{type(rule).__name__} takes for random in each copy alone; use fg.PSA() or fg.ST(), weight_noise=None, or "
                "flipgrad.exact.marginal_loss"
            )
        # An estimator evaluates its objective first at the path that it samples (or relaxes). The losses found there are what
        # all later evaluations, at flips or on other continuations of a copy, take the other copies' losses to be.
        known: list[tuple[Tensor, Tensor]] = []

        def objective(outputs: Tensor) -> Tensor:
            """S h_s of every copy s."""
            losses = evaluate(copies.objective, outputs.unflatten(-2, shape))
            if not known:
                # An estimator that samples no path, as Exact, sees all states of all copies at once: a pass is sampled for it.
                known.append(_others(losses.detach() if losses.dim() == 2 else _sampled(net, copies, shape)))
            log_sum, guesses = known[0]
            return (self.samples * (_bound(losses, log_sum) - guesses)).flatten(-2)

        # [S, B]: S h_s, whose mean over copies has the gradient of the sum of h_s. What the estimator adds to the losses to
        # train its own parameters is then averaged over copies, as over examples.
        losses: Tensor = rule.losses(net, replace(copies, objective=objective)).unflatten(0, shape)
        if not known:
            raise InputError("the estimator never evaluated the objective, so there is no bound; see Estimator.losses")
        mean, values = losses.mean(0), losses.detach() / self.samples + known[0][1]
        return values.mean(0) + (mean - mean.detach())


@torch.no_grad()
def _sampled(net: Network, copies: Batch, shape: tuple[int, int]) -> Tensor:
    """Losses [S, B] of one sampled pass."""
    states = net.run(net.front(copies.x), lambda call: call.sample(call.affine(call.x)), copies.draw)
    return evaluate(copies.objective, net.outputs(states).unflatten(0, shape))


def _others(losses: Tensor) -> tuple[Tensor, Tensor]:
    """What each of S copies knows of the others: log sum_{t != s} exp(-f_t), and the guesses v_s of the bound, [S, B] each."""
    own = torch.eye(len(losses), dtype=torch.bool, device=losses.device)[:, :, None]
    log_sum = torch.where(own, -torch.inf, -losses).logsumexp(1)
    mean = (losses.sum(0) - losses) / (len(losses) - 1)
    return log_sum, _bound(mean, log_sum)


def _bound(losses: Tensor, log_sum: Tensor) -> Tensor:
    """The bounds [..., S, B] where every copy has one of the ``losses`` [..., S, B] and the others have theirs."""
    return math.log(len(log_sum)) - torch.logaddexp(-losses, log_sum)


def _check_samples(samples: int) -> None:
    if samples < 1:
        raise InputError(f"samples={samples}: at least one sample is needed")
