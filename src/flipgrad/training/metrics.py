"""How good a network is: accuracies and losses on a set of examples, saturated units, and undecided binary weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Generator, Tensor

from flipgrad.bounds import multi_sample_bound
from flipgrad.contract import LayerCall
from flipgrad.data import Split
from flipgrad.layers import BinaryLayer
from flipgrad.network import BinaryNetwork, layers_with_binary_weights, probabilities
from flipgrad.objectives import CrossEntropy
from flipgrad.sampling import fresh

# A unit whose mean state is further than this from 0 is hardly random, and lets hardly any gradient through.
SATURATED = 0.99
# A drawn weight whose mean is closer than this to 0 is undecided: each sign comes up in more than a quarter of the draws.
UNDECIDED_MEAN = 0.5
# A weight that is the sign of a latent one is undecided if that is smaller than this share of the layer's mean size.
UNDECIDED_SIZE = 0.1


@dataclass(frozen=True)
class Evaluation:
    """Accuracies (in [0, 1]) and losses, averaged over examples.

    Attributes:
        samples: draws of all noises per example.
        accuracy_1: of the class predicted from one draw, averaged over the draws.
        accuracy_n: of the class predicted by the mean probability of all draws.
        accuracy_deterministic: of the net with every noise replaced by its median.
        expected_loss: the mean cross-entropy of one draw.
        marginal_loss: the cross-entropy of the mean probability of all draws.
        saturated: for every binary layer, the share of units whose mean state is further than 0.99 from 0.
        undecided: for every layer with binary weights, the share of these that might as well have the other sign: if they are
            drawn, those whose mean is closer than 0.5 to 0; if not, those whose latent weight is smaller than a tenth of the
            layer's mean size.
    """

    samples: int
    accuracy_1: float
    accuracy_n: float
    accuracy_deterministic: float
    expected_loss: float
    marginal_loss: float
    saturated: dict[str, float]
    undecided: dict[str, float] = field(default_factory=dict)


def is_record(metrics: Mapping[str, object]) -> bool:
    """Whether the ``metrics`` of an epoch, read from a file, hold what an evaluation, the objective and the split are."""
    numbers = {"objective", *(each.name for each in fields(Evaluation))} - {"saturated", "undecided"}
    known = isinstance(metrics.get("saturated"), dict) and isinstance(metrics.get("split"), str)
    return known and all(isinstance(metrics.get(name), float | int) for name in numbers)


@torch.no_grad()
def evaluate(
    net: BinaryNetwork,
    data: Split,
    samples: int,
    *,
    generator: Generator | None = None,
    batch_size: int = 128,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Evaluation:
    """Evaluate ``net``, in eval mode, on ``data`` with ``samples`` draws per example.

    Args:
        net: the network.
        data: the examples.
        samples: draws of all noises per example.
        generator: the source of randomness.
        batch_size: examples at once; 512 take a processor twice as long, as their activations leave its cache.
        total: adds up the sums over processes that have a part of the examples each; by default this process has all.
    """
    was_training = net.training
    net.eval()
    sums = torch.zeros(6 + 2 * len(net.binary_layers), dtype=torch.float64)
    for batch in data.batches(batch_size):
        first, units = _observed(net, batch.x, generator)
        # [samples, B, K]
        outputs = torch.stack([first, *(net(batch.x, generator=generator) for _ in range(samples - 1))])
        losses = CrossEntropy(batch.y)(outputs)
        columns = (
            (outputs.argmax(-1) == batch.y).double().mean(0),
            probabilities(outputs).mean(0).argmax(-1) == batch.y,
            net.deterministic(batch.x).argmax(-1) == batch.y,
            losses.mean(0),
            multi_sample_bound(losses),
            torch.ones_like(batch.y),
        )
        sums += torch.cat([torch.stack([column.cpu().double().sum() for column in columns]), units])
    net.train(was_training)
    sums = total(sums)
    saturated, of = sums[6:].view(2, -1)
    shares = {f"layer {k}": share for k, share in enumerate((saturated / of).tolist(), 1)}
    single, ensemble, deterministic, expected, marginal = (sums[:5] / sums[5]).tolist()
    return Evaluation(samples, single, ensemble, deterministic, expected, marginal, shares, undecided_weights(net))


def weight_signs(net: BinaryNetwork) -> dict[str, Tensor]:
    """Of every layer with binary weights, by name: whether its latent weights are 0 or more, i.e. likelier +1 than -1."""
    return {name: layer.weight.detach() >= 0 for name, layer in layers_with_binary_weights(net).items()}


def changed_signs(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """The shares of weights whose sign differs between two :func:`weight_signs`, by layer."""
    return {name: float((before[name] != signs).double().mean()) for name, signs in after.items()}


@torch.no_grad()
def undecided_weights(net: BinaryNetwork) -> dict[str, float]:
    """The share of undecided weights of every layer with binary weights; see :class:`Evaluation`."""
    return {name: float(_undecided(layer).double().mean()) for name, layer in layers_with_binary_weights(net).items()}


def _undecided(layer: BinaryLayer) -> Tensor:
    if layer.weight_noise is not None:
        return layer.weight_noise.mean_sign(layer.weight).abs() < UNDECIDED_MEAN
    sizes = layer.weight.abs()
    return sizes < UNDECIDED_SIZE * sizes.mean()


def _observed(net: BinaryNetwork, x: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """The outputs [B, K] of one sampled pass, and the numbers of saturated units of every binary layer, then of all units."""
    saturated, of = [], []

    def visit(call: LayerCall) -> Tensor:
        a = call.affine(call.x)
        saturated.append((call.noise.mean_sign(a).abs() > SATURATED).sum())
        of.append(a.numel())
        return call.sample(a)

    outputs = net.outputs(net.run(net.front(x), visit, fresh(generator)))
    return outputs, torch.cat([torch.stack(saturated).cpu(), torch.tensor(of)]).double()
