"""The paper's toy problem: how estimators train a small network, and what the trained networks predict."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flipgrad import exact, plots
from flipgrad.data import toy
from flipgrad.estimators import PSA
from flipgrad.estimators.names import for_training
from flipgrad.network import Sequential, probabilities
from flipgrad.objectives import CrossEntropy
from flipgrad.reproduce._cells import Cell, Place
from flipgrad.reproduce._workshop import Claim, Workshop, experiment
from flipgrad.reproduce.accuracy import WIDTHS
from flipgrad.training.models import fully_connected
from flipgrad.training.reference_training import reference_training

METHODS = ("reinforce", "arm", "psa:sampled", "st")
# Epochs and networks by scale; the paper trains one network for 2,000 epochs.
LENGTH = {"smoke": (3, 1), "small": (2000, 1), "paper": (2000, 10)}
# Points of a curve, at most; evenly spaced on a logarithmic scale.
POINTS = 40

# The 10-sample bound of Raiko et al., and as many draws for the expected loss.
DRAWS = 10
MEMBERS = 3
# Points of the grid across and up: x from -pi/2 to pi/2, y from -1 to 1.
GRID = (79, 51)
# The probability of class 1 where both classes are: class 0 is uniform on an area of pi, class 1 on one of pi + 2.
TRUTH = (1 / (math.pi + 2)) / (1 / (math.pi + 2) + 1 / math.pi)
EXAMPLE_EPOCHS = {"smoke": 2, "small": 1000, "paper": 2000}


@experiment("toy-training", "Figure C.2", seconds=(4, 560, 5600), cells=(4, 4, 40))
def toy_training(shop: Workshop) -> Iterator[Claim]:
    """Appendix C: training losses of a 5-5-5 network on the toy problem.

    Training losses of a 5-5-5 network on these data: the expected loss (dashed) and that of the ensemble (solid). REINFORCE
    does not do well in the beginning and gets there eventually; ARM and PSA are alike; ST is somewhat slower. Unbiased
    estimators perform well on this problem.
    """
    found = trainings(shop, "toy-training", METHODS, *LENGTH[shop.scale_name])
    curves = {name: np.mean([run["expected"] for run in entry["runs"]], 0).tolist() for name, entry in found.items()}
    return training_claims(curves, next(iter(found.values()))["epochs"])


def trainings(
    shop: Workshop, stage: str, methods: Sequence[str], epochs: int, networks: int, cell_name: Callable[[str], str] = str
) -> dict[str, dict[str, Any]]:
    """Train several networks with each of the ``methods``, and draw their losses.

    Cells call a method by its ``cell_name``.

    Returns:
        The ``epochs`` and ``runs`` of curves, by what figures call the method.
    """
    common = {"epochs": epochs, "widths": list(WIDTHS), "data_seed": shop.seed}
    cells = [
        Cell(f"{stage}-{cell_name(method)}-{k}", train_toy, {"method": method, "seed": shop.seed + k, **common}, cost=epochs)
        for method in methods
        for k in range(networks)
    ]
    found: dict[str, dict[str, Any]] = {}
    for record in shop.cells(stage, cells).values():
        entry = found.setdefault(record["result"]["label"], {"epochs": record["result"]["epochs"], "runs": []})
        entry["runs"].append({key: record["result"][key] for key in ("expected", "marginal")})
    plots.toy_training(shop.store(stage, {"methods": found, "widths": list(WIDTHS)}), shop.folder / stage)
    return found


def train_toy(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The exact losses of a network along its training by one estimator.

    They are measured after every epoch. As they go up and down with every update, their means over ever longer stretches are
    kept, which are equally long on a logarithmic scale.
    """
    data = toy(seed=settings["data_seed"]).train
    last, objective = settings["epochs"], CrossEntropy(data.y)
    label, estimator = for_training(settings["method"], len(data))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        net = fully_connected(data.x.shape[1], settings["widths"], 2)
    losses: list[tuple[float, float]] = []

    @torch.no_grad()
    def measure(epoch: int) -> None:
        expected, marginal = (loss(net, data.x, objective).mean() for loss in (exact.expected_loss, exact.marginal_loss))
        losses.append((float(expected), float(marginal)))
        place.tick(epoch / last)

    reference_training(data, [], [last], net=net, estimator=estimator, seed=settings["seed"], report=measure)
    ends = sorted({round(epoch) for epoch in np.geomspace(1, last, POINTS)})
    stretches = [slice(start, end) for start, end in pairwise([0, *ends])]
    means = [np.mean(losses[stretch], 0).tolist() for stretch in stretches]
    return {
        "label": label,
        "epochs": [(stretch.start + 1 + stretch.stop) / 2 for stretch in stretches],
        "expected": [expected for expected, _ in means],
        "marginal": [marginal for _, marginal in means],
    }


def training_claims(curves: Mapping[str, Sequence[float]], epochs: Sequence[float]) -> Iterator[Claim]:
    """What the expected losses along the training, by estimator, say."""
    yield Claim(
        "unbiased estimators perform well here, the variance reduction of PSA is not essential (REINFORCE and ARM end within "
        "10 % of PSA's expected loss, or below)",
        all(curves[name][-1] <= 1.1 * curves["PSA"][-1] for name in ("REINFORCE", "ARM")),
        "expected loss at the end: " + ", ".join(f"{name} {curve[-1]:.3f}" for name, curve in curves.items()),
    )
    # The first tenth of the training, on its logarithmic scale.
    early = sum(epoch <= epochs[-1] / 10 for epoch in epochs) or 1
    begun = {name: float(np.mean(curve[:early])) for name, curve in curves.items()}
    last = curves["REINFORCE"][-1]
    yield Claim(
        "REINFORCE does not do very well in the beginning, but eventually optimises the objective",
        begun["REINFORCE"] == max(begun.values()) and last < begun["REINFORCE"],
        f"mean expected loss until epoch {epochs[early - 1]:,.0f}, on the figure's logarithmic scale: "
        + ", ".join(f"{name} {value:.3f}" for name, value in begun.items())
        + f"; REINFORCE at the end {last:.3f}",
    )
    ratios = np.divide(curves["PSA"], curves["ARM"])
    mean = geometric_mean(ratios)
    yield Claim(
        "PSA and ARM perform similarly (their expected losses stay within 10 % of each other on average)",
        abs(math.log(mean)) < math.log(1.1),
        f"loss with PSA over that with ARM: mean {mean:.3f}, from {min(ratios):.2f} to {max(ratios):.2f}",
    )
    ratios = np.divide(curves["ST"], curves["PSA"])
    yield Claim(
        "ST is somewhat slower than PSA, due to its bias in this small network",
        geometric_mean(ratios) > 1,
        f"loss with ST over that with PSA: mean {geometric_mean(ratios):.3f}, at the end {ratios[-1]:.3f}",
    )


@experiment("toy-example", "Figure B.1", seconds=(3, 200, 400), cells=(2, 2, 2))
def toy_example(shop: Workshop) -> Iterator[Claim]:
    """Appendix B: the toy problem, trained by the expected loss and by the 10-sample bound.

    Two overlapping classes in the plane (a), the predictive probability of a network trained by the expected loss, which tends
    to be deterministic (b), and by a 10-sample bound, which fits the uncertainty of the data (c), and three members of that
    ensemble, with all noises fixed (d to f).
    """
    epochs = EXAMPLE_EPOCHS[shop.scale_name]
    cells = [
        Cell(
            f"toy-example-{'bound' if bound else 'expected'}",
            train_example,
            {"bound": bound, "epochs": epochs, "widths": list(WIDTHS), "draws": DRAWS, "seed": shop.seed},
            cost=epochs,
        )
        for bound in (False, True)
    ]
    records = shop.cells("toy-example", cells)
    expected, bound = (records[cell.name]["result"] for cell in cells)
    x, y = shop.data.x, shop.data.y
    points = [[[round(float(v), 4) for v in point] for point in x[y == k]] for k in range(2)]
    shown = {key: value for key, value in expected.items() if key != "members"}
    stored = {"points": points, "expected": shown, "bound": bound, "draws": DRAWS, "grid": list(GRID)}
    plots.toy_example(shop.store("toy-example", stored), shop.folder / "toy-example")
    return example_claims(expected, bound)


def train_example(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Train a network by PSA, and say what it predicts."""
    epochs = settings["epochs"]
    net = reference_training(
        toy(seed=settings["seed"]).train,
        settings["widths"],
        [epochs],
        estimator=PSA(inputs="sampled", head="sampled"),
        samples=settings["draws"],
        bound=settings["bound"],
        seed=settings["seed"],
        report=lambda epoch: place.tick(epoch / epochs),
    )[epochs]
    return describe(net, settings["seed"])


@torch.no_grad()
def describe(net: Sequential, seed: int) -> dict[str, Any]:
    """Probabilities of class 1 on the grid, of the ensemble and of three members, and numbers about them.

    The densities are known, and so is the probability that a perfect predictor gives where both classes are.
    """
    x, y = _axes()
    grid = torch.cartesian_prod(y, x).flip(1)
    probability = exact.predictive(net, grid)[:, 1]
    generator = torch.Generator().manual_seed(seed)
    members = torch.stack([probabilities(net.member(grid[:1], generator=generator)(grid))[:, 1] for _ in range(100)])
    inside = (grid[:, 1] > 0) & (grid[:, 1] < grid[:, 0].cos())
    new = toy(1000, seed=seed + 1).test
    return {
        "probability": _rows(probability, 3),
        "members": [_rows(member, 2) for member in members[:MEMBERS]],
        "marginal_test_loss": float(exact.marginal_loss(net, new.x, CrossEntropy(new.y)).mean()),
        "expected_test_loss": float(exact.expected_loss(net, new.x, CrossEntropy(new.y)).mean()),
        "overlap_error": float((probability[inside] - TRUTH).abs().mean()),
        "overlap_spread": float(members[:, inside].std(0).mean()),
        "truth": TRUTH,
    }


def _rows(values: Tensor, digits: int) -> list[list[float]]:
    """The grid from the bottom up, in few digits."""
    return [[round(float(value), digits) for value in row] for row in values.view(GRID[1], GRID[0])]


def example_claims(expected: Mapping[str, Any], bound: Mapping[str, Any]) -> Iterator[Claim]:
    """How much the draws of both networks differ, and both against the known probabilities and on new points.

    A network without noise may well be unsure, as its head gives probabilities: its draws are what does not differ.
    """
    gaps = [net["expected_test_loss"] - net["marginal_test_loss"] for net in (expected, bound)]
    yield Claim(
        "trained by the expected loss, the network tends to a deterministic one; trained by the bound, its members, with all "
        "noises fixed, differ where the classes overlap (the standard deviation of a member's probability is less than half "
        "as large)",
        expected["overlap_spread"] < bound["overlap_spread"] / 2,
        f"{expected['overlap_spread']:.3f} against {bound['overlap_spread']:.3f}; the loss of one draw is {gaps[0]:.3f} and "
        f"{gaps[1]:.3f} above that of the ensemble",
    )
    errors = [torch.tensor(net["probability"], dtype=torch.float64) - true_probabilities() for net in (bound, expected)]
    ours, theirs = (float(error.abs().mean()) for error in errors)
    yield Claim(
        "trained by the 10-sample bound, it fits the uncertainty of the data (its probabilities are closer to the true ones "
        "over the plane, and its marginal loss on 2,000 new points is lower)",
        ours < theirs and bound["marginal_test_loss"] < expected["marginal_test_loss"],
        f"mean error of the probability {ours:.3f} against {theirs:.3f} (where the classes overlap "
        f"{bound['overlap_error']:.3f} against {expected['overlap_error']:.3f}); marginal loss "
        f"{bound['marginal_test_loss']:.3f} against {expected['marginal_test_loss']:.3f}",
    )


def true_probabilities() -> Tensor:
    """Of class 1 on the grid, from the bottom up: 1 below 0, 0 above the cosine."""
    x, y = _axes()
    both = torch.where(y[:, None] < x.cos(), TRUTH, 0.0)
    return torch.where(y[:, None] < 0, 1.0, both).double()


def _axes() -> tuple[Tensor, Tensor]:
    """x and y of the points of the grid."""
    return torch.linspace(-math.pi / 2, math.pi / 2, GRID[0]), torch.linspace(-1, 1, GRID[1])
