"""Is an estimator's mean the exact gradient? A test with power: it also knows that it would have caught a 5 % error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.estimators._paths import Path, PathEstimator
from flipgrad.gradeval.draws import Problem, vectorised
from flipgrad.network import Batch, layers_with_binary_weights
from flipgrad.sampling import fresh

# Tests are at 5 standard errors. With a few hundred parameters in all, that is a false alarm in about 10,000 runs of the suite.
SIGMAS = 5.0
GROUPS = 50

# Every net with one noise; one with all noises is enough beside it.
ONE, TWO, THREE = ((4,), fg.Normal(1.5)), ((3, 4), fg.Logistic()), ((3, 3, 3), fg.Normal(1.5))
NETS = pytest.mark.parametrize(("widths", "noise"), [ONE, TWO, THREE], ids=str)
NOISES = pytest.mark.parametrize("noise", [fg.Logistic(), fg.Normal(1.5)], ids=["logistic", "normal"])


def with_baselines(baselines: dict, varied: str) -> tuple[pytest.MarkDecorator, pytest.MarkDecorator]:
    """Parametrises nets and baselines, and baselines alone.

    Every net has the baseline ``varied`` and one net has all; the other pairs, which repeat these, are slow.
    """
    pairs = [
        pytest.param(*net, baseline, id=f"{net[0]}-{name}", marks=[] if name == varied or net is TWO else pytest.mark.slow)
        for net in (ONE, TWO, THREE)
        for name, baseline in baselines.items()
    ]
    alone = [
        pytest.param(baseline, id=name, marks=[] if name == varied else pytest.mark.slow)
        for name, baseline in baselines.items()
    ]
    return pytest.mark.parametrize(("widths", "noise", "baseline"), pairs), pytest.mark.parametrize("baseline", alone)


def perfect_baseline(net: fg.Sequential, x: Tensor, y: Tensor) -> fg.ConstantBaseline:
    """The expected loss."""
    return fg.ConstantBaseline(fg.exact.expected_loss(net, x, fg.CrossEntropy(y)))


def random_net(widths: tuple[int, ...], noise: fg.Noise, seed: int = 0) -> tuple[fg.Sequential, Tensor, Tensor]:
    """A fully connected net with distinct gradients in every layer, one input and its label, in float64."""
    torch.manual_seed(seed)
    layers = [fg.BinaryLinear(n, m, noise=noise) for n, m in zip((2, *widths), widths, strict=False)]
    net = fg.Sequential(*layers, head=nn.Linear(widths[-1], 3)).double()
    _spread(net)
    return net, torch.tensor([[0.7, -0.4]]).double(), torch.tensor([1])


def random_conv_net(noise: fg.Noise, seed: int = 0) -> tuple[fg.Sequential, Tensor, Tensor]:
    """A convolutional net small enough to enumerate: 4 units, then 4."""
    torch.manual_seed(seed)
    net = fg.Sequential(
        fg.BinaryConv2d(1, 1, 2, noise=noise),
        fg.BinaryConv2d(1, 1, 2, padding=1, stride=2, noise=noise),
        nn.Flatten(),
        head=nn.Linear(4, 3),
    ).double()
    _spread(net)
    return net, torch.randn(1, 1, 3, 3).double(), torch.tensor([2])


def binary_weight_net(seed: int = 93) -> tuple[fg.Sequential, Tensor, Tensor]:
    """A net of 12 drawn weights, shared by two inputs: a convolution with a scale, and a fully connected layer with a norm.

    The seed is one with which the gradients in latent weights are large beside their noise.
    """
    torch.manual_seed(seed)
    noise = fg.Logistic(0.5)
    net = fg.Sequential(
        fg.BinaryConv2d(1, 1, 2, noise=noise, weights="binary", weight_noise=fg.Normal(1.2)),
        nn.Flatten(),
        fg.BinaryLinear(4, 2, noise=noise, weights="binary", weight_noise=fg.Logistic(0.8), norm=fg.ScaleShift(2)),
        head=nn.Linear(2, 3),
    ).double()
    _spread(net, 1.0)
    return net, torch.randn(2, 1, 3, 3).double(), torch.tensor([0, 2])


def _spread(net: nn.Module, scale: float = 0.8) -> None:
    """Larger weights than the default, so that no layer's gradient is lost in the others' noise."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)


def group_gradients(net, x, y, estimator, draws, generator) -> dict[str, Tensor]:
    """For every parameter, the mean gradient of each of the groups of ``draws`` draws, [GROUPS, *shape].

    The draws are examples of one batch or, where these would share their binary weights, batches.
    """
    result: dict[str, list[Tensor]] = {name: [] for name, _ in net.named_parameters()}
    if layers_with_binary_weights(net):
        problem = Problem(net, x, fg.CrossEntropy(y))
        parameters = problem.parameters()
        for _ in range(GROUPS):
            whole = vectorised(problem, estimator, draws, fresh(generator)).mean(0)
            sizes = [parameter.numel() for parameter in parameters.values()]
            for (name, parameter), part in zip(parameters.items(), whole.split(sizes), strict=True):
                result[name].append(part.view_as(parameter))
        return {name: torch.stack(values) for name, values in result.items()}
    index = torch.zeros(draws, dtype=torch.long)
    for _ in range(GROUPS):
        net.zero_grad(set_to_none=True)
        many = x.expand(draws, *x.shape[1:])
        losses = net(many, fg.CrossEntropy(y.expand(draws)), estimator=estimator, generator=generator, index=index)
        losses.mean().backward()
        for name, parameter in net.named_parameters():
            result[name].append(parameter.grad.clone())
    return {name: torch.stack(values) for name, values in result.items()}


def exact_gradients(net, x, y) -> dict[str, Tensor]:
    """The exact gradient in every parameter."""
    net.zero_grad(set_to_none=True)
    fg.exact.expected_loss(net, x, fg.CrossEntropy(y)).mean().backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def disagreement(net, x, y, estimator, draws: int, seed: int = 0) -> tuple[float, float]:
    """How far the mean is from the exact gradient, and how small an error would be seen.

    Returns:
        The largest deviation in standard errors, of any entry and of any layer's component along its exact gradient;
        and the largest relative standard error of such a component. Latent weights, and all that is no latent weight beside
        them, count as layers of their own.
    """
    generator = torch.Generator().manual_seed(seed)
    samples, exact = group_gradients(net, x, y, estimator, draws, generator), exact_gradients(net, x, y)
    worst, resolution = 0.0, 0.0
    for names in _parts(net):
        truth = torch.cat([exact[name].flatten() for name in names])
        drawn = torch.cat([samples[name].flatten(1) for name in names], 1)
        error = drawn.std(0) / GROUPS**0.5
        # Entries whose estimate does not vary are compared to rounding.
        worst = max(worst, ((drawn.mean(0) - truth).abs() / (error + 1e-9)).max().item())
        along = drawn @ truth / truth.square().sum()
        spread = along.std().item() / GROUPS**0.5
        worst = max(worst, abs(along.mean().item() - 1) / (spread + 1e-9))
        resolution = max(resolution, spread)
    return worst, resolution


def _parts(net: fg.Sequential) -> list[list[str]]:
    """The parameters' names by layer; those of latent weights each alone, and the others together."""
    latent = {layer.weight for layer in layers_with_binary_weights(net).values()}
    parts: dict[str, list[str]] = {}
    for name, parameter in net.named_parameters():
        layer = "" if latent else name.rpartition(".")[0]
        parts.setdefault(name if parameter in latent else layer, []).append(name)
    return list(parts.values())


def assert_unbiased(net, x, y, estimator, draws: int, seed: int = 0) -> None:
    """The mean agrees within SIGMAS standard errors, and a 5 % error in any layer would not have."""
    worst, resolution = disagreement(net, x, y, estimator, draws, seed)
    assert SIGMAS * resolution < 0.05, f"too few draws to see a 5 % error: the standard error is {resolution:.3f}"
    assert worst < SIGMAS, f"{worst:.1f} standard errors from the exact gradient"


def assert_caught(net, x, y, broken, draws: float, seed: int = 0) -> None:
    """A broken estimator is seen to be biased by the same test."""
    worst, _ = disagreement(net, x, y, broken, int(draws), seed)
    assert worst > SIGMAS, f"a broken estimator passed, at {worst:.1f} standard errors"


def variance(net, x, y, estimator, seed: int = 0, draws: int = 4000) -> tuple[float, float]:
    """The variance of one draw's gradient, summed over the units' pre-activations, and its standard error."""
    source = fresh(torch.Generator().manual_seed(seed))
    index = torch.zeros(draws, dtype=torch.long)
    many = Batch(x.expand(draws, *x.shape[1:]), fg.CrossEntropy(y.expand(draws)), source, index)
    path = Path.sample(net.network(), many)
    drawn = torch.cat([g.flatten(1) for g in estimator.gradients(path)], 1).detach()
    squares = (drawn - drawn.mean(0)).square().sum(1) * draws / (draws - 1)
    return squares.mean().item(), squares.std().item() / draws**0.5


def assert_less_variance(net, x, y, better, worse, ratio: float = 1.0) -> None:
    """``better`` has less than ``ratio`` times the variance of ``worse``, by more than 3 standard errors of the difference."""
    low, low_error = variance(net, x, y, better)
    high, high_error = variance(net, x, y, worse, seed=1)
    margin = 3 * (low_error**2 + (ratio * high_error) ** 2) ** 0.5
    assert low + margin < ratio * high, f"variances {low:.4g} and {high:.4g}, margin {margin:.2g}"


def variance_loss(estimator, net, x, objective) -> float:
    """The loss that the estimator's own parameters minimise, a mean over 10 draws that are the same for all estimators."""
    generator = torch.Generator().manual_seed(1)
    return sum(estimator.variance_loss(net, x, objective, generator=generator).item() for _ in range(10)) / 10


def train_parameters(estimator, net, x, objective, rate: float, steps: int = 60) -> None:
    """Lower the estimator's variance loss by Adam."""
    optimizer = torch.optim.Adam(estimator.parameters(), rate)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        estimator.variance_loss(net, x, objective, generator=generator).backward()
        optimizer.step()


class Broken(PathEstimator):
    """An estimator with an ``error`` made in its gradients, a function of the layer's number and its gradient.

    ``weight_error`` is one made in the estimate for binary weights.
    """

    unbiased, citation = True, "none"

    def __init__(self, sound: PathEstimator, error=lambda k, g: g, weight_error=lambda term: term) -> None:
        self.sound, self.error, self.weight_error = sound, error, weight_error

    def passes(self, depth: int) -> int:
        return self.sound.passes(depth)

    def gradients(self, path) -> list[Tensor]:
        return [self.error(k, gradient) for k, gradient in enumerate(self.sound.gradients(path))]

    def weight_term(self, path) -> Tensor:
        return self.weight_error(self.sound.weight_term(path))

    def extra(self, path) -> Tensor | None:
        return self.sound.extra(path)


# With the share of the draws: what is wrong altogether is seen with fewer than 5 %.
ERRORS = pytest.mark.parametrize(
    ("error", "share"),
    [(lambda k, g: 1.05 * g, 1), (lambda k, g: -g if k == 1 else g, 0.05), (lambda k, g: 0 * g if k == 0 else g, 0.05)],
    ids=["a factor", "a wrong sign", "a dropped layer"],
)
