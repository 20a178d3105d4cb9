"""The training of the paper's small networks, along which the accuracy of gradients is measured."""

import copy
from collections.abc import Callable, Sequence
from reprlib import repr as brief

import torch

from flipgrad.bounds import bound_losses, mean_losses
from flipgrad.data import Split
from flipgrad.errors import InputError
from flipgrad.estimators import REINFORCE, Estimator
from flipgrad.network import Sequential
from flipgrad.objectives import CrossEntropy
from flipgrad.training.models import fully_connected

# The paper's, appendix C.1.
BATCH_SIZE, RATE, MOMENTUM = 10, 0.03, 0.9


def reference_training(
    data: Split,
    widths: Sequence[int],
    epochs: Sequence[int],
    *,
    net: Sequential | None = None,
    estimator: Estimator | None = None,
    samples: int = 1,
    bound: bool = False,
    seed: int = 0,
    report: Callable[[int], None] = lambda epoch: None,
) -> dict[int, Sequential]:
    """Train a network on the toy problem, and give it as it is after each of the ``epochs``; 0 is the initialised one.

    SGD with momentum 0.9, batches of 10 and the constant rate 0.03, from weights that are whitened by propagated moments. The
    paper's ``estimator`` is REINFORCE. An update has ``samples`` draws of all noises, and lowers the mean of their losses or
    their multi-sample ``bound``. A ``net`` that is given is initialised and changed in place of a new one of the ``widths``.
    The ``seed`` is that of weights, order and noise; ``report`` is called after every epoch.
    """
    check_epochs(epochs)
    rule, method = estimator or REINFORCE(), bound_losses if bound else mean_losses
    generator = torch.Generator().manual_seed(seed)
    if net is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = fully_connected(data.x.shape[1], widths, int(data.y.max()) + 1)
    net.initialize(data.x, moments=True)
    # One operation for all parameters: this network is so small that a step is mostly the overhead of operations.
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, fused=data.x.device.type == "cpu")
    kept = {0: copy.deepcopy(net)} if 0 in epochs else {}
    for epoch in range(1, max(epochs) + 1):
        for batch in data.batches(BATCH_SIZE, generator=generator):
            optimizer.zero_grad(set_to_none=True)
            objective = CrossEntropy(batch.y)
            losses = method(net, batch.x, objective, samples, estimator=rule, generator=generator, index=batch.index)
            losses.mean().backward()
            optimizer.step()
        if epoch in epochs:
            kept[epoch] = copy.deepcopy(net)
        report(epoch)
    return kept


def check_epochs(epochs: Sequence[int]) -> None:
    """Refuse epochs at which no network is."""
    if not epochs or min(epochs) < 0:
        raise InputError(f"epochs={brief(list(epochs))}: give the epochs after which to look at the network, e.g. 1,100,2000")
