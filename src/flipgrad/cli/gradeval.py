"""``flipgrad gradeval``."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

from flipgrad import exact, files, plots
from flipgrad.cli._shared import Work, whole_numbers, working
from flipgrad.data import toy
from flipgrad.errors import InputError
from flipgrad.estimators import ESTIMATORS, Estimator
from flipgrad.gradeval import REFERENCE_FACTOR, Accuracy, Result, by_name, check_options, evaluate
from flipgrad.graph import as_network
from flipgrad.network import BinaryNetwork
from flipgrad.noise import noise_by_name
from flipgrad.objectives import CrossEntropy, Objective
from flipgrad.training.config import check_device
from flipgrad.training.models import fully_connected
from flipgrad.training.reference_training import check_epochs, reference_training
from flipgrad.user_code import call_user_function, check_runs

PAPER = "reinforce,arm,concrete:0.1,concrete,tanh,st,psa:sampled"


class _Subject(NamedTuple):
    """What is measured, and what its files are called."""

    name: str
    title: str
    net: BinaryNetwork
    x: Tensor
    objective: Objective


# Makes what is measured, one after the other; what can be wrong with it was found out before.
_Make = Callable[[Work], Iterable[_Subject]]


def gradeval(
    widths: Annotated[str, typer.Option(help="Units of every binary layer.")] = "5-5-5",
    estimators: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated, of {', '.join(ESTIMATORS)}; psa:sampled, concrete:0.1, arms:8, reinforce+mean work, too."
        ),
    ] = PAPER,
    samples: Annotated[int, typer.Option(help="Draws per estimator.")] = 10_000,
    noise: Annotated[str, typer.Option(help="Noise of the units: logistic, normal, laplace, uniform.")] = "logistic",
    epochs: Annotated[str, typer.Option(help="Epochs of the reference training to look at; 0 is before it.")] = "1,100,2000",
    model: Annotated[
        str | None,
        typer.Option(
            help="Your own: package.module:function that returns (network, inputs, objective); it may be written by hand."
        ),
    ] = None,
    reference: Annotated[
        str, typer.Option(help="The truth: exact, the name of an unbiased estimator, or auto (exact if possible).")
    ] = "auto",
    reference_samples: Annotated[int | None, typer.Option(help="Draws of such an estimator (default: 100 x samples).")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device: cpu, cuda, ...")] = "cpu",
    workers: Annotated[int | None, typer.Option(help="Threads that draw side by side (default: one per core).")] = None,
    output: Annotated[Path, typer.Option(help="Folder for JSON files and figures.")] = Path("results/gradeval"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace earlier files in that folder.")] = False,
) -> None:
    """Measure gradient estimators against the exact gradient: bias, variance, RMSE and cosine per layer.

    By default on the paper's problem: 200 points in the plane and a 5-5-5 network at epochs 1, 100 and 2,000 of a training.
    """
    names = estimators.split(",")
    # Mistakes are told before hours of work.
    by_name(names, lambda: torch.zeros(1))
    truth = _truth(reference)
    check_options(samples, seed, truth, reference_samples, workers)
    check_device(device)
    make = _user_subject(model) if model is not None else _toy(widths, epochs, noise, seed)
    console = Console(markup=False, highlight=False)
    folder = files.new_folder(output, overwrite=overwrite)
    options = {"seed": seed, "reference": truth, "reference_samples": reference_samples, "workers": workers}
    paths: dict[str, Path] = {}
    try:
        with working(console) as work:
            for subject in make(work):
                result = _measure(subject, names, samples, work, device, options)
                paths[subject.title] = folder / f"{subject.name}.json"
                result.write(paths[subject.title], title=subject.title, device=device)
                _print(console, subject.title, result)
    except KeyboardInterrupt:
        console.print(f"Interrupted. {len(paths)} finished results are in {folder}")
        raise
    for title, path in paths.items():
        panels = [plots.Panel(path, layer, layer) for layer in plots.layers(path)]
        plots.rmse(panels, folder / f"{path.stem}-rmse", title=title)
    first = plots.layers(next(iter(paths.values())))[0]
    plots.cosine([plots.Panel(path, first, title) for title, path in paths.items()], folder / "cosine")
    written = ", ".join(path.name for path in paths.values())
    console.print(f"Results ({written}) and figures are in {folder}", soft_wrap=True)


def _measure(subject: _Subject, names: list[str], samples: int, work: Work, device: str, options: Mapping[str, Any]) -> Result:
    net, x, objective = subject.net.to(device), subject.x.to(device), subject.objective
    rules = by_name(names, lambda: exact.expected_loss(net.network(), x, objective).detach())
    of_reference = options["reference_samples"] or REFERENCE_FACTOR * samples

    def report(name: str, new: int) -> None:
        total = of_reference if name == "reference" else samples * len(rules)
        work.advance(f"{subject.title}{' reference' * (name == 'reference')}: {name}", new, total)

    return evaluate(net, x, objective, rules, samples, report=report, **options)


def _toy(widths: str, epochs: str, noise: str, seed: int) -> _Make:
    data = toy(seed=seed).train
    units, wanted = whole_numbers(widths, "--widths", "-"), whole_numbers(epochs, "--epochs", ",")
    check_epochs(wanted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = fully_connected(2, units, 2, noise=noise_by_name(noise))

    def make(work: Work) -> Iterator[_Subject]:
        def report(epoch: int) -> None:
            work.advance("reference training", 1, max(wanted))

        for epoch, trained in reference_training(data, units, wanted, net=net, seed=seed, report=report).items():
            yield _Subject(f"epoch-{epoch}", f"{widths}, epoch {epoch:,}", trained, data.x, CrossEntropy(data.y))

    return make


def _user_subject(model: str) -> _Make:
    made = call_user_function(model)
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and isinstance(made[1], Tensor)):
        raise InputError(
            f"--model {brief(model)} must return (network, inputs [B, ...], objective), the network a flipgrad.Sequential or a "
            f"model of binary layers written by hand, got {brief(made)}"
        )
    net = check_runs(model, made[0], made[1], as_network)
    return lambda work: [_Subject("model", model.partition(":")[2], net, *made[1:])]


def _truth(name: str) -> Estimator | Literal["auto"]:
    if name == "auto":
        return "auto"
    if name not in ESTIMATORS:
        raise InputError(f"--reference {name!r}: give auto, exact, or an unbiased estimator such as disarm")
    return ESTIMATORS[name]()


def _print(console: Console, title: str, result: Result) -> None:
    most = next(iter(result.estimators.values())).layers[0].samples[-1]
    tables: dict[str, Callable[[Accuracy], str]] = {
        f"relative RMSE, 1 → {most:,} draws": lambda layer: f"{layer.rmse[0]:.2g} → {layer.rmse[-1]:.2g}",
        "relative bias": lambda layer: f"{layer.bias:.2g}" if layer.bias_low > 0 else f"< {layer.bias_high:.2g}",
        "cosine of 1 draw": lambda layer: f"{layer.cosine_mean[0]:.3f}",
    }
    for what, cell in tables.items():
        columns = [Column(layer.name, justify="right", no_wrap=True) for layer in result.reference.layers]
        table = Table(Column("estimator", no_wrap=True), *columns, title=f"{title}: {what}")
        for name, measured in result.estimators.items():
            table.add_row(name, *(cell(layer) for layer in measured.layers))
        console.print(table)
    rates = ", ".join(
        f"{name} {measured.samples_per_second:,.0f}{'' if measured.vectorised else ' (one by one)'}"
        for name, measured in result.estimators.items()
    )
    console.print(f"Draws per second: {rates}", soft_wrap=True)
    if result.reference.kind == "draws":
        errors = ", ".join(f"{layer.name} {layer.error:.1%}" for layer in result.reference.layers)
        draws = f"{result.reference.draws:,} draws of {result.reference.estimator}"
        console.print(f"Compared with the mean of {draws}, whose own relative standard error is: {errors}", soft_wrap=True)
