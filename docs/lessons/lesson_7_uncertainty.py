"""
.. index:: ! uncertainty, ! uncertainty per input, ! disagreement of members

7. Uncertainty, input by input
==============================

Every draw of the noises is a network of its own. Where these members disagree, the network does not know. What it was trained by
decides whether they may.
"""

# %%
# Two classes that overlap, in the plane. We train the same network twice: by the expected loss, the mean over draws of
# :math:`-\log p(y|x, Z)`, which rewards it for being sure; and by the 10-sample bound, :math:`-\log` of the mean of 10 likelihoods,
# which lets its draws disagree where the data do.

import matplotlib.pyplot as plt
import torch
from torch import nn

import flipgrad as fg
from flipgrad.data import toy

data = toy()
x, y = data.train.x, data.train.y
objective = fg.CrossEntropy(y)


def make() -> fg.Sequential:
    """The same network each time."""
    torch.manual_seed(0)
    return fg.Sequential(fg.BinaryLinear(2, 20), fg.BinaryLinear(20, 20), head=nn.Linear(20, 2)).initialize(x)


UPDATES = 200
nets = {"expected loss": make(), "10-sample bound": make()}
for name, net in nets.items():
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        loss = fg.bounds.mean_losses if name == "expected loss" else fg.bounds.bound_losses
        loss(net, x, objective, 10, estimator=fg.PSA()).mean().backward()
        optimizer.step()
    net.eval()

# %%
# The bound is the loss of the ensemble, which ``predict`` averages over; on it the second network is better.

test = fg.CrossEntropy(data.test.y)
for name, net in nets.items():
    marginal = fg.bounds.marginal_loss(net, data.test.x, test, samples=200).mean()
    expected = fg.bounds.expected_loss(net, data.test.x, test, samples=200).mean()
    print(f"trained by the {name:15}: marginal test loss {marginal:.3f}, expected {expected:.3f}")

# %%
# Members and their disagreement
# ------------------------------
#
# ``net.member(x)`` fixes all noises: an ordinary deterministic network, the same for every input it is then given. The share of
# members that do not vote with the majority is a measure of doubt *for each input*.

low, high = x.min(0).values - 0.3, x.max(0).values + 0.3
grid = torch.stack(
    torch.meshgrid(torch.linspace(low[0], high[0], 60), torch.linspace(low[1], high[1], 60), indexing="xy"), -1
).reshape(-1, 2)


@torch.no_grad()
def disagreement(net: fg.Sequential, points: torch.Tensor, members: int = 30) -> torch.Tensor:
    """The share of members, for each point, that do not say what most say."""
    votes = torch.stack([net.member(points[:1])(points).argmax(1) for _ in range(members)])
    share = votes.float().mean(0)
    return torch.minimum(share, 1 - share)


figure, panels = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
for axes, (name, net) in zip(panels, nets.items(), strict=True):
    doubt = disagreement(net, grid).reshape(60, 60)
    extent = (low[0].item(), high[0].item(), low[1].item(), high[1].item())
    shown = axes.imshow(doubt, origin="lower", extent=extent, vmin=0, vmax=0.5, cmap="magma", aspect="auto")
    axes.scatter(*x.T, c=y, s=6, cmap="coolwarm", edgecolors="none")
    axes.set_title(f"trained by the {name}")
figure.colorbar(shown, ax=panels, label="share of members that disagree")
plt.show()

# %%
# Is the doubt worth anything? Leave undecided what the members disagree on most, and look at the errors that remain:

for name, net in nets.items():
    doubt = disagreement(net, data.test.x)
    wrong = net.predict(data.test.x, samples=100).argmax(1) != data.test.y
    kept = doubt.argsort()[: len(doubt) // 2]
    print(f"{name:15}: {wrong.float().mean():.1%} wrong of all, {wrong[kept].float().mean():.1%} of the surer half")

# %%
# ``flipgrad train --objective bound --samples 10`` does the first part, and ``flipgrad evaluate`` draws calibration, accuracy by number of
# samples, and disagreement into the report page.
