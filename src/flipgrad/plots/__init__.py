"""Figures of results, as they were measured or from their files: anything drawn can be redrawn.

A function ``..._figure`` gives the figure, the one without that word writes it as PNG and PDF.

>>> import torch, flipgrad as fg
>>> net = fg.Sequential(fg.BinaryLinear(2, 3), fg.BinaryLinear(3, 3), head=torch.nn.Linear(3, 2))
>>> x, objective = torch.randn(20, 2), fg.CrossEntropy(torch.randint(2, (20,)))
>>> result = fg.gradeval.evaluate(net, x, objective, [fg.PSA(), fg.ST()], samples=100)
>>> figure = fg.plots.rmse_figure(result)                       # shown by a notebook
>>> paths = fg.plots.rmse(result, Path("rmse"))                 # rmse.png and rmse.pdf  # doctest: +SKIP
"""

from flipgrad.plots.accuracy import Measured, Panel, cosine_figure, layers, rmse_figure
from flipgrad.plots.bias import bias_and_spread_figure
from flipgrad.plots.charts import training_curve
from flipgrad.plots.elbo import elbo_report
from flipgrad.plots.learning import learning_figure, muprop_figure
from flipgrad.plots.options import by_layer_figure, over_rates_figure
from flipgrad.plots.report import report
from flipgrad.plots.style import saved
from flipgrad.plots.timing import scaling_figure, timing_figure
from flipgrad.plots.toy import toy_example_figure, toy_training_figure
from flipgrad.plots.vae import elbo_figure, pictures_figure
from flipgrad.plots.weights import weights_accuracy_figure, weights_training_figure

__all__ = [
    "Measured",
    "Panel",
    "bias_and_spread",
    "bias_and_spread_figure",
    "by_layer",
    "by_layer_figure",
    "cifar",
    "cosine",
    "cosine_figure",
    "elbo_report",
    "elbos",
    "layers",
    "learning_figure",
    "muprop",
    "muprop_figure",
    "over_rates",
    "over_rates_figure",
    "pictures",
    "report",
    "rmse",
    "rmse_figure",
    "scaling",
    "scaling_figure",
    "timing",
    "timing_figure",
    "toy_example",
    "toy_example_figure",
    "toy_training",
    "toy_training_figure",
    "training_curve",
    "weights_accuracy",
    "weights_accuracy_figure",
    "weights_training",
    "weights_training_figure",
]

bias_and_spread = saved(bias_and_spread_figure)
by_layer, over_rates = saved(by_layer_figure), saved(over_rates_figure)
cosine, rmse = saved(cosine_figure), saved(rmse_figure)
elbos, pictures = saved(elbo_figure), saved(pictures_figure)
cifar, muprop = saved(learning_figure), saved(muprop_figure)
scaling, timing = saved(scaling_figure), saved(timing_figure)
toy_example, toy_training = saved(toy_example_figure), saved(toy_training_figure)
weights_accuracy, weights_training = saved(weights_accuracy_figure), saved(weights_training_figure)
