"""How every figure looks: one style per estimator, panels that fit a page, and files that are the same each time."""

import colorsys
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getdoc
from io import BytesIO
from math import inf
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image

from flipgrad import files

# Okabe and Ito's palette, distinguishable with any colour vision.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
# Of notes, reference lines and zones: behind the data.
GREY, PALE, BAND, GRID = "#767676", "#F1F1F1", "#E2E2E2", "#DDDDDD"

# Points, for a figure printed at its own size across two columns.
FONT, SMALL, TINY = 8.0, 6.6, 5.8
# Inches: the width of a page, and of what :func:`grid` begins with, where any decoration of a panel has room.
PAGE, AMPLE = 7.2, 4.0

# Lengths of dashes and gaps in line widths. A biased estimator is solid; an unbiased one is dashed, by family.
SOLID: tuple[float, ...] = ()
SCORE, ANTITHETIC, CONTROL, DOTTED = (5.0, 1.8), (2.4, 1.3), (5.5, 1.5, 1.3, 1.5), (1.0, 1.2)


@dataclass(frozen=True)
class Style:
    """How an estimator is drawn: colour and (marker, dashes) each suffice to recognise it; ``rank`` 0 comes first."""

    colour: str
    marker: str
    dashes: tuple[float, ...]
    width: float
    rank: int

    @property
    def zorder(self) -> float:
        """The more prominent, the further in front."""
        return 4 - self.rank / 100

    @property
    def weight(self) -> str:
        """The method under study is named in bold."""
        return "bold" if self.rank == 0 else "normal"


PROPOSED, MAIN, OTHER = 2.4, 1.5, 1.0
# One hue per family: blue PSA, red straight-through, green and grey relaxed, brown score function, purple antithetic,
# steel blue learned or sampled control. The seven of the paper's figures keep apart with any colour vision.
_TABLE: tuple[tuple[str, str, str, tuple[float, ...], float], ...] = (
    ("PSA", "#0F4CC0", "o", SOLID, PROPOSED),
    ("ST", "#D5420A", "s", SOLID, MAIN),
    ("Tanh", "#262626", "D", SOLID, MAIN),
    ("Concrete 1", "#12A05C", "^", SOLID, MAIN),
    ("Concrete 0.1", "#0FA3A3", "v", SOLID, MAIN),
    ("ARM", "#9A3A98", "P", ANTITHETIC, MAIN),
    ("REINFORCE", "#6E4000", "X", SCORE, MAIN),
    ("HardST", "#8E1B1B", "p", SOLID, OTHER),
    ("ZGR", "#E0607A", "h", SOLID, OTHER),
    ("GumbelRao", "#6B8E00", "<", SOLID, OTHER),
    ("ADF", "#6A6A6A", ">", SOLID, OTHER),
    ("ADF states", "#3E6E73", "$S$", SOLID, OTHER),
    ("LocalReparam", "#8A8F99", "d", SOLID, OTHER),
    ("REINFORCE + mean", "#B07A10", "^", SCORE, OTHER),
    ("MuProp", "#5E5A1E", "s", SCORE, OTHER),
    ("REINFORCE + running", "#9C4A12", "o", SCORE, OTHER),
    ("MuProp + running", "#3F7A1F", "v", SCORE, OTHER),
    ("MuProp + mean", "#A08A3C", "D", SCORE, OTHER),
    ("DisARM", "#B95FD0", "o", ANTITHETIC, OTHER),
    ("ARMS", "#7D5CB0", "d", ANTITHETIC, OTHER),
    ("BitFlip", "#D0489A", "v", ANTITHETIC, OTHER),
    ("LEG", "#4B2A7B", "s", ANTITHETIC, OTHER),
    ("REBAR", "#1F6E8C", "<", CONTROL, OTHER),
    ("RELAX", "#3D95C4", ">", CONTROL, OTHER),
    ("DoubleCV", "#5477A8", "p", CONTROL, OTHER),
    ("FlipCV", "#0B7A75", "h", CONTROL, OTHER),
    ("Exact", "#000000", "*", DOTTED, OTHER),
    ("PSA auto", "#E0218A", "$A$", SOLID, OTHER),
    ("PSA posterior", "#C2187A", "*", SOLID, OTHER),
    ("PSA rao-blackwell", "#5B2DA8", "P", SOLID, OTHER),
    ("PSA mean", "#00838F", "X", SOLID, OTHER),
    ("PSA enhanced", "#5C8FE6", "8", SOLID, OTHER),
    ("ST posterior", "#B8860B", "H", SOLID, OTHER),
    ("ST rao-blackwell", "#8A5A44", "$R$", SOLID, OTHER),
    ("ST mean", "#7A8B00", "$M$", SOLID, OTHER),
)
STYLES = {name: Style(colour, marker, dashes, width, rank) for rank, (name, colour, marker, dashes, width) in enumerate(_TABLE)}
_MARKERS = "osD^v<>pPXhd"


def style_of(name: str, *, unbiased: bool = False) -> Style:
    """The style of an estimator; an unknown one gets a style that depends on its name and its claim alone.

    >>> style_of("PSA").colour
    '#0F4CC0'
    """
    if name in STYLES:
        return STYLES[name]
    hue, lightness, marker = hashlib.sha256(name.encode()).digest()[:3]
    rgb = colorsys.hls_to_rgb(hue / 256, 0.30 + 0.10 * lightness / 255, 0.65)
    return Style(to_hex(rgb).upper(), _MARKERS[marker % len(_MARKERS)], CONTROL if unbiased else SOLID, OTHER, len(STYLES))


def ordered(names: Iterable[str]) -> list[str]:
    """The most prominent first; unknown names last, by name."""
    return sorted(names, key=lambda name: (style_of(name).rank, name))


@contextmanager
def defaults(scale: float = 1.0) -> Iterator[None]:
    """Draw inside this: matplotlib's own defaults, not the user's, with our sizes (times ``scale``) and embedded fonts."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("font", size=scale * FONT)
        matplotlib.rc("axes", titlesize=scale * FONT, labelsize=scale * FONT, linewidth=0.6)
        matplotlib.rc("xtick", labelsize=scale * SMALL)
        matplotlib.rc("ytick", labelsize=scale * SMALL)
        matplotlib.rc("pdf", fonttype=42)
        yield


def tidy(axes: Axes) -> None:
    """A thin grid behind the data, no box, small ticks."""
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="major", length=2.5, width=0.6, pad=2)
    axes.tick_params(which="minor", length=1.5, width=0.4)


def grid(rows: int, columns: int, *, count: int | None = None, title: str = "", **options: Any) -> tuple[Figure, list[Axes]]:
    """Tidy panels, ``count`` or all of ``rows`` times ``columns``, row by row; ``options`` are those of ``subplots``.

    When all that stands beside the panels is drawn, :func:`fit` must find their places.
    """
    engine = ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.07, wspace=0, hspace=0)
    figure = Figure(figsize=(columns * AMPLE, rows * AMPLE), layout=engine)
    places = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    panels = places[:count]
    for panel in panels:
        tidy(panel)
    for panel in places[len(panels) :]:
        panel.remove()
    if title:
        figure.suptitle(title, ha="left", fontsize=FONT + 1, fontweight="bold")
    return figure, panels


def fit(figure: Figure, *, height: float, narrowest: float = 0.0, widest: float = inf) -> None:
    """Choose the figure's size, and keep the panels where constrained layout then puts them.

    A panel is ``height`` inches tall, and as wide as the page allows, between ``narrowest`` and ``widest``.
    """
    engine = cast("ConstrainedLayoutEngine", figure.get_layout_engine())
    rows, columns = cast("GridSpec", figure.axes[0].get_gridspec()).get_geometry()
    engine.execute(figure)
    across, up = figure.get_size_inches()
    boxes = [axes.get_position() for axes in figure.axes[:columns]]
    beside = across * (1 - sum(box.width for box in boxes))
    above = up * (1 - rows * boxes[0].height)
    width = min(max((PAGE - beside) / columns, narrowest), widest)
    figure.set_size_inches(beside + columns * width, above + rows * height)
    engine.execute(figure)
    figure.set_layout_engine("none")
    for title in figure.texts:
        title.set_x(figure.axes[0].get_position().x0)


def legend(figure: Figure, looks: Mapping[str, Mapping[str, Any]], *, columns: int = 2, **options: Any) -> None:
    """A legend of the whole figure, outside the panels: the looks of lines by what they are called."""
    handles = [Line2D([], [], label=label, **look) for label, look in looks.items()]
    look: dict[str, Any] = {"loc": "outside lower right", "frameon": False, "fontsize": SMALL, "borderaxespad": 0.2}
    figure.legend(handles=handles, ncols=columns, **{**look, **options})


def log_ticks(axis: Axis) -> None:
    """Label the decades of a logarithmic axis in plain numbers; where they are few, also 2 and 5 times them."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 50 else (1.0, 2.0, 5.0), numticks=99))
    axis.set_major_formatter(lambda value, _: plain(value))
    axis.set_minor_locator(LogLocator(subs=tuple(range(2, 10)), numticks=99))
    axis.set_minor_formatter(NullFormatter())


def percent_ticks(axis: Axis) -> None:
    """Label the ticks of shares as percents."""
    axis.set_major_formatter(lambda share, _: f"{100 * share:.4g}%")


def plain(value: float) -> str:
    """A tick's number as one would say it.

    >>> [plain(value) for value in (0.01, 0.5, 20.0, 5000.0, 1e6)]
    ['0.01', '0.5', '20', '5k', '1M']
    """
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


@defaults()
def save(figure: Figure, output: Path) -> list[Path]:
    """Write ``output`` as PNG (200 dpi) and as PDF, each at once or not at all, and the same bytes each time."""
    stem = output.with_suffix("") if output.suffix in (".png", ".pdf") else output
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".pdf")]
    for path in paths:
        write(figure, path)
    return paths


def write(figure: Figure, path: Path, *, dpi: int = 200) -> None:
    """Write a figure in the format that the name of the file says."""
    content = BytesIO()
    metadata = {".png": {"Software": None}, ".pdf": {"CreationDate": None}}[path.suffix]
    figure.savefig(content, format=path.suffix[1:], dpi=dpi, metadata=metadata)
    files.write(path, content.getvalue())


# Colours of a figure that is to be kept small.
PALETTE = 128


def with_palette(picture: bytes) -> bytes:
    """A PNG of few colours, at most :data:`PALETTE`: a figure of lines and their shades looks the same and is a third of it.

    One that has a palette of no more stays as it is, byte by byte.
    """
    with Image.open(BytesIO(picture)) as image:
        if image.mode == "P" and image.getcolors(PALETTE):
            return picture
        # What is transparent becomes white paper.
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image.convert("RGBA"))
        few = paper.convert("RGB").quantize(PALETTE, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    content = BytesIO()
    few.save(content, format="PNG", optimize=True)
    return content.getvalue()


Source = TypeVar("Source")
Options = ParamSpec("Options")


def saved(draw: Callable[Concatenate[Source, Options], Figure]) -> Callable[Concatenate[Source, Path, Options], list[Path]]:
    """The function that draws a figure of a source and saves it as ``output``.png and .pdf."""

    def draw_and_save(source: Source, output: Path, /, *args: Options.args, **options: Options.kwargs) -> list[Path]:
        return save(draw(source, *args, **options), output)

    draw_and_save.__doc__ = f"{getdoc(draw)}\n\nSaved as ``output``.png and .pdf."
    return draw_and_save
