"""A run as one page: headline, curves, numbers, calibration, number of samples, examples, disagreement, configuration.

The page holds everything that it shows: it loads nothing, runs nothing (its content security policy forbids both), and is the
same, byte by byte, for the same result files.
"""

import json
import shlex
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from flipgrad import files
from flipgrad.plots.charts import Chart, charts, css, draw, draw_disagreement, inline, meaning
from flipgrad.plots.ensembles import (
    colour_of,
    draw_accuracies,
    draw_losses,
    draw_reliability,
    name_of,
    reliability_words,
    sizes_words,
)
from flipgrad.plots.runs import (
    Disagreement,
    Ensembles,
    EnsembleSize,
    Epoch,
    Evaluated,
    Example,
    Reliability,
    RunFiles,
    Scores,
    read_run,
)
from flipgrad.plots.style import BLUE, GREEN, ORANGE, defaults

# Inches, and the scale of the text: legible when a telephone shows the figure at 350 pixels.
SIZE, TALL, TEXT = (4.6, 2.9), (4.6, 4.2), 1.5

# Of every line its label, its colour, and whether it is dashed.
Legend = list[tuple[str, str, bool]]
Numbers = NDArray[np.float64]

# Where the scores of the headline come from, if from the test examples.
TESTED = "On the test examples"
# Classes that a table of confusions has room for; of more, only the pairs are told that are confused most.
MOST_CONFUSED, ROOM = 5, 20
# Classes that are shown of every example; the label is shown in any case.
CLASSES = 4
# Members that are marked on a bar, at most; of more, evenly spaced ones in the order of their probability.
MARKS = 32
# The groups of examples, by how they were chosen; any other is called "Examples".
GROUPS = {"random": "Drawn at random", "uncertain": "Least certain of the rest"}


def report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a run, from the result files that are there.

    Args:
        folder: holds ``config.json`` and ``metrics.jsonl``, and maybe ``summary.json`` and ``evaluation.json``.

    Returns:
        The path of the page.

    Raises:
        InputError: if a result file is missing or broken.
    """
    path = folder / "report.html"
    files.write(path, page(read_run(folder)).encode())
    return path


def page(run: RunFiles) -> str:
    """The page of a run. Every string from a file is escaped: the template does so unless told otherwise."""
    evaluation = run.evaluation or Evaluated()
    where, scores = headline_scores(run, evaluation.splits)
    shown = cards(evaluation.examples, evaluation.classes)
    groups: dict[str, list[SimpleNamespace]] = {}
    for card in shown:
        groups.setdefault(GROUPS.get(card.example.chosen or "", "Examples"), []).append(card)
    columns = columns_of(run.epochs) | evaluation.splits
    ensembles = evaluation.ensembles or Ensembles()
    with defaults(TEXT):
        plots = [_plot_chart(chart) for chart in charts(run.epochs)]
        reliability = ensembles.reliability and _plot_reliability(ensembles.reliability)
        sizes = ensembles.sizes and _plot_sizes(ensembles.sizes, scores)
        members = evaluation.disagreement and _plot_disagreement(evaluation.disagreement, evaluation.samples)
    text = template("report.html").render(
        run=run,
        confusion=confusion(evaluation),
        tested=sum(map(sum, evaluation.confusion)) if where == TESTED else 0,
        title=title(run.config),
        facts=list(facts(run)),
        where=where,
        scores=scores,
        plots=plots,
        measured_on=run.epochs[-1].split if run.epochs else None,
        columns=columns,
        measures=measures(columns.values()),
        groups=groups.items(),
        places=[card.place for card in shown if card.place],
        disagreement=members,
        reliability=reliability,
        sizes=sizes,
        command=shlex.join(["flipgrad", *run.command]) if run.command else "",
    )
    return text.lstrip()


def template(name: str) -> Template:
    """A page to be filled in; it knows the style sheet that all pages share."""
    pages = PackageLoader("flipgrad.plots", "page")
    environment = Environment(loader=pages, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(percent=percent, loss=loss, short=short, flat=flat, interval=interval)
    environment.globals["style"] = Markup(environment.get_template("report.css").render())
    return environment.get_template(name)


def title(config: Mapping[str, Any]) -> str:
    """What was trained, as far as the configuration says.

    >>> title({"estimator": "psa", "data": "digits"})
    'PSA on digits'
    >>> title({})
    'A stochastic binary network'
    """
    estimator, data = (config[key] if isinstance(config.get(key), str) else "" for key in ("estimator", "data"))
    name = estimator.upper() if len(estimator) <= 4 else estimator
    what = "A stochastic binary network" if not name else name if data else f"Trained with {name}"
    return f"{what} on {data}" if data else what


def facts(run: RunFiles) -> Iterator[str]:
    """A few words about the run."""
    if run.epochs:
        yield f"{run.epochs[-1].epoch:,} epoch{'s' if run.epochs[-1].epoch != 1 else ''}"
    seconds = [epoch.seconds for epoch in run.epochs if epoch.seconds is not None]
    if seconds:
        yield f"{duration(sum(seconds))} of training"
    speeds = sorted(epoch.images_per_second for epoch in run.epochs if epoch.images_per_second is not None)
    if speeds:
        yield f"{speeds[len(speeds) // 2]:,.0f} images per second"
    if run.config.get("weights") == "binary":
        yield "binary weights"
    for key in ("model", "seed"):
        if isinstance(value := run.config.get(key), str | int):
            yield f"{key} {value}"


def headline_scores(run: RunFiles, splits: Mapping[str, Scores]) -> tuple[str, Scores | None]:
    """The scores that count, and on what: those of the test part where there are some, else the best there is."""
    if splits:
        name = "test" if "test" in splits else next(iter(splits))
        return TESTED if name == "test" else f"On the {name} examples", splits[name]
    if run.summary and run.summary.known:
        return "At the end of training", run.summary
    last = [epoch for epoch in run.epochs if epoch.known][-1:]
    return (f"After epoch {last[0].epoch}", last[0]) if last else ("", None)


def interval(share: float, count: int) -> str:
    """Wilson's 95 % interval of a share that was measured on ``count`` examples.

    >>> interval(0.99, 360)
    '97.3% to 99.6%'
    """
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * (share * (1 - share) / count + z * z / (4 * count**2)) ** 0.5 / (1 + z * z / count)
    return f"{max(0.0, middle - half):.1%} to {min(1.0, middle + half):.1%}"


def confusion(evaluation: Evaluated) -> SimpleNamespace | None:
    """The table of classes against the ensemble's, with shades of errors; and the pairs that are confused most."""
    counts = evaluation.confusion
    if not counts:
        return None
    own = evaluation.classes if len(evaluation.classes) == len(counts) else []
    names = own or [str(number) for number in range(len(counts))]
    errors = sorted(
        ((count, names[i], names[j]) for i, row in enumerate(counts) for j, count in enumerate(row) if count and i != j),
        key=lambda error: -error[0],
    )
    most = max((error[0] for error in errors), default=1)
    rows = [
        (names[i], [(count, "right" if i == j else "error" if count else "none", count / most) for j, count in enumerate(row)])
        for i, row in enumerate(counts)
    ]
    return SimpleNamespace(names=names, rows=rows if len(counts) <= ROOM else [], worst=errors[:MOST_CONFUSED])


def columns_of(epochs: Sequence[Epoch]) -> dict[str, Scores]:
    """The columns of the table of numbers that are epochs: the last and the best."""
    best, last = best_epoch(epochs), epochs[-1:]
    shown = [("last, best" if [best] == last else "last", epoch) for epoch in last]
    shown += [("best", best)] if best and [best] != last else []
    return {f"{what} epoch ({epoch.epoch})": epoch for what, epoch in shown}


def measures(shown: Collection[Scores]) -> Iterator[tuple[str, list[str], bool]]:
    """The lines of the table of numbers, those that say something: name, values by column, whether it is the main one."""
    for key, (name, show) in MEASURES.items():
        values = [getattr(scores, key, None) for scores in shown]
        if any(value is not None for value in values):
            yield name, ["–" if value is None else show(value) for value in values], key == "accuracy_n"


def best_epoch(epochs: Sequence[Epoch]) -> Epoch | None:
    """The first of those with the highest accuracy of the ensemble, if any has one."""
    able = [(epoch.accuracy_n, epoch) for epoch in epochs if epoch.accuracy_n is not None]
    return max(able, key=lambda pair: pair[0])[1] if able else None


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as lines.

    >>> list(flat({"lr": 0.1, "net": {"widths": [5, 5], "bias": True, "name": None}}))
    [('lr', '0.1'), ('net.widths', '[5, 5]'), ('net.bias', 'yes'), ('net.name', '–')]
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, bool):
            yield f"{prefix}{key}", {None: "–", True: "yes", False: "no"}[value]
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def loss(value: float) -> str:
    """A loss, with four decimals or, where these would say little, three digits.

    >>> loss(0.31117), loss(0.00012345), loss(12345.678)
    ('0.3112', '0.000123', '1.23e+04')
    """
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def short(value: float) -> str:
    """A probability on a bar: whole percents, and never a false certainty.

    >>> [short(p) for p in (0.0, 0.004, 0.62, 0.996, 1.0)]
    ['0%', '<1%', '62%', '>99%', '100%']
    """
    if 0 < value < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= value < 1 else f"{value:.0%}"


def duration(seconds: float) -> str:
    """A time as one would say it.

    >>> [duration(s) for s in (0.25, 42.0, 754.0, 8000.0)]
    ['0.2 s', '42 s', '12 min 34 s', '2 h 13 min']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


# An accuracy.
percent = "{:.2%}".format
# The lines of the table of numbers, and how a number of each is written.
MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "accuracy_1": ("accuracy, 1 sample", percent),
    "accuracy_n": ("accuracy, ensemble", percent),
    "accuracy_deterministic": ("accuracy, deterministic", percent),
    "expected_loss": ("expected loss", loss),
    "marginal_loss": ("marginal loss", loss),
    "objective": ("training objective", loss),
    "samples": ("samples", "{:,.0f}".format),
}


def _plot(key: str, title: str, draw: Callable[[Axes], None], legend: Legend, words: str) -> dict[str, Any]:
    """A figure of the page with one pair of axes."""
    return _plot_figure(key, title, lambda figure: draw(figure.subplots()), legend, words)


def _plot_figure(
    key: str, title: str, draw: Callable[[Figure], None], legend: Legend, words: str, size: tuple[float, float] = SIZE
) -> dict[str, Any]:
    """A figure of the page, with what a legend and a screen reader say."""
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    return {"key": key, "title": title, "svg": inline(figure, key), "legend": legend, "words": words}


def _plot_chart(chart: Chart) -> dict[str, Any]:
    # A single line that is called as the chart needs no legend.
    named = [line for line in chart.lines if line.label != chart.title.lower()]
    legend = [(line.label, css(line.colour), line.dashed) for line in named]
    show = percent if chart.percent else loss
    ends = "; ".join(f"{line.label} from {show(line.values[0])} to {show(line.values[-1])}" for line in chart.lines)
    first, last = (pick(line.epochs[at] for line in chart.lines) for pick, at in ((min, 0), (max, -1)))
    words = f"{chart.title}, epochs {first} to {last}: {ends}."
    return _plot(chart.key, chart.title, partial(draw, chart=chart), legend, words)


def _plot_disagreement(found: Disagreement, samples: int | None) -> dict[str, Any]:
    counts = (("correct", sum(found.correct), GREEN), ("wrong", sum(found.wrong), ORANGE))
    legend = [(f"{name} ({count:,})", css(colour), False) for name, count, colour in counts]
    bins = zip(found.edges, found.correct, found.wrong, strict=False)
    told = "; ".join(f"from {edge:.0%}: {right:,} correct, {wrong:,} wrong" for edge, right, wrong in bins if right or wrong)
    words = f"Numbers of predictions by the share of members that disagree. {told}."
    histogram = partial(draw_disagreement, found=found, samples=samples)
    plot = _plot("disagreement", "Ensemble disagreement", histogram, legend, words)
    return plot | {"meaning": meaning(found, samples=samples)}


def _plot_reliability(every: Sequence[Reliability]) -> dict[str, Any]:
    legend = [(f"{name_of(found)} (ECE {found.error:.2%})", css(colour_of(found)), False) for found in every]
    words = reliability_words(every)
    draw = partial(draw_reliability, every=every)
    return _plot_figure("reliability", "Accuracy by confidence", draw, legend, words, TALL) | {"meaning": words}


def _plot_sizes(sizes: Sequence[EnsembleSize], scores: Scores | None) -> dict[str, Any]:
    """Accuracy and loss by the number of samples, and what they say."""
    words = sizes_words(sizes)
    deterministic = scores.accuracy_deterministic if scores else None
    dashed = [("deterministic", css(BLUE), True)] if deterministic is not None else []
    legend: Legend = [("ensemble", css(GREEN), False), *dashed]
    accuracies = partial(draw_accuracies, sizes=sizes, deterministic=deterministic)
    plots = [
        _plot("sizes-accuracy", "Accuracy by samples", accuracies, legend, words),
        _plot("sizes-loss", "Marginal loss by samples", partial(draw_losses, sizes=sizes), [], words),
    ]
    return {"plots": plots, "meaning": words}


@dataclass(frozen=True)
class Bar:
    """One class of an example; ``marks`` are the members' probabilities, in order."""

    name: str
    mean: float
    marks: list[float]
    is_label: bool
    is_predicted: bool


def cards(examples: Sequence[Example], classes: Sequence[str]) -> list[SimpleNamespace]:
    """The examples in their order; all images share one range of values, all points one plane."""
    images = [example.image for example in examples if example.image is not None]
    low, high = min((image.min() for image in images), default=0.0), max((image.max() for image in images), default=1.0)
    limits = float(low), float(high if high > low else low + 1)
    # A point of a plane is drawn; points of other spaces are told by their coordinates.
    plane = np.array([example.point for example in examples if example.point is not None and len(example.point) == 2])
    return [_card(example, classes, limits, plane) for example in examples]


def picture(image: Numbers, low: float, high: float) -> str:
    """A data URI of an image [C, H, W], black at ``low`` and white at ``high``; in colour if it has three channels."""
    pixels = np.clip((image - low) / (high - low) * 255, 0, 255).round().astype(np.uint8)
    shown = pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels.mean(0).round().astype(np.uint8)
    content = BytesIO()
    Image.fromarray(np.ascontiguousarray(shown)).save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(content.getvalue()).decode()}"


def _card(example: Example, classes: Sequence[str], limits: tuple[float, float], plane: Numbers) -> SimpleNamespace:
    """What the page shows of an example."""
    count = len(example.probabilities)
    names = [classes[k] if k < len(classes) else str(k) for k in range(count)]
    predicted = int(np.argmax(example.probabilities))
    members = np.empty((0, count)) if example.members is None else example.members
    marked = np.linspace(0, len(members) - 1, min(len(members), MARKS)).round().astype(int)
    marks = np.sort(members, axis=0)[marked].clip(0, 1)
    order = sorted(range(count), key=lambda k: -example.probabilities[k])
    shown = order[:CLASSES] if example.label in order[:CLASSES] else [*order[: CLASSES - 1], example.label]
    return SimpleNamespace(
        example=example,
        label=names[example.label],
        predicted=names[predicted],
        correct=predicted == example.label,
        agreeing=int((members.argmax(1) == predicted).sum()),
        members=len(members),
        bars=[Bar(names[k], example.probabilities[k], marks[:, k].tolist(), k == example.label, k == predicted) for k in shown],
        picture=None if example.image is None else picture(example.image, *limits),
        place=_place(example.point, plane),
        coordinates="" if example.point is None else f"({', '.join(f'{value:.3g}' for value in example.point)})",
    )


def _place(point: list[float] | None, plane: Numbers) -> tuple[float, float] | None:
    """Where a point of the plane lies among the others: in [0, 1] x [0, 1], from the lower left."""
    if point is None or len(point) != 2:
        return None
    low, high = plane.min(0), plane.max(0)
    x, y = (np.array(point) - low) / np.where(high > low, high - low, 1)
    return float(x), float(y)
