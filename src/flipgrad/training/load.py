"""A run that was trained, read back from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import safetensors
import safetensors.torch

from flipgrad.data import DataSet
from flipgrad.errors import InputError
from flipgrad.network import Sequential
from flipgrad.training.config import TrainConfig
from flipgrad.training.problem import load_data, make_net
from flipgrad.training.run import RunFolder, read_config


@final
@dataclass(frozen=True)
class Run:
    """What a folder of ``flipgrad train`` holds: the configuration, the network with its weights, the data set."""

    config: TrainConfig
    net: Sequential
    data: DataSet


def load_run(path: Path | str, *, device: str | None = None) -> Run:
    """The run in the folder ``path``, with the weights of its last whole epoch, in eval mode.

    Args:
        path: the folder.
        device: instead of the run's own.

    Raises:
        InputError: if a file is missing or damaged.
    """
    path = Path(path)
    config = read_config(path, device=device)
    data = load_data(config)
    net = make_net(config, data)
    file = path / RunFolder.WEIGHTS
    try:
        net.load_state_dict(safetensors.torch.load_file(file))
    except FileNotFoundError:
        raise InputError(f"'{file}' is missing: the run has no whole epoch yet; flipgrad train --resume {path}") from None
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        reason = str(error).replace("\n", " ")
        raise InputError(f"'{file}' is damaged or of another network ({reason:.200}); flipgrad train --resume {path}") from None
    return Run(config, net.to(config.device).eval(), data)
