"""All experiments by their names on the command line, and one page with each beside the paper's, from result files alone."""

import re
import shutil
from pathlib import Path

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.plots import paper
from flipgrad.reproduce import accuracy, learning, toy
from flipgrad.reproduce._cells import read_result
from flipgrad.reproduce._workshop import Experiment
from flipgrad.reproduce.beyond import Beyond
from flipgrad.reproduce.timing import Timing

# What is cheap and needs no images comes first.
ALL: list[type[Experiment]] = [
    *(accuracy.Rmse, accuracy.Cosine, accuracy.RmseUnbiased, accuracy.CosineUnbiased, accuracy.Width, accuracy.Depth),
    *(Timing, accuracy.Estimators, toy.ToyTraining, toy.ToyExample, learning.Cifar, learning.MuProp, Beyond),
]
EXPERIMENTS = {kind.name: kind() for kind in ALL}
PAGE = "report.html"


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a reproduction, from what is there.

    Raises:
        InputError: if there is no result at all, or one is damaged.
    """
    sections = [_section(folder, experiment) for experiment in in_the_papers_order()]
    if not any(section.record for section in sections):
        raise InputError(f"'{folder}' holds no results; make some first, e.g. flipgrad reproduce rmse --output {folder}")
    path = folder / PAGE
    files.write(path, paper.page(sections).encode())
    return path


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


def _section(folder: Path, experiment: Experiment) -> paper.Section:
    path = folder / f"{experiment.name}.json"
    record = read_result(path, "title", "claims") if path.is_file() else {}
    captions = {experiment.name: str(record.get("title", "")), **experiment.figures}
    figures = [(f"{figure}.png", caption) for figure, caption in captions.items() if (folder / f"{figure}.png").is_file()]
    return paper.Section(experiment.name, experiment.place, experiment.words, record, figures)
