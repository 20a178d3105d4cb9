"""Training a stochastic binary network: configuration, the loop, metrics, and what a run leaves behind."""

from flipgrad.training.config import TrainConfig
from flipgrad.training.loop import DivergenceError, train
from flipgrad.training.metrics import Evaluation, evaluate
from flipgrad.training.models import digits_net
from flipgrad.training.run import RunFolder

__all__ = ["DivergenceError", "Evaluation", "RunFolder", "TrainConfig", "digits_net", "evaluate", "train"]
