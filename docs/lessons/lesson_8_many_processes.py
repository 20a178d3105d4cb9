"""
8. Many processes and clusters
==============================

One training on several processes or GPUs, and many trainings on a cluster.
"""

# %%
# One training, several processes
# -------------------------------
#
# ``torchrun`` starts them, each takes its share of every batch, and the result is one network. Every estimator works, with its
# baselines and learned parameters kept the same in all processes::
#
#     torchrun --nproc-per-node 2 -m flipgrad train --batch-size 64
#
# In a loop of your own, ``fg.Sequential`` goes into DistributedDataParallel as any module does, since everything happens in
# ``forward``. Here is the whole thing with one process, so that it runs on this page; under ``torchrun`` the same lines use all of them.

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flipgrad as fg
from flipgrad.data import digits

rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
store = None if "MASTER_ADDR" in os.environ else dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

data = digits()
torch.manual_seed(0)
net = fg.Sequential(fg.BinaryConv2d(1, 16, 3), nn.Flatten(), fg.BinaryLinear(16 * 36, 64), head=nn.Linear(64, 10))
net.initialize(data.train.x[:256])
parallel = DistributedDataParallel(net)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)

# The order of the images is the same in all processes, the noise is not.
order = torch.Generator().manual_seed(0)
noise = torch.Generator().manual_seed(1 + rank)
for batch in torch.randperm(len(data.train), generator=order).split(64):
    mine = batch[rank::size]
    optimizer.zero_grad()
    loss = parallel(data.train.x[mine], fg.CrossEntropy(data.train.y[mine]), estimator=fg.PSA(), generator=noise).mean()
    loss.backward()
    optimizer.step()
print(f"process {rank} of {size}: last loss {loss.item():.3f}")
dist.destroy_process_group()

# %%
# What counts: initialise before wrapping, with the same seed everywhere; give each process a generator of its own, else all draw the
# same noise; call ``parallel(...)``, not ``net(...)``, for gradients to be averaged.
#
# Nothing is lost
# ---------------
#
# ``flipgrad train`` writes checkpoints whole or not at all. Killed at any instant, it goes on to the same weights, to the bit::
#
#     flipgrad train --resume runs/digits-psa
#
# Many trainings, one cluster
# ---------------------------
#
# The paper's learning experiments are hundreds of independent trainings. They run in a process per core, or on a cluster whose
# machines share a disk; those of a worker that dies are gone on with by another::
#
#     pip install 'flipgrad[dask]'
#     dask scheduler &  dask worker tcp://HOST:8786 --nthreads 1 --nworkers 8    # on every machine
#     flipgrad reproduce cifar --scale paper --data /data/cifar10 --output /shared/results --dask tcp://HOST:8786
#
# The same from Python, for the cells of an experiment of your own, is :doc:`/reference/module-reproduce`.
