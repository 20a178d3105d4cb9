"""Training a stochastic binary network: configuration, the loop, metrics, and what a run leaves behind."""

from flipgrad.errors import DivergenceError
from flipgrad.memory import keep_freed_memory
from flipgrad.training.config import TrainConfig, load_data, make_net
from flipgrad.training.elbo import ElboRun, elbo_data, load_model, make_model
from flipgrad.training.ensembles import Ensembles, EnsembleSize, measure_ensembles
from flipgrad.training.loop import automatic_rate, train
from flipgrad.training.metrics import Evaluation, evaluate
from flipgrad.training.models import MODELS, cifar_net, digits_net, fully_connected, mnist_net, model
from flipgrad.training.processes import Processes, connect
from flipgrad.training.reliability import Reliability
from flipgrad.training.run import (
    Checkpoint,
    Run,
    RunFolder,
    load_run,
    read_checkpoint,
    read_config,
    read_trials,
    read_weights,
)
from flipgrad.training.trainer import Trainer

__all__ = [
    "MODELS",
    "Checkpoint",
    "DivergenceError",
    "ElboRun",
    "EnsembleSize",
    "Ensembles",
    "Evaluation",
    "Processes",
    "Reliability",
    "Run",
    "RunFolder",
    "TrainConfig",
    "Trainer",
    "automatic_rate",
    "cifar_net",
    "connect",
    "digits_net",
    "elbo_data",
    "evaluate",
    "fully_connected",
    "keep_freed_memory",
    "load_data",
    "load_model",
    "load_run",
    "make_model",
    "make_net",
    "measure_ensembles",
    "mnist_net",
    "model",
    "read_checkpoint",
    "read_config",
    "read_trials",
    "read_weights",
    "train",
]
