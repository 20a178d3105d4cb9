"""One page with every figure and table of the paper beside ours, from result files alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.plots import paper
from flipgrad.reproduce._cells import AGAIN, read_result
from flipgrad.reproduce._experiment import Experiment
from flipgrad.reproduce.experiments import EXPERIMENTS

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
    target.mkdir(parents=True, exist_ok=True)
    (target / "measured").mkdir(exist_ok=True)
    for name, experiment in EXPERIMENTS.items():
        figures = (name, *experiment.figures)
        wanted = [f"{name}.md", *(file for figure in figures for file in (f"{figure}.png", f"measured/{figure}.json"))]
        if (source / f"{name}.json").is_file():
            for file in wanted:
                if (source / file).is_file():
                    shutil.copyfile(source / file, target / file)
            # Where files lay when it was made is of no use to others.
            record = {key: value for key, value in _read(source / f"{name}.json").items() if key != "command"}
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
    record = _read(path) if path.is_file() else {}
    captions = {experiment.name: str(record.get("title", "")), **experiment.figures}
    figures = [(f"{figure}.png", caption) for figure, caption in captions.items() if (folder / f"{figure}.png").is_file()]
    return paper.Section(experiment.name, experiment.place, experiment.words, record, figures)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = read_result(path)
        record["title"], record["claims"]
    except KeyError as error:
        raise InputError(f"'{path}' is damaged ({error}); {AGAIN}") from None
    return record
