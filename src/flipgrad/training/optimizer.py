"""The optimizer of a run, its learning rate, and its state as tensors by name."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flipgrad.network import BinaryNetwork, layers_with_binary_weights
from flipgrad.norms import ScaleShift
from flipgrad.training.config import TrainConfig

# The step schedule divides the rate by 10 at these shares of all updates.
STEPS = (0.5, 0.75)
# On these devices one operation updates all parameters.
FUSED = ("cpu", "cuda")
# The key of an optimizer's groups of parameters that holds their factor on the rate.
RATE_FACTOR = "rate_factor"


def make_optimizer(config: TrainConfig, net: BinaryNetwork, more: Iterable[nn.Parameter] = ()) -> Optimizer:
    """SGD with Nesterov momentum, or Adam, of the parameters of ``net`` and ``more``.

    Of SGD, binary weights and their scales have the :func:`rate_factors`; steps of Adam do not depend on the gradient's size,
    and have none. The size of a latent weight whose sign alone counts means nothing, so that weight decay leaves it alone;
    drawn weights have it, as it keeps them undecided.
    """
    factors = rate_factors(net) if config.optimizer == "sgd" else {}
    signs = {layer.weight for layer in layers_with_binary_weights(net).values() if layer.weight_noise is None}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in (*net.parameters(), *more):
        how = factors.get(parameter, 1.0), 0.0 if parameter in signs else config.weight_decay
        groups.setdefault(how, []).append(parameter)
    fused = torch.device(config.device).type in FUSED
    options: dict[str, Any] = {"lr": config.rate, "fused": fused}
    named = [
        {"params": parameters, "weight_decay": decay, RATE_FACTOR: factor} for (factor, decay), parameters in groups.items()
    ]
    if config.optimizer == "adam":
        return torch.optim.Adam(named, **options)
    return torch.optim.SGD(named, momentum=config.momentum, nesterov=config.momentum > 0, **options)


def rate_factors(net: BinaryNetwork) -> dict[Tensor, float]:
    r"""The factors on SGD's rate of a network's binary weights and of their scales; all others have 1.

    A pre-activation is :math:`\gamma \sum_i W_i x_i` of n inputs, with :math:`\gamma \approx 1/\sqrt n`. Its derivative in a
    binary weight is :math:`\gamma` times that in a real one, while latent weights begin as large as real ones: with the factor
    :math:`\sqrt n` they change, relative to their size, as fast as these. The derivative in the scale is a sum over n inputs,
    and the scale is small: without a factor it outruns the weights. Between 1/n, with which it would change like a parameter
    of size 1, and none, :math:`1/\sqrt n` was best (digits, 10 epochs: losses of 0.28, 0.30 and 0.19). A BatchNorm divides by
    the size of the sum before it scales, and needs no factor.
    """
    factors: dict[Tensor, float] = {}
    for layer in layers_with_binary_weights(net).values():
        inputs = max(1, layer.weight[0].numel())
        factors[layer.weight] = inputs**0.5
        scale = layer.norm.scale if isinstance(layer.norm, ScaleShift) else layer.weight_scale
        if scale is not None:
            factors[scale] = inputs**-0.5
    return factors


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every parameter the ``rate`` times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE_FACTOR]


def scheduled_rate(config: TrainConfig, share: float) -> float:
    """The learning rate when a ``share`` of all updates is done.

    During ``config.warmup`` it rises in proportion to the updates; the schedule is over the rest of them.

    Goyal et al. Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour. 2017, section 2.2.

    >>> [scheduled_rate(TrainConfig(lr=1.0, schedule="step"), share) for share in (0, 0.5, 0.75)]
    [1.0, 0.1, 0.01]
    >>> [scheduled_rate(TrainConfig(lr=1.0, schedule="cosine", warmup=0.5), share) for share in (0, 0.25, 0.5, 0.75, 1)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if share < config.warmup:
        return config.rate * share / config.warmup
    share = (share - config.warmup) / (1 - config.warmup)
    if config.rate_schedule == "cosine":
        return config.rate * (1 + math.cos(math.pi * share)) / 2
    if config.rate_schedule == "step":
        return config.rate / 10.0 ** sum(share >= step for step in STEPS)
    return config.rate


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of every parameter by the parameter's number and the state's name, such as "0.momentum_buffer"."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    named = {f"{number}.{name}": value for number, values in state.items() for name, value in values.items()}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give an optimizer the state that :func:`optimizer_tensors` gave.

    A tensor that belongs to no parameter, or is not like its own, is a ValueError: a fused step reads it by address.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        if not number.isdecimal() or int(number) >= len(parameters):
            raise ValueError(f"the optimizer's {key!r} belongs to no parameter")
        like = parameters[int(number)]
        if value.dim() and (value.shape != like.shape or value.dtype != like.dtype):
            raise ValueError(f"the optimizer's {key!r} is not like its parameter {list(like.shape)}")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
