"""The running times of methods as ratios to an ordinary network's, the paper's beside ours."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flipgrad.errors import InputError
from flipgrad.files import read_json
from flipgrad.plots._fields import get, is_finite, mapping
from flipgrad.plots.style import GREY, SMALL, defaults, ordered, save, style_of, tidy

REWRITE = "run the experiment again to rewrite it"
PANELS = {
    "forward": "forward, one batch",
    "backward": "backward, one batch",
    "step": "forward and backward",
    "train_epoch": "training epoch, measured",
}


def timing(result: Path, output: Path) -> list[Path]:
    """Draw the ratios, as ``output``.png and .pdf."""
    return save(timing_figure(result), output)


def timing_figure(result: Path) -> Figure:
    """The figure of `timing`: open circles are the paper's ratios, filled ones ours."""
    record = read_json(result, missing="run the experiment that writes it", broken=REWRITE)
    methods, where = mapping(record, "methods", str(result)), str(result)
    reference = str(get(record, "reference", where))
    names = [name for name in ordered(methods) if name != reference]
    with defaults():
        left, across, gap, up, below, above = 0.78, 1.46, 0.14, 0.2 * len(names) + 0.15, 0.44, 0.5
        width, height = left + len(PANELS) * (across + gap), below + up + above
        figure = Figure(figsize=(width, height))
        for index, (key, title) in enumerate(PANELS.items()):
            place = ((left + index * (across + gap)) / width, below / height, across / width, up / height)
            axes = figure.add_axes(place)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.axvline(1, color=GREY, linewidth=0.8)
            values = []
            for row, name in enumerate(names):
                style = style_of(name)
                theirs, ours = (
                    _seconds(methods, name, whose, key, where) / _seconds(methods, reference, whose, key, where)
                    for whose in ("paper", "ours")
                )
                axes.plot([theirs, ours], [row, row], color=style.colour, linewidth=0.8, alpha=0.6)
                axes.plot([theirs], [row], "o", markersize=4.5, color=style.colour, markerfacecolor="white", label="_")
                axes.plot([ours], [row], "o", markersize=4.5, color=style.colour, label=name)
                values += [theirs, ours]
            axes.set_xlim(0, 1.1 * max(values))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
            axes.set_yticks(range(len(names)), labels=names if index == 0 else [""] * len(names))
            axes.set_title(title, pad=4)
            axes.set_xlabel(f"ratio to {reference}", labelpad=2)
            tidy(axes)
            axes.tick_params(axis="y", length=0)
        keys = [
            Line2D([], [], marker="o", linestyle="", markersize=4.5, color=GREY, markerfacecolor=face)
            for face in ("white", GREY)
        ]
        threads = get(record, "threads", where)
        labels = ["the paper, on a GPU", f"here, on {threads} thread{'s' * (threads != 1)} of a processor"]
        figure.legend(keys, labels, loc="upper right", ncols=2, frameon=False, fontsize=SMALL, borderpad=0, handletextpad=0.2)
        return figure


def _seconds(methods: object, name: str, whose: str, key: str, where: str) -> float:
    entry = mapping(mapping(methods, name, where), whose, where)
    keys = ("forward", "backward") if key == "step" else (key,)
    values = [get(entry, one, where) for one in keys]
    if not all(is_finite(value) and value > 0 for value in values):
        raise InputError(f"{where}: {name!r} has no positive {key!r}; {REWRITE}")
    return float(sum(values))
