"""All experiments by their names on the command line, what they cost, and one page with each beside the paper's."""

import re
import shlex
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flipgrad import files
from flipgrad.benchmarks.step import PSA_SAMPLED, gradient, photographs
from flipgrad.errors import InputError
from flipgrad.machine import cores, fastest, threads
from flipgrad.plots.report import duration, template
from flipgrad.reproduce import accuracy, beyond, learning, timing, toy, vae, weights
from flipgrad.reproduce._cells import read_result
from flipgrad.reproduce._workshop import SCALES, Experiment
from flipgrad.training.models import cifar_net

# What is cheap and needs no images comes first.
ALL = [
    *(accuracy.rmse, accuracy.cosine, accuracy.rmse_unbiased, accuracy.cosine_unbiased, accuracy.width, accuracy.depth),
    *(timing.running_times, accuracy.every_estimator, toy.toy_training, toy.toy_example, learning.cifar, learning.muprop),
    *(beyond.averaging, weights.weights, vae.vae),
]
# The experiments by name.
EXPERIMENTS = {experiment.name: experiment for experiment in ALL}
PAGE = "report.html"
# Seconds of the probe on the machine where the costs of experiments were recorded.
PROBE = 0.026


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a reproduction, from what is there. Every string is escaped.

    Raises:
        InputError: if there is no result at all, or one is damaged.
    """
    sections = [_section(folder, experiment) for experiment in in_the_papers_order()]
    made = [section.record for section in sections if section.record]
    if not made:
        raise InputError(f"'{folder}' holds no results; make some first, e.g. flipgrad reproduce rmse --output {folder}")
    holds = [bool(claim["holds"]) for record in made for claim in record["claims"]]
    versions: dict[str, Any] = next((record["versions"] for record in made if "versions" in record), {})
    numbers = {"made": len(made), "held": sum(holds), "claims": len(holds)}
    text = template("paper.html").render(sections=sections, versions=versions, **numbers)
    files.write(folder / PAGE, text.encode())
    return folder / PAGE


def keep(source: Path, target: Path) -> Path:
    """Copy what is worth keeping of a reproduction, its small files, and write the page there.

    That is every experiment's text, numbers and PNG figures, and the curves that figures are drawn from; not the networks,
    the cells and the PDFs. What ``target`` holds of other experiments stays.
    """
    (target / "measured").mkdir(parents=True, exist_ok=True)
    for name, experiment in EXPERIMENTS.items():
        if (source / f"{name}.json").is_file():
            figures = (name, *experiment.figures)
            for file in (f"{name}.md", *(file for figure in figures for file in (f"{figure}.png", f"measured/{figure}.json"))):
                if (source / file).is_file():
                    shutil.copyfile(source / file, target / file)
            record = read_result(source / f"{name}.json", "title", "claims")
            # Where files lay when it was made is of no use to others.
            record.pop("command", None)
            files.write_json(target / f"{name}.json", record)
    return write_report(target)


def in_the_papers_order() -> list[Experiment]:
    """The experiments by the numbers of the paper's figures, those without a number last.

    >>> [experiment.place for experiment in in_the_papers_order()][2:5]
    ['Figures 4 and C.1', 'Figure B.1', 'Figure C.2']
    """
    return sorted(EXPERIMENTS.values(), key=lambda experiment: re.findall(r"[A-Z]?\.?\d", experiment.place) or ["last"])


def _section(folder: Path, experiment: Experiment) -> SimpleNamespace:
    """What the page shows of an experiment; the ``record`` of one that was not run is empty."""
    path = folder / f"{experiment.name}.json"
    record = read_result(path, "title", "claims") if path.is_file() else {}
    title = str(record.get("title", experiment.name))
    captions = {experiment.name: title, **experiment.figures}
    made = [f"{key} {record[key]}" for key in ("scale", "seed") if key in record]
    made += [duration(record["seconds"])] if isinstance(record.get("seconds"), int | float) else []
    return SimpleNamespace(
        name=experiment.name,
        place=experiment.place,
        words=experiment.words,
        record=record,
        # Without its place in the paper.
        title=title.partition(": ")[2] or title,
        figures=[(f"{figure}.png", caption) for figure, caption in captions.items() if (folder / f"{figure}.png").is_file()],
        # Older result files have one table, or none.
        sheets=[sheet for sheet in record.get("sheets", [record.get("sheet")]) if sheet],
        made=", ".join(made),
        command=shlex.join(["flipgrad", "reproduce", experiment.name, "--scale", str(record.get("scale", "small"))]),
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
    number = list(SCALES).index(scale)
    seconds = experiment.seconds[number] / min(workers or cores(), experiment.cells[number])
    return speed * seconds, False
