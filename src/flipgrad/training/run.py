"""The folder of a run: configuration, metrics, weights, checkpoint, which one process writes; and a run read back from it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from flipgrad import files, tensor_files
from flipgrad.data import DataSet
from flipgrad.errors import InputError, StorageError
from flipgrad.estimators.names import is_user_estimator
from flipgrad.network import BinaryNetwork
from flipgrad.training.config import TrainConfig, load_data, make_net
from flipgrad.training.lock import FolderLock
from flipgrad.training.search import Trial
from flipgrad.user_code import is_user_function

# The kinds of our files of tensors, which change with the meaning of what is stored.
WEIGHTS_FORMAT = "weights 1"
CHECKPOINT_FORMAT = "checkpoint 2"
# Bytes: many times what a command line can hold.
LARGEST_CONFIG = 2**24


@final
@dataclass(frozen=True)
class Checkpoint:
    """The state of a training between two updates, in a file of tensors and JSON; nothing in it could run.

    Attributes:
        tensors: by name, with the part that they belong to in front ("net.head.weight").
        facts: the position, the configuration and the data's fingerprint, in what JSON can hold.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, without its name."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return tensor_files.tensors_to_bytes(CHECKPOINT_FORMAT, self.tensors, self.facts)

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        """The checkpoint in a ``file``.

        Raises:
            InputError: if there is none, or what is there is truncated, damaged or something else.
        """
        fix = "put the whole file back, or train anew with --overwrite"
        return cls(*tensor_files.read_tensors(file, CHECKPOINT_FORMAT, missing=fix, broken=fix))


@final
class RunFolder:
    """A folder that belongs to one run, new or gone on with; hold it with ``with``, or :meth:`close` it.

    Args:
        path: where to make it.
        overwrite: whether the files of an earlier run there may be replaced.

    Raises:
        InputError: if the folder holds something already, cannot be written, or is being written by another run.
    """

    CONFIG = "config.json"
    METRICS = "metrics.jsonl"
    WEIGHTS = "weights.safetensors"
    CHECKPOINT = "checkpoint.safetensors"
    SUMMARY = "summary.json"
    EVALUATION = "evaluation.json"
    SEARCH = "search.json"
    CURVE = "curve.png"
    REPORT = "report.html"

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = files.new_folder(path, overwrite=overwrite)
        self._lock = _locked(path)
        # The checkpoint and the configuration first: what is half removed must not look like a run that can go on.
        earlier = (self.CHECKPOINT, self.CONFIG, self.METRICS, self.SUMMARY, self.WEIGHTS)
        try:
            for name in (*earlier, self.EVALUATION, self.SEARCH, self.CURVE, self.REPORT):
                files.remove(path / name)
            files.write(path / self.METRICS, b"")
        except BaseException as error:
            self.close()
            if isinstance(error, StorageError):
                raise StorageError(f"{error}; make room, and give the same command again") from None
            raise

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a run that is to go on; nothing in it is changed."""
        if not any((path / name).is_file() for name in (cls.CONFIG, cls.CHECKPOINT)):
            raise InputError(f"'{path}' is no folder of a run: it has no {cls.CONFIG}; give the --output of flipgrad train")
        folder = cls.__new__(cls)
        folder.path = path
        folder._lock = _locked(path)
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs have the folder."""
        self._lock.release()

    def write_config(self, config: TrainConfig, **more: object) -> None:
        """The configuration, with what is needed to tell where numbers came from."""
        files.write_json(self.path / self.CONFIG, {"config": config.to_json(), **more, **files.provenance()})

    def append_metrics(self, record: Mapping[str, object]) -> None:
        """One line of JSON per epoch."""
        files.append_json(self.path / self.METRICS, record)

    def keep_metrics(self, count: int) -> list[dict[str, Any]]:
        """Drop the lines of epochs after the first ``count``: a kill may have come between a line and its checkpoint.

        A file that was taken away begins anew: the weights do not depend on it.
        """
        path, records = self.path / self.METRICS, []
        fix = "put it back, or move it elsewhere: the run then goes on without the numbers of these epochs"
        if path.exists():
            records = files.read_json_lines(path, missing=fix, broken=fix, count=count)
            if len(records) < count:
                raise InputError(f"'{path}' does not hold the {count} epochs of the checkpoint; {fix}")
        files.write(path, "".join(files.json_line(record) + "\n" for record in records).encode())
        return records

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """The final numbers."""
        files.write_json(self.path / self.SUMMARY, dict(summary))

    def write_trials(self, trials: Sequence[Trial], data: DataSet) -> None:
        """What the search for the learning rate has tried so far on ``data``."""
        stored = [trial.as_json() for trial in trials]
        files.write_json(self.path / self.SEARCH, {"trials": stored, "data": data.fingerprint})

    def save_weights(self, net: torch.nn.Module, data: DataSet) -> None:
        """The state of the network, which was trained on ``data``."""
        content = tensor_files.tensors_to_bytes(WEIGHTS_FORMAT, net.state_dict(), {"data": data.fingerprint})
        files.write(self.path / self.WEIGHTS, content)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """All that is needed to go on."""
        files.write(self.path / self.CHECKPOINT, checkpoint.to_bytes())


def read_config(
    path: Path,
    *,
    device: str | None = None,
    data_folder: str | None = None,
    model: str | None = None,
    estimator: str | None = None,
    repair: bool = False,
) -> TrainConfig:
    """The configuration of the run in the folder ``path``.

    Args:
        path: the folder.
        device: instead of the run's own, which may not be there.
        data_folder: instead of the run's own, for files that were moved.
        model: the run's own again, where that is a user's function: a file alone may not name code that is run.
        estimator: likewise.
        repair: take it from the checkpoint if its own file is missing.

    Raises:
        InputError: if it is missing or damaged, or names code that ``model`` or ``estimator`` does not.
    """
    file, checkpoint = path / RunFolder.CONFIG, path / RunFolder.CHECKPOINT
    if file.exists() or not checkpoint.exists():
        missing = "give the --output of flipgrad train"
        broken = "put it back as it was, or train anew with --overwrite"
        if checkpoint.exists():
            broken = f"put it back as it was, or delete it: {resume_command(path)} writes it again from the checkpoint"
        stored = files.read_json(file, missing=missing, broken=broken, most=LARGEST_CONFIG).get("config")
    elif repair:
        file, stored = checkpoint, Checkpoint.read(checkpoint).facts.get("config")
    else:
        raise InputError(f"'{file}' is missing; {resume_command(path)} writes it again from the checkpoint")
    if not isinstance(stored, dict):
        raise InputError(f"'{file}' is not the configuration of a run; give the --output of flipgrad train")
    changes = {name: value for name, value in {"device": device, "data_folder": data_folder}.items() if value is not None}
    config = TrainConfig.from_json({**stored, **changes}, f"'{file}'")
    _check_named(config, "model", model, file)
    _check_named(config, "estimator", estimator, file)
    return config


def _check_named(config: TrainConfig, name: str, given: str | None, file: Path) -> None:
    """Refuse to run code that only a file names, and another network or estimator than the run's own."""
    stored = getattr(config, name)
    option = f"--{name} {shlex.quote(stored)} (in Python: {name}={stored!r})"
    if given is None and name in _user_code(config):
        what = f"function {stored!r} as the network" if name == "model" else f"code {stored!r} as the estimator"
        fix = f"flipgrad runs no code that only a file names: if you trust it, add {option}"
        raise InputError(f"'{file}' names your own {what}; {fix}")
    if given not in (None, stored):
        raise InputError(f"the run's {name} is {stored!r} and not {given!r}; a run keeps its own: give {option}")


def _user_code(config: TrainConfig) -> dict[str, str]:
    """The fields that name code of the user's own, and what they name."""
    own = {"model": is_user_function(config.model), "estimator": is_user_estimator(config.estimator)}
    return {name: getattr(config, name) for name, yes in own.items() if yes}


def resume_command(path: Path, config: TrainConfig | None = None) -> str:
    """What to type to go on with a run."""
    own = "".join(f" --{name} {shlex.quote(value)}" for name, value in (_user_code(config) if config else {}).items())
    return f"flipgrad train --resume {shlex.quote(str(path))}{own}"


def read_trials(path: Path, data: DataSet) -> list[Trial]:
    """What the search for the learning rate had tried on ``data`` in the folder ``path``."""
    file = path / RunFolder.SEARCH
    if not file.exists():
        return []
    fix = "remove it, and the search begins anew"
    stored = files.read_json(file, missing=fix, broken=fix)
    if stored.get("data") != data.fingerprint:
        raise InputError(f"'{file}' is of a search on other data; put the data back as they were, or {fix}")
    try:
        return [Trial.from_json(trial) for trial in stored["trials"]]
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"'{file}' holds no trials of a search; {fix}") from None


def read_weights(path: Path, config: TrainConfig | None = None) -> tuple[dict[str, Tensor], str]:
    """The weights of the last whole epoch in the folder ``path``, and the fingerprint of the data they were trained on.

    ``config`` is that of the run, for the advice.
    """
    fix = f"{resume_command(path, config)} writes it again"
    tensors, facts = tensor_files.read_tensors(path / RunFolder.WEIGHTS, WEIGHTS_FORMAT, missing=fix, broken=fix)
    return tensors, str(facts.get("data"))


def read_checkpoint(path: Path) -> Checkpoint | None:
    """What was saved last in the folder ``path``; None if nothing was done before the run was stopped.

    Raises:
        InputError: if it is damaged, or does not tell how far the run was.
    """
    metrics = path / RunFolder.METRICS
    done = (path / RunFolder.WEIGHTS).exists() or (metrics.is_file() and metrics.stat().st_size > 0)
    file = path / RunFolder.CHECKPOINT
    checkpoint = Checkpoint.read(file) if done or file.exists() else None
    if checkpoint is not None and not isinstance(checkpoint.facts.get("epoch"), int):
        raise InputError(f"'{file}' does not tell its epoch; put the run's own file back, or train anew with --overwrite")
    return checkpoint


def is_whole(path: Path) -> bool:
    """Whether all that a finished run leaves is there and undamaged; what is not, is written again by going on."""
    try:
        files.read_json(path / RunFolder.CONFIG, missing="", broken="")
        summary = files.read_json(path / RunFolder.SUMMARY, missing="", broken="")
        read_weights(path)
        records = files.read_json_lines(path / RunFolder.METRICS, missing="", broken="")
    except InputError:
        return False
    # A line without an end is what a kill leaves, and a finished run has none.
    ended = (path / RunFolder.METRICS).read_bytes()[-1:] in (b"", b"\n")
    # Of epochs before the file was taken away there are no lines.
    return ended and (not records or records[-1].get("epoch") == summary.get("epoch"))


def _locked(path: Path) -> FolderLock:
    try:
        return FolderLock(path)
    except OSError as error:
        fix = "make room or allow it, and give the same command again"
        raise InputError(f"cannot write to '{path}': {error.strerror}; {fix}") from None


@final
@dataclass(frozen=True)
class Run:
    """What a folder of ``flipgrad train`` holds.

    Attributes:
        config: the configuration.
        net: the network with its weights.
        data: the data set.
        same_data: whether that is, to the bit, the one that the network was trained on.
    """

    config: TrainConfig
    net: BinaryNetwork
    data: DataSet
    same_data: bool


def load_run(
    path: Path | str,
    *,
    device: str | None = None,
    data_folder: str | None = None,
    model: str | None = None,
    estimator: str | None = None,
) -> Run:
    """The run in the folder ``path``, with the weights of its last whole epoch, in eval mode.

    Arguments are those of :func:`read_config`. A function that ``model`` names is imported and called; ``estimator`` is not
    imported here, but who trains with the configuration would.

    Raises:
        InputError: if a file is missing or damaged, or names code that ``model`` or ``estimator`` does not.
    """
    path = Path(path)
    config = read_config(path, device=device, data_folder=data_folder, model=model, estimator=estimator)
    weights, trained_on = read_weights(path, config)
    data = load_data(config)
    net = make_net(config, data)
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).replace("\n", " ")
        raise InputError(
            f"'{path / RunFolder.WEIGHTS}' does not fit the network that the configuration makes of the data ({reason:.200}); "
            "put the run's own files and the data back together"
        ) from None
    return Run(config, net.to(config.device).eval(), data, data.fingerprint == trained_on)
