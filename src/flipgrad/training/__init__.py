"""Training a stochastic binary network: configuration, the loop, metrics, and what a run leaves behind."""

from flipgrad.training.config import TrainConfig
from flipgrad.training.loop import DivergenceError, train
from flipgrad.training.metrics import Evaluation, evaluate
from flipgrad.training.models import MODELS, cifar_net, digits_net, fully_connected, mnist_net, model
from flipgrad.training.run import RunFolder

__all__ = [
    "MODELS",
    "DivergenceError",
    "Evaluation",
    "RunFolder",
    "TrainConfig",
    "cifar_net",
    "digits_net",
    "evaluate",
    "fully_connected",
    "mnist_net",
    "model",
    "train",
]
