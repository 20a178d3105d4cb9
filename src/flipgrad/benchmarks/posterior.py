"""What an approximate posterior of inputs does to the gradients that are averaged by it."""

import torch
from torch import Generator, Tensor

from flipgrad.contract import Estimator
from flipgrad.network import Sequential, parameters_by_layer
from flipgrad.objectives import CrossEntropy

# Draws of the noises, and examples of a batch that they are made with.
DRAWS, EXAMPLES = 8, 8


def growth(net: Sequential, x: Tensor, objective: CrossEntropy, rule: Estimator, exact: Estimator) -> dict[str, float]:
    """By how much RMSE and bias of a layer's gradient grow from the ``exact`` estimator to the ``rule``, over its RMSE.

    The largest of all layers, from pairs of gradients g and g + d with the same draws. The bias is the length of the mean of d,
    of which the part that is due to few draws is taken off.
    """
    x, objective = x[:EXAMPLES], CrossEntropy(objective.labels[:EXAMPLES])
    groups = parameters_by_layer(net)
    parameters = [parameter for group in groups.values() for parameter in group.values()]

    def gradients(estimator: Estimator, seed: int) -> list[Tensor]:
        losses = net(x, objective, estimator=estimator, generator=Generator().manual_seed(seed))
        found = iter(torch.autograd.grad(losses.mean(), parameters))
        return [torch.cat([next(found).flatten() for _ in group]) for group in groups.values()]

    pairs = [(gradients(exact, seed), gradients(rule, seed)) for seed in range(DRAWS)]
    rmses, biases = [0.0], [0.0]
    for of_layer in zip(*(zip(*pair, strict=True) for pair in pairs), strict=True):
        wanted, found = (torch.stack(gradients).double() for gradients in zip(*of_layer, strict=True))
        error = found - wanted
        spread = wanted - wanted.mean(0)
        variance = spread.square().sum() / (DRAWS - 1)
        changed = variance + 2 * (spread * error).sum() / (DRAWS - 1) + error.square().sum() / DRAWS
        rmses.append(float((changed / variance).sqrt()) - 1)
        by_chance = (error - error.mean(0)).square().sum() / (DRAWS - 1) / DRAWS
        biases.append(float(((error.mean(0).square().sum() - by_chance).clamp(min=0) / variance).sqrt()))
    return {"rmse": max(rmses), "bias": max(biases)}
