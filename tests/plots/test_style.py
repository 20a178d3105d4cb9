import itertools

import matplotlib
import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from flipgrad.plots.style import STYLES, defaults, log_ticks, ordered, save, style_of

MAIN = ["PSA", "ST", "Tanh", "Concrete 1", "Concrete 0.1", "ARM", "REINFORCE"]
UNBIASED = {
    "REINFORCE",
    "REINFORCE + mean",
    "MuProp",
    "MuProp + mean",
    "REINFORCE + running",
    "MuProp + running",
    "ARM",
    "LEG",
    "REBAR",
    "RELAX",
}
UNBIASED |= {"DisARM", "ARMS", "BitFlip", "DoubleCV", "Exact", "FlipCV"}
BIASED = {"PSA", "ST", "HardST", "Tanh", "Concrete 1", "Concrete 0.1", "ADF", "ADF states", "LocalReparam", "ZGR", "GumbelRao"}
BIASED |= {"PSA auto", "PSA enhanced", "PSA posterior", "PSA rao-blackwell", "PSA mean"}
BIASED |= {"ST posterior", "ST rao-blackwell", "ST mean"}

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])


def linear(colour):
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = XYZ @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def closest(vision):
    """The least distance in CIELAB between two of the main estimators' colours as seen with a colour vision."""
    seen = [lab(np.array(vision) @ linear(STYLES[name].colour)) for name in MAIN]
    return min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))


def test_every_estimator_has_its_own_style():
    assert set(STYLES) == BIASED | UNBIASED
    assert len({style.colour for style in STYLES.values()}) == len(STYLES)
    # In greyscale, too.
    assert len({(style.marker, style.dashes) for style in STYLES.values()}) == len(STYLES)


def test_unbiased_means_dashed():
    assert {name for name, style in STYLES.items() if style.dashes} == UNBIASED


def test_the_main_estimators_stand_out_and_psa_most():
    assert list(STYLES)[:7] == MAIN
    assert len({STYLES[name].marker for name in MAIN}) == 7
    widths = {name: style.width for name, style in STYLES.items()}
    assert widths["PSA"] > max(widths[name] for name in MAIN[1:])
    assert min(widths[name] for name in MAIN) > max(width for name, width in widths.items() if name not in MAIN)
    assert STYLES["PSA"].zorder == max(style.zorder for style in STYLES.values())
    assert [name for name, style in STYLES.items() if style.weight == "bold"] == ["PSA"]


# Distances in CIELAB; matplotlib's first seven colours come as close as 28, 7 and 5.
@pytest.mark.parametrize(("vision", "least"), [(np.eye(3), 30), (DEUTERANOPIA, 20), (PROTANOPIA, 15)])
def test_the_main_colours_keep_apart_with_any_colour_vision(vision, least):
    assert closest(vision) > least


@pytest.mark.parametrize("name", [*STYLES, "Mine", "Yours"])
def test_names_in_their_colour_are_legible_on_white(name):
    luminance = XYZ[1] @ linear(style_of(name).colour)
    assert 1.05 / (luminance + 0.05) >= 3


def test_an_unknown_name_has_a_style_of_its_own_that_never_changes():
    assert style_of("Mine").colour == "#921F3D"
    assert style_of("Mine") == style_of("Mine") != style_of("Yours")
    assert style_of("Mine", unbiased=True).dashes
    assert not style_of("Mine").dashes


def test_the_most_prominent_come_first_and_unknown_ones_last():
    assert ordered({"Yours", "ARM", "Mine", "PSA"}) == ["PSA", "ARM", "Mine", "Yours"]


@pytest.mark.parametrize(
    ("limits", "labels"), [((0.05, 20), ["0.1", "1", "10"]), ((0.15, 0.9), ["0.2", "0.5"]), ((1, 2e6), ["1", "1k", "1M"])]
)
def test_ticks_are_plain_numbers(limits, labels):
    axes = Figure().subplots()
    axes.set(xscale="log", xlim=limits)
    log_ticks(axes.xaxis)
    shown = [label.get_text() for label in axes.get_xticklabels()]
    positions = axes.get_xticks()
    inside = [text for text, x in zip(shown, positions, strict=True) if limits[0] <= x <= limits[1]]
    assert set(labels) <= set(inside)
    assert 2 <= len(inside) <= 8


def drawing():
    with defaults():
        figure = Figure(figsize=(2, 1))
        figure.subplots().plot([1, 2], label="a")
        figure.text(0.5, 0.5, "name")
    return figure


@pytest.mark.parametrize("name", ["figure", "figure.png", "figure.pdf"])
def test_both_formats_are_written_under_one_stem(tmp_path, name):
    paths = save(drawing(), tmp_path / "new" / name)
    assert paths == [tmp_path / "new" / "figure.png", tmp_path / "new" / "figure.pdf"]
    # Nothing temporary is left.
    assert sorted(tmp_path.rglob("*.*")) == sorted(paths)
    assert matplotlib.image.imread(paths[0]).shape[:2] == (200, 400)
    pdf = paths[1].read_bytes()
    assert b"/TrueType" in pdf or b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


def test_a_number_in_the_name_is_no_extension(tmp_path):
    assert [path.name for path in save(drawing(), tmp_path / "concrete-0.1")] == ["concrete-0.1.png", "concrete-0.1.pdf"]


def test_a_figure_is_the_same_twice_whatever_the_users_settings(tmp_path):
    first = [path.read_bytes() for path in save(drawing(), tmp_path / "first")]
    with matplotlib.rc_context({"font.size": 20, "pdf.fonttype": 3, "lines.linewidth": 9}):
        second = [path.read_bytes() for path in save(drawing(), tmp_path / "second")]
    assert first == second


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    (old,) = [path for path in save(drawing(), tmp_path / "figure") if path.suffix == ".png"]
    before = old.read_bytes()

    def fail(self, file, **options):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        save(drawing(), tmp_path / "figure")
    assert old.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.pdf", "figure.png"]
