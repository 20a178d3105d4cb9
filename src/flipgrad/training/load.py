"""A run that was trained, read back from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from flipgrad.data import DataSet
from flipgrad.errors import InputError
from flipgrad.network import Sequential
from flipgrad.training.config import TrainConfig
from flipgrad.training.problem import load_data, make_net
from flipgrad.training.run import RunFolder, read_config, read_weights


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
    net: Sequential
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

    Args:
        path: the folder.
        device: instead of the run's own.
        data_folder: instead of the run's own, for files that were moved.
        model: the run's own "package.module:function" again, where it has one. That function is imported and called, and a
            file alone may not cause that.
        estimator: the run's own "package.module:Name" again, where it has one. It is not imported here, but who trains with the
            configuration would.

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
