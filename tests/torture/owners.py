"""What users may name with --model, by mistake."""

from __future__ import annotations

from torch import nn

# No function at all.
number = 7


def raises(*arguments: object) -> None:
    """A function with an error of its own."""
    raise RuntimeError("an error\nof the user's own function")


def none(*arguments: object) -> None:
    """A function that returns nothing."""


def wrong(*arguments: object) -> nn.Module:
    """A network that is none of ours."""
    return nn.Linear(2, 2)
