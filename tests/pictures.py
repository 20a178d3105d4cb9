"""Tests that make figures for other reasons than to look at them need not wait for their letters."""

from __future__ import annotations

import importlib
from io import BytesIO
from typing import Any

import pytest
from matplotlib.figure import Figure


def render_nothing(patch: pytest.MonkeyPatch) -> None:
    """Write other bytes in place of pictures and of the page of a run, all kinds of which are rendered in ``tests/plots``.

    Figures are made, and the files of a run are read, all the same: what they are made of has to be there.
    """
    patch.setattr(Figure, "savefig", lambda figure, content, **_: content.write(b"a picture" * 20))
    patch.setattr(importlib.import_module("flipgrad.plots.report"), "page", lambda run: "a page")


def render_roughly(patch: pytest.MonkeyPatch) -> None:
    """Render PNG files with few dots, and write other bytes in place of PDF files, whose fonts take long to embed."""
    draw = Figure.savefig

    def savefig(figure: Figure, content: BytesIO, **options: Any) -> None:
        if options["format"] == "pdf":
            content.write(b"a picture" * 20)
        else:
            draw(figure, content, **{**options, "dpi": 40})

    patch.setattr(Figure, "savefig", savefig)
