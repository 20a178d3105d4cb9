"""What two processes find out together; started by test_processes.py through torchrun, with a folder as the argument."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from problems import StopAfter, blobs, config, drawn_net, small_net
from torch import Tensor

from flipgrad.data import Split
from flipgrad.estimators import ESTIMATORS
from flipgrad.network import Sequential
from flipgrad.training import Checkpoint, Processes, RunFolder, Trainer, connect, train
from flipgrad.training.loop import isolated
from torture.runs import timeless

# With batches of 4: the last one has a single example, so that the second process has none.
EXAMPLES, BATCH = 13, 4


def precise_blobs():
    data = blobs()
    return replace(data, train=Split(data.train.x[:EXAMPLES].double(), data.train.y[:EXAMPLES]), test=data.test)


def noises(count: int, generator: torch.Generator) -> list[Tensor]:
    """Z of a batch for both layers of the small network."""
    uniform = [torch.rand(count, *shape, dtype=torch.float64, generator=generator) for shape in ((4, 2, 2), (4, 1, 1))]
    return [torch.logit(u) for u in uniform]


# What FlipCV keeps of units cannot be shared, which is refused.
SHAREABLE = [name for name in ESTIMATORS if name != "flip-cv"]
# Estimators with the networks that they train: of the last, weights are drawn, too.
PROBLEMS = {"psa": small_net, "st": small_net, "reinforce+running": small_net, "psa:mean": drawn_net}


def trained(estimator: str, processes: Processes) -> Trainer:
    """A training of one epoch with handed-in noise of the units."""
    settings = config(estimator=estimator, batch_size=BATCH, augment="none")
    trainer = Trainer(settings, PROBLEMS[estimator]().double(), precise_blobs(), processes)
    generator = torch.Generator().manual_seed(1)
    for update in range(trainer.updates):
        drawn = noises(min(BATCH, EXAMPLES - update * BATCH), generator)
        mine = [z[processes.rank :: processes.size] for z in drawn]
        trainer.update([own if len(own) else z[:1] for own, z in zip(mine, drawn, strict=True)])
    return trainer


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest absolute difference of two states."""
    assert one.keys() == other.keys()
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())


def same_update(estimator: str, many: Processes) -> float:
    """How far the weights and the estimator's state of two processes are from those of one."""
    alone, together = trained(estimator, Processes()).state(), trained(estimator, many).state()
    parts = ("net", "estimator", "optimizer")
    return max(difference(alone.part(part), together.part(part)) for part in parts if alone.part(part))


def disagreement(estimator: str, many: Processes, net: Callable[[], Sequential] = small_net) -> float:
    """How far the states of the two processes are from one another after an epoch with noise of their own."""
    trainer = Trainer(config(estimator=estimator, batch_size=7), net(), blobs(), many)
    for _ in range(trainer.updates):
        trainer.update()
    state = [*trainer.net.state_dict().values(), *trainer._learned.state_dict().values()]
    flat = torch.cat([value.double().flatten() for value in state])
    first, second = many.gather(flat)
    return float((first - second).abs().max())


def deviation(many: Processes, draws: int = 200) -> float:
    """The largest difference, in standard errors, of the mean gradients of two processes and of one."""
    found = []
    for processes in (Processes(), many):
        trainer = Trainer(config(augment="none", batch_size=9), small_net(), blobs(), processes)
        mine, factor = processes.share(torch.arange(9))
        gradients = []
        for _ in range(draws):
            trainer.net.zero_grad()
            trainer.backward(mine, factor)
            gradients.append(torch.cat([p.grad.flatten() for p in trainer.net.parameters()]))
        found.append(torch.stack(gradients).double())
    one, two = found
    error = torch.sqrt((one.var(0) + two.var(0)) / draws).clamp(min=1e-9)
    return float(((one.mean(0) - two.mean(0)).abs() / error).max())


def goes_on(folder: Path, many: Processes, make: Callable[..., Sequential]) -> bool:
    """Whether an interrupted run of two processes ends as an undisturbed one."""
    finals = []
    for name, stop in (("whole", None), ("parts", StopAfter(1))):
        path, net = folder / f"{make.__name__}-{name}", make()
        run = RunFolder(path) if many.first else None
        if stop is None:
            train(config(), net, blobs(), run, processes=many)
        else:
            try:
                # One of them is told, both stop.
                train(config(), net, blobs(), run, processes=many, stop=stop if many.first else lambda: False)
            except KeyboardInterrupt:
                checkpoint = Checkpoint.read(path / RunFolder.CHECKPOINT)
                assert checkpoint.facts["processes"] == 2
                net = make(5)
                train(config(), net, blobs(), run, processes=many, checkpoint=checkpoint)
        if run is not None:
            run.close()
        finals.append(net.state_dict())
    same = difference(*finals) == 0
    whole, parts = (folder / f"{make.__name__}-{name}" for name in ("whole", "parts"))
    return same and (not many.first or timeless(whole) == timeless(parts))


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    many = connect("cpu")
    with isolated(many.device):
        found = {
            "same update": {name: same_update(name, many) for name in PROBLEMS},
            "disagreement": {name: disagreement(name, many) for name in (*SHAREABLE, "reinforce+running", "muprop+running")},
            "disagreement about drawn weights": disagreement("psa", many, drawn_net),
            "deviation": deviation(many),
            "goes on": [goes_on(folder, many, make) for make in (small_net, drawn_net)],
        }
    assert math.isfinite(found["deviation"])
    (folder / f"found-{many.rank}.json").write_text(json.dumps(found))
    many.close()


if __name__ == "__main__":
    main()
