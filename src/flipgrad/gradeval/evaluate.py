"""How good is a gradient? Every estimator against the truth, layer by layer.

The truth is the exact gradient, or the mean of very many draws of an unbiased estimator.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from reprlib import repr as brief
from typing import Any, Literal, final

import torch
from torch import Tensor

from flipgrad import exact, files
from flipgrad.contract import check_estimator
from flipgrad.errors import InputError
from flipgrad.estimators import DisARM, Estimator, Exact
from flipgrad.gradeval.draws import Problem, Sampler, default_workers, whole_gradient
from flipgrad.gradeval.statistics import CONFIDENCE, COSINE_SHARE, Accuracy, Tally
from flipgrad.guards import keeping_buffers
from flipgrad.latent import Variational, check_latent
from flipgrad.network import StochasticModel, check_network, layers_with_binary_weights
from flipgrad.objectives import Objective
from flipgrad.sampling import check_seed

# Fewer draws say nothing about variances.
FEWEST = 10
# More draws than a person can wait for.
MOST_SAMPLES = 10**9
# A reference of draws has this many times the draws of an estimator.
REFERENCE_FACTOR = 100
# More threads than any processor has.
MOST_WORKERS = 1024
# A part of the gradient that is shorter than this, relative to the whole, is rounding.
ROUNDING_SHARE = 1e-6

# Told what is at hand, and how many draws of it have come since the last time.
Report = Callable[[str, int], None]


@final
@dataclass(frozen=True)
class ReferenceLayer:
    """The reference in one layer: its length, and its own standard error relative to that (0 if exact)."""

    name: str
    length: float
    error: float


@final
@dataclass(frozen=True)
class Reference:
    """The gradient that estimates are compared with.

    Attributes:
        gradient: [P], in double precision.
        kind: "exact" or "draws".
        estimator: whose draws were averaged.
        draws: how many.
        layers: length and standard error of every layer's part.
    """

    gradient: Tensor
    kind: str
    estimator: str
    draws: int
    layers: list[ReferenceLayer]


@final
@dataclass(frozen=True)
class Measured:
    """What was found out about one estimator.

    Attributes:
        samples_per_second: one-draw gradients per second.
        vectorised: whether draws were made many at once.
        unbiased: what the estimator says of itself.
        layers: its accuracy in every layer, and, last, in "all" of them.
    """

    samples_per_second: float
    vectorised: bool
    unbiased: bool
    layers: list[Accuracy]


@final
@dataclass(frozen=True)
class Result:
    """Accuracies of estimators on one problem.

    Attributes:
        estimators: what was measured, by the estimator's name.
        reference: what it was compared with.
        samples: draws per estimator.
        points: data points.
        seed: of the draws.
    """

    estimators: dict[str, Measured]
    reference: Reference
    samples: int
    points: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with where it came from."""
        result = {**asdict(self), "confidence": CONFIDENCE, "cosine_share": COSINE_SHARE, **files.provenance()}
        del result["reference"]["gradient"]
        return result

    def write(self, path: Path | str, **more: object) -> None:
        """Write the result, and what ``more`` is to be told, as JSON."""
        files.write_json(Path(path), {**self.to_dict(), **more})

    def accuracy(self, estimator: str, layer: str = "all") -> Accuracy:
        """The accuracy of one estimator in one layer."""
        if estimator not in self.estimators:
            raise InputError(f"no estimator {estimator!r} in this result; there are {', '.join(self.estimators)}")
        layers = {accuracy.name: accuracy for accuracy in self.estimators[estimator].layers}
        if layer not in layers:
            raise InputError(f"no layer {layer!r} in this result; there are {', '.join(layers)}")
        return layers[layer]


def evaluate(
    net: StochasticModel,
    x: Tensor,
    objective: Objective | None,
    estimators: Sequence[Estimator] | Mapping[str, Estimator],
    samples: int = 10_000,
    *,
    seed: int = 0,
    reference: Estimator | Literal["auto"] = "auto",
    reference_samples: int | None = None,
    workers: int | None = None,
    report: Report | None = None,
) -> Result:
    """Measure bias, variance, RMSE and cosine of gradient estimators, per layer and in the whole network.

    A draw is the gradient of the mean loss over the data points, with one draw of all noises; see
    :mod:`flipgrad.gradeval.statistics` for what is made of the draws. The network is evaluated as it is (call ``net.eval()``
    first, if modules before its binary layers behave differently in training) and left unchanged.

    Where binary weights are not drawn, the true gradient in their latent weights is 0, so that whatever an estimator gives
    them counts as an error: give such layers a ``weight_noise``, or freeze their weights by ``requires_grad_(False)``.

    Args:
        net: the network, a :class:`~flipgrad.Sequential` or a :class:`~flipgrad.Graph`; parameters with
            ``requires_grad=False`` are left out. Or a latent-variable model, :class:`~flipgrad.Variational`.
        x: data points [B, ...].
        objective: maps outputs [..., B, K] to losses [..., B]; None for a latent-variable model, which has its own.
        estimators: estimators, called by the names of their classes; or a mapping from names.
        samples: draws per estimator, at least 10.
        seed: the same seed gives the same draws.
        reference: what estimates are compared with. "auto" is the exact gradient where the network is small enough or has
            binary weights, else, and of models written by hand, the mean of many draws of DisARM, with its standard error in
            the result; ``fg.Exact()`` insists on the exact one; an unbiased estimator is drawn from. Of binary weights that are
            drawn such estimates are noisy: ``fg.LEG()`` is the least so, and takes a pass for every weight.
        reference_samples: draws of the reference; by default 100 times ``samples``.
        workers: threads that draw side by side; by default one for every core. The result does not depend on it.
        report: called with what is at hand and the number of new draws, for a progress bar.

    Returns:
        The accuracies; ``result.write(path)`` stores them as JSON.

    Raises:
        InputError: if the reference is out of reach, an estimate is not finite, or an argument is wrong.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3), head=torch.nn.Linear(3, 2))
    >>> x, objective = torch.randn(10, 2), fg.CrossEntropy(torch.arange(10) % 2)
    >>> result = fg.gradeval.evaluate(net, x, objective, [fg.PSA(), fg.ARM()], samples=100)
    >>> result.accuracy("PSA", "layer 1").rmse[0] < result.accuracy("ARM", "layer 1").rmse[0]
    True
    """
    named = _named(estimators)
    check_options(samples, seed, reference, reference_samples, workers)
    problem = _problem(net, x, objective, list(named.values()))
    workers = default_workers(x.device) if workers is None else workers
    tell = report or (lambda name, draws: None)
    with keeping_buffers(net):
        truth = _reference(problem, reference, reference_samples or REFERENCE_FACTOR * samples, seed, workers, tell)
        measured = {name: _measure(problem, truth, name, rule, samples, seed, workers, tell) for name, rule in named.items()}
    return Result(measured, truth, samples, len(x), seed)


def _problem(net: StochasticModel, x: Tensor, objective: Objective | None, rules: Sequence[Estimator]) -> Problem:
    if not isinstance(net, Variational):
        check_network(net, "gradeval")
    elif objective is not None:
        raise InputError("objective: a flipgrad.Variational has its own, the negative ELBO; give None")
    else:
        for rule in rules:
            check_latent(rule, net.network())
    problem = Problem(net, x, objective)
    if not problem.parameters():
        raise InputError("the network has no parameter with requires_grad=True, so there is no gradient to measure")
    if not len(x):
        raise InputError("x is empty; give at least one data point")
    net.network().check_examples_alone("gradeval")
    return problem


def check_options(
    samples: int, seed: int, reference: Estimator | Literal["auto"], reference_samples: int | None, workers: int | None
) -> None:
    """Refuse options of :func:`evaluate` that need no network to be found wrong, before the work that makes one."""
    for name, count in (("samples", samples), ("reference_samples", reference_samples)):
        if count is not None and not FEWEST <= count <= MOST_SAMPLES:
            raise InputError(
                f"{name}={brief(count)}: give at least {FEWEST} draws per estimator and at most {MOST_SAMPLES}, e.g. 10000"
            )
    check_seed(seed)
    if reference != "auto" and not isinstance(reference, Estimator):
        raise InputError(f"reference={brief(reference)}: give 'auto', fg.Exact() or an unbiased estimator such as fg.DisARM()")
    if not isinstance(reference, str) and not reference.unbiased:
        raise InputError(
            f"reference={type(reference).__name__}: averaging draws finds the true gradient only with an unbiased estimator, "
            "e.g. fg.DisARM() or fg.LEG()"
        )
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise InputError(f"workers={brief(workers)}: give from 1 to {MOST_WORKERS}, or leave it out for one per core")


def _named(estimators: Sequence[Estimator] | Mapping[str, Estimator]) -> dict[str, Estimator]:
    if not estimators:
        raise InputError("estimators: give at least one, e.g. [fg.PSA()]")
    pairs = estimators.items() if isinstance(estimators, Mapping) else [(type(rule).__name__, rule) for rule in estimators]
    named: dict[str, Estimator] = {}
    for name, estimator in pairs:
        check_estimator(estimator, f"estimators[{name!r}]" if isinstance(estimators, Mapping) else "estimators")
        if name in named:
            raise InputError(f"estimators: {name} is there more than once; name them: {{'{name} a': ..., '{name} b': ...}}")
        named[name] = estimator
    return named


def _measure(
    problem: Problem, truth: Reference, name: str, estimator: Estimator, samples: int, seed: int, workers: int, tell: Report
) -> Measured:
    # Seeded by its name: the draws of an estimator do not depend on which others are measured.
    sampler = Sampler(problem, estimator, [seed, 1, zlib.crc32(name.encode())], workers)
    started = time.perf_counter()
    accuracies = accuracy_of_draws(problem.layers(), truth, name, samples, sampler.draws(samples, partial(tell, name)))
    rate = samples / (time.perf_counter() - started)
    return Measured(rate, sampler.vectorised, estimator.unbiased, accuracies)


def _reference(
    problem: Problem, choice: Estimator | Literal["auto"], draws: int, seed: int, workers: int, tell: Report
) -> Reference:
    if isinstance(choice, Exact) or (choice == "auto" and (_must_be_exact(problem) or _can_be_exact(problem))):
        loss = problem.exact_losses().mean()
        gradient = whole_gradient(loss, problem.parameters()).double().cpu()
        check_finite(gradient[None], problem.layers(), "Exact")
        layers = [ReferenceLayer(name, float(gradient[part].norm()), 0.0) for name, part in problem.layers().items()]
        reference = Reference(gradient, "exact", "Exact", 0, layers)
    else:
        estimator = DisARM() if isinstance(choice, str) else choice
        made = Sampler(problem, estimator, [seed, 0], workers).draws(draws, partial(tell, "reference"))
        reference = mean_of_draws(problem.layers(), type(estimator).__name__, draws, made)
    for layer in reference.layers:
        if layer.error >= 1:
            raise InputError(
                f"the reference of {draws:,} draws of {reference.estimator} is mostly noise in {layer.name!r}: take more of "
                "them (reference_samples), or an unbiased estimator with less variance (reference)"
            )
    for layer in reference.layers:
        if layer.length <= ROUNDING_SHARE * reference.layers[-1].length:
            raise InputError(
                f"the true gradient of {layer.name!r} is zero to rounding, so that no error can be relative to it: exclude its "
                "parameters with requires_grad_(False), or look for dead units"
            )
    return reference


def _must_be_exact(problem: Problem) -> bool:
    """Whether there are binary weights; networks of them that are too large for the exact gradient are refused.

    Where weights are not drawn nothing else has their gradient, 0; where they are, most numbers of draws would end in noise.
    """
    binary = layers_with_binary_weights(problem.net).values()
    if binary and all(layer.weight_noise is not None for layer in binary):
        try:
            _try_exact(problem)
        except InputError as error:
            raise InputError(
                f"{error}; or choose what to draw the reference from: reference=fg.LEG(), or fg.DisARM()"
            ) from None
    return bool(binary)


def _can_be_exact(problem: Problem) -> bool:
    """Whether the network is small enough for the exact gradient."""
    try:
        _try_exact(problem)
    except InputError:
        return False
    return True


@torch.no_grad()
def _try_exact(problem: Problem) -> None:
    if isinstance(problem.net, Variational):
        replace(problem, x=problem.x[:2]).exact_losses()
    else:
        exact.expected_loss(problem.net.network(), problem.x[:2], lambda outputs: outputs.sum(-1))


def mean_of_draws(layers: Mapping[str, slice], name: str, draws: int, made: Iterable[Tensor]) -> Reference:
    """The mean of ``draws`` draws of the estimator with that ``name``: its own expectation, be it biased or not.

    They are ``made`` [n, P] at a time. A layer in which the mean is mostly noise has the relative error 1.
    """
    tally = _tallied(Tally(torch.zeros(layers["all"].stop), layers, draws, grid=[]), name, made)
    gradient, known = tally.mean(), []
    for (layer, part), of_one_draw in zip(layers.items(), tally.variances(), strict=True):
        variance = max(0.0, of_one_draw / draws)
        # The squared length of a noisy mean holds its variance, too.
        squared = max(float(gradient[part].square().sum()) - variance, variance)
        known.append(ReferenceLayer(layer, math.sqrt(squared), math.sqrt(variance / squared) if squared else 1.0))
    return Reference(gradient, "draws", name, draws, known)


def accuracy_of_draws(
    layers: Mapping[str, slice], reference: Reference, name: str, samples: int, made: Iterable[Tensor]
) -> list[Accuracy]:
    """The accuracy in every layer of ``samples`` draws of the estimator with that ``name``, ``made`` [n, P] at a time."""
    tally = _tallied(Tally(reference.gradient, layers, samples), name, made)
    # Biases without the part that is the reference's own error, and intervals that allow for two standard errors of it.
    return [
        replace(
            accuracy,
            bias=math.sqrt(max(0.0, accuracy.bias**2 - layer.error**2)),
            bias_low=max(0.0, accuracy.bias_low - 2 * layer.error),
            bias_high=accuracy.bias_high + 2 * layer.error,
        )
        for accuracy, layer in zip(tally.accuracies(), reference.layers, strict=True)
    ]


def _tallied(tally: Tally, name: str, made: Iterable[Tensor]) -> Tally:
    """The ``tally`` of all draws, which must be finite."""
    for draws in made:
        check_finite(draws, tally.layers, name)
        tally.add(draws)
    return tally


def check_finite(draws: Tensor, layers: Mapping[str, slice], name: str) -> None:
    """Refuse gradients with NaN or infinity, naming the estimator and the layer."""
    for layer, part in layers.items():
        if not bool(torch.isfinite(draws[:, part]).all()):
            raise InputError(
                f"{name} gave a gradient with NaN or infinity in {layer!r}: look for weights or losses that overflow, or leave "
                "this estimator out"
            )
