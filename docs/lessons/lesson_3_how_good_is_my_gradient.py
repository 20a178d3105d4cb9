"""
3. How good is my gradient?
===========================

Every estimator trades bias against variance and cost. ``fg.gradeval`` measures that on *your* network, layer by layer, against the
exact gradient where it can be computed.
"""

# %%
# A network of three layers with five units each is small enough for the exact gradient: a sum over all states. We train it a
# little, since gradients of random networks are easy.

import matplotlib.pyplot as plt
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

import flipgrad as fg
from flipgrad.data import toy

torch.manual_seed(0)
data = toy()
some = torch.randperm(len(data.train))[:100]
x, objective = data.train.x[some], fg.CrossEntropy(data.train.y[some])
net = fg.Sequential(fg.BinaryLinear(2, 5), fg.BinaryLinear(5, 5), fg.BinaryLinear(5, 5), head=nn.Linear(5, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for _ in range(50):
    optimizer.zero_grad()
    net(x, objective, estimator=fg.PSA()).mean().backward()
    optimizer.step()

# %%
# The exact gradient is one call; it is differentiable like any loss.

exact = fg.exact.expected_loss(net, x, objective).mean()
print(f"exact expected loss: {exact.item():.4f}")

# %%
# Now measure: ``samples`` draws of every estimator. RMSE is relative to the length of the true gradient.

SAMPLES = 1000
result = fg.gradeval.evaluate(net, x, objective, [fg.PSA(), fg.ST(), fg.Tanh(), fg.ARM(), fg.REINFORCE()], samples=SAMPLES)
print(f"{'layer 1':12} {'RMSE, 1 draw':>13} {'bias':>6} {'cosine':>7}")
for name in result.estimators:
    layer = result.accuracy(name, "layer 1")
    print(f"{name:12} {layer.rmse[0]:13.2f} {layer.bias:6.2f} {layer.cosine_mean[0]:7.2f}")

# %%
# The figure of the paper, of your network. Lines that go on falling are unbiased; one that turns flat shows its bias. What counts in
# training, where a gradient is one draw, is the left end.


def show(figure: Figure) -> None:
    """Show a figure on this page; a notebook does so by itself, and ``figure.savefig("rmse.pdf")`` writes it."""
    figure.set_dpi(150)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    _, axes = plt.subplots(figsize=figure.get_size_inches(), layout="constrained")
    axes.imshow(canvas.buffer_rgba())
    axes.axis("off")
    plt.show()


show(fg.plots.rmse_figure(result))

# %%
# Bias against spread, for all layers at once:

show(fg.plots.bias_and_spread_figure(result))

# %%
# A wide network has no exact gradient. Then the reference is the mean of very many draws of an unbiased estimator, and the result says
# how far that can be trusted:

wide = fg.Sequential(fg.BinaryLinear(2, 30), fg.BinaryLinear(30, 30), head=nn.Linear(30, 2))
result = fg.gradeval.evaluate(wide, x, objective, [fg.PSA(), fg.ST()], samples=SAMPLES // 20, reference_samples=2 * SAMPLES)
errors = {layer.name: layer.error for layer in result.reference.layers}
print(f"the reference: {result.reference.draws} draws of {result.reference.estimator}, its relative error by layer:")
print({name: round(error, 3) for name, error in errors.items()})

# %%
# From the command line: ``flipgrad gradeval --model mine:net --estimators psa,st,arm``.
