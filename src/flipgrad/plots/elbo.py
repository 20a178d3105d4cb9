"""A run of a latent-variable model as one page: its ELBOs and bounds, reconstructions, samples, and configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.plots.charts import inline
from flipgrad.plots.loading import Count, NotNegative, build, load
from flipgrad.plots.report import TEXT, duration, flat, picture, template, title
from flipgrad.plots.style import BLUE, ORANGE, defaults, legend, tidy, write
from flipgrad.plots.vae import Pictures

SIZE = (4.6, 2.9)
FIX = "go on with flipgrad train --resume, which writes it again"


@dataclass(frozen=True)
class ElboEpoch:
    """A line of ``metrics.jsonl``: the mean training ELBO of an epoch, and the bound of unseen images after it."""

    epoch: Count
    elbo: float
    split: str
    bound: float
    seconds: NotNegative


@dataclass(frozen=True)
class ElboSummary:
    """``summary.json``: the bound of the test images at the end, with so many samples, and pictures of a ``size``."""

    epoch: Count
    bound: float
    samples: Count
    images: Count
    seconds: NotNegative
    pictures: Pictures
    size: list[Count]


def elbo_report(folder: Path) -> Path:
    """Write ``curve.png`` and ``report.html`` into the folder of a run, from its configuration, metrics and summary.

    Raises:
        InputError: if a result file is missing or broken.
    """
    stored = files.read_json(folder / "config.json", missing=FIX, broken=FIX)
    config: dict[str, Any] = stored.get("config", {})
    lines = files.read_json_lines(folder / "metrics.jsonl", missing=FIX, broken=FIX)
    epochs = build(list[ElboEpoch], lines, where=str(folder / "metrics.jsonl"), fix=FIX)
    if not epochs:
        raise InputError(f"'{folder / 'metrics.jsonl'}' holds no epochs; {FIX}")
    path = folder / "summary.json"
    summary = load(path, ElboSummary, missing=FIX, broken=FIX) if path.is_file() else None
    with defaults(TEXT):
        figure = _curve(epochs)
        write(figure, folder / "curve.png", dpi=120)
        svg = inline(figure, "elbo")
    text = template("elbo.html").render(
        title=f"{title(config)}: a latent-variable model",
        svg=svg,
        epochs=epochs,
        last=epochs[-1],
        time=duration(epochs[-1].seconds),
        summary=summary,
        rows=[] if summary is None else list(_rows(summary)),
        settings=list(flat(config)),
        versions=stored.get("versions", {}),
    )
    files.write(folder / "report.html", text.encode())
    return folder / "report.html"


def _rows(summary: ElboSummary) -> list[tuple[str, list[str]]]:
    """What stands in a row, and its images as data URIs."""
    kinds = {
        "Test images": summary.pictures.data,
        "Their reconstructions, of binarised images": summary.pictures.reconstructions,
        "Samples of the model": summary.pictures.samples,
    }
    if len(summary.size) != 2 or any(
        len(image) != summary.size[0] * summary.size[1] for rows in kinds.values() for image in rows
    ):
        raise InputError(f"summary.json: its pictures do not have the size {summary.size}; {FIX}")
    return [
        (name, [picture(np.array(image, dtype=float).reshape(1, *summary.size), 0.0, 255.0) for image in images])
        for name, images in kinds.items()
    ]


def _curve(epochs: list[ElboEpoch]) -> Figure:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes: Axes = figure.subplots()
    tidy(axes)
    lines = {"training ELBO": ("elbo", BLUE), f"{epochs[-1].split} bound of log p(x)": ("bound", ORANGE)}
    for key, colour in lines.values():
        values = [getattr(epoch, key) for epoch in epochs]
        axes.plot([epoch.epoch for epoch in epochs], values, color=colour, marker="o", markersize=3, linewidth=1.6)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, {name: {"color": colour} for name, (_, colour) in lines.items()}, loc="outside lower center")
    return figure
