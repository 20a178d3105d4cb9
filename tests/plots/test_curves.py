import matplotlib.image
import numpy
import pytest
from figures import lines
from matplotlib.figure import Figure
from run_files import LAYERS, epoch, put_lines, write_run

from flipgrad.errors import InputError
from flipgrad.plots import training_curve
from flipgrad.plots.charts import charts, draw
from flipgrad.plots.runs import Epoch, read_metrics


@pytest.mark.parametrize("epochs", [1, 5])
def test_a_curve_is_drawn_from_the_metrics_alone(tmp_path, epochs):
    keys = ("objective", "expected_loss", "marginal_loss", "accuracy_1", "accuracy_n", "accuracy_deterministic")
    records = [{"epoch": e, "samples": 10, **dict.fromkeys(keys, 1 / (e + 1))} for e in range(1, epochs + 1)]
    put_lines(tmp_path / "metrics.jsonl", records)
    training_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    image = matplotlib.image.imread(tmp_path / "curve.png")
    assert image.shape[:2] == (540, 1350)
    red, green, blue = (image[..., channel] * 255 for channel in range(3))
    colours = set(numpy.unique((2**16 * red.round() + 2**8 * green.round() + blue.round()).astype(int)).tolist())
    assert {0x0072B2, 0xD55E00, 0x009E73} <= colours
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "metrics.jsonl"]


def test_a_curve_of_no_epoch_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "acc')
    with pytest.raises(InputError, match=r"metrics\.jsonl: holds no whole epoch"):
        training_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_a_failure_leaves_the_earlier_curve(tmp_path, monkeypatch):
    (write_run(tmp_path) / "curve.png").write_text("before")

    def fail(self, file, **options):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        training_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_text() == "before"


def drawn(chart):
    axes = Figure().subplots()
    draw(axes, chart)
    return axes


def test_every_chart_shows_the_numbers_of_the_file(tmp_path):
    found = {chart.key: chart for chart in charts(read_metrics(write_run(tmp_path) / "metrics.jsonl"))}
    assert list(found) == ["losses", "accuracies", "gradients", "saturated", "changed", "undecided", "rate"]
    expected = {
        "losses": {
            "training objective": "objective",
            "expected loss": "expected_loss",
            "marginal loss (10 samples)": "marginal_loss",
        },
        "accuracies": {"1 sample": "accuracy_1", "10 samples": "accuracy_n", "deterministic": "accuracy_deterministic"},
        "rate": {"learning rate": "lr"},
    }
    for key, names in expected.items():
        shown = lines(drawn(found[key]))
        assert {label: list(line.get_ydata()) for label, line in shown.items()} == {
            label: [epoch(number)[name] for number in range(1, 5)] for label, name in names.items()
        }
        assert all(list(line.get_xdata()) == [1, 2, 3, 4] for line in shown.values())
    for key, name, layers in (
        ("gradients", "gradient_norm", LAYERS),
        ("saturated", "saturated", LAYERS[:2]),
        ("changed", "changed_signs", LAYERS[1:2]),
        ("undecided", "undecided", LAYERS[1:2]),
    ):
        shown = lines(drawn(found[key]))
        assert list(shown) == list(layers)
        for layer, line in shown.items():
            assert list(line.get_ydata()) == [epoch(number)[name][layer] for number in range(1, 5)]
        assert len({line.get_color() for line in shown.values()}) == len(layers)


def test_what_is_missing_is_left_out():
    assert charts([]) == charts([Epoch(epoch=1)]) == []
    (only,) = charts([Epoch(epoch=1, objective=1.0), Epoch(epoch=2), Epoch(epoch=3, objective=0.5)])
    assert [(line.epochs, line.values) for line in only.lines] == [([1, 3], [1.0, 0.5])]
    (accuracies,) = charts([Epoch(epoch=1, accuracy_n=0.5)])
    assert [line.label for line in accuracies.lines] == ["many samples"]


def test_a_constant_rate_is_no_curve():
    assert charts([Epoch(epoch=1, lr=0.1), Epoch(epoch=2, lr=0.1)]) == []


def test_a_layer_may_come_later_than_others():
    (chart,) = charts([Epoch(epoch=1, gradient_norm={"a": 1.0}), Epoch(epoch=2, gradient_norm={"a": 2.0, "b": 3.0})])
    assert [(line.label, line.epochs) for line in chart.lines] == [("a", [1, 2]), ("b", [2])]


@pytest.mark.parametrize(
    ("values", "scale"), [((1.0, 0.01), "log"), ((1.0, 0.5), "linear"), ((1.0, 0.0), "linear"), ((1.0, -3.0), "linear")]
)
def test_losses_are_logarithmic_where_that_helps_and_can_be(values, scale):
    (chart,) = charts([Epoch(epoch=number, objective=value) for number, value in enumerate(values, 1)])
    assert drawn(chart).get_yscale() == scale


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("count", [1, 2, 9, 30])
def test_layers_stand_out_from_light_and_dark_pages(count):
    (chart,) = charts([Epoch(epoch=1, gradient_norm={str(index): 1.0 for index in range(count)})])
    assert len({(line.colour, line.dashed) for line in chart.lines}) == count
    for line in chart.lines:
        assert 1.05 / (luminance(line.colour) + 0.05) >= 3
        assert (luminance(line.colour) + 0.05) / (luminance("#1A1E23") + 0.05) >= 3
