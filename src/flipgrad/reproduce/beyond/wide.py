"""Wide networks, where the exact gradient is out of reach: options against the mean of very many draws of PSA.

That mean is PSA's own expectation. It is the exact gradient in the last layer and the head, and biased elsewhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from flipgrad import files
from flipgrad.contract import Estimator
from flipgrad.data import DataSet, Split
from flipgrad.gradeval import Reference, ReferenceLayer
from flipgrad.gradeval.draws import Problem, one_by_one, stream
from flipgrad.gradeval.evaluate import accuracy_of_draws, mean_of_draws
from flipgrad.objectives import CrossEntropy
from flipgrad.reproduce._cells import Cell, Place
from flipgrad.reproduce._training import RUN, prepared
from flipgrad.reproduce._workshop import Workshop
from flipgrad.reproduce.beyond.draws import WAYS, of_draws
from flipgrad.reproduce.beyond.options import OPTIONS, Net, named, per_layer
from flipgrad.reproduce.beyond.rates import MEASURED, Setting
from flipgrad.training import TrainConfig, make_net, read_weights

# What a cell of options is given: the folder of the reference's.
REFERENCE, PROBLEM = "reference", "problem.safetensors"
# The kind of that file; changes with the meaning of what is stored.
PROBLEM_FORMAT = "problem 1"
# Images that the data-dependent initialisation looks at, and draws that are held at once.
INITIAL, DRAWS_AT_ONCE = 256, 8
STATES = {"start": "at the start", "trained": "trained"}


@final
@dataclass(frozen=True)
class Effort:
    """How many data points, draws of the reference, and draws of every option."""

    points: int
    reference: int
    draws: int


# Of fully connected networks, and of convolutions.
EFFORTS = {
    "smoke": (Effort(8, 60, 12), Effort(4, 60, 12)),
    "small": (Effort(64, 3000, 120), Effort(16, 500, 100)),
    "paper": (Effort(64, 40_000, 2500), Effort(16, 15_000, 1000)),
}


def measure(shop: Workshop, settings: Sequence[Setting], costs: Mapping[str, Mapping[str, float]]) -> list[Net]:
    """The accuracy of every option in the networks that are looked at, before and after their training."""
    efforts = dict(zip(("fc", "conv"), EFFORTS[shop.scale_name], strict=True))
    root = shop.folder / shop.CELLS
    wanted = [
        (setting, state, effort := efforts[setting.key.partition("-")[0]], _reference(shop, setting, state, effort, root))
        for setting in settings
        if setting.looked_at is not None
        for state in STATES
    ]
    references = shop.cells("beyond", [cell for *_, cell in wanted])
    ways = {named(option)[0]: (option, "one") for option in OPTIONS} | WAYS
    cells = {
        (reference.name, label): _option(reference, *way, effort, root)
        for _, _, effort, reference in wanted
        for label, way in ways.items()
    }
    records = shop.cells("beyond", list(cells.values()))
    nets = []
    for setting, state, effort, reference in wanted:
        layers = references[reference.name]["result"]["layers"]
        numbers = {label: per_layer(records[cells[reference.name, label].name]["result"]["layers"]) for label in ways}
        error = max(layer["error"] for layer in layers)
        nets.append(
            Net(
                f"{setting.title}, {STATES[state]}",
                f"{setting.title},\n{STATES[state]}",
                True,
                f"the mean of {effort.reference:,} draws of PSA (its own relative error at most {error:.2g})",
                [layer["name"] for layer in layers],
                {label: numbers[label] for label in ways if label not in WAYS},
                {label: numbers[label] for label in WAYS},
                costs[setting.key],
            )
        )
    return nets


def _reference(shop: Workshop, setting: Setting, state: str, effort: Effort, root: Path) -> Cell:
    training = setting.cell(shop, MEASURED, setting.looked_at or 0.0)
    settings = {**training.settings, "trained": state == "trained", "points": effort.points, "draws": effort.reference}
    inputs = {**training.inputs, RUN: str(training.folder(root) / RUN)}
    return Cell(f"beyond-{setting.key}-{state}-reference", reference_cell, settings, effort.reference, inputs)


def _option(reference: Cell, option: str, way: str, effort: Effort, root: Path) -> Cell:
    settings = {**reference.settings, "option": option, "way": way, "option_draws": effort.draws}
    name = f"{reference.name.removesuffix('reference')}{option}" + ("" if way == "one" else f"-{way.replace(' ', '-')}")
    return Cell(name, option_cell, settings, effort.draws, {REFERENCE: str(reference.folder(root))})


def reference_cell(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Draw the reference, and store it with the network and the data points.

    Returns:
        The ``layers``: the reference's length in each, and its own standard error relative to that.
    """
    config, data = prepared(settings, place)
    net = make_net(config, data)
    if settings["trained"]:
        net.load_state_dict(read_weights(Path(place.inputs[RUN]))[0])
    else:
        net.initialize(data.train.x[:INITIAL], generator=torch.Generator().manual_seed(config.seed))
    x, y = (part[: settings["points"]].clone() for part in (data.train.x, data.train.y))
    problem, count = Problem(net, x, CrossEntropy(y)), settings["draws"]
    label, estimator = named(MEASURED)
    made = _draws(problem, estimator, count, [config.seed, zlib.crc32(b"reference")], place.tick)
    reference = mean_of_draws(problem.layers(), label, count, made)
    weights = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    known = torch.tensor([[layer.length, layer.error] for layer in reference.layers])
    stored = {**weights, "gradient": reference.gradient, "known": known, "x": x, "y": y}
    files.write(place.folder / PROBLEM, files.tensors_to_bytes(PROBLEM_FORMAT, stored))
    return {"layers": [asdict(layer) for layer in reference.layers]}


def option_cell(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Draw gradients of one option.

    Returns:
        The ``layers``: accuracies as :mod:`flipgrad.gradeval` has them, relative to the reference's length. The bias is the
        distance of the option's mean from the reference, without the reference's own error.
    """
    file = Path(place.inputs[REFERENCE]) / PROBLEM
    fix = f"delete '{file.parent}', and it is made again"
    stored, _ = files.read_tensors(file, PROBLEM_FORMAT, missing=fix, broken=fix)
    x, y = stored["x"], stored["y"]
    data = DataSet(settings["config"]["data"], Split(x, y), Split(x, y), classes=10, background=0.0)
    config = TrainConfig.from_json(settings["config"])
    net = make_net(config, data)
    net.load_state_dict({name[4:]: tensor for name, tensor in stored.items() if name.startswith("net.")})
    problem, count = Problem(net, x, CrossEntropy(y)), settings["option_draws"]
    layers = problem.layers()
    known = [ReferenceLayer(layer, *numbers) for layer, numbers in zip(layers, stored["known"].tolist(), strict=True)]
    reference = Reference(stored["gradient"], "draws", named(MEASURED)[0], settings["draws"], known)
    # The same noise for all options, so that their numbers differ by what they do with it.
    seed = [config.seed, zlib.crc32(b"options")]
    made = _draws(problem, of_draws(settings["option"], settings["way"]), count, seed, place.tick)
    return {"layers": [asdict(layer) for layer in accuracy_of_draws(layers, reference, settings["option"], count, made)]}


def _draws(
    problem: Problem, estimator: Estimator, count: int, seed: Sequence[int], tick: Callable[[float], None]
) -> Iterator[Tensor]:
    """One after the other: in wide networks that is faster than many at once."""
    noise = stream(seed, problem.x.device)
    for start in range(0, count, DRAWS_AT_ONCE):
        yield one_by_one(problem, estimator, min(DRAWS_AT_ONCE, count - start), noise)
        tick(min(1.0, (start + DRAWS_AT_ONCE) / count))
