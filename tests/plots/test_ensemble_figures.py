import pytest
from matplotlib.figure import Figure
from run_files import ensembles, evaluation, put, reliability, write_run

from flipgrad.errors import InputError
from flipgrad.plots.ensembles import draw_accuracies, draw_losses, draw_reliability, reliability_words, sizes_words
from flipgrad.plots.loading import build
from flipgrad.plots.runs import Ensembles, read_run


def found(**changes):
    return build(Ensembles, {**ensembles(), **changes}, where="a test", fix="nothing")


def test_a_bin_is_drawn_at_its_mean_confidence_and_accuracy():
    figure = Figure(layout="constrained")
    draw_reliability(figure, found().reliability)
    upper, lower = figure.axes
    diagonal, first, *_ = upper.get_lines()
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    # The empty bin is left out.
    assert first.get_xydata().tolist() == [[0.4, 0.4], [0.6, 0.5], [0.9, 0.78]]
    sizes = upper.collections[0].get_sizes()
    assert sizes[0] < sizes[1] < sizes[2]
    assert len(lower.patches) == 3
    assert lower.patches[0].get_data().values.tolist() == [0, 0.1, 0.3, 0.6]
    figure.draw_without_rendering()


def test_sizes_are_drawn_with_their_standard_errors():
    figure = Figure(layout="constrained")
    axes, other = figure.subplots(1, 2)
    draw_accuracies(axes, found().sizes, 0.95)
    line, deterministic = axes.get_lines()
    assert line.get_xydata().tolist() == [[1, 0.92], [4, 0.96], [8, 0.965]]
    assert set(deterministic.get_ydata()) == {0.95}
    band = axes.collections[0].get_paths()[0].vertices
    assert {(1.0, 0.91), (1.0, 0.93)} <= {(x, round(y, 6)) for x, y in band.tolist()}
    draw_losses(other, found().sizes)
    assert other.get_lines()[0].get_ydata().tolist() == [0.29, 0.18, 0.16]
    figure.draw_without_rendering()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "8"]


def test_many_sizes_have_ticks_at_decades():
    row = ensembles()["sizes"][0]
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    draw_accuracies(
        axes, found(sizes=[row | {"samples": number, "accuracy_error": None} for number in range(1, 30)]).sizes, None
    )
    figure.draw_without_rendering()
    assert len(axes.get_lines()) == 1
    assert "20" in [label.get_text() for label in axes.get_xticklabels()]


def test_what_they_mean_is_said():
    assert reliability_words(found().reliability[1:]) == (
        "With 4 samples the expected calibration error is 3.10%; on average, confidence is 4.86% above accuracy. "
        "For the deterministic network the expected calibration error is 20.00%; on average, confidence is 15.00% above "
        "accuracy."
    )
    under = reliability(10, 0.1) | {"accuracy": [None, 0.9, 0.9, 1.0]}
    assert reliability_words(found(reliability=[under]).reliability).endswith("confidence is 20.00% below accuracy.")
    assert sizes_words(found().sizes[:1]) == "Only one number of samples was measured: 1."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": [1, 2]}, "'count' must have 4 counts, one between edges, got 2"),
        ({"edges": [0.5, 0.5]}, "'edges' must be two or more increasing numbers"),
        ({"accuracy": [None, None, 0.5, 0.5]}, "'accuracy' must have a number in every bin that has predictions"),
        ({"error": 2.0}, r"error: must be a finite number from 0 to 1, got 2\.0"),
        ({"samples": 0}, "must be a whole number of at least 1, got 0"),
    ],
)
def test_a_broken_diagram_is_refused(tmp_path, change, message):
    broken = evaluation()
    broken["ensembles"]["reliability"][0] |= change
    put(write_run(tmp_path) / "evaluation.json", broken)
    with pytest.raises(InputError, match=message):
        read_run(tmp_path)


def test_sizes_out_of_order_are_refused(tmp_path):
    broken = evaluation()
    broken["ensembles"]["sizes"].reverse()
    put(write_run(tmp_path) / "evaluation.json", broken)
    with pytest.raises(InputError, match=r"'sizes' must be in the order of their samples, got \[8, 4, 1\]"):
        read_run(tmp_path)
