"""The paper's toy problem: training losses of small networks, and what they predict in the plane."""

from __future__ import annotations

from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flipgrad.errors import InputError
from flipgrad.files import read_json
from flipgrad.plots._fields import get, mapping, numbers
from flipgrad.plots.labels import label_ends
from flipgrad.plots.style import GREY, SMALL, defaults, log_ticks, ordered, save, style_of, tidy

REWRITE = "run the experiment again to rewrite it"
# The two classes: distinguishable with any colour vision, and from the white between them.
CLASSES = ("#C8501E", "#1F5FA8")
MAP = LinearSegmentedColormap.from_list("classes", [CLASSES[0], "#EDBFA8", "#FFFFFF", "#AFC8E4", CLASSES[1]])
# The paper draws the loss of the ensemble solid, and that of one draw dashed.
KINDS: dict[str, Any] = {"marginal": "-", "expected": (0, (3.0, 1.5))}

# Letters of a name that needs more room.
LONG = 15


def toy_training(result: Path, output: Path) -> list[Path]:
    """Draw expected and marginal losses over epochs, as ``output``.png and .pdf."""
    return save(toy_training_figure(result), output)


def toy_example(result: Path, output: Path) -> list[Path]:
    """Draw the data, two networks' probabilities and three members of an ensemble, as ``output``.png and .pdf."""
    return save(toy_example_figure(result), output)


def toy_training_figure(result: Path) -> Figure:
    """The figure of `toy_training`: a line is the mean of all networks, a shade reaches from the lowest to the highest."""
    record = read_json(result, missing="run the experiment that writes it", broken=REWRITE)
    methods = mapping(record, "methods", str(result))
    with defaults():
        figure = Figure(figsize=(4.8, 3.1))
        # Names are on the right.
        axes = figure.add_axes((0.115, 0.135, 0.70 if max(map(len, methods), default=0) < LONG else 0.66, 0.845))
        ends = {}
        most = 1.0
        for name in ordered(methods):
            where = f"{result}, {name!r}"
            epochs = numbers(methods[name], "epochs", where, low=1)
            runs = get(methods[name], "runs", where)
            style = style_of(name)
            for kind, line in KINDS.items():
                values = np.array([numbers(run, kind, where, low=0) for run in runs])
                if values.shape != (len(runs), len(epochs)):
                    raise InputError(f"{where}: {kind!r} must have {len(epochs)} entries; {REWRITE}")
                mean = values.mean(0)
                axes.plot(
                    epochs, mean, color=style.colour, linewidth=0.75 * style.width, linestyle=line, label=f"{name} {kind}"
                )
                if len(runs) > 1:
                    axes.fill_between(epochs, values.min(0), values.max(0), color=style.colour, alpha=0.12, linewidth=0)
                if kind == "marginal":
                    ends[name] = (epochs[-1], float(mean[-1]), style)
            most = max(most, epochs[-1])
        axes.set(xscale="log", xlim=(1, most), xlabel="epoch", ylabel="training loss, exact")
        tidy(axes)
        log_ticks(axes, "x")
        label_ends(axes, ends)
        keys = [Line2D([], [], color=GREY, linestyle=line, linewidth=1.3) for line in KINDS.values()]
        names = ["marginal loss, of the ensemble", "expected loss, of one draw"]
        axes.legend(keys, names, frameon=False, fontsize=SMALL, loc="lower left", handlelength=2.6)
        return figure


def toy_example_figure(result: Path) -> Figure:
    """The figure of `toy_example`: (a) to (f) in two rows, as the paper's; black is where the probability is 1/2."""
    record = read_json(result, missing="run the experiment that writes it", broken=REWRITE)
    where = str(result)
    points = [np.array(points) for points in get(record, "points", where)]
    expected, bound = (mapping(record, key, where) for key in ("expected", "bound"))
    draws = int(get(record, "draws", where))
    maps: list[tuple[str, Any]] = [
        ("data; grey: both classes", None),
        ("trained by the expected loss", get(expected, "probability", where)),
        (f"trained by the {draws}-sample bound", get(bound, "probability", where)),
        *((f"member {k} of (c)", member) for k, member in enumerate(get(bound, "members", where), 1)),
    ]
    with defaults():
        # Inches: one panel, and what is around it.
        across, up, left, bottom, gap, above = 2.05, 1.36, 0.32, 0.3, 0.34, 0.28
        rows, columns = 2, 3
        width = left + columns * (across + gap) + 0.46
        height = bottom + rows * (up + above) + 0.04
        figure = Figure(figsize=(width, height))
        image = None
        for index, (title, values) in enumerate(maps):
            row, column = divmod(index, columns)
            place = (left + column * (across + gap)) / width, (bottom + (rows - 1 - row) * (up + above)) / height
            axes = figure.add_axes((*place, across / width, up / height))
            axes.set_title(f"({'abcdef'[index]}) {title}", pad=3, loc="left")
            if values is None:
                _boundaries(axes)
                _scatter(axes, points, 5.0, 0.9)
            else:
                image = _probabilities(axes, np.array(values, dtype=float))
                _scatter(axes, points, 1.6, 0.45)
            _frame(axes, labels=(row == rows - 1, column == 0))
        if image is not None:
            place = (left + columns * (across + gap) - 0.12) / width, bottom / height
            bar = figure.colorbar(image, cax=figure.add_axes((*place, 0.09 / width, (rows * up + above) / height)))
            bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "¼", "½", "¾", "1"])
            bar.ax.tick_params(length=2, width=0.5)
            bar.outline.set_visible(False)
            bar.set_label("probability of class 1", labelpad=3)
        return figure


def _probabilities(axes: Axes, values: Any) -> Any:
    x, y = np.linspace(-pi / 2, pi / 2, values.shape[1]), np.linspace(-1, 1, values.shape[0])
    extent = (-pi / 2, pi / 2, -1.0, 1.0)
    image = axes.imshow(
        values, origin="lower", extent=extent, cmap=MAP, vmin=0, vmax=1, aspect="auto", interpolation="bilinear"
    )
    if values.min() < 0.5 < values.max():
        axes.contour(x, y, values, levels=[0.5], colors="black", linewidths=0.9)
    return image


def _boundaries(axes: Axes) -> None:
    """Class 0 lies above 0, class 1 below the cosine; between them both."""
    x = np.linspace(-pi / 2, pi / 2, 100)
    heights = np.array([cos(value) for value in x])
    axes.fill_between(x, 0, heights, color="#EFEFEF", linewidth=0)
    axes.plot(x, heights, color=CLASSES[1], linewidth=0.9)
    axes.plot([-pi / 2, pi / 2], [0, 0], color=CLASSES[0], linewidth=0.9)


def _scatter(axes: Axes, points: list[Any], size: float, alpha: float) -> None:
    for own, colour, marker in zip(points, CLASSES, ("o", "s"), strict=True):
        axes.scatter(own[:, 0], own[:, 1], s=size, color=colour, marker=marker, alpha=alpha, linewidths=0.2, edgecolors="white")


def _frame(axes: Axes, labels: tuple[bool, bool]) -> None:
    axes.set(xlim=(-pi / 2, pi / 2), ylim=(-1, 1))
    axes.set_xticks([-pi / 2, 0, pi / 2], labels=["−π/2", "0", "π/2"] if labels[0] else ["", "", ""])
    axes.set_yticks([-1, 0, 1], labels=["−1", "0", "1"] if labels[1] else ["", "", ""])
    axes.tick_params(length=2, width=0.5, pad=2)
    axes.spines[:].set_linewidth(0.5)
