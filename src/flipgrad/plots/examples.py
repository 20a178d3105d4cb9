"""Example predictions as a page shows them: a picture of the input, and a bar for each of the likeliest classes."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flipgrad.plots.runs import Example

# Classes that are shown of every example; the label is shown in any case.
CLASSES = 4
# Members that are marked on a bar, at most; of more, evenly spaced ones in the order of their probability.
MARKS = 32

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Bar:
    """One class of an example; ``marks`` are the members' probabilities, in order."""

    name: str
    mean: float
    marks: list[float]
    is_label: bool
    is_predicted: bool

    @property
    def path(self) -> str:
        """The members as strokes across a bar of size 100 x 10."""
        return "".join(f"M{100 * mark:.1f} 0v10" for mark in self.marks)

    @property
    def members_range(self) -> str:
        """From the lowest to the highest member."""
        return f", members {self.marks[0]:.0%} to {self.marks[-1]:.0%}" if self.marks else ""


def cards(examples: Sequence[Example], classes: Sequence[str]) -> list[SimpleNamespace]:
    """The examples in their order; all images share one range of values, all points one plane."""
    images = [example.image for example in examples if example.image is not None]
    low, high = min((image.min() for image in images), default=0.0), max((image.max() for image in images), default=1.0)
    limits = float(low), float(high if high > low else low + 1)
    # A point of a plane is drawn; points of other spaces are told by their coordinates.
    plane = np.array([example.point for example in examples if example.point is not None and len(example.point) == 2])
    return [_card(example, classes, limits, plane) for example in examples]


def picture(image: Numbers, low: float, high: float) -> str:
    """A data URI of an image [C, H, W], black at ``low`` and white at ``high``; in colour if it has three channels."""
    pixels = np.clip((image - low) / (high - low) * 255, 0, 255).round().astype(np.uint8)
    shown = pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels.mean(0).round().astype(np.uint8)
    content = BytesIO()
    Image.fromarray(np.ascontiguousarray(shown)).save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(content.getvalue()).decode()}"


def _card(example: Example, classes: Sequence[str], limits: tuple[float, float], plane: Numbers) -> SimpleNamespace:
    """What the page shows of an example."""
    count = len(example.probabilities)
    names = [classes[k] if k < len(classes) else str(k) for k in range(count)]
    predicted = int(np.argmax(example.probabilities))
    members = np.empty((0, count)) if example.members is None else example.members
    marked = np.linspace(0, len(members) - 1, min(len(members), MARKS)).round().astype(int)
    marks = np.sort(members, axis=0)[marked].clip(0, 1)
    order = sorted(range(count), key=lambda k: -example.probabilities[k])
    shown = order[:CLASSES] if example.label in order[:CLASSES] else [*order[: CLASSES - 1], example.label]
    return SimpleNamespace(
        example=example,
        label=names[example.label],
        predicted=names[predicted],
        correct=predicted == example.label,
        agreeing=int((members.argmax(1) == predicted).sum()),
        members=len(members),
        bars=[Bar(names[k], example.probabilities[k], marks[:, k].tolist(), k == example.label, k == predicted) for k in shown],
        picture=None if example.image is None else picture(example.image, *limits),
        place=_place(example.point, plane),
        coordinates="" if example.point is None else f"({', '.join(f'{value:.3g}' for value in example.point)})",
    )


def _place(point: list[float] | None, plane: Numbers) -> tuple[float, float] | None:
    """Where a point of the plane lies among the others: in [0, 1] x [0, 1], from the lower left."""
    if point is None or len(point) != 2:
        return None
    low, high = plane.min(0), plane.max(0)
    x, y = (np.array(point) - low) / np.where(high > low, high - low, 1)
    return float(x), float(y)
