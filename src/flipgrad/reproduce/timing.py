"""Appendix C.2: the running times of the methods, beside the paper's."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from flipgrad import plots
from flipgrad.benchmarks.step import RATE
from flipgrad.estimators import Estimator
from flipgrad.estimators.names import for_training
from flipgrad.machine import fastest
from flipgrad.objectives import CrossEntropy
from flipgrad.plots.loading import load
from flipgrad.plots.timing import Method, Times, TimingFile
from flipgrad.reproduce._workshop import Claim, Sheet, Workshop, experiment
from flipgrad.training.models import cifar_net

METHODS = ("psa:sampled", "concrete", "tanh", "reinforce", "adf", "local-reparam", "st", "hard-st")
BATCH = 64
# 45,000 training and 5,000 validation images, and draws per image for the measurements in an epoch, as in the paper.
TRAINING, VALIDATION, DRAWS = -(-45_000 // BATCH), -(-5_000 // BATCH), 10
# The network's width and the number of repeats.
SCALES = {"smoke": (0.0625, 1), "small": (1.0, 3), "paper": (1.0, 10)}
REFERENCE = "Tanh"


# The paper's table, on a GPU. Its Gumbel is Concrete at temperature 1.
PAPER = {
    "PSA": Times(0.013, 0.056, 105, 14),
    "Concrete 1": Times(0.009, 0.012, 77, 13),
    "Tanh": Times(0.005, 0.011, 77, 12.5),
    "REINFORCE": Times(0.014, 0.009, 77, 14),
    "ADF": Times(0.012, 0.031, 91.5, 14),
    "LocalReparam": Times(0.015, 0.029, 98, 14),
    "ST": Times(0.009, 0.011, 77, 13),
    "HardST": Times(0.009, 0.011, 77, 13),
}


@experiment("timing", "Table of running times", seconds=(4, 120, 350))
def running_times(shop: Workshop) -> Iterator[Claim | Sheet]:
    """Appendix C.2: running times.

    Seconds of a batch forward and backward, and of epochs with measurements by 10 samples per image, of eight methods on a GPU.
    PSA's step takes 4.3 times Tanh's, its epoch 1.4 times.
    """
    path = shop.stored("timing")
    if not path.exists():
        width, repeats = SCALES[shop.scale_name]
        measured = measure(width, repeats, shop)
        methods = {name: asdict(Method(PAPER[name], times)) for name, times in measured.items()}
        facts = {"batch": BATCH, "width": width, "threads": torch.get_num_threads(), "repeats": repeats}
        shop.store("timing", {"methods": methods, "reference": REFERENCE, **facts})
    plots.timing(path, shop.folder / "timing")
    file = load(path, TimingFile)
    yield from claims(file)
    yield table(file)


def measure(width: float, repeats: int, shop: Workshop) -> dict[str, Times]:
    """Time all methods in turns, and take the fastest of the repeats, after one that does not count.

    It runs alone, on all threads, so that nothing else is timed. Epochs are not run: their times are those of their batches,
    with an update each, and of the passes that measure.
    """
    generator = torch.Generator().manual_seed(shop.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shop.seed)
        net = cifar_net(width)
    x = torch.randn(BATCH, 3, 32, 32, generator=generator)
    objective = CrossEntropy(torch.randint(10, (BATCH,), generator=generator))
    net.initialize(x, generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    methods = dict(for_training(method, BATCH) for method in METHODS)

    def parts(estimator: Estimator) -> dict[str, Callable[[], object]]:
        """The parts of an update and a pass that measures, to be run in this order."""
        losses: list[Tensor] = []

        def forward() -> None:
            optimizer.zero_grad(set_to_none=True)
            losses.append(net(x, objective, estimator=estimator, generator=generator).mean())

        def draw() -> None:
            with torch.no_grad():
                net(x, generator=generator)

        return {"forward": forward, "backward": lambda: losses.pop().backward(), "update": optimizer.step, "draw": draw}

    works = {f"{label}: {part}": work for label, rule in methods.items() for part, work in parts(rule).items()}
    total = (repeats + 1) * len(works)
    seconds = fastest(works, repeats=repeats, done=lambda work: shop.report(f"timing: {work}", 1, total))
    # The network that is measured is the same one for all methods.
    draws = DRAWS * min(seconds[f"{label}: draw"] for label in methods)

    def times(label: str) -> Times:
        forward, backward, update = (seconds[f"{label}: {part}"] for part in ("forward", "backward", "update"))
        return Times(forward, backward, TRAINING * (forward + backward + update + draws), VALIDATION * draws)

    return {label: times(label) for label in methods}


def table(file: TimingFile) -> Sheet:
    """Both tables: seconds, and in brackets the ratio to Tanh."""
    columns = [(key, who) for key in ("forward", "backward", "train_epoch", "val_epoch") for who in ("paper", "ours")]

    def entry(name: str, key: str, who: str) -> str:
        value = getattr(getattr(file.methods[name], who), key)
        return f"{f'{value:,.0f}' if value >= 100 else f'{value:.3g}'} ({file.ratio(name, who, (key,)):.2f})"

    return Sheet(
        "Seconds, and in brackets the ratio to Tanh, an ordinary network of the same size. The paper's are of a GPU. Our "
        "epochs are computed from the times of batches.",
        ["method", *(f"{key.replace('_', ' ')}, {who}" for key, who in columns)],
        [[name, *(entry(name, *column) for column in columns)] for name in file.methods],
    )


def claims(file: TimingFile) -> Iterator[Claim]:
    """A step of PSA and of ST, and an epoch of PSA with its measurements, over those of Tanh."""
    step = "forward and backward, costs a small constant factor more than an ordinary network's (not more than in the paper)"
    epoch = "within an epoch with its measurements the difference is small (no more than in the paper)"
    for name, keys, text, what in (
        ("PSA", ("forward", "backward"), f"a step of PSA, {step}", "over Tanh"),
        ("ST", ("forward", "backward"), f"a step of ST, {step}", "over Tanh"),
        ("PSA", ("train_epoch",), epoch, "an epoch of PSA over one of Tanh"),
    ):
        own, paper = (file.ratio(name, who, keys) for who in ("ours", "paper"))
        yield Claim(text, own <= paper, f"{what}: {own:.2f} here, {paper:.2f} in the paper")
