"""``flipgrad predict``: without torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Column, Table

from flipgrad import memory
from flipgrad.errors import InputError
from flipgrad.packed import PackedNetwork, load
from flipgrad.packed.inputs import Inputs, read_inputs
from flipgrad.packed.network import probabilities

# Of a member's output and its probability in single precision, and of a double-precision number on the way to it.
BYTES_PER_OUTPUT = 4 + 4 + 8
# Members of the ensemble, if the user does not say.
SAMPLES = 10


def predict(
    network: Annotated[Path, typer.Argument(help="File of flipgrad pack.")],
    inputs: Annotated[list[Path], typer.Argument(help="Images (.png, .jpg), or arrays (.npy) of one input or a batch.")],
    samples: Annotated[
        int | None,
        typer.Option(
            help="Members of the ensemble; 0 for the network without noise.",
            show_default="10, or 0 if it was packed without draws",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of their draws: the same seed gives the same answers on every machine.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the probabilities of all classes.")] = False,
) -> None:
    """Classify images with a packed network, without torch: class, probability, and how much the members disagree.

    Images are resized to the network's size. Arrays of bytes are pixels, other arrays are inputs as the network takes them. The
    answer for one file does not depend on the others.
    """
    if samples is not None and samples < 0:
        raise InputError(f"--samples {samples}: give at least 1, or 0 for the network without noise")
    net = load(network)
    if samples is None:
        samples = SAMPLES if net.draws else 0
    # All of them are looked at before the first is computed.
    given = [(path, read_inputs(path, net)) for path in inputs]
    found = [answer for path, read in given for answer in _answers(net, path, read, samples, seed)]
    if as_json:
        facts = {"network": str(network), "data": net.facts.data, "classes": _class_names(net), "engine": net.engine}
        typer.echo(json.dumps({**facts, "samples": samples, "seed": seed, "predictions": found}, indent=2))
        return
    columns = [Column(name, justify="right") for name in ("probability", *(["disagree"] if samples else []))]
    table = Table(Column("input", overflow="fold"), "class", *columns)
    for answer in found:
        row = [answer["input"], answer["class"], f"{answer['probability']:.1%}"]
        table.add_row(*row, *([f"{round(answer['disagreement'] * samples)} of {samples}"] if samples else []))
    console = Console(markup=False, highlight=False)
    console.print(table)
    resized = sum(read.resized for _, read in given)
    if resized:
        height, width = net.inputs[1:]
        console.print(f"{resized} image{'s' * (resized > 1)} resized to {width}x{height} pixels")


def _answers(net: PackedNetwork, path: Path, read: Inputs, samples: int, seed: int) -> Iterator[dict[str, Any]]:
    """What is said of every input of a file."""
    members_of = f"{samples:,} members for {len(read.x):,} inputs"
    memory.check_fits(
        BYTES_PER_OUTPUT * samples * len(read.x) * net.outputs, members_of, "give fewer --samples, or fewer inputs"
    )
    # [members, inputs, classes]
    members = probabilities(net.members(read.x, samples, seed) if samples else net(read.x)[None])
    if net.outputs == 1:
        # The probability of the second class of two.
        members = np.concatenate([1 - members, members], -1)
    names = _class_names(net)
    means = members.mean(0, dtype=np.float64)
    for number, (mean, each) in enumerate(zip(means, members.swapaxes(0, 1), strict=True)):
        best = int(mean.argmax())
        yield {
            "input": f"{path}[{number}]" if len(means) > 1 else str(path),
            "class": names[best],
            "probability": float(mean[best]),
            "disagreement": float((each.argmax(-1) != best).mean()),
            "probabilities": mean.tolist(),
            "resized": read.resized,
        }


def _class_names(net: PackedNetwork) -> tuple[str, ...]:
    """Names of the classes, or their numbers; one output is about two of them."""
    return net.facts.classes or tuple(map(str, range(max(2, net.outputs))))
