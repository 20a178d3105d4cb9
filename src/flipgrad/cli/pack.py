"""``flipgrad pack``."""

from pathlib import Path
from reprlib import repr as brief
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import flipgrad
from flipgrad import packed
from flipgrad.cli._trained import Trained, trained
from flipgrad.costs import summary
from flipgrad.errors import InputError
from flipgrad.network import Sequential
from flipgrad.packed.c_source import to_c

BITS, C = "bits", "c"
ENDINGS = {BITS: ".safetensors", C: ".c"}
C_PANEL = "C code"
# By how much an output may differ from PyTorch's, relative to the largest.
TOLERANCE = 1e-5
# Examples that are compared: without a compiler one takes a tenth of a second.
COMPARED = 32
# What flipgrad.data.sets.from_bytes does, also with the 17 greys of the digits as 0 to 255.
PIXELS = {"pixel_scale": 1 / 127.5, "pixel_shift": -1.0}

Numbers = Annotated[str, typer.Option(help="First layer and head: float, double (exact) or fixed.", rich_help_panel=C_PANEL)]
Stream = Annotated[str, typer.Option(help="Residual blocks' stream: int16, int32 or real.", rich_help_panel=C_PANEL)]
Stochastic = Annotated[bool, typer.Option("--stochastic", help="Draw samples, too: it needs tables.", rich_help_panel=C_PANEL)]
Main = Annotated[
    bool, typer.Option("--main", help="A program, too, that classifies its standard input.", rich_help_panel=C_PANEL)
]


def pack(
    run: Annotated[str, typer.Argument(help="Folder of a run of flipgrad train, or zoo:NAME for a network of flipgrad zoo.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file, .safetensors, or .c whose name is that of the function; one that is there is replaced.",
            show_default="net.safetensors, or net.c",
        ),
    ] = None,
    to: Annotated[str, typer.Option(help="bits, for a file of these, or c, for C code without dependencies.")] = BITS,
    data_folder: Annotated[
        str | None, typer.Option(help="Where the data set's files of a run are now, if they were moved.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The run's own package.module:function again: no code is run that only a file names.")
    ] = None,
    estimator: Annotated[str | None, typer.Option(help="The run's own package.module:Name again, likewise.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="A smaller file, of which no samples can be drawn.")
    ] = False,
    numbers: Numbers = "float",
    stream: Stream = "int16",
    stochastic: Stochastic = False,
    main: Main = False,
) -> None:
    """Write a trained network with binary weights as a file of bits, which runs without torch.

    flipgrad predict uses it and, in Python, flipgrad.packed.load. With --to c it becomes C code for small devices.
    """
    if to not in ENDINGS:
        raise InputError(f"--to {brief(to)}: choose {' or '.join(ENDINGS)}")
    ending = ENDINGS[to]
    output = output or Path(f"net{ending}")
    if output.suffix.lower() != ending:
        raise InputError(f"--output {brief(str(output))} does not end with {ending}: name a file that does, e.g. net{ending}")
    if to == BITS and (numbers, stream, stochastic, main) != ("float", "int16", False, False):
        raise InputError("--numbers, --stream, --stochastic and --main are about C code: add --to c, or leave them")
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
    net = packed.pack(found.net, found.examples, facts, draws=not deterministic)
    if to == C:
        _write_c(net, found, output, numbers, stream, stochastic, main)
    else:
        _write_bits(net, found, output)


def _write_bits(net: packed.PackedNetwork, found: Trained, output: Path) -> None:
    """Writes the file of bits, and prints how large it is."""
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
    console.print(
        f"Use it: flipgrad predict {output} {'inputs.npy' if net.facts.pixel_scale is None else 'image.png'}", soft_wrap=True
    )


def _write_c(
    net: packed.PackedNetwork, found: Trained, output: Path, numbers: str, stream: str, stochastic: bool, main: bool
) -> None:
    """Writes the network as C code, and prints what this needs."""
    options: dict[str, Any] = {"numbers": numbers, "stream": stream, "stochastic": stochastic}
    code = to_c(net, output.stem, **options, examples=found.examples.numpy())
    names = ", ".join(str(path) for path in code.save(output.parent, main))
    size = code.compiled()
    compiled = f"; compiled here {size.flash:,} bytes of flash and {size.ram:,} of RAM" if size else ""
    console = Console(markup=False, highlight=False)
    console.print(f"{names}: {code.flash:,} bytes of constants, {code.ram:,} bytes of buffers{compiled}", soft_wrap=True)
    more = f" {output.stem}_main.c -o {output.stem} -lm" if main else " -c"
    console.print(f"Use it: cc -std=c99 -O2 {output.name}{more}", soft_wrap=True)


def _same(found: Trained, net: packed.PackedNetwork) -> int:
    """The number of examples for which a packed network without noise has PyTorch's outputs."""
    x = found.examples[:COMPARED]
    with torch.no_grad():
        expected = found.net.deterministic(x)
    outputs = torch.from_numpy(net(x.numpy()))
    return int(((outputs - expected).abs().amax(1) <= TOLERANCE * expected.abs().max()).sum())
