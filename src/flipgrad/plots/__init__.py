"""Figures, drawn from result files only: anything drawn can be redrawn."""

from flipgrad.plots.accuracy import Panel, cosine_figure, layers, rmse_figure
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
    "Panel",
    "bias_and_spread",
    "by_layer",
    "cifar",
    "cosine",
    "elbo_report",
    "elbos",
    "layers",
    "muprop",
    "over_rates",
    "pictures",
    "report",
    "rmse",
    "scaling",
    "timing",
    "toy_example",
    "toy_training",
    "training_curve",
    "weights_accuracy",
    "weights_training",
]

bias_and_spread = saved(bias_and_spread_figure)
by_layer, over_rates = saved(by_layer_figure), saved(over_rates_figure)
cosine, rmse = saved(cosine_figure), saved(rmse_figure)
elbos, pictures = saved(elbo_figure), saved(pictures_figure)
cifar, muprop = saved(learning_figure), saved(muprop_figure)
scaling, timing = saved(scaling_figure), saved(timing_figure)
toy_example, toy_training = saved(toy_example_figure), saved(toy_training_figure)
weights_accuracy, weights_training = saved(weights_accuracy_figure), saved(weights_training_figure)
