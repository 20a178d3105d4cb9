"""The optimizer of a run, its learning rate, and its state as tensors by name."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flipgrad.training.config import TrainConfig

# The step schedule divides the rate by 10 at these shares of all updates.
STEPS = (0.5, 0.75)
# On these devices one operation updates all parameters.
FUSED = ("cpu", "cuda")


def make_optimizer(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD with Nesterov momentum, or Adam."""
    fused = torch.device(config.device).type in FUSED
    options: dict[str, Any] = {"lr": config.rate, "weight_decay": config.weight_decay, "fused": fused}
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, **options)
    return torch.optim.SGD(parameters, momentum=config.momentum, nesterov=config.momentum > 0, **options)


def scheduled_rate(config: TrainConfig, share: float) -> float:
    """The learning rate when a ``share`` of all updates is done.

    >>> [scheduled_rate(TrainConfig(lr=1.0, schedule="step"), share) for share in (0, 0.5, 0.75)]
    [1.0, 0.1, 0.01]
    """
    if config.schedule == "cosine":
        return config.rate * (1 + math.cos(math.pi * share)) / 2
    if config.schedule == "step":
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
