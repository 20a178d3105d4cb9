import pytest
from matplotlib.figure import Figure

from flipgrad.plots.charts import draw_disagreement, meaning
from flipgrad.plots.runs import Disagreement


def found(correct, wrong):
    return Disagreement([i / len(correct) for i in range(len(correct) + 1)], correct, wrong)


@pytest.mark.parametrize(
    ("correct", "wrong", "samples", "sentence"),
    [
        (
            [1990, 8, 2, 0],
            [10, 3, 4, 2],
            4,
            "Where all 4 members agree (2,000 predictions), 0.5% are wrong; of the other 19, 47.4% are. Disagreement, which "
            "needs no labels to be seen, warns of errors.",
        ),
        (
            [60, 8, 2, 20],
            [40, 3, 4, 2],
            4,
            "Where all 4 members agree (100 predictions), 40.0% are wrong; of the other 39, 23.1% are. Disagreement is a weak "
            "sign of errors here.",
        ),
        (
            [90, 2],
            [1, 7],
            50,
            "Where fewer than 50% disagree (91 predictions), 1.1% are wrong; of the other 9, 77.8% are. Disagreement, which "
            "needs no labels to be seen, warns of errors.",
        ),
        ([90, 2], [0, 0], 2, "The ensemble made no error; in 90 of 92 predictions all 2 members agree."),
        ([90, 0], [2, 0], 2, "In every one of 92 predictions all 2 members agree, so that disagreement tells nothing about"),
        ([0, 90], [0, 2], 2, "In no one of 92 predictions all 2 members agree, so that disagreement tells nothing about"),
        ([0, 0], [0, 0], 2, "There were no predictions to compare."),
        ([3], [1], 1, "A single member cannot disagree: evaluate with more samples"),
    ],
)
def test_what_it_means_is_said(correct, wrong, samples, sentence):
    assert meaning(found(correct, wrong), samples=samples).startswith(sentence)


def test_bars_are_shares_of_each_group():
    axes = Figure(figsize=(4, 3)).subplots()
    draw_disagreement(axes, found([6, 2, 0, 0], [0, 1, 0, 3]), samples=4)
    heights = [[bar.get_height() for bar in container] for container in axes.containers]
    assert heights == [[0.75, 0.25, 0, 0], [0, 0.25, 0, 0.75]]
    for index, (left, right) in enumerate(zip(*axes.containers, strict=True)):
        # Side by side, within the bin.
        assert index / 4 < left.get_x() < left.get_x() + left.get_width() <= right.get_x()
        assert right.get_x() + right.get_width() < (index + 1) / 4
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0%", "25%", "50%", "75%"]


@pytest.mark.parametrize("samples", [None, 1000])
def test_bins_of_several_shares_are_labelled_at_their_edges(samples):
    figure = Figure(figsize=(4, 3))
    axes = figure.subplots()
    draw_disagreement(axes, found([6] * 20, [0] * 20), samples=samples)
    figure.draw_without_rendering()
    assert axes.get_xticks()[0] == 0
    assert axes.get_xticklabels()[0].get_text() == "0%"
