"""Figures as SVG inside a page, in the page's colours, whether it is light or dark."""

from __future__ import annotations

import re
from io import StringIO

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from flipgrad.plots.style import BLUE, GREEN, GREY, GRID, ORANGE

# What a colour of a figure is called in the page's style sheet.
COLOURS = {
    "#000000": "var(--ink)",
    GREY: "var(--muted)",
    GRID: "var(--grid)",
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
}


def css(colour: str) -> str:
    """A colour of a figure as the page's style sheet calls it; any other colour as it is.

    >>> css(BLUE), css("#123456")
    ('var(--blue)', '#123456')
    """
    return COLOURS.get(colour, colour)


def inline(figure: Figure, key: str) -> Markup:
    """The figure as an ``<svg>`` element: text stays text, and ids begin with ``key`` so that figures can share a page.

    It holds no strings but those of the figure, which are escaped, and the same bytes each time.
    """
    content = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flipgrad"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(content, format="svg", metadata=nothing, transparent=True)
    text = content.getvalue()
    box = re.search(r'viewBox="([-\d. ]+)"', text)
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # Its rules would hold in the whole page, whose style sheet has them, and its fonts.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r" font-family: [^;\"]*;?", "", body)
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = re.sub(r'xlink:href="#', f'href="#{key}-', body)
    body = re.sub(r"url\(#", f"url(#{key}-", body)
    for colour, name in COLOURS.items():
        body = re.sub(rf"(?<=: ){colour}\b", name, body, flags=re.IGNORECASE)
    size = Markup("").join([Markup(' viewBox="'), box.group(1), Markup('"')]) if box else Markup("")
    return Markup("<svg") + size + Markup(' aria-hidden="true" focusable="false">') + Markup(body) + Markup("</svg>")
