"""The paper's toy problem: training losses of small networks, and what they predict in the plane."""

from dataclasses import dataclass, field
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flipgrad.errors import InputError
from flipgrad.plots.labels import label_ends
from flipgrad.plots.loading import Matrix, NotNegative, Positive, load, load_field
from flipgrad.plots.style import GREY, SMALL, defaults, fit, grid, log_ticks, ordered, style_of

# The two classes: distinguishable with any colour vision, and from the white between them.
CLASSES = ("#C8501E", "#1F5FA8")
MAP = LinearSegmentedColormap.from_list("classes", [CLASSES[0], "#EDBFA8", "#FFFFFF", "#AFC8E4", CLASSES[1]])
# The paper draws the loss of the ensemble solid, and that of one draw dashed.
KINDS: dict[str, Any] = {"marginal": "-", "expected": (0, (3.0, 1.5))}
# The plane reaches from -EDGE to EDGE, and from -1 to 1.
EDGE = pi / 2


@dataclass(frozen=True)
class Method:
    """The networks that a method trained, evaluated after the same epochs: each run's losses by kind, see :data:`KINDS`."""

    epochs: list[Positive]
    runs: list[dict[str, list[NotNegative]]]

    def __post_init__(self) -> None:
        if not self.epochs or not self.runs:
            raise InputError("'epochs' and 'runs' must not be empty")
        for kind in KINDS:
            if any(len(run.get(kind, [])) != len(self.epochs) for run in self.runs):
                raise InputError(f"{kind!r} must have {len(self.epochs)} entries")


@dataclass(frozen=True)
class Predictions:
    """The probability of class 1 on a grid of the plane, by a network and by members of its ensemble."""

    probability: Matrix
    members: list[Matrix] = field(default_factory=list)


@dataclass(frozen=True)
class ExampleFile:
    """The result file of the example: points of both classes, and networks trained by two losses."""

    points: list[Matrix]
    expected: Predictions
    bound: Predictions
    draws: int


@defaults()
def toy_training_figure(result: Path) -> Figure:
    """Expected and marginal losses over epochs: a line is the mean of networks, a shade reaches from lowest to highest."""
    methods = load_field(result, "methods", dict[str, Method])
    figure, (axes,) = grid(1, 1)
    ends = {}
    for name in ordered(methods):
        method, style = methods[name], style_of(name)
        for kind, dashes in KINDS.items():
            values = np.array([run[kind] for run in method.runs])
            mean = values.mean(0)
            look: dict[str, Any] = {"color": style.colour, "linewidth": 0.75 * style.width, "linestyle": dashes}
            axes.plot(method.epochs, mean, label=f"{name} {kind}", **look)
            if len(values) > 1:
                axes.fill_between(method.epochs, values.min(0), values.max(0), color=style.colour, alpha=0.12, linewidth=0)
            if kind == "marginal":
                ends[name] = (method.epochs[-1], float(mean[-1]), style)
    longest = max((method.epochs[-1] for method in methods.values()), default=1.0)
    axes.set(xscale="log", xlim=(1, longest), xlabel="epoch", ylabel="training loss, exact")
    log_ticks(axes.xaxis)
    keys = [Line2D([], [], color=GREY, linestyle=line, linewidth=1.3) for line in KINDS.values()]
    names = ["marginal loss, of the ensemble", "expected loss, of one draw"]
    axes.legend(keys, names, frameon=False, fontsize=SMALL, loc="lower left", handlelength=2.6)
    label_ends(figure, [axes], [ends], height=2.6, narrowest=3.3, widest=3.3)
    return figure


@defaults()
def toy_example_figure(result: Path) -> Figure:
    """The data, two networks' probabilities and three members of an ensemble; black is where the probability is 1/2."""
    file = load(result, ExampleFile)
    maps = {
        "trained by the expected loss": file.expected.probability,
        f"trained by the {file.draws}-sample bound": file.bound.probability,
        **{f"member {k} of (c)": member for k, member in enumerate(file.bound.members, 1)},
    }
    figure, every = grid(2, 3, count=1 + len(maps), sharex=True, sharey=True)
    # Class 0 lies above 0, class 1 below the cosine; between them both.
    x = np.linspace(-EDGE, EDGE, 100)
    every[0].fill_between(x, 0, np.cos(x), color="#EFEFEF", linewidth=0)
    every[0].plot(x, np.cos(x), color=CLASSES[1], linewidth=0.9)
    every[0].plot([-EDGE, EDGE], [0, 0], color=CLASSES[0], linewidth=0.9)
    _scatter(every[0], file, 5.0, 0.9)
    for axes, values in zip(every[1:], maps.values(), strict=True):
        look: dict[str, Any] = {"extent": (-EDGE, EDGE, -1, 1), "aspect": "auto", "interpolation": "bilinear"}
        image = axes.imshow(values, origin="lower", cmap=MAP, vmin=0, vmax=1, **look)
        if values.min() < 0.5 < values.max():
            x, y = np.linspace(-EDGE, EDGE, values.shape[1]), np.linspace(-1, 1, values.shape[0])
            axes.contour(x, y, values, levels=[0.5], colors="black", linewidths=0.9)
        _scatter(axes, file, 1.6, 0.45)
    for axes, letter, title in zip(every, "abcdef", ["data; grey: both classes", *maps], strict=False):
        axes.set_title(f"({letter}) {title}", pad=3, loc="left")
        axes.set(xlim=(-EDGE, EDGE), ylim=(-1, 1))
        axes.set_xticks([-EDGE, 0, EDGE], labels=["−π/2", "0", "π/2"])
        axes.set_yticks([-1, 0, 1], labels=["−1", "0", "1"])
        axes.grid(visible=False)
        axes.spines[:].set(visible=True, linewidth=0.5)
    bar = figure.colorbar(image, ax=every, aspect=35, pad=0.02)
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "¼", "½", "¾", "1"])
    bar.ax.tick_params(length=2, width=0.5)
    bar.outline.set_visible(False)
    bar.set_label("probability of class 1", labelpad=3)
    fit(figure, height=1.36)
    return figure


def _scatter(axes: Axes, file: ExampleFile, size: float, alpha: float) -> None:
    for own, colour, marker in zip(file.points, CLASSES, ("o", "s"), strict=True):
        axes.scatter(own[:, 0], own[:, 1], s=size, color=colour, marker=marker, alpha=alpha, linewidths=0.2, edgecolors="white")
