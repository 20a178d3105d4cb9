"""All experiments by their names on the command line, what they cost, and one page with each beside the paper's."""

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flipgrad import files
from flipgrad.benchmarks.step import PSA_SAMPLED, gradient, photographs
from flipgrad.errors import InputError
from flipgrad.machine import cores, fastest, threads
from flipgrad.plots.report import duration, template
from flipgrad.plots.style import with_palette
from flipgrad.reproduce import accuracy, beyond, cifar, learning, timing, toy, vae, weights
from flipgrad.reproduce._cells import AGAIN, RESULT, folder_name, read_result
from flipgrad.reproduce._workshop import MEDIUM, VERDICTS, Experiment, Sheet, Workshop, as_text
from flipgrad.training.models import cifar_net

# What is cheap and needs no images comes first.
ALL = [
    *(accuracy.rmse, accuracy.cosine, accuracy.rmse_unbiased, accuracy.cosine_unbiased, accuracy.width, accuracy.depth),
    *(timing.running_times, accuracy.every_estimator, toy.toy_training, toy.toy_example, cifar.cifar, learning.muprop),
    *(beyond.averaging, weights.weights, vae.vae),
]
# The experiments by name.
EXPERIMENTS = {experiment.name: experiment for experiment in ALL}
PAGE = "report.html"
# Digits of measurements that are kept: more than a figure shows.
DIGITS = 5
BY_SCALE = (
    "The paper's claims by scale and augmentation. The verdict over several seeds is that of the 95% interval of their mean: "
    "undecided where this leaves it open. What one seed shows may be chance."
)
# Seconds of the probe on the machine where the costs of experiments were recorded.
PROBE = 0.026


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a reproduction, from what is there. Every string is escaped.

    Raises:
        InputError: if there is no result at all, or one is damaged.
    """
    sections = []
    for experiment in in_the_papers_order():
        stems = dict.fromkeys(map(experiment.stem, experiment.efforts()))
        # What is beside the usual scales is shown once it is there.
        sections += [_section(folder, experiment, s) for s in stems if s == experiment.name or (folder / f"{s}.json").is_file()]
    made = [section.record for section in sections if section.record]
    if not made:
        raise InputError(f"'{folder}' holds no results; make some first, e.g. flipgrad reproduce rmse --output {folder}")
    holds = [claim["holds"] for record in made for claim in record["claims"]]
    versions: dict[str, Any] = next((record["versions"] for record in made if "versions" in record), {})
    numbers = {"made": len(made), "held": holds.count(True), "claims": len(holds), "undecided": holds.count(None)}
    text = template("paper.html").render(sections=sections, versions=versions, **numbers)
    files.write(folder / PAGE, text.encode())
    return folder / PAGE


def keep(source: Path, target: Path) -> Path:
    """Copy what is worth keeping of a reproduction, made small, and write the page there.

    That is every experiment's text, numbers and figures, and the curves that figures are drawn from; not the networks, the
    cells and the PDFs. Figures have as many colours as a palette holds, measurements ``DIGITS`` digits. What ``target``
    holds of other experiments and scales stays; both may be the same folder, which then becomes small.
    """
    (target / "measured").mkdir(parents=True, exist_ok=True)
    for experiment in EXPERIMENTS.values():
        for scale in experiment.efforts():
            stem = experiment.stem(scale)
            path = source / f"{stem}.json"
            if not path.is_file() or (record := read_result(path, "title", "claims")).get("scale", scale) != scale:
                continue
            # Where files lay when it was made is of no use to others.
            record.pop("command", None)
            files.write_json(target / f"{stem}.json", record)
            for figure in (stem, *experiment.captions(scale)):
                _keep_figure(source, target, figure)
        _tell_scales(target, experiment)
    return write_report(target)


def _keep_figure(source: Path, target: Path, figure: str) -> None:
    """A figure and what it was drawn from, as far as they are there."""
    picture, measured = f"{figure}.png", f"measured/{figure}.json"
    if (source / picture).is_file():
        try:
            small = with_palette((source / picture).read_bytes())
        except OSError as error:
            raise InputError(f"'{source / picture}' is no picture ({error}); {AGAIN}") from None
        files.write(target / picture, small)
    if (source / measured).is_file():
        files.write_json(target / measured, rounded(read_result(source / measured)), indent=None)


def _tell_scales(folder: Path, experiment: Experiment) -> None:
    """Write the texts of what is kept, with a table of the claims that were looked at in several places or scales."""
    stems = dict.fromkeys(map(experiment.stem, experiment.efforts()))
    paths = [path for stem in stems if (path := folder / f"{stem}.json").is_file()]
    records = [read_result(path, "title", "claims") for path in paths]
    left = []
    if experiment.medium and not any(_is_judged(record) for record in records if record.get("scale") == MEDIUM):
        begun = any(record.get("scale") == MEDIUM for record in records)
        why = "no claim can be judged yet" if begun else "not run"
        left = [f"{MEDIUM} ({why}: flipgrad reproduce {experiment.name} --scale {MEDIUM})"]
    table = claims_by_scale(records, left)
    for path, record in zip(paths, records, strict=True):
        # Older result files have one table, or none.
        sheets = [sheet for sheet in record.pop("sheets", [record.pop("sheet", None)]) if sheet]
        record["sheets"] = [sheet for sheet in sheets if sheet["caption"] != BY_SCALE]
        if table is not None:
            record["sheets"].insert(0, asdict(table))
        files.write_json(path, record)
        files.write(path.with_suffix(".md"), as_text(record).encode())


def _is_judged(record: Mapping[str, Any]) -> bool:
    """Whether it holds a claim that is looked at in several places or scales."""
    return any("about" in claim for claim in record["claims"])


def rounded(value: Any) -> Any:
    """Numbers of a measurement with :data:`DIGITS` significant digits; whole numbers and texts as they are.

    >>> rounded({"rate": 0.0123456789, "epochs": [1, 20000.04]})
    {'rate': 0.012346, 'epochs': [1, 20000.0]}
    """
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def claims_by_scale(records: Sequence[Mapping[str, Any]], left: Sequence[str] = ()) -> Sheet | None:
    """Whether each claim holds in every place and at every scale where it was looked at; None if there is no such claim.

    What is ``left`` to be looked at gets columns without a verdict.
    """
    columns: dict[str, dict[str, str]] = {}
    claims: dict[str, None] = {}
    for record in records:
        for claim in record["claims"]:
            if "about" in claim:
                claims[claim["about"]] = None
                told, seeds = VERDICTS[claim["holds"]].lower(), claim.get("seeds", 0)
                column = columns.setdefault(f"{record['scale']}, {claim['where']}", {})
                column[claim["about"]] = f"{told} in one seed" if seeds == 1 else f"{told} ({seeds} seeds)"
    if not claims:
        return None
    columns |= {name: {} for name in left}
    return Sheet(
        BY_SCALE, ["claim", *columns], [[name, *(column.get(name, "–") for column in columns.values())] for name in claims]
    )


def in_the_papers_order() -> list[Experiment]:
    """The experiments by the numbers of the paper's figures, those without a number last.

    >>> [experiment.place for experiment in in_the_papers_order()][2:5]
    ['Figures 4 and C.1', 'Figure B.1', 'Figure C.2']
    """
    return sorted(EXPERIMENTS.values(), key=lambda experiment: re.findall(r"[A-Z]?\.?\d", experiment.place) or ["last"])


def _section(folder: Path, experiment: Experiment, stem: str) -> SimpleNamespace:
    """What the page shows of an experiment whose files are called ``stem``; the ``record`` of one that was not run is empty."""
    path = folder / f"{stem}.json"
    record = read_result(path, "title", "claims") if path.is_file() else {}
    title, scale = str(record.get("title", experiment.name)), str(record.get("scale", "small"))
    captions = {stem: title, **experiment.captions(scale)}
    made = [f"{key} {record[key]}" for key in ("scale", "seed") if key in record]
    made += [duration(record["seconds"])] if isinstance(record.get("seconds"), int | float) else []
    return SimpleNamespace(
        name=stem,
        place=experiment.place + (f", {scale}" if stem != experiment.name else ""),
        words=experiment.words,
        record=record,
        # Without its place in the paper.
        title=title.partition(": ")[2] or title,
        figures=[(f"{figure}.png", caption) for figure, caption in captions.items() if (folder / f"{figure}.png").is_file()],
        # Older result files have one table, or none.
        sheets=[sheet for sheet in record.get("sheets", [record.get("sheet")]) if sheet],
        made=", ".join(made),
        command=shlex.join(["flipgrad", "reproduce", experiment.name, "--scale", scale]),
    )


def probe() -> float:
    """Seconds of one core for a gradient of a small network: the fastest of some."""
    with threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, objective = photographs(16)
        work = gradient(cifar_net(0.125).initialize(x), x, objective, PSA_SAMPLED)
        # The processor's time, as others may be using it.
        return fastest({"probe": work}, clock=time.process_time)["probe"]


def cost(experiment: Experiment, scale: str, folder: Path, speed: float, workers: int | None = None) -> tuple[float, bool]:
    """The seconds of an experiment at a ``scale``, and whether they were measured on this machine or are an estimate.

    Results may be in ``folder``. The ``speed`` is the seconds of the probe here over :data:`PROBE`; ``workers`` cells run at a
    time, by default one per core.
    """
    try:
        record = read_result(folder / f"{experiment.name}.json")
        here: Any = files.provenance()["machine"]
        if record["scale"] == scale and all(record["machine"][key] == here[key] for key in ("system", "processor", "cores")):
            return float(record["seconds"]), True
    except (ValueError, TypeError, KeyError):
        pass
    seconds, cells = experiment.efforts()[scale]
    return speed * seconds / min(workers or cores(), cells), False


def done(experiment: Experiment, scale: str, folder: Path) -> tuple[int, int, float] | None:
    """How many cells of an experiment are done in ``folder``, of how many, and the share of the work that is left.

    None of one that is not made of cells, or of which none is done, and where the folder is of another scale.
    """
    mark = folder / Workshop.MARK
    if experiment.parts is None or not mark.is_file() or read_result(mark).get("scale") != scale:
        return None
    costs = experiment.parts(scale)
    root = folder / Workshop.CELLS
    finished = [name for name in costs if (root / folder_name(name) / RESULT).is_file()]
    left = sum(cost for name, cost in costs.items() if name not in finished)
    return (len(finished), len(costs), left / sum(costs.values())) if finished else None
