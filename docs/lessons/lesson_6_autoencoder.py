"""
6. A binary autoencoder
=======================

Latent variables that are bits: an encoder draws them, a decoder explains the data by them, and the evidence lower bound (ELBO)
trains both. With one layer of latents and a linear decoder, PSA's gradient is unbiased at about the cost of one backward pass.
"""

# %%
# The data are the digits, each pixel black or white.

import matplotlib.pyplot as plt
import torch
from torch import nn

import flipgrad as fg
from flipgrad.data import digits

torch.manual_seed(0)
data = digits()


def binarised(images: torch.Tensor) -> torch.Tensor:
    """Pixels 0 and 1, [N, 64]."""
    flat = images.flatten(1)
    return (flat > flat.mean()).float()


x, test = binarised(data.train.x), binarised(data.test.x)

# %%
# The model: 64 pixels, 32 bits. ``model(x)`` gives negative ELBOs ``[B]``, in nats, with the estimator's gradient.

LATENTS = 32
UPDATES = 400


def train(estimator: fg.Estimator) -> tuple[fg.Variational, list[float]]:
    """A trained model, and the negative ELBOs on the way."""
    torch.manual_seed(0)
    model = fg.Variational(encoder=[fg.BinaryLinear(64, LATENTS)], decoder=[nn.Linear(LATENTS, 64)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(UPDATES):
        batch = x[torch.randint(len(x), (100,))]
        optimizer.zero_grad()
        loss = model(batch, estimator=estimator).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


models = {}
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for estimator in (fg.PSA(), fg.DisARM(), fg.ST()):
    models[repr(estimator)], losses = train(estimator)
    axes.plot(torch.tensor(losses).unfold(0, 20, 1).mean(1), label=repr(estimator))
axes.set(xlabel="update", ylabel="negative ELBO, nats")
axes.legend()
plt.show()

# %%
# The bound with many samples is tighter: an estimate of the log-likelihood of test images.

for name, model in models.items():
    with torch.no_grad():
        print(f"{name:9} log-likelihood of test images, 100 samples: {model.log_likelihood(test, samples=100).mean():.2f}")

# %%
# Test images, what 32 bits keep of them, and new ones drawn from the prior:

model = models["PSA()"]
with torch.no_grad():
    rows = [test[:8], model.reconstruct(test[:8]), model.sample(8)]
figure, panels = plt.subplots(3, 8, figsize=(8, 3.2), layout="constrained")
for line, images, title in zip(panels, rows, ("data", "reconstructed", "sampled"), strict=True):
    for panel, image in zip(line, images, strict=True):
        panel.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        panel.axis("off")
    line[0].set_title(title, loc="left", fontsize=9)
plt.show()
