"""The paper's figures and tables, and what lies beyond, from one command each, with the claims checked against the numbers."""

from flipgrad.reproduce._cells import CellError
from flipgrad.reproduce._dask import DaskRunner
from flipgrad.reproduce._experiment import Claim, Experiment
from flipgrad.reproduce._local import LocalRunner
from flipgrad.reproduce._workshop import SCALES, Workshop
from flipgrad.reproduce.experiments import EXPERIMENTS
from flipgrad.reproduce.report import keep, write_report

__all__ = [
    "EXPERIMENTS",
    "SCALES",
    "CellError",
    "Claim",
    "DaskRunner",
    "Experiment",
    "LocalRunner",
    "Workshop",
    "keep",
    "write_report",
]
