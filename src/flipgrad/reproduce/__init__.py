"""The paper's figures and tables, and what lies beyond, from one command each, with the claims checked against the numbers."""

from flipgrad.errors import CellError
from flipgrad.reproduce._cells import DaskRunner, LocalRunner
from flipgrad.reproduce._workshop import SCALES, Claim, Experiment, Workshop
from flipgrad.reproduce.experiments import EXPERIMENTS, keep, write_report

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
