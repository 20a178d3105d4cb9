"""``flipgrad evaluate``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import flipgrad.zoo
from flipgrad import files, plots
from flipgrad.cli._shared import ZOO, check_no_own_code, evaluation_table, sizes_table, whole_numbers
from flipgrad.costs import summary
from flipgrad.data import SOURCES
from flipgrad.errors import InputError
from flipgrad.sampling import check_seed
from flipgrad.training import Run, RunFolder, load_run, measure_ensembles
from flipgrad.training import evaluate as measure
from flipgrad.training.predictions import describe


def evaluate(
    run: Annotated[str, typer.Argument(help="Folder of a run of flipgrad train, or zoo:NAME for a network of flipgrad zoo.")],
    samples: Annotated[int | None, typer.Option(help="Draws per image (default: the run's --eval-samples).")] = None,
    sample_counts: Annotated[
        str | None,
        typer.Option(help="Numbers of draws to compare on the test images (default: 1,2,5,10,... up to twice --samples)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.")] = 0,
    device: Annotated[str | None, typer.Option(help="Torch device (default: the run's).")] = None,
    data_folder: Annotated[
        str | None,
        typer.Option(help="Where the data set's files are now, if they were moved (zoo: default $FLIPGRAD_DATA/DATA)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The run's own package.module:function again: no code is run that only a file names.")
    ] = None,
    estimator: Annotated[str | None, typer.Option(help="The run's own package.module:Name again, likewise.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the files of a network of the zoo (default: none are written).")
    ] = None,
) -> None:
    """Measure a trained network: accuracies, losses and calibration with one, many and no samples, and what layers cost.

    Stores evaluation.json and report.html.
    """
    check_seed(seed)
    sizes = None if sample_counts is None else whole_numbers(sample_counts, "--sample-counts", ",")
    if run.startswith(ZOO):
        name = run.removeprefix(ZOO)
        check_no_own_code(model, estimator)
        loaded, folder = flipgrad.zoo.load_run(name, device=device, data_folder=data_folder), output
        if output is not None:
            _unfold(name, files.new_folder(output))
    elif output is not None:
        raise InputError("--output is for networks of the zoo; a run keeps its evaluation in its own folder: leave it out")
    else:
        folder = Path(run)
        loaded = load_run(folder, device=device, data_folder=data_folder, model=model, estimator=estimator)
    _evaluate(loaded, folder, samples, sizes, seed)


def _unfold(name: str, folder: Path) -> None:
    """Write what is told of the training of a network of the zoo as the files of a run, which a page is made of."""
    card = flipgrad.zoo.card(name)
    origin = {"command": card.command.split()[1:], "versions": card.versions, "machine": card.machine}
    files.write_json(folder / RunFolder.CONFIG, {"config": card.config.to_json(), **origin})
    files.write(folder / RunFolder.METRICS, "".join(files.json_line(epoch) + "\n" for epoch in card.curves).encode())


def _evaluate(loaded: Run, folder: Path | None, samples: int | None, sizes: list[int] | None, seed: int) -> None:
    """Measure a network, print what was found, and store it in the ``folder`` if there is one."""
    torch.set_num_threads(loaded.config.threads)
    device, count = loaded.config.device, loaded.config.eval_samples if samples is None else samples
    results = {}
    for name, split in {"validation": loaded.data.validation, "test": loaded.data.test}.items():
        if split is not None:
            noise = torch.Generator(device).manual_seed(seed)
            results[name] = measure(loaded.net, split.to(device), count, generator=noise)
    test = loaded.data.test.to(device)
    ensembles = measure_ensembles(loaded.net, test, count, sizes, generator=torch.Generator(device).manual_seed(seed))
    costs = summary(loaded.net, loaded.data.test.x[:1].to(device))
    console = Console(markup=False, highlight=False)
    tables = {f"{name.capitalize()} images": result for name, result in results.items()}
    console.print(evaluation_table(tables, {"Test images": ensembles}))
    console.print(sizes_table("Test images", ensembles))
    # As wide as it is: a table that is broken into shorter lines cannot be read.
    console.print(str(costs), soft_wrap=True)
    if not loaded.same_data:
        console.print("These are not, to the bit, the data that the network was trained on.")
    if folder is not None:
        file = folder / RunFolder.EVALUATION
        splits = {name: asdict(result) for name, result in results.items()}
        classes = loaded.data.class_names or SOURCES[loaded.config.data].class_names
        found = {**describe(loaded.net, test, count, seed=seed), "ensembles": asdict(ensembles)}
        content = {
            "splits": splits,
            "classes": list(classes),
            **found,
            "layers": [asdict(row) for row in costs.rows],
            "seed": seed,
        }
        files.write_json(file, {**content, "same_data": loaded.same_data, **files.provenance()})
        console.print(f"Numbers and examples are in {file}, and on the page {plots.report(folder)}", soft_wrap=True)
