"""``flipgrad pack``."""

from pathlib import Path
from reprlib import repr as brief
from typing import Annotated

import torch
import typer
from rich.console import Console

import flipgrad
from flipgrad import packed
from flipgrad.cli._trained import Trained, trained
from flipgrad.costs import summary
from flipgrad.errors import InputError
from flipgrad.network import Sequential

ENDING = ".safetensors"
# By how much an output may differ from PyTorch's, relative to the largest.
TOLERANCE = 1e-5
# Examples that are compared: without a compiler one takes a tenth of a second.
COMPARED = 32
# What flipgrad.data.sets.from_bytes does, also with the 17 greys of the digits as 0 to 255.
PIXELS = {"pixel_scale": 1 / 127.5, "pixel_shift": -1.0}


def pack(
    run: Annotated[str, typer.Argument(help="Folder of a run of flipgrad train, or zoo:NAME for a network of flipgrad zoo.")],
    output: Annotated[Path, typer.Option(help="The file, which ends with .safetensors; one that is there is replaced.")] = Path(
        "net.safetensors"
    ),
    data_folder: Annotated[
        str | None, typer.Option(help="Where the data set's files of a run are now, if they were moved.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The run's own package.module:function again: no code is run that only a file names.")
    ] = None,
    estimator: Annotated[str | None, typer.Option(help="The run's own package.module:Name again, likewise.")] = None,
) -> None:
    """Write a trained network with binary weights as a file of bits, which runs without torch.

    flipgrad predict uses it and, in Python, flipgrad.packed.load.
    """
    if output.suffix.lower() != ENDING:
        raise InputError(f"--output {brief(str(output))} does not end with {ENDING}: name a file that does, e.g. net{ENDING}")
    found = trained(run, data_folder=data_folder, model=model, estimator=estimator)
    if not isinstance(found.net, Sequential):
        raise InputError(
            f"{brief(run)} holds a model written by hand, whose steps are not known one by one: build it as "
            "fg.Sequential(*layers, head=...), and train that"
        )
    images = found.examples.dim() == 4
    facts = packed.Facts(
        classes=found.class_names,
        **(PIXELS if images else {}),
        accuracy=found.accuracy,
        data=found.config.data,
        made_by=f"flipgrad {flipgrad.__version__}",
    )
    net = packed.pack(found.net, found.examples, facts)
    same, compared = _same(found, net), min(COMPARED, len(found.examples))
    arrays = net.save(output)
    size, as_float = output.stat().st_size, summary(found.net, found.examples).float_bytes
    console = Console(markup=False, highlight=False)
    console.print(
        f"{output}: {size:,} bytes, {arrays:,} of them weights, which are {as_float:,} in float32: {as_float / arrays:.1f} "
        "times as many",
        soft_wrap=True,
    )
    console.print(f"Outputs of {same} of {compared} examples are PyTorch's, to {TOLERANCE:g} of the largest")
    console.print(f"Use it: flipgrad predict {output} {'image.png' if images else 'inputs.npy'}", soft_wrap=True)


def _same(found: Trained, net: packed.PackedNetwork) -> int:
    """The number of examples for which a packed network without noise has PyTorch's outputs."""
    x = found.examples[:COMPARED]
    with torch.no_grad():
        expected = found.net.deterministic(x)
    outputs = torch.from_numpy(net(x.numpy()))
    return int(((outputs - expected).abs().amax(1) <= TOLERANCE * expected.abs().max()).sum())
