"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import nn

from flipgrad.data import DataSet, shift
from flipgrad.estimators import ESTIMATORS
from flipgrad.network import Sequential
from flipgrad.objectives import CrossEntropy
from flipgrad.training.config import TrainConfig
from flipgrad.training.metrics import Evaluation, evaluate
from flipgrad.training.run import RunFolder

# Told after every update: how many were done, and the last epoch's record (empty during the first one).
Report = Callable[[int, dict[str, float]], None]

# Images that the data-dependent initialisation looks at.
INITIAL_BATCH = 256


class DivergenceError(RuntimeError):
    """The loss is no longer a number; the weights of the last whole epoch are kept."""


def train(config: TrainConfig, net: Sequential, data: DataSet, folder: RunFolder, report: Report) -> Evaluation:
    """Train ``net`` on ``data`` as ``config`` says, leaving configuration, metrics and weights in ``folder``.

    Weights and metrics are stored after every epoch, so an interruption loses at most the epoch at hand.

    Returns:
        The evaluation on the test images.

    Raises:
        DivergenceError: if a loss is NaN or infinite.
    """
    folder.write_config(asdict(config))
    estimator = ESTIMATORS[config.estimator]()
    # Some estimators have parameters of their own, which learn along, and buffers.
    state = estimator.to(config.device) if isinstance(estimator, nn.Module) else nn.Module()
    # Order and augmentation are drawn on the CPU, noise where the network is.
    order = torch.Generator().manual_seed(config.seed)
    noise = torch.Generator(config.device).manual_seed(config.seed + 1)
    train_set, test_set = data.train.to(config.device), data.test.to(config.device)
    net.to(config.device).initialize(train_set.x[:INITIAL_BATCH], generator=noise)
    if isinstance(estimator, nn.Module):
        # Its parameters may depend on the network: an estimate makes them, before the optimizer asks.
        net(train_set.x[:1], CrossEntropy(train_set.y[:1]), estimator=estimator, generator=noise, index=torch.zeros(1).long())
    parameters = [*net.parameters(), *state.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0)
    updates = config.epochs * -(-len(train_set) // config.batch_size)
    record: dict[str, float] = {}
    done = 0
    for epoch in range(1, config.epochs + 1):
        started, total = time.perf_counter(), 0.0
        net.train()
        for batch in train_set.batches(config.batch_size, generator=order):
            x = shift(batch.x, config.shift, data.background, generator=order) if config.shift else batch.x
            losses = net(x, CrossEntropy(batch.y), estimator=estimator, generator=noise, index=batch.index)
            if config.schedule == "cosine":
                optimizer.param_groups[0]["lr"] = config.lr * (1 + math.cos(math.pi * done / updates)) / 2
            optimizer.zero_grad(set_to_none=True)
            losses.mean().backward()
            optimizer.step()
            total += losses.detach().sum().item()
            if not math.isfinite(total):
                advice = f"lower the rate, e.g. --lr {config.lr / 3:.2g}"
                raise DivergenceError(f"the loss is {total} in epoch {epoch}; {advice}")
            done += 1
            report(done, record)
        seconds = time.perf_counter() - started
        evaluation = evaluate(net, test_set, config.samples, generator=noise)
        record = {"epoch": epoch, "train_loss": total / len(train_set), "seconds": seconds, **asdict(evaluation)}
        folder.save_weights(net)
        folder.save_estimator(state)
        folder.append_metrics(record)
    folder.write_summary(record)
    return evaluation
