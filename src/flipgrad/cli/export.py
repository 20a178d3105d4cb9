"""``flipgrad export``."""

import json
from importlib.util import find_spec
from pathlib import Path
from reprlib import repr as brief
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

from flipgrad.cli._trained import Trained, trained
from flipgrad.data import SOURCES
from flipgrad.errors import InputError
from flipgrad.export import OPSET, FixedNet, OnnxSession, deterministic, member, write_onnx
from flipgrad.sampling import check_seed

ONNX = "onnx"
ENDING = ".onnx"
# What outputs of onnxruntime and torch may differ by, relative to the largest.
TOLERANCE = 1e-5


def export(
    run: Annotated[str, typer.Argument(help="Folder of a run of flipgrad train, or zoo:NAME for a network of flipgrad zoo.")],
    to: Annotated[str, typer.Option(help="The format: onnx.")] = ONNX,
    output: Annotated[Path, typer.Option(help="The file, which ends with .onnx; one that is there is replaced.")] = Path(
        "net.onnx"
    ),
    as_member: Annotated[
        bool, typer.Option("--member", help="One member of the ensemble, its noise drawn now (default: no noise).")
    ] = False,
    seed: Annotated[int, typer.Option(help="With --member: of its noise.")] = 0,
    batch_size: Annotated[int | None, typer.Option(help="The one size of batches (default: any).")] = None,
    data_folder: Annotated[
        str | None, typer.Option(help="Where the data set's files of a run are now, if they were moved.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The run's own package.module:function again: no code is run that only a file names.")
    ] = None,
    estimator: Annotated[str | None, typer.Option(help="The run's own package.module:Name again, likewise.")] = None,
) -> None:
    """Write a trained network for other programs: an ONNX file of standard operators, checked by onnxruntime if that is there.

    The input is called "inputs" and the output "outputs": a row of scores for every example, whose softmax gives probabilities.
    What the classes are called, and how inputs are made of pixels, is in its metadata.
    """
    check_seed(seed)
    if to != ONNX:
        raise InputError(f"--to {brief(to)}: choose {ONNX}")
    if output.suffix.lower() != ENDING:
        raise InputError(f"--output {brief(str(output))} does not end with {ENDING}: name a file that does, e.g. net{ENDING}")
    if not output.parent.is_dir():
        raise InputError(f"--output {brief(str(output))} is in a folder that is not there: make that first")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"--batch-size {batch_size}: give at least 1, or leave it out for batches of any size")
    found = trained(run, data_folder=data_folder, model=model, estimator=estimator)
    facts, plain = {**_facts(found), "kind": "deterministic"}, deterministic(found.net)
    if as_member:
        noise = torch.Generator().manual_seed(seed)
        plain = member(found.net.member(found.examples[:1], generator=noise))
        facts |= {"kind": "member", "seed": str(seed)}
    write_onnx(plain, found.examples, output, batch_size=batch_size, metadata=facts)
    console = Console(markup=False, highlight=False)
    size = f"{output.stat().st_size:,} bytes"
    console.print(
        f"{facts['kind'].capitalize()} network in {output}: ONNX, operators of version {OPSET}, {size}", soft_wrap=True
    )
    console.print(_checked(plain, found.examples, output, batch_size), soft_wrap=True)


def _facts(found: Trained) -> dict[str, str]:
    """What a user of the file needs to know, as texts."""
    source = SOURCES[found.config.data]
    told = {
        **found.origin,
        "data": found.config.data,
        "inputs": f"{'x'.join(map(str, found.examples.shape[1:]))}: {source.inputs}",
        "outputs": "scores of the classes; their softmax gives probabilities",
        "classes": json.dumps(found.class_names),
        "weights": found.config.weights,
    }
    return told if found.accuracy is None else {**told, "accuracy": json.dumps(found.accuracy)}


def _checked(plain: FixedNet, examples: Tensor, file: Path, batch_size: int | None) -> str:
    """What onnxruntime makes of the file, in words, where it is installed."""
    if find_spec("onnxruntime") is None:
        return "Not checked: pip install onnxruntime, and it is."
    session, size = OnnxSession(file), batch_size or len(examples)
    batches = [batch for batch in examples.split(size) if len(batch) == size] or [
        examples[:1].repeat(size, *[1] * (examples.dim() - 1))
    ]
    expected, found = (torch.cat([net(batch) for batch in batches]) for net in (plain, session))
    differences = (found - expected).abs().amax(1) / expected.abs().max().clamp(min=1)
    same = int((differences <= TOLERANCE).sum())
    # Rounding decides a unit whose pre-activation is its noise but for rounding: of a few examples, outputs differ more.
    if 2 * same < len(expected):
        file.unlink()
        raise RuntimeError(f"onnxruntime gives other outputs than torch for {len(expected) - same} of {len(expected)} examples")
    return f"Checked by onnxruntime: {same} of {len(expected)} examples have torch's outputs, to {TOLERANCE:g} of the largest"
