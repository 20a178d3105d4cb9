"""
5. Fully binary, packed, in C
=============================

With binary weights *and* binary states a multiplication is a bit operation. We train such a network, pack it into a file of bits,
run that file without torch, and ship it as one C file that needs no library at all.
"""

# %%
# ``weights="binary"`` makes a layer's weights ±1 as well, times a scale for each output channel. The first layer, whose inputs are real
# numbers, keeps real weights. ``weight`` is the latent weight behind each sign, so float checkpoints load.

import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import flipgrad as fg
from flipgrad.data import digits
from flipgrad.packed import Facts, load, pack
from flipgrad.packed.c_source import to_c

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
# One safetensors file: weights in bits, norms and noise folded into thresholds and tables. Nothing in it could run. ``Facts`` go
# into its header: here, how the bytes 0 to 255 of an image become the network's inputs -1 to 1.

folder = Path(tempfile.mkdtemp())
facts = Facts(classes=tuple("0123456789"), pixel_scale=1 / 127.5, pixel_shift=-1.0)
pack(net, data.train.x[:1], facts).save(folder / "net.safetensors")
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
# How sure are the members, image by image? A row has the classes that 20 of them give to one image.

votes = packed.members(images[:5], samples=20).argmax(-1).T
for number, row in enumerate(votes):
    classes, counts = np.unique(row, return_counts=True)
    told = ", ".join(f"{count} say {name}" for name, count in zip(classes, counts, strict=True))
    print(f"image {number}, a {labels[number]}: {told}")

# %%
# In C
# ----
#
# ``to_c`` writes the network as C99: states and weights in bits, thresholds in whole numbers, no library, no allocated memory. The
# header says how it is called.

code = to_c(packed, "digits")
code.save(folder, main=True)
print(f"{code.flash:,} bytes of constants, {code.ram:,} bytes of buffers")
print(code.header)

# %%
# Where there is a compiler, we try it: ``digits_main.c`` is a program that reads images, a byte for each pixel, and prints a line
# for each: its class, the name of this, and the probabilities.

compiler = shutil.which("cc")
if compiler:
    sources = ["digits.c", "digits_main.c", "-o", "digits", "-lm"]
    subprocess.run([compiler, "-std=c99", "-O2", *sources], cwd=folder, check=True)
    pixels = ((images + 1) * 127.5).round().astype("u1")
    answers = subprocess.run([folder / "digits"], input=pixels.tobytes(), capture_output=True, check=True).stdout
    print(answers.decode().splitlines()[0])
    in_c = np.array([int(line.split()[0]) for line in answers.decode().splitlines()])
    in_python = packed(pixels / 127.5 - 1).argmax(1)
    print(f"{(in_c == in_python).mean():.1%} of the classes in C are those of the packed network in Python")

# %%
# On the command line: ``flipgrad pack RUN``, then ``flipgrad predict net.safetensors photo.png``, and ``flipgrad pack RUN --to c`` for C. What
# each way costs, fixed point, and ONNX for other programs are on :doc:`/guide/shipping` and :doc:`/deploy`.
