"""Trained networks that come with the package, each with a card: its recipe, its curves, and how good it is.

>>> import flipgrad as fg
>>> net = fg.zoo.load("digits-binary")
>>> fg.zoo.card("digits-binary").config.weights
'binary'
"""

from pathlib import Path

from flipgrad.network import BinaryNetwork
from flipgrad.training import Run
from flipgrad.zoo.adding import add
from flipgrad.zoo.cards import Card, overview, table
from flipgrad.zoo.folder import Zoo

__all__ = ["OURS", "Card", "Zoo", "add", "card", "load", "load_run", "markdown", "names"]

# The networks of the package.
OURS = Zoo(Path(__file__).parent / "networks")


def names() -> list[str]:
    """The networks of the package, by name."""
    return OURS.names()


def card(name: str) -> Card:
    """What is told of a network of the package; see :meth:`Zoo.card`."""
    return OURS.card(name)


def load(name: str, *, device: str = "cpu") -> BinaryNetwork:
    """A trained network of the package, in eval mode; see :meth:`Zoo.load`."""
    return OURS.load(name, device=device)


def load_run(name: str, *, device: str | None = None, data_folder: str | None = None) -> Run:
    """A trained network of the package with its data set; see :meth:`Zoo.load_run`."""
    return OURS.load_run(name, device=device, data_folder=data_folder)


def markdown(zoo: Zoo = OURS) -> str:
    """The cards of all networks of the package, or of another ``zoo``, as a page."""
    cards = [zoo.card(name) for name in zoo.names()]
    return "\n".join([*table(overview(cards)), "", *(each.markdown() for each in cards)])
