"""Gradients of every option in small and wide networks: their accuracy, what they cost, and how networks train with them.

Small networks are measured against the exact gradient. In wide ones that is out of reach: there, against the mean of very many
draws of PSA. That mean is PSA's own expectation. It is the exact gradient in the last layer and the head, and biased elsewhere.
"""

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flipgrad import files, machine, tensor_files
from flipgrad.benchmarks.loop import in_the_loop
from flipgrad.benchmarks.step import RATE, gradient
from flipgrad.bounds import MeanOfDraws
from flipgrad.contract import Estimator, LayerCall, LocalEstimator, Network
from flipgrad.data import DataSet, Split
from flipgrad.estimators.names import for_training
from flipgrad.gradeval import Reference, ReferenceLayer
from flipgrad.gradeval.draws import Problem, one_by_one, stream
from flipgrad.gradeval.evaluate import accuracy_of_draws, mean_of_draws
from flipgrad.machine import fastest, threads
from flipgrad.network import BinaryNetwork
from flipgrad.objectives import CrossEntropy, Objective
from flipgrad.plots.learning import Training
from flipgrad.plots.options import KEYS, PAPER, Grid, Net, Trained
from flipgrad.reproduce._cells import Cell, Place, read_result
from flipgrad.reproduce._workshop import ToyNet, Workshop
from flipgrad.reproduce.learning import RUN, TrainingPlan, prepared, trainings
from flipgrad.sampling import states as sampled_states
from flipgrad.training import TrainConfig, Trainer, make_net, read_weights
from flipgrad.training.loop import isolated

# The paper's own first: psa:sampled is PSA, st is ST, psa:enhanced the head of its appendix. psa:auto is the default.
OPTIONS = (
    *("psa:sampled", "psa:enhanced", "psa:auto", "psa:posterior", "psa:rao-blackwell", "psa:mean"),
    *("st:sampled", "st:posterior", "st:rao-blackwell", "st:mean"),
)
# How a gradient is made of several draws, by what tables call it: the option, and how.
WAYS = {
    "PSA auto, 2 draws": ("psa:auto", "independent"),
    "PSA auto, Z and −Z": ("psa:auto", "antithetic"),
    "PSA auto, Z and −Z of the upper half": ("psa:auto", "upper"),
    "PSA mean, 2 draws": ("psa:mean", "independent"),
    "PSA mean, Z and −Z": ("psa:mean", "antithetic"),
    "PSA mean, 4 of the last layer": ("psa:mean", "last 4"),
    "PSA mean, 16 of the last layer": ("psa:mean", "last 16"),
}
# How often the numbers of an option have changed since results were first kept: cells, measurements and times of an earlier
# count are not reused. The posterior's log ratio got a tolerance of its own, and averages were weighed anew.
REVISIONS = dict.fromkeys(("psa:posterior", "psa:rao-blackwell", "st:posterior", "st:rao-blackwell", "psa:auto"), 1)
# What figures call the options.
LABELS = [for_training(option, 1)[0] for option in OPTIONS]

# The options that are trained with, over a grid of learning rates: which rates they bear, and how far they come.
METHODS = ("st:sampled", "st:mean", "psa:sampled", "psa:auto", "psa:mean")
FEWER = ("st:sampled", "psa:sampled", "psa:auto", "psa:mean")

# Small networks beside 5-5-5, but at the smoke scale: a wider one, and those of other depths.
OTHER_NETS = ((10, 10, 10), *((5,) * depth for depth in (2, 4, 5, 6, 7)))
# Wide networks: how many data points, draws of the reference, and draws of every option, by the kind of network.
EFFORTS = {
    "smoke": {"fc": (8, 60, 12), "conv": (4, 60, 12)},
    "small": {"fc": (64, 3000, 120), "conv": (16, 500, 100)},
    "paper": {"fc": (64, 40_000, 2500), "conv": (16, 15_000, 1000)},
}
STATES = {"start": "at the start", "trained": "trained"}
# Whose draws are the reference, in a network that was trained with it.
MEASURED = "psa:sampled"
# What a cell of options is given: the folder of the reference's, and the file there.
REFERENCE, PROBLEM = "reference", "problem.safetensors"
# The kind of that file; changes with the meaning of what is stored.
PROBLEM_FORMAT = "problem 1"
# Images that the data-dependent initialisation looks at, and draws that are held at once.
INITIAL, DRAWS_AT_ONCE = 256, 8

# The file of the costs, and what those of accuracies in small networks end with.
COSTS, MEASUREMENTS = "beyond-costs", f"beyond-{sum(REVISIONS.values())}"
# Processes at work on the whole machine, on average over a minute, up to which it is called quiet: before times are taken, and
# after, when one of them is this one.
QUIET, ALONE = 0.5, 1.5
# Images of a batch, and repeats, the fastest of which counts, after one that does not.
SCALES = {"smoke": (8, 1), "small": (64, 6), "paper": (64, 10)}
# The factor on repeats in small networks, which take no time.
MORE_REPEATS = 10

# The time of a gradient over that of PSA, by network and option; and that of an update of a training, by :func:`of_updates`.
Costs = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Setting:
    """A network and its trainings with several ``methods`` at several ``rates``; cells are named by the ``key``.

    Gradients are measured in the network that was trained at the rate ``looked_at``; None for one that is only trained.
    """

    key: str
    title: str
    plan: TrainingPlan
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    augment: str
    looked_at: float | None = None

    def cell(self, shop: Workshop, method: str, rate: float, repeat: int = 0) -> Cell:
        """One training; every ``repeat`` has another seed."""
        again = f"-seed-{shop.seed + repeat}" if repeat else ""
        name = f"beyond-{self.key}-{revised(method)}-{rate:g}{again}"
        return self.plan.cell(shop, name, method, self.augment, rate, seed=shop.seed + repeat)

    @property
    def states(self) -> tuple[str, ...]:
        """In which of the :data:`STATES` gradients of its network are measured and timed."""
        return tuple(STATES) if self.looked_at is not None else ()

    def subject(self, shop: Workshop, state: str) -> Cell:
        """The training whose network is looked at in a ``state``; its settings say which, its inputs where it is."""
        training = self.cell(shop, MEASURED, self.looked_at or self.rates[0])
        settings = {**training.settings, "trained": state == "trained"}
        return replace(
            training, settings=settings, inputs={**training.inputs, RUN: str(training.folder(shop.folder / shop.CELLS) / RUN)}
        )


def of_updates(title: str) -> str:
    """What the times of an update of the trainings of that ``title`` are called."""
    return f"{title}, an update"


# A training: the setting, its method, rate and repeat, and what was found.
TrainedCell = tuple[tuple[Setting, tuple[str, float, int]], Training]


def revised(option: str) -> str:
    """The name of an option in those of cells: another one whenever its numbers change."""
    count = REVISIONS.get(option, 0)
    return f"{option}-revision-{count}" if count else option


def _plan(
    data: str, images: int | None, held_out: int | None, watched: int, epochs: int, model: str, width: float = 1.0
) -> TrainingPlan:
    """Rates are given, so nothing is searched for; the noise goes with the root of the width, as in ``cifar``."""
    noise = f"logistic:{width**0.5:g}" if model == "cifar" else "logistic"
    return TrainingPlan(data, width, images, held_out, watched, epochs, noise=noise, model=model)


FOUR, EIGHT = "-".join(["200"] * 4), "-".join(["200"] * 8)
CIFAR = "quarter-width CIFAR net"
GRID, CIFAR_GRID = (0.05, 0.1, 0.15, 0.2, 0.3), (0.005, 0.015, 0.03, 0.05)
# Trainings of every kind, each with a seed of its own.
SEEDS = {"smoke": 1, "small": 3, "paper": 3}
SETTINGS = {
    "smoke": (
        Setting("fc-4", "4 × 20, digits", _plan("digits", 128, 64, 64, 2, "20-20-20-20"), METHODS, (0.1,), "none"),
        Setting(
            "fc-8", "8 × 20, digits", _plan("digits", 128, 64, 64, 2, "20-20-20-20-20-20-20-20"), FEWER[:3], (0.1, 0.3), "none"
        ),
        Setting("conv", "convolutions, digits", _plan("digits", 128, 64, 64, 1, "digits", 0.25), FEWER, (0.05,), "none", 0.05),
    ),
    "small": (
        Setting("fc-4", "4 × 200, MNIST", _plan("mnist", 20_000, 1000, 1000, 4, FOUR), METHODS, GRID, "none", 0.1),
        Setting("fc-8", "8 × 200, MNIST", _plan("mnist", 20_000, 1000, 1000, 4, EIGHT), METHODS, GRID, "none"),
        Setting("conv", CIFAR, _plan("cifar10", 5000, 500, 1000, 3, "cifar", 0.25), FEWER, CIFAR_GRID, "flip-crop", 0.015),
    ),
    "paper": (
        Setting("fc-4", "4 × 200, MNIST", _plan("mnist", None, None, 5000, 20, FOUR), METHODS, (0.02, *GRID), "none", 0.1),
        Setting("fc-8", "8 × 200, MNIST", _plan("mnist", None, None, 5000, 20, EIGHT), METHODS, (0.02, *GRID), "none"),
        Setting(
            "conv", CIFAR, _plan("cifar10", 20_000, 2000, 5000, 18, "cifar", 0.25), METHODS, CIFAR_GRID, "flip-crop", 0.015
        ),
    ),
}


def of_draws(option: str, way: str, layers: int) -> Estimator:
    """The estimator of an option (a specification) with "one" draw, or in one of the :data:`WAYS`, for so many layers."""
    _, rule = for_training(option, 1)
    if way == "one":
        return rule
    if way.startswith("last ") and isinstance(rule, LocalEstimator):
        return LastLayer(rule, int(way.removeprefix("last ")))
    return MeanOfDraws(rule, 2, antithetic=way != "independent", shared=layers // 2 if way == "upper" else 0)


class LastLayer(LocalEstimator):
    """One draw of all layers but the last, ``count`` of the last: its signals and the head's gradient are averaged.

    Not for posterior inputs of the last layer: these belong to one draw of its states.
    """

    unbiased = False
    citation = "Shekhovtsov, Yanush, Flach 2020"

    def __init__(self, rule: LocalEstimator, count: int) -> None:
        self.rule, self.count = rule, count

    def passes(self, depth: int) -> int:
        return self.rule.passes(depth)

    def states(self, call: LayerCall) -> Tensor:
        return self.rule.states(call)

    def head(self, net: Network, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        if last.distribution is None:
            raise RuntimeError("the last layer drew no states")
        # Other values, the same gradient: what comes back to all of them goes on to the layer once, added up.
        carried = states - states.detach()
        every = [states, *(sampled_states(last.draw, last.noise, last.distribution.a) + carried for _ in range(self.count - 1))]
        return torch.stack([self.rule.head(net, last, some, objective) for some in every]).mean(0)


def per_layer(entries: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The numbers of one draw from accuracies as :mod:`flipgrad.gradeval` gives them, layer by layer."""
    rows = [{**entry, "rmse": entry["rmse"][0], "cosine": entry["cosine_mean"][0]} for entry in entries]
    # In few digits: a file to be kept.
    return {key: [float(f"{row[key]:.5g}") for row in rows] for key in KEYS}


def small_nets(shop: Workshop) -> list[ToyNet]:
    """5-5-5 along its training, a wider network and those of other depths after one epoch."""
    epochs, smoke = shop.scale.epochs, shop.scale_name == "smoke"
    along = [ToyNet((5, 5, 5), epoch, epochs) for epoch in (epochs[:1] if smoke else epochs)]
    return [*along, *(ToyNet(widths) for widths in ([(5, 5)] if smoke else OTHER_NETS))]


def measure_small(shop: Workshop, costs: Costs) -> list[Net]:
    """The accuracy of every option in the small networks."""
    found = []
    for net in small_nets(shop):
        entries = read_result(shop.measure(net, OPTIONS, shop.scale.samples, apart=MEASUREMENTS))["estimators"]
        options = {label: per_layer(entries[label]["layers"]) for label in LABELS}
        layers = [entry["name"] for entry in entries[PAPER]["layers"]]
        state = f"epoch {net.epoch:,}"
        title = f"{net.shape if len(net.widths) <= 3 else f'{len(net.widths)} × {net.widths[0]}'},\n{state}"
        name = f"{net.shape}, {state}"
        found.append(Net(name, title, False, "the exact gradient", layers, options, {}, costs[name]))
    return found


def measure_wide(shop: Workshop, settings: Sequence[Setting], costs: Costs) -> list[Net]:
    """The accuracy of every option in the wide networks that are looked at, before and after their training."""
    ways = {label: (option, "one") for label, option in zip(LABELS, OPTIONS, strict=True)} | WAYS
    looked_at = [(setting, state, *_cells(shop, setting, state, ways)) for setting in settings for state in setting.states]
    made = shop.cells("beyond", [reference for _, _, reference, _ in looked_at])
    drawn = shop.cells("beyond", [cell for *_, cells in looked_at for cell in cells.values()])
    nets = []
    for setting, state, reference, cells in looked_at:
        layers = made[reference.name]["result"]["layers"]
        numbers = {label: per_layer(drawn[cell.name]["result"]["layers"]) for label, cell in cells.items()}
        error = max(layer["error"] for layer in layers)
        nets.append(
            Net(
                f"{setting.title}, {STATES[state]}",
                f"{setting.title},\n{STATES[state]}",
                True,
                f"the mean of {reference.cost:,} draws of PSA (its own relative error at most {error:.2g})",
                [layer["name"] for layer in layers],
                {label: numbers[label] for label in LABELS},
                {label: numbers[label] for label in WAYS},
                costs[f"{setting.title}, {STATES[state]}"],
            )
        )
    return nets


def _cells(shop: Workshop, setting: Setting, state: str, ways: Mapping[str, tuple[str, str]]) -> tuple[Cell, dict[str, Cell]]:
    """The cell of the reference in one network, and the cells of all options and ways, which need it."""
    root, prefix = shop.folder / shop.CELLS, f"beyond-{setting.key}-{state}"
    points, draws, option_draws = EFFORTS[shop.scale_name][setting.key.partition("-")[0]]
    subject = setting.subject(shop, state)
    settings = {**subject.settings, "points": points, "draws": draws}
    reference = Cell(f"{prefix}-reference", reference_cell, settings, draws, subject.inputs)
    given = {REFERENCE: str(reference.folder(root))}
    cells = {}
    for label, (option, way) in ways.items():
        name = f"{prefix}-{revised(option)}" + ("" if way == "one" else f"-{way.replace(' ', '-')}")
        more = {"option": option, "way": way, "option_draws": option_draws}
        cells[label] = Cell(name, option_cell, {**settings, **more}, option_draws, given)
    return reference, cells


def reference_cell(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Draw the reference, and store it with the network and the data points.

    Returns:
        The ``layers``: the reference's length in each, and its own standard error relative to that.
    """
    config, data, net = _subject(settings, place)
    x, y = (part[: settings["points"]].clone() for part in (data.train.x, data.train.y))
    problem, count = Problem(net, x, CrossEntropy(y)), settings["draws"]
    label, estimator = for_training(MEASURED, 1)
    reference = mean_of_draws(problem.layers(), label, count, _draws(problem, estimator, count, config.seed, place))
    weights = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    known = torch.tensor([[layer.length, layer.error] for layer in reference.layers])
    stored = {**weights, "gradient": reference.gradient, "known": known, "x": x, "y": y}
    files.write(place.folder / PROBLEM, tensor_files.tensors_to_bytes(PROBLEM_FORMAT, stored))
    return {"layers": [asdict(layer) for layer in reference.layers]}


def _subject(settings: Mapping[str, Any], place: Place) -> tuple[TrainConfig, DataSet, BinaryNetwork]:
    """A wide network as it is looked at, before or after its training, and what it learns from."""
    config, data = prepared(settings, place)
    net = make_net(config, data)
    if settings["trained"]:
        net.load_state_dict(read_weights(Path(place.inputs[RUN]))[0])
    else:
        net.initialize(data.train.x[:INITIAL], generator=torch.Generator().manual_seed(config.seed))
    return config, data, net


def option_cell(settings: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Draw gradients of one option.

    Returns:
        The ``layers``: accuracies as :mod:`flipgrad.gradeval` has them, relative to the reference's length. The bias is the
        distance of the option's mean from the reference, without the reference's own error.
    """
    file = Path(place.inputs[REFERENCE]) / PROBLEM
    fix = f"delete '{file.parent}', and it is made again"
    stored, _ = tensor_files.read_tensors(file, PROBLEM_FORMAT, missing=fix, broken=fix)
    x, y = stored["x"], stored["y"]
    net = _network(settings["config"], x, y)
    net.load_state_dict({name[4:]: tensor for name, tensor in stored.items() if name.startswith("net.")})
    problem, count = Problem(net, x, CrossEntropy(y)), settings["option_draws"]
    layers = problem.layers()
    known = [ReferenceLayer(layer, *numbers) for layer, numbers in zip(layers, stored["known"].tolist(), strict=True)]
    reference = Reference(stored["gradient"], "draws", for_training(MEASURED, 1)[0], settings["draws"], known)
    # The same noise for all options, so that their numbers differ by what they do with it.
    estimator = of_draws(settings["option"], settings["way"], len(net.binary_layers))
    made = _draws(problem, estimator, count, settings["config"]["seed"], place, "options")
    return {"layers": [asdict(layer) for layer in accuracy_of_draws(layers, reference, settings["option"], count, made)]}


def _network(config: Mapping[str, Any], x: Tensor, y: Tensor) -> BinaryNetwork:
    """A network for these examples, untrained; no data are read."""
    return make_net(
        TrainConfig.from_json(config), DataSet(config["data"], Split(x, y), Split(x, y), classes=10, background=0.0)
    )


def _draws(
    problem: Problem, estimator: Estimator, count: int, seed: int, place: Place, purpose: str = "reference"
) -> Iterator[Tensor]:
    """One after the other: in wide networks that is faster than many at once."""
    noise = stream([seed, zlib.crc32(purpose.encode())], problem.x.device)
    for start in range(0, count, DRAWS_AT_ONCE):
        yield one_by_one(problem, estimator, min(DRAWS_AT_ONCE, count - start), noise)
        place.tick(min(1.0, (start + DRAWS_AT_ONCE) / count))


def measure_costs(shop: Workshop, settings: Sequence[Setting]) -> tuple[Costs, str]:
    """The time of a gradient over that of PSA, by network and option, and in words what else the machine did meanwhile.

    What the default averages depends on the network, so that each is timed as it is looked at; trainings come first. With them,
    the time of an update of every training, at its start. It runs alone and on one thread, as they do. Times are found again
    where they were measured before; those of other :data:`REVISIONS`, or taken beside other work on a machine that is quiet
    now, are taken again.
    """
    path = shop.stored(COSTS)
    stored = read_result(path) if path.exists() else {}
    if stored.get("timed") != _timed() or _could_be_better(stored["load"]):
        stored = _take_times(shop, settings)
    seconds: Costs = stored["seconds"]
    costs = {name: {label: own / times[PAPER] for label, own in times.items()} for name, times in seconds.items()}
    load = stored["load"]
    if load is None:
        return costs, "beside what is not known"
    return costs, "with nothing else at work" if load <= ALONE else f"beside other work (a load of {load:.1f})"


def _could_be_better(load: float | None) -> bool:
    """Whether times that were taken under that load were taken beside other work, which is done now."""
    now = machine.load()
    return load is not None and now is not None and load > ALONE and now < QUIET


def _timed() -> dict[str, Any]:
    """What there are times of."""
    return {"options": [*LABELS, *WAYS], "updates": list(METHODS), "revisions": REVISIONS}


def _take_times(shop: Workshop, settings: Sequence[Setting]) -> dict[str, Any]:
    """Seconds of a gradient by every option in every network, and of updates, and the machine's load after that; stored."""
    batch, repeats = SCALES[shop.scale_name]
    several = repeats * MORE_REPEATS if repeats > 1 else 1
    options = dict(for_training(option, 1) for option in OPTIONS)
    seconds: dict[str, dict[str, float]] = {}
    for net in small_nets(shop):
        name = f"{net.shape}, epoch {net.epoch:,}"
        seconds[name] = _time(shop, name, _gradients(shop, shop.network(net), shop.data.x, shop.data.y, options), several)
    for setting in settings:
        seconds[of_updates(setting.title)] = _time_updates(shop, setting, several)
    for setting, state in [(each, state) for each in settings for state in each.states]:
        cell = setting.subject(shop, state)
        _, data, network = _subject(cell.settings, Place(shop.folder, cell.inputs, lambda: False, lambda share: None))
        ways = {label: of_draws(*way, len(network.binary_layers)) for label, way in WAYS.items()}
        count = repeats if setting.plan.model == "cifar" else several
        name, x, y = f"{setting.title}, {STATES[state]}", data.train.x[:batch], data.train.y[:batch]
        seconds[name] = _time(shop, name, _gradients(shop, network, x, y, {**options, **ways}), count)
    facts = {"seconds": seconds, "batch": batch, "repeats": repeats, "timed": _timed(), "load": machine.load()}
    shop.store(COSTS, facts)
    return facts


def _gradients(
    shop: Workshop, net: BinaryNetwork, x: Tensor, y: Tensor, rules: Mapping[str, Estimator]
) -> dict[str, Callable[[], None]]:
    """A gradient by every rule."""
    generator, objective = torch.Generator().manual_seed(shop.seed), CrossEntropy(y)
    return {label: gradient(net, x, objective, rule, generator) for label, rule in rules.items()}


def _time_updates(shop: Workshop, setting: Setting, repeats: int) -> dict[str, float]:
    """Seconds of an update with every method, as its trainings make them, from the batch to the weights."""
    cell = setting.cell(shop, MEASURED, RATE)
    config, data = prepared(cell.settings, Place(shop.folder, cell.inputs, lambda: False, lambda share: None))
    works = {}
    with isolated(torch.device("cpu")):
        for method in setting.methods:
            own = replace(config, estimator=method)
            works[for_training(method, 1)[0]] = in_the_loop(Trainer(own, make_net(own, data), data))
        return _time(shop, of_updates(setting.title), works, repeats)


def _time(shop: Workshop, name: str, works: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Seconds of each of several works, which take turns."""
    total = (repeats + 1) * len(works)

    def done(label: str) -> None:
        shop.report(f"beyond: time of {name}", 1, total)

    with threads(1):
        # The processor's time, as others may be using it.
        return fastest(works, repeats=repeats, clock=time.process_time, done=done)


def train(shop: Workshop, settings: Sequence[Setting]) -> list[TrainedCell]:
    """All trainings of all settings; all of the first seed come before any of the second."""
    repeats = range(SEEDS[shop.scale_name])
    wanted = [
        (setting, (method, rate, repeat))
        for repeat in repeats
        for setting in settings
        for method in setting.methods
        for rate in setting.rates
    ]
    return list(zip(wanted, trainings(shop, "beyond", [setting.cell(shop, *which) for setting, which in wanted]), strict=True))


def grids_of(shop: Workshop, settings: Sequence[Setting], found: Sequence[TrainedCell], costs: Costs) -> list[Grid]:
    """What was ``found`` in :func:`train`, by setting, with the ``costs`` of updates."""
    grids = []
    for setting in settings:
        plan = setting.plan
        images = "all" if plan.images is None else f"{plan.images:,}"
        words = f"{images} images, {plan.epochs} epoch{'s' * (plan.epochs > 1)}, {plan.noise} noise"
        runs = [
            Trained(run.method, rate, run.curve("train_loss").tolist(), run.diverged, shop.seed + repeat)
            for (of, (_, rate, repeat)), run in found
            if of is setting
        ]
        cost = {run.method: costs[of_updates(setting.title)][run.method] for run in runs}
        grids.append(Grid(setting.title, words, list(setting.rates), plan.epochs, runs, cost))
    return grids
