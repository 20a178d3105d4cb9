"""
.. index:: ! adding an estimator, ! add an estimator, ! own estimator

4. Invent an estimator
======================

A new estimator is one class, in a file of your own: no change to the package. We write a biased one and an unbiased one, check both
against the exact gradient, and train with them.
"""

# %%
# A local estimator
# -----------------
#
# It needs only the layer at hand: from its input it makes the layer's states, with a gradient attached. This one samples and
# differentiates the mean of a *softer* unit, :math:`2F(a/t) - 1`; with :math:`t = 1` it is straight-through.

from typing import final

import torch
from torch import Tensor, nn

import flipgrad as fg
from flipgrad.contract import LayerCall


@final
class SoftST(fg.LocalEstimator):
    """Sample forward; differentiate the mean of a softer unit backward. Biased."""

    unbiased = False
    citation = "this tutorial"

    def __init__(self, t: float = 2.0) -> None:
        self.t = t

    def states(self, call: LayerCall) -> Tensor:
        """Sampled states, with the gradient of the softer mean."""
        a = call.affine(call.x)
        m = call.noise.mean_sign(a / self.t)
        return call.sample(a) + (m - m.detach())


print(SoftST(), SoftST(0.5))

# %%
# An unbiased estimator
# ---------------------
#
# It looks at sampled paths and their losses. A subclass of ``fg.PathEstimator`` writes ``gradient(path, k)``, the estimate in the
# pre-activations of layer k. This is the score function with the mean loss of the *other* examples as its baseline, which does not
# depend on the example and so keeps it unbiased.


@final
class LeaveOneOut(fg.PathEstimator):
    """REINFORCE whose baseline is the mean loss of the batch's other examples. Unbiased."""

    unbiased = True
    citation = "this tutorial"
    units_only = "the losses of all examples share the weights"

    def passes(self, depth: int) -> int:
        """One, however deep the network is."""
        return 1

    def gradient(self, path: fg.Path, k: int) -> Tensor:
        """The gradient in the pre-activations of layer ``k``."""
        losses = path.losses.detach()
        others = (losses.sum() - losses) / max(1, len(losses) - 1)
        a, states = path.a[k].detach(), path.states[k]
        with torch.enable_grad():
            a.requires_grad_(True)
            score = torch.autograd.grad(path.noises[k].log_cdf(states * a).sum(), a)[0]
        reward = (losses - others).reshape(-1, *[1] * (a.dim() - 1))
        return reward * score


# %%
# Are they right?
# ---------------
#
# The exact gradient is the judge. ``bias`` has a 95 % interval: that of an unbiased estimator must contain 0.

SAMPLES = 4000
torch.manual_seed(0)
net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=nn.Linear(4, 2))
x, y = torch.randn(40, 2), torch.randint(2, (40,))
estimators = {"SoftST": SoftST(), "LeaveOneOut": LeaveOneOut(), "ST": fg.ST(), "REINFORCE": fg.REINFORCE(), "PSA": fg.PSA()}
result = fg.gradeval.evaluate(net, x, fg.CrossEntropy(y), estimators, samples=SAMPLES)
for name in result.estimators:
    layer = result.accuracy(name, "layer 1")
    print(f"{name:12} bias {layer.bias:.3f} [{layer.bias_low:.3f}, {layer.bias_high:.3f}], spread of one draw {layer.std:.2f}")

# %%
# Training with it
# ----------------
#
# It goes wherever ours go; on the command line by the name of its module, ``flipgrad train --estimator mine:SoftST``.

UPDATES = 150
for estimator in (SoftST(1.5), LeaveOneOut(), fg.PSA()):
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(2, 16), fg.BinaryLinear(16, 16), head=nn.Linear(16, 2))
    target = (x[:, 0] * x[:, 1] > 0).long()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        net(x, fg.CrossEntropy(target), estimator=estimator).mean().backward()
        optimizer.step()
    loss = fg.bounds.expected_loss(net, x, fg.CrossEntropy(target), samples=200).mean()
    print(f"{estimator!r:18} expected loss after {UPDATES} updates: {loss.item():.3f}")

# %%
# An estimator for the package itself is the same file in ``src/flipgrad/estimators`` and one line in its list: :doc:`/contributing`.
