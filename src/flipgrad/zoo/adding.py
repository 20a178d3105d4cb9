"""Makes a network of the zoo from a finished run: one command, whatever the architecture."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from reprlib import repr as brief

import torch
from torch import Tensor, nn

from flipgrad import files, tensor_files
from flipgrad.connections import Connections
from flipgrad.data import SOURCES
from flipgrad.errors import InputError
from flipgrad.training import Evaluation, Run, RunFolder, TrainConfig, evaluate, load_run, measure_ensembles
from flipgrad.training.config import AUTO
from flipgrad.training.ensembles import usual_sizes
from flipgrad.training.run import resume_command
from flipgrad.zoo.cards import CURVES, Card, check_own, recipe
from flipgrad.zoo.folder import BITS, FORMAT, Zoo, as_bits, full_precision, half_precision

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
NO_RUN = "give the folder of a run of flipgrad train"


def add(zoo: Zoo, run: Path, name: str, *, data_folder: str | None = None, samples: int | None = None, seed: int = 0) -> Card:
    """Put the network of a ``run`` into the ``zoo``, in place of one of the same name, and measure it for its card.

    The weights are those of the run's last whole epoch. They are stored in half precision, and binary weights that are not
    drawn as bits, if that costs no more than one standard error of the accuracy with ``samples``; the numbers of the card are
    those of the weights that are stored.

    Args:
        zoo: where to put it.
        run: the folder of ``flipgrad train``.
        name: what to call it: small letters, digits and hyphens.
        data_folder: where the data set's files are, if they were moved.
        samples: draws per example for the numbers of the card; by default those of the run.
        seed: of these draws.

    Raises:
        InputError: if the run names code of a user's own, was trained on other data, or has no whole epoch; if the name is
            none; or if the zoo would become too large.
    """
    if not NAME.fullmatch(name):
        raise InputError(
            f"a network cannot be called {brief(name)}; give small letters, digits and hyphens, e.g. digits-binary"
        )
    origin = files.read_json(run / RunFolder.CONFIG, missing=NO_RUN, broken=NO_RUN)
    check_own(origin.get("config"), f"the run in '{run}'")
    trained = load_run(run, data_folder=data_folder)
    if not trained.same_data:
        raise InputError(f"the run in '{run}' was trained on other data than are there now; put them back as they were")
    records = files.read_json_lines(run / RunFolder.METRICS, missing=NO_RUN, broken=NO_RUN)
    if not records:
        raise InputError(f"the run in '{run}' has no whole epoch yet; go on with {resume_command(run)}")
    count = trained.config.eval_samples if samples is None else samples
    stored, found, before = _rounded(trained, count, seed)
    content = tensor_files.tensors_to_bytes(FORMAT, stored)
    device, test = trained.config.device, trained.data.test
    noise = torch.Generator(device).manual_seed(seed)
    sizes = [size for size in usual_sizes(count) if size <= count]
    card = Card(
        name=name,
        command=recipe(trained.config),
        config=_portable(trained.config),
        inputs=list(test.x.shape[1:]),
        classes=trained.data.classes,
        data=trained.data.fingerprint,
        epochs=len(records),
        parameters=sum(parameter.numel() for parameter in trained.net.parameters()),
        precision="float16" if torch.float16 in {tensor.dtype for tensor in stored.values()} else "float32",
        weights=tensor_files.tensors_checksum(stored),
        bytes=len(content),
        test=asdict(found),
        accuracy_float32=before.accuracy_n,
        ensembles=asdict(measure_ensembles(trained.net, test.to(device), count, sizes, generator=noise)),
        seed=seed,
        curves=[{key: record[key] for key in CURVES} for record in records],
        versions=origin.get("versions", {}),
        machine=origin.get("machine", {}),
    )
    zoo.store(card, content)
    return card


def _rounded(run: Run, samples: int, seed: int) -> tuple[dict[str, Tensor], Evaluation, Evaluation]:
    """The weights to store, which the network of ``run`` then has; its numbers with these, and before they were rounded."""
    full = {key: tensor.detach().clone() for key, tensor in run.net.state_dict().items()}
    signs = _signs(run.net)
    half = {key: half_precision(tensor) for key, tensor in full.items() if key not in signs}
    half |= {key + BITS: as_bits(full[key]) for key in signs}
    before = _evaluated(run, full, samples, seed)
    after = _evaluated(run, half, samples, seed)
    error = (before.accuracy_n * (1 - before.accuracy_n) / len(run.data.test)) ** 0.5
    if before.accuracy_n - after.accuracy_n <= error:
        return half, after, before
    return full, _evaluated(run, full, samples, seed), before


def _signs(net: nn.Module) -> list[str]:
    """The names of binary weights that are not drawn: of these nothing counts but the sign."""
    found = [
        f"{name}.weight"
        for name, module in net.named_modules()
        if isinstance(module, Connections) and module.weights == "binary" and module.weight_noise is None
    ]
    return [key for key in found if key in net.state_dict()]


def _evaluated(run: Run, weights: dict[str, Tensor], samples: int, seed: int) -> Evaluation:
    """The numbers of the network of ``run`` with these weights, on the test examples and always by the same draws."""
    run.net.load_state_dict(full_precision(weights, run.net.state_dict()))
    noise = torch.Generator(run.config.device).manual_seed(seed)
    return evaluate(run.net, run.data.test.to(run.config.device), samples, generator=noise)


def _portable(config: TrainConfig) -> TrainConfig:
    """The configuration as any machine can use it, which names its network even if that was left to the data set."""
    name = SOURCES[config.data].model if config.model == AUTO else config.model
    return replace(config, data_folder=None, device="cpu", model=name or config.model)
