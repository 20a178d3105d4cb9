"""
1. Your first binary network
============================

We train a small convolutional network whose hidden units are ±1 on 8x8 images of handwritten digits, look at its accuracy with
one sample, with ten and with none, and see where it is unsure.
"""

# %%
# The data come with the package: 1,437 training images and 360 test images, ``[N, 1, 8, 8]``.

import matplotlib.pyplot as plt
import torch

import flipgrad as fg
from flipgrad.data import digits

torch.manual_seed(0)
data = digits()
print(f"{len(data.train)} training images, {len(data.test)} test images, {data.classes} classes")

# %%
# A network is layers and a head. ``BinaryConv2d`` and ``BinaryLinear`` take the arguments of torch's layers, and their outputs are
# sampled states ±1. Only the head's outputs are real numbers. ``initialize`` looks at the data once and scales every layer so that
# its units are neither stuck nor coin tosses.

net = fg.Sequential(
    fg.BinaryConv2d(1, 16, 3),
    fg.BinaryConv2d(16, 32, 3, stride=2),
    torch.nn.Flatten(),
    head=torch.nn.Linear(32 * 2 * 2, 10),
)
net.initialize(data.train.x[:256])
states = net[0](data.train.x[:1])
print("values of the first layer's units:", states.unique().tolist())

# %%
# Training is the loop that you know. The network takes the objective, so that PSA, the estimator, can evaluate the loss at flipped
# states; what comes back are losses ``[B]`` whose gradient is the estimate.

EPOCHS = 8
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
history = []
for _ in range(EPOCHS):
    for batch in torch.randperm(len(data.train)).split(64):
        optimizer.zero_grad()
        loss = net(data.train.x[batch], fg.CrossEntropy(data.train.y[batch]), estimator=fg.PSA()).mean()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    schedule.step()

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(history)
axes.set(xlabel="update", ylabel="sampled loss of the batch", title="Training by PSA")
plt.show()

# %%
# There are three ways to predict. ``predict`` averages class probabilities over sampled networks, ``net(x)`` is one sample, and
# ``deterministic`` sets every noise to its median. The average is the most accurate.

net.eval()
x, y = data.test.x, data.test.y
with torch.no_grad():
    accuracy = {
        "10 samples": (net.predict(x, samples=10).argmax(1) == y).float().mean(),
        "1 sample": (net(x).argmax(1) == y).float().mean(),
        "deterministic": (net.deterministic(x).argmax(1) == y).float().mean(),
    }
for kind, value in accuracy.items():
    print(f"{kind:>13}: {value:.1%}")

# %%
# The probabilities tell where the network is unsure. Here are the four test images with the least probable first class:

probabilities = net.predict(x, samples=50)
unsure = probabilities.max(1).values.argsort()[:4]
figure, panels = plt.subplots(1, 4, figsize=(8, 2.4), layout="constrained")
for panel, i in zip(panels, unsure, strict=True):
    panel.imshow(x[i, 0], cmap="gray_r")
    guess = probabilities[i].argmax().item()
    panel.set_title(f"is {y[i].item()}, says {guess}\nwith {probabilities[i, guess]:.0%}", fontsize=9)
    panel.axis("off")
plt.show()

# %%
# From here: your own architecture in :doc:`the next tutorial </tutorials/lesson_2_your_own_network>`, or the same from the command
# line, ``flipgrad train``, with checkpoints and a report page (:doc:`/start`).
