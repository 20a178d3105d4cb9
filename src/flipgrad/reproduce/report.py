"""One page with every figure and table of the paper beside ours, from result files alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.plots import paper
from flipgrad.reproduce._cells import AGAIN

PAGE = "report.html"


@final
@dataclass(frozen=True)
class Source:
    """What the paper shows, in our words.

    Attributes:
        place: the figure or table.
        words: what it shows, and what the paper says of it.
        figures: our figures, beside the one that is called as the experiment: their names and captions.
    """

    place: str
    words: str
    figures: Mapping[str, str] = field(default_factory=dict)


# In the order of the paper. Its own figures are in the paper; figure 1 is a drawing of the model.
SOURCES = {
    "rmse": Source(
        "Figure 2",
        "The error of the estimated gradient in each of three layers of a 5-5-5 network, relative to the gradient's "
        "length, against the number of draws that are averaged, after one epoch of training. Unbiased estimators "
        "improve with every draw; biased ones up to a point, but they start much lower, the more so the further a "
        "layer is from the loss. One draw of PSA is not worse than 1,000 of ARM; PSA is always more accurate than ST, "
        "and unbiased in the last layer.",
    ),
    "cosine": Source(
        "Figure 3",
        "The cosine between estimated and true gradient in layer 1 after 1, 100 and 2,000 epochs, with the interval "
        "that holds 70 % of the trials. With few draws some estimators have good chances of a direction that does not "
        "descend, some biased ones even with many. PSA is the best with few draws.",
    ),
    "cifar": Source(
        "Figures 4 and C.1",
        "Training losses, validation accuracies, validation losses and training accuracies on CIFAR-10 without "
        "augmentation, with affine augmentation, and with flips and crops. PSA and ST train very similarly and "
        "stably. Methods with a relaxed objective (Tanh, Concrete, ADF, LocalReparam) lower that objective very well, "
        "while the expected loss of the binary network stalls or grows. HardST performs rather poorly and diverges in "
        "two of the three cases; ADF with flips and crops has a very good accuracy in spite of its loss; REINFORCE "
        "needs a rate so small that no progress is seen.",
        {"cifar-extra": "Validation losses and training accuracies."},
    ),
    "toy-example": Source(
        "Figure B.1",
        "Two overlapping classes in the plane (a), the predictive probability of a network trained by the expected "
        "loss, which tends to be deterministic (b), and by a 10-sample bound, which fits the uncertainty of the data "
        "(c), and three members of that ensemble, with all noises fixed (d to f).",
    ),
    "toy-training": Source(
        "Figure C.2",
        "Training losses of a 5-5-5 network on these data: the expected loss (dashed) and that of the ensemble "
        "(solid). REINFORCE does not do well in the beginning and gets there eventually; ARM and PSA are alike; ST is "
        "somewhat slower. Unbiased estimators perform well on this problem.",
    ),
    "rmse-unbiased": Source(
        "Figure C.3",
        "The setting of figure 2 with more unbiased estimators: REINFORCE with the true expected loss as its "
        "baseline, and MuProp. MuProp's linear baseline does not help in the layers far from the loss.",
    ),
    "cosine-unbiased": Source(
        "Figure C.4",
        "The setting of figure 3 with the same estimators. MuProp's linear baseline degrades by the end of the training.",
    ),
    "width": Source(
        "Figure C.5",
        "Errors in layer 1 for networks 3-3-3, 5-5-5 and 10-10-10. The bias of PSA and ST is more prominent in small networks.",
    ),
    "depth": Source(
        "Figure C.6",
        "Errors in layer 1 for 2, 5 and 7 layers of 5 units. The variance of unbiased estimators grows much faster "
        "with the depth.",
    ),
    "muprop": Source(
        "Figure C.7",
        "Training losses of REINFORCE and MuProp with the running average of every example's loss as the baseline, at "
        "several learning rates. With a careful choice both make progress, at rates one to two orders smaller than "
        "those of biased methods: in 1,000 epochs hardly that of biased ones in 10.",
    ),
    "timing": Source(
        "Table of running times",
        "Seconds of a batch forward and backward, and of epochs with measurements by 10 samples per image, of eight "
        "methods on a GPU. PSA's step takes 4.3 times Tanh's, its epoch 1.4 times.",
    ),
    "estimators": Source(
        "Not in the paper",
        "Bias and spread of every estimator of this library, the newer ones included, with one draw.",
    ),
    "beyond": Source(
        "Beyond the paper",
        "PSA averages over paths from a unit to the loss, but the gradient of a weight still multiplies by the sampled "
        "state of its input, and the head's by that of the last layer. These can be averaged, too: given all other "
        "units (rao-blackwell), given the next layer (posterior), or given the layer before (mean). Errors, biases and "
        "errors at equal cost of every option in every layer, against the exact gradient in small networks and against "
        "very many draws of PSA in wide ones; what a gradient costs; and trainings over a grid of learning rates.",
        {
            "beyond-wide": "The same in wide networks, relative to PSA's own expectation.",
            "beyond-training": "Training losses over learning rates, and at the best rate over time.",
            "beyond-toy": "Long trainings on the toy problem at the paper's rate: exact losses.",
        },
    ),
}


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a reproduction, from what is there.

    Raises:
        InputError: if there is no result at all, or one is damaged.
    """
    sections = [_section(folder, name, source) for name, source in SOURCES.items()]
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
    for name, entry in SOURCES.items():
        wanted = [
            f"{name}.json",
            f"{name}.md",
            *(f"{figure}.png" for figure in (name, *entry.figures)),
            *(f"measured/{figure}.json" for figure in (name, *entry.figures)),
        ]
        if (source / f"{name}.json").is_file():
            for file in wanted:
                if (source / file).is_file():
                    shutil.copyfile(source / file, target / file)
            # Where files lay when it was made is of no use to others.
            record = {key: value for key, value in _read(source / f"{name}.json").items() if key != "command"}
            files.write_json(target / f"{name}.json", record)
    return write_report(target)


def _section(folder: Path, name: str, source: Source) -> paper.Section:
    path = folder / f"{name}.json"
    record = _read(path) if path.is_file() else {}
    captions = {name: str(record.get("title", "")), **source.figures}
    figures = [(f"{figure}.png", caption) for figure, caption in captions.items() if (folder / f"{figure}.png").is_file()]
    return paper.Section(name, source.place, source.words, record, figures)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = files.read_json(path, missing=AGAIN, broken=AGAIN)
        record["title"], record["claims"]
    except KeyError as error:
        raise InputError(f"'{path}' is damaged ({error}); {AGAIN}") from None
    return record
