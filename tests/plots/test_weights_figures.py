"""The figures of real and binary weights: what they show, that nothing is cut off, and what they refuse."""

from __future__ import annotations

import pytest
from figures import clipped, lines
from run_files import put

import flipgrad as fg
from flipgrad.plots.weights import weights_accuracy_figure, weights_training_figure

METHODS = ["PSA", "PSA posterior", "ST", "HardST"]


def accuracies() -> list[dict]:
    return [
        {
            "weights": weights,
            "method": method,
            "layers": ["layer 1", "layer 2"],
            "bias": [0.1 * k, 0.2],
            "rmse": [1.0 * k, 0.5],
            "cosine": [0.3, 0.9],
            "unbiased": [0, 3],
            "networks": 3,
        }
        for weights in ("real", "binary")
        for k, method in enumerate(METHODS, 1)
    ]


def courses(*data: str) -> list[dict]:
    return [
        {
            "data": name,
            "weights": weights,
            "method": method,
            "rate": 0.1,
            "losses": [2.0, 1.0 / k],
            "accuracies": [0.5, 0.8 + 0.04 * k],
            "diverged": "the loss" if method == "HardST" else None,
        }
        for name in data
        for weights in ("real", "binary")
        for k, method in enumerate(METHODS, 1)
    ]


def test_accuracies_of_both_kinds_are_drawn_in_every_layer(tmp_path):
    put(tmp_path / "weights.json", {"accuracies": accuracies(), "courses": []})
    figure = weights_accuracy_figure(tmp_path / "weights.json")
    assert not clipped(figure)
    assert len(figure.axes) == 3
    for axes in figure.axes:
        assert list(lines(axes)) == [f"{kind} {method}" for kind in ("real", "binary") for method in METHODS]
    assert list(lines(figure.axes[0])["binary ST"].get_ydata()) == pytest.approx([0.3, 0.2])
    assert lines(figure.axes[0])["real ST"].get_markerfacecolor() == "white"
    assert lines(figure.axes[0])["binary ST"].get_markerfacecolor() != "white"


@pytest.mark.parametrize("data", [("digits",), ("digits", "mnist")])
def test_losses_and_accuracies_of_every_training_are_drawn(tmp_path, data):
    put(tmp_path / "weights.json", {"accuracies": [], "courses": courses(*data)})
    figure = weights_training_figure(tmp_path / "weights.json")
    assert not clipped(figure)
    assert len(figure.axes) == 2 * len(data)
    drawn = lines(figure.axes[0])
    assert list(drawn["binary PSA"].get_ydata()) == [2.0, 1.0]
    assert drawn["real PSA"].is_dashed()
    assert not drawn["binary PSA"].is_dashed()
    assert list(lines(figure.axes[-1])["binary ST"].get_ydata()) == pytest.approx([0.5, 0.92])
    # Where a training diverged there is a cross.
    assert sum(line.get_marker() == "x" for line in figure.axes[0].lines) == 2


def test_files_without_results_or_with_missing_layers_are_refused(tmp_path):
    path = tmp_path / "weights.json"
    put(path, {"accuracies": [], "courses": []})
    with pytest.raises(fg.InputError, match=r"holds no accuracies; run the experiment again"):
        weights_accuracy_figure(path)
    with pytest.raises(fg.InputError, match=r"holds no trainings; run the experiment again"):
        weights_training_figure(path)
    put(path, {"accuracies": [{**accuracies()[0], "bias": [0.1]}]})
    with pytest.raises(fg.InputError, match=r"'PSA' must have 2 numbers of each kind"):
        weights_accuracy_figure(path)
