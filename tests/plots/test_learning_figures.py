"""The figures of the learning experiments: what they show, that nothing clashes or is cut off, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from figures import clashes, clipped, labels, lines
from run_files import put

import flipgrad as fg
from flipgrad import plots
from flipgrad.plots.learning import ACCURACY, LOSS, TRAINING, VALIDATION, learning_figure, muprop_figure, smooth
from flipgrad.plots.timing import timing_figure
from flipgrad.plots.toy import toy_example_figure, toy_training_figure

EPOCHS = 12
RELAXED = ("Tanh", "Concrete 1", "ADF", "LocalReparam")
METHODS = ("PSA", "ST", "HardST", *RELAXED, "REINFORCE")


def curve(start: float, end: float, n: int = EPOCHS) -> list[float]:
    return [end + (start - end) * math.exp(-k / 3) + 0.01 * (-1) ** k for k in range(n)]


def entry(method: str, augment: str, n: int = EPOCHS, rate: float | None = 0.0123, **more) -> dict:
    k = METHODS.index(method) if method in METHODS else 3
    curves = {
        "epoch": list(range(1, n + 1)),
        "objective": curve(2.3, 0.3 + 0.05 * k, n),
        "train_loss": curve(2.3, 0.8 + 0.1 * k, n),
        "train_accuracy": curve(0.1, 0.8 - 0.02 * k, n),
        "loss": curve(2.3, 1.1 + 0.1 * k, n),
        "accuracy_1": curve(0.1, 0.6 - 0.02 * k, n),
        "accuracy_n": curve(0.1, 0.7 - 0.02 * k, n),
    }
    about = {"method": method, "augment": augment, "searched": False, "starred": False, "relaxed": method in RELAXED}
    return {**about, "rate": rate, "trials": [], "diverged": None, "curves": curves, "seconds": 1.0, **more}


def stored(tmp_path, value) -> object:
    path = tmp_path / "result.json"
    put(path, value)
    return path


@pytest.mark.parametrize("augmentations", [("flip-crop",), ("none", "affine", "flip-crop")])
@pytest.mark.parametrize("kinds", [(LOSS, ACCURACY), (VALIDATION, TRAINING)])
def test_every_method_is_drawn_and_named_with_its_rate(tmp_path, augmentations, kinds):
    runs = [entry(method, augment) for augment in augmentations for method in METHODS]
    figure = learning_figure(stored(tmp_path, {"runs": runs}), kinds)
    assert len(figure.axes) == 2 * len(augmentations)
    assert not clipped(figure)
    for axes in figure.axes:
        wanted = {f"{method}  0.012" for method in METHODS}
        assert set(lines(axes)) == wanted == set(labels(axes))
        assert not clashes(list(labels(axes).values()))
        assert axes.get_xlim() == (1, EPOCHS)


def test_relaxed_objectives_and_one_sample_accuracies_are_dotted(tmp_path):
    figure = learning_figure(stored(tmp_path, {"runs": [entry(method, "none") for method in METHODS]}), (LOSS, ACCURACY))
    dotted = [[line for line in axes.lines if line.get_label() == "_" and line.is_dashed()] for axes in figure.axes]
    assert [len(found) for found in dotted] == [len(RELAXED), len(METHODS)]
    assert "dotted: relaxed" in figure.axes[0].get_ylabel()
    assert "dotted: 1 sample" in figure.axes[1].get_ylabel()


def test_columns_share_their_limits(tmp_path):
    runs = [entry("PSA", "none"), entry("REINFORCE", "affine")]
    left, right, *_ = learning_figure(stored(tmp_path, {"runs": runs}), (LOSS, ACCURACY)).axes
    assert left.get_ylim() == right.get_ylim()


def test_a_training_that_diverged_ends_with_a_cross_and_one_without_a_rate_is_left_out(tmp_path):
    none = {**entry("HardST", "none", rate=None, diverged="all"), "curves": {}}
    runs = [entry("PSA", "none"), entry("ST", "none", n=4, diverged="the loss"), none]
    axes = learning_figure(stored(tmp_path, {"runs": runs}), (LOSS, ACCURACY)).axes[0]
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert list(cross.get_xdata()) == [4]
    assert set(labels(axes)) == {"PSA  0.012", "ST  0.012"}


def test_seeds_are_drawn_as_one_mean_with_their_range(tmp_path):
    runs = [
        entry("ST", "none", rate=rate, seed=seed, n=n) for seed, (rate, n) in enumerate([(0.02, 12), (0.01, 9), (0.015, 12)])
    ]
    for run in runs:
        run["curves"]["train_loss"] = [2.0 + run["seed"]] * len(run["curves"]["epoch"])
    axes = learning_figure(stored(tmp_path, {"runs": runs}), (LOSS, ACCURACY)).axes[0]
    (line,) = lines(axes).values()
    assert set(labels(axes)) == {"ST  0.01–0.02"}
    # As far as all of them go.
    np.testing.assert_allclose(line.get_ydata(), [3.0] * 9)
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((2.0, 4.0))
    assert axes.get_xlim() == (1, EPOCHS)


def test_values_after_one_that_is_no_number_are_not_drawn(tmp_path):
    run = entry("PSA", "none")
    run["curves"]["train_loss"][5] = None
    axes = learning_figure(stored(tmp_path, {"runs": [run]}), (LOSS, ACCURACY)).axes[0]
    assert len(lines(axes)["PSA  0.012"].get_xdata()) == 5


def test_losses_far_above_guessing_leave_the_axes(tmp_path):
    run = entry("Tanh", "none")
    run["curves"]["train_loss"] = [2.0 + k * k for k in range(EPOCHS)]
    axes = learning_figure(stored(tmp_path, {"runs": [run, entry("PSA", "none")]}), (LOSS, ACCURACY)).axes[0]
    assert axes.get_ylim()[1] < 1.5 * math.log(10)
    assert set(labels(axes)) == {"Tanh  0.012", "PSA  0.012"}


def test_smoothing_keeps_lines_and_measures_the_noise_about_them():
    line = np.linspace(2, 1, 50)
    noise = 0.1 * np.random.default_rng(0).standard_normal(2000)
    mean, deviation = smooth(line, 3.0)
    np.testing.assert_allclose(mean, line, atol=1e-12)
    np.testing.assert_allclose(deviation, 0, atol=1e-7)
    mean, deviation = smooth(1 + noise, 20.0)
    assert np.abs(mean - 1).max() < 0.1
    # The standard error of a deviation from about 70 values is 8 %.
    assert deviation.mean() == pytest.approx(0.1, rel=0.1)
    assert smooth(np.array([1.0, 2.0]), 1.0)[1].tolist() == [0, 0]


def test_muprop_names_every_rate_and_stars_the_searched(tmp_path):
    runs = [entry("PSA", "flip-crop", searched=True, starred=True)]
    for method in ("REINFORCE + running", "MuProp + running"):
        runs += [entry(method, "flip-crop", rate=rate, searched=rate == 0.03, starred=True) for rate in (0.03, 0.001)]
    figure = muprop_figure(stored(tmp_path, {"runs": runs}))
    wanted = {f"{method} + running  {rate}" for method in ("REINFORCE", "MuProp") for rate in ("0.03*", "0.001")}
    assert set(labels(figure.axes[0])) == wanted | {"PSA  0.012*"}
    assert len({line.get_color() for line in lines(figure.axes[0]).values()}) == 5
    assert not clipped(figure)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "has no 'runs'"),
        ({"runs": []}, "'runs' holds no training"),
        ({"runs": [{"augment": "none"}]}, "has no 'method'"),
        (
            {"runs": [{**entry("PSA", "none"), "curves": {"epoch": "all"}}]},
            r"runs\[0\]\.curves\.epoch: must be a list, got 'all'",
        ),
    ],
)
def test_broken_results_of_trainings_are_refused(tmp_path, value, message):
    with pytest.raises(fg.InputError, match=message):
        plots.cifar(stored(tmp_path, value), tmp_path / "figure")


def test_muprop_without_any_epoch_is_refused(tmp_path):
    run = {**entry("PSA", "flip-crop"), "curves": {"epoch": [], "train_loss": []}}
    with pytest.raises(fg.InputError, match="holds no training that came to an end of an epoch"):
        plots.muprop(stored(tmp_path, {"runs": [run]}), tmp_path / "figure")


def test_muprop_with_two_augmentations_is_refused(tmp_path):
    runs = [entry("PSA", "flip-crop"), entry("PSA", "none")]
    with pytest.raises(fg.InputError, match="has 2 augmentations, and the figure shows one"):
        plots.muprop(stored(tmp_path, {"runs": runs}), tmp_path / "figure")


def toy_methods(runs: int) -> dict:
    losses = {"expected": [0.7, 0.5, 0.4], "marginal": [0.65, 0.45, 0.38]}
    return {name: {"epochs": [1, 10, 100], "runs": [losses] * runs} for name in ("PSA", "ST", "ARM", "REINFORCE")}


@pytest.mark.parametrize("runs", [1, 3])
def test_the_toy_training_shows_both_losses_of_every_method(tmp_path, runs):
    figure = toy_training_figure(stored(tmp_path, {"methods": toy_methods(runs)}))
    (axes,) = figure.axes
    assert set(lines(axes)) == {f"{name} {kind}" for name in toy_methods(1) for kind in ("expected", "marginal")}
    assert set(labels(axes)) == set(toy_methods(1))
    assert not clashes(list(labels(axes).values()))
    assert not clipped(figure)
    assert len(axes.collections) == (8 if runs > 1 else 0)


def test_a_toy_training_with_missing_epochs_is_refused(tmp_path):
    methods = toy_methods(1)
    methods["PSA"]["runs"][0] = {"expected": [0.7], "marginal": [0.7]}
    with pytest.raises(fg.InputError, match="'marginal' must have 3 entries"):
        plots.toy_training(stored(tmp_path, {"methods": methods}), tmp_path / "figure")


def test_the_toy_example_has_six_panels(tmp_path):
    field = [[x / 9 for x in range(10)] for _ in range(8)]
    net = {"probability": field, "members": [field] * 3}
    record = {"points": [[[0.0, 0.5]], [[0.1, -0.5]]], "expected": net, "bound": net, "draws": 10}
    figure = toy_example_figure(stored(tmp_path, record))
    titles = [axes.get_title(loc="left") for axes in figure.axes[:6]]
    assert [title[:3] for title in titles] == ["(a)", "(b)", "(c)", "(d)", "(e)", "(f)"]
    assert "10-sample bound" in titles[2]
    assert not clipped(figure)
    assert [path.suffix for path in plots.toy_example(tmp_path / "result.json", tmp_path / "figure")] == [".png", ".pdf"]


def test_times_are_ratios_to_tanh(tmp_path):
    slow = {"forward": 2.0, "backward": 6.0, "train_epoch": 30.0, "val_epoch": 3.0}
    quick = {"forward": 1.0, "backward": 2.0, "train_epoch": 20.0, "val_epoch": 3.0}
    methods = {"PSA": {"paper": slow, "ours": quick}, "Tanh": {"paper": quick, "ours": quick}}
    record = {"methods": methods, "reference": "Tanh", "threads": 2}
    figure = timing_figure(stored(tmp_path, record))
    assert [list(lines(axes)["PSA"].get_xdata()) for axes in figure.axes] == [[1], [1], [1], [1]]
    paper = [next(line for line in axes.lines if line.get_markerfacecolor() == "white") for axes in figure.axes]
    assert [float(line.get_xdata()[0]) for line in paper] == pytest.approx([2, 3, 8 / 3, 1.5])
    assert not clipped(figure)
    methods["PSA"]["ours"] = {**quick, "forward": 0}
    with pytest.raises(fg.InputError, match=r"methods\.PSA\.ours\.forward: must be a finite number above 0, got 0"):
        plots.timing(stored(tmp_path, record), tmp_path / "figure")
