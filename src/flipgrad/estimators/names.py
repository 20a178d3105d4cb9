"""Estimators by name, for the command line and the paper's figures: "psa", "concrete:0.1", "reinforce+mean", "mine:Mix"."""

from collections.abc import Callable, Sequence

from torch import Tensor

from flipgrad.contract import Estimator, check_estimator
from flipgrad.errors import InputError
from flipgrad.estimators import ESTIMATORS
from flipgrad.estimators.baselines import Baseline, BaselineEstimator, ConstantBaseline, RunningBaseline
from flipgrad.user_code import call_user_function

# Estimators that take a number: their temperature, interpolation or number of samples.
WITH_NUMBER: dict[str, Callable[[str], float]] = {
    "arms": int,
    "concrete": float,
    "double-cv": int,
    "flip-cv": int,
    "gumbel-rao": int,
    "rebar": float,
    "zgr": float,
}

# How the weights' inputs and the heads of some estimators are averaged: the options of each way, and which is their default.
VARIANTS = {
    "auto": {"inputs": "auto", "head": "auto"},
    "sampled": {"inputs": "sampled", "head": "sampled"},
    "enhanced": {"inputs": "sampled", "head": "enhanced"},
    "mean": {"inputs": "mean", "head": "rao-blackwell"},
    "posterior": {"inputs": "posterior", "head": "rao-blackwell"},
    "rao-blackwell": {"inputs": "rao-blackwell", "head": "rao-blackwell"},
}
DEFAULT_VARIANT = {"psa": "auto", "st": "sampled"}
# What ADF draws, beside its default.
ADF_STATES = "states"

SYNTAX = (
    f"one of {', '.join(ESTIMATORS)}; with a number where it takes one (concrete:0.1, arms:8, gumbel-rao:100), or for psa and "
    f"st how they average: psa:sampled (the paper's), {', '.join(f'psa:{name}' for name in VARIANTS if name != 'sampled')}; "
    f"adf:{ADF_STATES} (its appendix's); or package.module:Name, a class or function of your own"
)
BASELINES = {
    "mean": "with '+mean' for the true expected loss as the baseline (reinforce+mean, muprop+mean)",
    "running": "with '+running' for the running average of each example's losses as the baseline (reinforce+running)",
}


def by_name(specifications: Sequence[str], mean: Callable[[], Tensor]) -> dict[str, Estimator]:
    """Estimators to be measured, and the names that results and figures call them.

    Args:
        specifications: what is wanted: a name, with a number ("concrete:0.1") or the mean as a baseline ("reinforce+mean").
        mean: gives the expected loss [B] of every data point, for baselines; called only if one is wanted.

    >>> import torch
    >>> list(by_name(["psa:sampled", "psa:mean", "concrete:0.1", "concrete"], lambda: torch.zeros(1)))
    ['PSA', 'PSA mean', 'Concrete 0.1', 'Concrete 1']
    """
    named: dict[str, Estimator] = {}
    for specification in specifications:
        label, estimator = _one(specification, "mean", lambda: ConstantBaseline(mean()))
        if label in named:
            raise InputError(f"estimators: {specification!r} is there more than once")
        named[label] = estimator
    return named


def for_training(specification: str, points: int) -> tuple[str, Estimator]:
    """An estimator to train with, and what it is called.

    Args:
        specification: a name, with a number ("concrete:0.1") or a running baseline ("reinforce+running").
        points: how many training examples there are.

    >>> for_training("reinforce+running", 100)[0], for_training("adf:states", 100)
    ('REINFORCE + running', ('ADF states', ADF(sample='states')))
    """
    return _one(specification, "running", lambda: RunningBaseline(points))


def is_user_estimator(specification: str) -> bool:
    """Whether a specification names a user's own class or function, ``package.module:Name``, and not one of ours.

    >>> [is_user_estimator(name) for name in ("psa:mean", "arms:8", "mine:Mix")]
    [False, False, True]
    """
    module, _, name = specification.strip().partition(":")
    return name.isidentifier() and module.lower() not in ESTIMATORS and all(map(str.isidentifier, module.split(".")))


def _one(specification: str, baseline: str, make_baseline: Callable[[], Baseline]) -> tuple[str, Estimator]:
    """The name and the estimator of a ``specification``, which may end with a plus and the name of the ``baseline``."""
    if is_user_estimator(specification):
        function = specification.strip()
        estimator = call_user_function(function, option="--estimator")
        check_estimator(estimator, f"what --estimator {function!r} gives")
        return type(estimator).__name__, estimator
    unknown = InputError(f"unknown estimator {specification!r}; give {SYNTAX}; {BASELINES[baseline]}")
    wanted = specification.strip().lower()
    name, separator, option = wanted.partition("+" if "+" in wanted else ":")
    if name not in ESTIMATORS:
        raise unknown
    kind: Callable[..., Estimator] = ESTIMATORS[name]
    label = ESTIMATORS[name].__name__
    if separator == "+":
        if not issubclass(ESTIMATORS[name], BaselineEstimator) or option != baseline:
            raise unknown
        return f"{label} + {baseline}", kind(make_baseline())
    if name in DEFAULT_VARIANT:
        variant = option if separator else DEFAULT_VARIANT[name]
        if variant not in VARIANTS:
            raise unknown
        return label if variant == "sampled" else f"{label} {variant}", kind(**VARIANTS[variant])
    if (name, option) == ("adf", ADF_STATES):
        return f"{label} {option}", kind(sample=option)
    if not separator:
        return "Concrete 1" if name == "concrete" else label, kind()
    try:
        number = WITH_NUMBER[name](option)
    except (KeyError, ValueError):
        raise unknown from None
    return f"{label} {number:g}", kind(number)
