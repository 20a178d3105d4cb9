"""Gradients of small networks on 200 points of the toy problem: exact ones, and draws of every estimator."""

import resource
from typing import Any

import torch

from flipgrad import gradeval as measure
from flipgrad.benchmarks.step import gradient
from flipgrad.data import toy
from flipgrad.estimators import ESTIMATORS, Exact
from flipgrad.gradeval.draws import Problem, Sampler, default_workers, one_by_one
from flipgrad.machine import fastest
from flipgrad.objectives import CrossEntropy
from flipgrad.sampling import fresh
from flipgrad.training.models import fully_connected
from flipgrad.training.reference_training import reference_training

# Seconds of an exact gradient on two cores, by the width of the three layers.
LIMITS = {5: 0.05, 10: 1.0, 12: 10.0}
# Draws per timed run: enough for the slowest to take a second.
FAST, SLOW = 8000, 2000
REPEATS = 3
# Standard errors that the mean of the vectorised draws may be off that of sequential ones, in any parameter.
TOLERANCE = 6.0


def _problem(width: int) -> Problem:
    data = toy().train
    torch.manual_seed(0)
    net = fully_connected(2, [width] * 3, 2).initialize(data.x, moments=True)
    return Problem(net, data.x, CrossEntropy(data.y))


def exact() -> dict[str, Any]:
    """Seconds and peak memory (of the process, in GB) of the exact expected loss and its gradient, by network."""
    seconds: dict[str, float] = {}
    result: dict[str, Any] = {"points": len(toy().train), "seconds": seconds, "limits": {}, "peak_memory_gb": {}}
    for width, limit in LIMITS.items():
        problem, name = _problem(width), f"{width}-{width}-{width}"
        net: Any = problem.net
        objective: Any = problem.objective
        seconds |= fastest({name: gradient(net, problem.x, objective, Exact())}, repeats=REPEATS)
        result["limits"][name] = limit
        result["peak_memory_gb"][name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return result


def gradeval() -> dict[str, Any]:
    """One-draw gradients of 5-5-5 per second (the best of three runs), and the seconds of an epoch of the reference training.

    An estimator whose vectorised draws do not have the mean of its sequential ones gets no number.
    """
    problem = _problem(5)
    workers = default_workers(problem.x.device)
    rates: dict[str, float | None] = {}
    single_pass = []
    for name, estimator in measure.by_name(list(ESTIMATORS), lambda: torch.zeros(1)).items():
        sampler = Sampler(problem, estimator, [0], workers)
        # One evaluation of the network and no further work that grows with it.
        once = estimator.passes(3) == 1 and not estimator.cost
        if once:
            single_pass.append(name)
        rates[name] = _rate(sampler, FAST if once else SLOW) if _agrees(sampler) else None
    training = fastest({"20 epochs": lambda: reference_training(toy().train, [5, 5, 5], [20])}, repeats=1)
    return {
        "points": len(problem.x),
        "workers": workers,
        "samples_per_second": rates,
        "single_pass": single_pass,
        "reference_training_seconds_per_epoch": training["20 epochs"] / 20,
    }


def _rate(sampler: Sampler, draws: int) -> float:
    return draws / fastest({"draws": lambda: list(sampler.draws(draws))}, repeats=REPEATS)["draws"]


def _agrees(sampler: Sampler) -> bool:
    """Whether vectorised and sequential draws have the same mean."""
    many = torch.cat(list(sampler.draws(1000))).double()
    few = one_by_one(sampler.problem, sampler.estimator, 100, fresh(torch.Generator().manual_seed(1))).double()
    error = (many.var(0) / len(many) + few.var(0) / len(few)).sqrt()
    rounding = 1e-5 * few.abs().max()
    return bool(((many.mean(0) - few.mean(0)).abs() <= TOLERANCE * error + rounding).all())
