"""Trainings of latent-variable models: ELBOs against updates and against time, variances of gradients, and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flipgrad.errors import InputError
from flipgrad.plots.loading import REWRITE, Count, Natural, NotNegative, load_field
from flipgrad.plots.style import PAGE, defaults, fit, grid, legend, log_ticks, plain, style_of

# The share of a training whose ELBOs its panel shows: the first ones are far below.
SHOWN = 0.05


@dataclass(frozen=True)
class ElboCourse:
    """One training of a model by an estimator, as far as it came.

    Attributes:
        model: its name.
        method: the estimator.
        seed: of everything.
        steps: updates at which it was looked at, and
        seconds: processor time of these updates until then, and
        elbos: the mean training ELBO since the look before.
        looked: updates at which more was measured, and
        variances: of the encoder's gradient then, and
        bounds: the lower bound of the log-likelihood of unseen images then.
        bound: that of all test images at the end; None if it is not done.
    """

    model: str
    method: str
    seed: Natural
    steps: list[Count]
    seconds: list[NotNegative]
    elbos: list[float]
    looked: list[Count]
    variances: list[NotNegative]
    bounds: list[float]
    bound: float | None = None

    def __post_init__(self) -> None:
        if not len(self.steps) == len(self.seconds) == len(self.elbos):
            raise InputError(f"'courses': {self.model}, {self.method} must have as many steps as seconds and ELBOs")
        if not len(self.looked) == len(self.variances) == len(self.bounds):
            raise InputError(f"'courses': {self.model}, {self.method} must have as many looks as variances and bounds")

    def after(self, seconds: float) -> float:
        """The training ELBO when so much time was spent; NaN before the first look."""
        known = [elbo for spent, elbo in zip(self.seconds, self.elbos, strict=True) if spent <= seconds]
        return known[-1] if known else nan


@dataclass(frozen=True)
class Pictures:
    """Grey levels from 0 to 255 of square images, one list for each: data, their reconstructions, and samples of a model."""

    data: list[list[Natural]]
    reconstructions: list[list[Natural]]
    samples: list[list[Natural]]


@defaults()
def elbo_figure(result: Path) -> Figure:
    """A row for every model: training ELBOs against updates and against time, and the variance of the encoder's gradient."""
    courses = load_field(result, "courses", list[ElboCourse])
    models = list(dict.fromkeys(course.model for course in courses if course.steps))
    if not models:
        raise InputError(f"{result}: holds no trainings; {REWRITE}")
    figure, every = grid(len(models), 3)
    for row, model in enumerate(models):
        shown = [course for course in courses if course.model == model and course.steps]
        by_steps, by_time, spread = every[3 * row : 3 * row + 3]
        _draw(by_steps, shown, "steps", "elbos")
        _draw(by_time, shown, "seconds", "elbos")
        _draw(spread, [course for course in shown if course.looked], "looked", "variances")
        for axes in (by_steps, by_time):
            _from_the_middle(axes, shown)
        by_steps.set_title(f"training ELBO, {model} model", pad=5)
        by_time.set_title("the same against time", pad=5)
        spread.set_title("variance of the encoder's gradient", pad=5)
        if spread.lines:
            spread.set_yscale("log")
            log_ticks(spread.yaxis)
        for axes, what in ((by_steps, "updates"), (by_time, "seconds of one core"), (spread, "updates")):
            axes.set_xlabel(what, labelpad=2)
            axes.xaxis.set_major_formatter(lambda value, _: plain(value))
    methods = list(dict.fromkeys(course.method for course in courses))
    looks: dict[str, dict[str, Any]] = {method: {"color": style_of(method).colour, "linewidth": 1.4} for method in methods}
    legend(figure, looks, loc="outside lower center", columns=len(looks))
    fit(figure, height=1.8)
    return figure


def _draw(axes: Axes, courses: Sequence[ElboCourse], x: str, y: str) -> None:
    for course in courses:
        style = style_of(course.method)
        look: dict[str, Any] = {"color": style.colour, "linewidth": 0.9, "zorder": style.zorder}
        axes.plot(getattr(course, x), getattr(course, y), label=f"{course.method} {course.seed}", **look)


def _from_the_middle(axes: Axes, courses: Sequence[ElboCourse]) -> None:
    """Limits that show the trainings after their beginnings."""
    later = [elbo for course in courses for elbo in course.elbos[max(1, round(SHOWN * len(course.elbos))) :]]
    if later:
        low, high = min(later), max(later)
        axes.set_ylim(low - 0.02 * (high - low) - 0.1, high + 0.05 * (high - low) + 0.1)


@defaults()
def pictures_figure(result: Path) -> Figure:
    """Images, their reconstructions below them, and samples of the model."""
    pictures = load_field(result, "pictures", Pictures)
    rows = {"data": pictures.data, "reconstructed": pictures.reconstructions, "sampled": pictures.samples}
    if not all(rows.values()) or len({len(images) for images in rows.values()}) > 1:
        raise InputError(f"{result}: must hold as many pictures of each kind, and at least one; {REWRITE}")
    table = np.vstack([np.hstack([_square(image) for image in images]) for images in rows.values()])
    high, wide = table.shape
    figure, (axes,) = grid(1, 1)
    axes.grid(visible=False)
    axes.imshow(table, cmap="gray", vmin=0, vmax=255, aspect="auto")
    axes.set_yticks([high * (k + 0.5) / len(rows) for k in range(len(rows))], labels=list(rows))
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    # Square, beside their names.
    fit(figure, height=(PAGE - 0.8) * high / wide)
    return figure


def _square(image: Sequence[int]) -> np.ndarray:
    side = int(sqrt(len(image)))
    return np.pad(np.array(image, dtype=np.uint8).reshape(side, side), 1, constant_values=96)
