"""
5. Fully binary, packed, and shipped
====================================

With binary weights *and* binary states a multiplication is a bit operation. We train such a network, pack it into a file of bits,
and run that file without torch.
"""

# %%
# ``weights="binary"`` makes a layer's weights ±1 as well, times a scale for each output channel. The first layer, whose inputs are real
# numbers, keeps real weights. ``weight`` is the latent weight behind each sign, so float checkpoints load.

import tempfile
from pathlib import Path

import torch
from torch import nn

import flipgrad as fg
from flipgrad.data import digits
from flipgrad.packed import load, pack

torch.manual_seed(0)
data = digits()
net = fg.Sequential(
    fg.BinaryConv2d(1, 16, 3, bias=False, norm=nn.BatchNorm2d(16), noise=fg.Logistic(0.3)),
    fg.BinaryConv2d(16, 32, 3, stride=2, weights="binary", bias=False, norm=nn.BatchNorm2d(32), noise=fg.Logistic(0.3)),
    nn.Flatten(),
    fg.BinaryLinear(32 * 2 * 2, 64, weights="binary", bias=False, norm=nn.BatchNorm1d(64), noise=fg.Logistic(0.3)),
    head=nn.Linear(64, 10),
)
net.initialize(data.train.x[:256])

# %%
# The training is the same. PSA's flips of units and of weights are exact here, at the price of straight-through. Let the rate fall to 0:
# signs never settle at a constant one.

EPOCHS = 6
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
for _ in range(EPOCHS):
    for batch in torch.randperm(len(data.train)).split(64):
        optimizer.zero_grad()
        net(data.train.x[batch], fg.CrossEntropy(data.train.y[batch]), estimator=fg.PSA()).mean().backward()
        optimizer.step()
    schedule.step()
net.eval()

# %%
# What it saves:

print(fg.summary(net, data.train.x[:1]))

# %%
# Pack it
# -------
#
# One safetensors file: weights in bits, norms and noise folded into thresholds and tables. Nothing in it could run.

folder = Path(tempfile.mkdtemp())
pack(net, data.train.x[:1]).save(folder / "net.safetensors")
floats = sum(4 * p.numel() for p in net.parameters())
print(f"{(folder / 'net.safetensors').stat().st_size:,} bytes packed, {floats:,} bytes of float32 parameters")

# %%
# From here on no torch is needed, only numpy. The deterministic network gives the same classes as torch's, and ``samples=`` draws members
# of the ensemble in integer arithmetic, the same on every machine for the same seed.

packed = load(folder / "net.safetensors")
images, labels = data.test.x.numpy(), data.test.y.numpy()
same = (packed(images).argmax(1) == net.deterministic(data.test.x).argmax(1).numpy()).mean()
accuracy = (packed(images, samples=10, seed=0).argmax(1) == labels).mean()
print(f"{same:.1%} of the classes are torch's; accuracy with 10 samples {accuracy:.1%}")

# %%
# How sure are the members, image by image?

members = packed.members(images[:5], samples=20)
print("shape of the members' outputs:", members.shape)

# %%
# On the command line: ``flipgrad pack RUN --output net.safetensors``, then ``flipgrad predict net.safetensors photo.png``. Other ways out, C for
# small devices and ONNX for other programs, are on :doc:`/guide/shipping`.
