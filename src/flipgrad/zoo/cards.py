"""What is told of a trained network: its recipe, its curves, and how good it is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from reprlib import repr as brief
from typing import Any, final

from flipgrad.data import SOURCES, VARIABLE
from flipgrad.errors import InputError
from flipgrad.estimators.names import is_user_estimator
from flipgrad.training import EnsembleSize, Evaluation, TrainConfig
from flipgrad.user_code import is_user_function

# What is kept of the metrics of an epoch.
CURVES = (
    *("epoch", "objective", "lr", "seconds", "split", "samples", "accuracy_1", "accuracy_n", "accuracy_deterministic"),
    *("expected_loss", "marginal_loss"),
)
# What a page shows of the numbers on the test examples, and of those by the number of samples.
TEST = tuple(each.name for each in fields(Evaluation))
SIZES = tuple(each.name for each in fields(EnsembleSize))
# Numbers of one input: with more, a card is not one of ours.
MOST_NUMBERS = 2**24
# Epochs that the page shows of a training.
SHOWN_EPOCHS = 6


@final
@dataclass(frozen=True)
class Card:
    """A trained network of the zoo.

    Attributes:
        name: what it is called.
        command: the recipe, as it is typed; the same seed gives the same weights on the same machine.
        config: the same as a configuration, without the folder of the data, and with the name of the network in full.
        inputs: the shape of one input, [C, H, W] for images.
        classes: outputs of the head.
        data: the fingerprint of the data set that it was trained on.
        epochs: whole epochs of training; the configuration says how many were planned.
        parameters: numbers that were learned.
        precision: of the stored weights, "float16" or "float32".
        weights: the checksum of the stored weights.
        bytes: the size of their file.
        test: numbers of the stored network on the test examples, as :class:`flipgrad.training.Evaluation` has them.
        accuracy_float32: the same accuracy of the ensemble before the weights were rounded.
        ensembles: calibration, and accuracy by the number of samples, as :class:`flipgrad.training.Ensembles` has them.
        seed: of the draws of these measurements.
        curves: some metrics of every epoch.
        versions: of what it was trained with.
        machine: that it was trained on.
    """

    name: str
    command: str
    config: TrainConfig
    inputs: list[int]
    classes: int
    data: str
    epochs: int
    parameters: int
    precision: str
    weights: str
    bytes: int
    test: dict[str, Any]
    accuracy_float32: float
    ensembles: dict[str, Any]
    seed: int
    curves: list[dict[str, Any]]
    versions: dict[str, Any]
    machine: dict[str, Any]

    @property
    def seconds(self) -> float:
        """The time of training, without evaluation."""
        return float(sum(epoch["seconds"] for epoch in self.curves))

    @property
    def accuracy(self) -> float:
        """On the test examples, with as many samples as were averaged."""
        return float(self.test["accuracy_n"])

    def calibration_error(self, samples: int | None) -> float:
        """The expected calibration error with 1 sample, as many as were averaged, or None: of the deterministic network."""
        errors = {found["samples"]: float(found["error"]) for found in self.ensembles["reliability"]}
        if samples not in errors:
            raise InputError(
                f"the calibration of {self.name!r} was measured with {sorted(filter(None, errors))} samples, or None"
            )
        return errors[samples]

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return {**asdict(self), "config": self.config.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> Card:
        """The card of fields by name; an InputError begins with ``where`` they come from."""
        if not _is_card(values):
            raise InputError(f"{where} is no card of a network of this version of flipgrad; make it anew by flipgrad zoo --add")
        check_own(values["config"], where)
        sizes = values["inputs"]
        total = values["classes"]
        for size in sizes:
            total *= size if isinstance(size, int) and size > 0 else MOST_NUMBERS
        if not sizes or values["classes"] < 2 or total > MOST_NUMBERS:
            raise InputError(f"{where} tells inputs {sizes!r:.60} and {values['classes']} classes, which no network has")
        return cls(**{**values, "config": TrainConfig.from_json(values["config"], where)})

    def markdown(self) -> str:
        """The card as a section of a page."""
        return "\n".join(_lines(self)) + "\n"


def _is_card(values: Mapping[str, Any]) -> bool:
    """Whether every field is there and of its type, and measurements hold what a page shows of them."""
    types = {"str": str, "int": int, "float": float, "list": list, "dict": dict, "TrainConfig": dict}
    wanted = {each.name: types[str(each.type).partition("[")[0]] for each in fields(Card)}
    if values.keys() != wanted.keys() or not all(isinstance(values[name], kind) for name, kind in wanted.items()):
        return False
    tables = {name: values["ensembles"].get(name) for name in ("sizes", "reliability")}
    rows = {**tables, "curves": values["curves"], "test": [values["test"]]}
    needed = {"curves": CURVES, "test": TEST, "sizes": SIZES, "reliability": ("samples", "error")}
    return all(
        isinstance(rows[name], list)
        and rows[name]
        and all(isinstance(row, dict) and row.keys() >= set(keys) for row in rows[name])
        for name, keys in needed.items()
    )


def check_own(config: object, where: str) -> None:
    """Refuse a configuration that names code of a user's own: a network of the zoo is made from our own names alone."""
    values = config if isinstance(config, Mapping) else {}
    model, estimator = (str(values.get(name, "")) for name in ("model", "estimator"))
    if is_user_function(model) or is_user_estimator(estimator):
        code = model if is_user_function(model) else estimator
        raise InputError(
            f"{where} names your own code {brief(code)}; networks of the zoo are of flipgrad's own models and estimators"
        )


def recipe(config: TrainConfig) -> str:
    """The command that trains as ``config`` says; the folder of a data set is that of ``$FLIPGRAD_DATA``.

    >>> recipe(TrainConfig(weights="binary", lr=0.1))
    'flipgrad train --weights binary --lr 0.1'
    """
    words = ["flipgrad", "train"]
    for option in fields(config):
        value = getattr(config, option.name)
        # The command takes all cores for data sets that are read from files, where the configuration has one thread.
        counted = option.name == "threads" and SOURCES[config.data].needs_folder
        if value != option.default or counted:
            text = f"${VARIABLE}/{config.data}" if option.name == "data_folder" else shlex.quote(str(value))
            words += [f"--{option.name.replace('_', '-')}", text]
    return " ".join(words)


def overview(cards: Sequence[Card]) -> list[list[str]]:
    """A table of networks: the names of its columns, then a row for each.

    Accuracies with samples and of the deterministic network, the expected calibration error, and minutes of training.
    """
    many = " or ".join(sorted({f"{card.test['samples']} samples" for card in cards})) or "samples"
    rows = [["network", many, "1 sample", "no noise", "ECE", "kB", "minutes"]]
    for card in cards:
        shares = [card.accuracy, card.test["accuracy_1"], card.test["accuracy_deterministic"]]
        sizes = [f"{card.bytes / 1000:,.0f}", f"{card.seconds / 60:.1f}"]
        error = card.calibration_error(card.test["samples"])
        rows.append([card.name, *(f"{share:.2%}" for share in shares), f"{error:.2%}", *sizes])
    return rows


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table of rows, the first one its head."""
    head, *body = rows
    for row in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(row)} |"


def _lines(card: Card) -> Iterator[str]:
    """The lines of a card in Markdown."""
    test, samples = card.test, card.test["samples"]
    planned = "" if card.epochs == card.config.epochs else f" of {card.config.epochs} planned"
    yield f"## {card.name}"
    yield ""
    yield f"`{card.command}`"
    yield ""
    yield (
        f"{card.parameters:,} parameters in {card.bytes:,} bytes ({card.precision}), {card.epochs} epochs{planned}, "
        f"{_minutes(card.seconds)} of training with {card.config.threads} thread{'s' * (card.config.threads > 1)}, seed "
        f"{card.config.seed}; inputs {'x'.join(map(str, card.inputs))}, {card.classes} classes. Measured with seed {card.seed} "
        f"on the test examples; before rounding, {samples} samples had {card.accuracy_float32:.2%}."
    )
    yield ""
    kinds = [("1 sample", 1), (f"{samples} samples", samples), ("deterministic", None)]
    accuracies = [test["accuracy_1"], test["accuracy_n"], test["accuracy_deterministic"]]
    losses = [f"{test['expected_loss']:.4f}", f"{test['marginal_loss']:.4f}", "–"]
    yield from table(
        [
            ["", *(name for name, _ in kinds)],
            ["accuracy", *(f"{share:.2%}" for share in accuracies)],
            ["cross-entropy", *losses],
            ["expected calibration error", *(f"{card.calibration_error(count):.2%}" for _, count in kinds)],
        ]
    )
    yield ""
    sizes = card.ensembles["sizes"]
    yield from table(
        [
            ["samples", *(str(size["samples"]) for size in sizes)],
            ["accuracy ± standard error", *(f"{size['accuracy']:.2%} ± {size['accuracy_error']:.2%}" for size in sizes)],
            ["marginal cross-entropy", *(f"{size['loss']:.4f} ± {size['loss_error']:.4f}" for size in sizes)],
        ]
    )
    yield ""
    yield from table(
        [["epoch", "training objective", *(f"{kind}, {card.curves[0]['split']}" for kind, _ in kinds)], *_epochs(card)]
    )


def _epochs(card: Card) -> Iterator[list[str]]:
    """A few epochs of the training, evenly spaced, and the last one."""
    last = len(card.curves) - 1
    for number in sorted({round(last * part / (SHOWN_EPOCHS - 1)) for part in range(SHOWN_EPOCHS)}):
        epoch = card.curves[number]
        accuracies = (epoch["accuracy_1"], epoch["accuracy_n"], epoch["accuracy_deterministic"])
        yield [str(epoch["epoch"]), f"{epoch['objective']:.4f}", *(f"{share:.2%}" for share in accuracies)]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
