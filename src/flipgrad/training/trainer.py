"""One training: its state, and the updates that change it."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from enum import IntEnum
from typing import Any, final

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from flipgrad.data import AUGMENTATIONS, DataSet, Split
from flipgrad.errors import DivergenceError, InputError
from flipgrad.estimators import PSA, ST, Estimator
from flipgrad.estimators.names import for_training
from flipgrad.network import BinaryNetwork, parameters_by_layer, sample_weight_noise
from flipgrad.objectives import CrossEntropy, Objective, SoftCrossEntropy
from flipgrad.training.config import AUTO, LOSSES, TrainConfig, augmentation
from flipgrad.training.metrics import Evaluation, changed_signs, evaluate, weight_signs
from flipgrad.training.optimizer import make_optimizer, optimizer_tensors, restore_optimizer, scheduled_rate, set_rate
from flipgrad.training.processes import Processes
from flipgrad.training.run import Checkpoint

# Images that the data-dependent initialisation looks at.
INITIAL_BATCH = 256
# Reading a number from a GPU makes the processor wait for it, so there divergence is looked for less often.
CHECK_EVERY_ON_GPU = 50
# The mean loss of an epoch, per example, above which training has gone astray: to guess among K classes costs log K.
EXPLODED_LOSS = 1e4


# What random numbers are for: every purpose has a stream of its own, independent of the others. The order never changes.
Stream = IntEnum("Stream", "START ORDER NOISE AUGMENT EVALUATE MODULES EVALUATE_TRAINING WEIGHTS", start=0)


def stream_seed(seed: int, stream: Stream, *numbers: int) -> int:
    """A seed for one stream; ``numbers`` tell apart epochs or processes.

    >>> stream_seed(0, Stream.ORDER, 1) == stream_seed(0, Stream.ORDER, 2)
    False
    """
    return int(np.random.SeedSequence([seed, stream, *numbers]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def training_objective(labels: Tensor, classes: int, smoothing: float) -> Objective:
    """The cross-entropy that is minimised: with the share ``smoothing`` of every label spread evenly over all classes.

    Szegedy, Vanhoucke, Ioffe, Shlens, Wojna. Rethinking the Inception Architecture for Computer Vision. CVPR 2016, section 7.

    >>> training_objective(torch.tensor([1]), 4, 0.2).p_star
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    if not smoothing:
        return CrossEntropy(labels)
    return SoftCrossEntropy((1 - smoothing) * functional.one_hot(labels, classes) + smoothing / classes)


def draws_pairs(config: TrainConfig, net: BinaryNetwork, estimator: Estimator) -> bool:
    """Whether several draws for an update are antithetic pairs; unless the configuration says, where that is known to pay.

    It was measured for PSA and ST. DisARM and its kin make antithetic states themselves: their estimate from -Z is that from Z.
    A graph whose layers do not have the batch first has no halves that could be opposite.
    """
    if config.draws != AUTO:
        return config.draws == "antithetic"
    if config.samples % 2 or config.objective != "expected" or not isinstance(estimator, PSA | ST):
        return False
    try:
        for step in net.network().steps:
            step.check_examples_alone("antithetic draws")
    except InputError:
        return False
    return True


@final
class Trainer:
    """A network in training: :meth:`update` by update, :meth:`finish_epoch` after the last one of an epoch.

    All that is random comes from generators that are part of the state, or of the seed and the number of the epoch alone, so
    that a training that is restored goes on as if nothing had happened. Modules that draw from torch's global generator, such
    as dropout, are seeded as well: see :func:`flipgrad.training.loop.isolated`.

    Args:
        config: what to do.
        net: the network; it is initialised and then trained in place.
        data: the examples; without a validation part, epochs are evaluated on the test part.
        processes: those that train together.

    Attributes:
        epoch: how many whole epochs are done.
        updates_done: how many updates of the current one.
    """

    def __init__(self, config: TrainConfig, net: BinaryNetwork, data: DataSet, processes: Processes | None = None) -> None:
        self.config, self.net, self.data = config, net, data
        self._processes = processes or Processes(config.device)
        self._device = self._processes.device
        self._train = data.train.to(self._device)
        self._held_out = "test" if data.validation is None else "validation"
        self._augment = AUGMENTATIONS[augmentation(config)]
        self._estimator = for_training(config.estimator, len(self._train))[1]
        # What it learns while it is used, which most do not.
        self._learned = self._estimator if isinstance(self._estimator, nn.Module) else nn.Module()
        self._begin()
        self._processes.check_shareable(self._learned)
        self._layers = {name: list(group.values()) for name, group in parameters_by_layer(net).items()}
        own = [parameter for parameter in self._learned.parameters() if parameter.requires_grad]
        if own:
            self._layers["estimator"] = own
        self._antithetic = draws_pairs(config, net, self._estimator)
        self._optimizer = make_optimizer(config, net, self._learned.parameters())
        self._model = self._processes.wrap(net)
        rank = self._processes.rank
        self._noise = self._generator(Stream.NOISE, rank, device=self._device)
        self._augmenting = self._generator(Stream.AUGMENT, rank)
        # The same in all processes: binary weights are drawn once for a whole batch.
        self._weight_noise = self._generator(Stream.WEIGHTS, device=self._device)
        torch.manual_seed(stream_seed(config.seed, Stream.MODULES, rank))
        self.epoch = self.updates_done = 0
        self._order = self._drawn(None, Stream.ORDER, self.epoch)
        # The squared gradient norms of the layers, and the method's own loss, added up over the epoch's updates.
        self._sums = torch.zeros(len(self._layers) + 1, dtype=torch.float64, device=self._device)
        self._loss = self._sums[-1].clone()
        # Of binary weights, when the epoch began.
        self._signs = weight_signs(net)
        self._began = 0.0

    @property
    def updates(self) -> int:
        """Updates of an epoch."""
        return -(-len(self._train) // self.config.batch_size)

    @property
    def total_done(self) -> int:
        """Updates of all epochs so far."""
        return self.epoch * self.updates + self.updates_done

    def update(self, noise: Sequence[Tensor] | None = None) -> None:
        """Take the next batch, and change the weights.

        Args:
            noise: Z of every binary layer for this process' examples, instead of drawing it.

        Raises:
            DivergenceError: if a gradient is not finite; the weights are left as they were.
        """
        if not self.updates_done:
            self._began = time.perf_counter()
        start = self.updates_done * self.config.batch_size
        batch = self._order[start : start + self.config.batch_size]
        if not self.net.training:
            self.net.train()
        self._optimizer.zero_grad(set_to_none=True)
        mine, factor = self._processes.share(batch)
        self.backward(mine, factor, noise)
        self._processes.agree(self._learned, mine, len(batch))
        self._sums[:-1] += self._squared_norms()
        self.updates_done += 1
        if self._device.type == "cpu" or self.updates_done % CHECK_EVERY_ON_GPU == 0:
            self._check_sums()
        set_rate(self._optimizer, self._rate())
        self._optimizer.step()

    def backward(self, examples: Tensor, factor: float, noise: Sequence[Tensor] | None = None) -> None:
        """Add the estimated gradient of ``factor`` times the sum of the ``examples``' losses."""
        x = self._augment(self._train.x[examples], self.data.background, self._augmenting)
        objective = training_objective(self._train.y[examples], self.data.classes, self.config.label_smoothing)
        weight_noise = sample_weight_noise(self.net, self._weight_noise)
        how: dict[str, Any] = {"estimator": self._estimator, "generator": self._noise, "noise": noise, "index": examples}
        if weight_noise:
            how["weight_noise"] = weight_noise
        if noise is None and self._antithetic:
            how["antithetic"] = True
        if self.config.shared:
            how["shared"] = self.config.shared
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            losses = LOSSES[self.config.objective](self._model, x, objective, self.config.samples, **how).sum()
        (losses * factor).backward()
        # A process without examples of its own has looked at one of another's.
        self._loss = losses.detach() * (factor > 0)
        self._sums[-1] += self._loss

    def batch_loss(self) -> float:
        """The method's own loss of the last batch, per example. Every process has to ask for it."""
        size = min(self.config.batch_size, len(self._train) - (self.updates_done - 1) * self.config.batch_size)
        return float(self._processes.sum(self._loss)) / size

    def finish_epoch(self) -> dict[str, Any]:
        """Evaluate the network and begin the next epoch.

        Returns:
            The epoch's metrics. Of these ``objective`` is the running mean of the method's own objective, ``gradient_norm`` the
            root mean square over updates of each layer's gradient norm, ``changed_signs`` the share of each layer's binary
            weights whose sign (if drawn, the likelier one) is another than when the epoch began; ``training`` is from training
            images, if so configured; the rest is from the validation images, or the test images where there are none.
        """
        self._check_sums()
        self.check_weights()
        sums = self._sums.tolist()
        loss = float(self._processes.sum(self._sums[-1])) / len(self._train)
        if not math.isfinite(loss):
            raise self._divergence("the loss")
        if loss > EXPLODED_LOSS:
            # Binary units hide it: weights may grow without end, and all numbers stay finite.
            largest = max(zip(sums[:-1], self._layers, strict=True))[1]
            raise self._divergence(f"the loss is {loss:.3g} on average, with the largest gradient in {largest}", "")
        seconds, done = self._seconds(), self.epoch + 1
        record = {
            "epoch": done,
            "objective": loss,
            "lr": self._rate(),
            "seconds": seconds,
            "images_per_second": len(self._train) / seconds,
            "split": self._held_out,
            **asdict(self.evaluate(self._held_out, done)),
        }
        if self.config.eval_train:
            record["training"] = asdict(self._evaluate_training(done))
        norms = zip(self._layers, sums, strict=False)
        record["gradient_norm"] = {name: math.sqrt(total / self.updates) for name, total in norms}
        signs = weight_signs(self.net)
        record["changed_signs"] = changed_signs(self._signs, signs)
        self._signs = signs
        self.next_epoch()
        return record

    def next_epoch(self) -> None:
        """Begin the next epoch without a look at this one."""
        self.epoch, self.updates_done = self.epoch + 1, 0
        self._sums.zero_()
        self._order = self._drawn(None, Stream.ORDER, self.epoch)

    def evaluate(self, split: str, epoch: int) -> Evaluation:
        """The numbers on "test" or "validation"; every process looks at a part of the images."""
        rank, size = self._processes.rank, self._processes.size
        whole: Split = getattr(self.data, split)
        part = Split(whole.x[rank::size], whole.y[rank::size])
        return self._evaluate(part, self._generator(Stream.EVALUATE, epoch, rank, device=self._device))

    def _evaluate_training(self, epoch: int) -> Evaluation:
        """The numbers on training images, always the same ones, augmented anew as in training: the loss that is minimised."""
        rank, stream = self._processes.rank, Stream.EVALUATE_TRAINING
        mine = self._drawn(self.config.eval_train, stream)[rank :: self._processes.size]
        x = self._augment(self._train.x[mine], self.data.background, self._generator(stream, epoch, rank))
        return self._evaluate(Split(x, self._train.y[mine]), self._generator(stream, epoch, rank, device=self._device))

    def _evaluate(self, part: Split, noise: Generator) -> Evaluation:
        self._processes.copy_first(self.net.buffers())
        samples = self.config.eval_samples
        return evaluate(self.net, part.to(self._device), samples, generator=noise, total=self._processes.sum)

    def state(self) -> Checkpoint:
        """All that changes in a training. Every process has to ask for it."""
        mine = {"sums": self._sums}
        mine |= {f"random.{name}": source.get_state() for name, source in self._random_sources().items()}
        parts = {
            "net": self.net.state_dict(),
            "estimator": self._learned.state_dict(),
            "optimizer": optimizer_tensors(self._optimizer),
            "signs": self._signs,
            "process": {name: self._processes.gather(tensor) for name, tensor in mine.items()},
        }
        tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        facts = {
            "config": self.config.to_json(),
            "data": self.data.fingerprint,
            "processes": self._processes.size,
            "epoch": self.epoch,
            "update": self.updates_done,
            "seconds": self._seconds(),
        }
        return Checkpoint(tensors, facts)

    def restore(self, checkpoint: Checkpoint, where: str = "the checkpoint") -> None:
        """Go back to a :meth:`state`; errors say ``where`` it comes from.

        Raises:
            InputError: if it is of another run, of other data, or of another number of processes.
        """
        facts = checkpoint.facts
        if facts.get("processes") != self._processes.size:
            raise InputError(
                f"{where} is of {facts.get('processes')} processes, and there are {self._processes.size}: go on with as many, "
                f"torchrun --nproc-per-node {facts.get('processes')} -m flipgrad train --resume ..."
            )
        # A run may be made longer, and files may be moved.
        free: dict[str, object] = {"epochs": 0, "data_folder": None}
        stored, wanted = facts.get("config"), self.config.to_json()
        if isinstance(stored, dict) and stored.keys() != wanted.keys():
            raise InputError(f"{where} is of another version of flipgrad; go on with that one, or begin a new run")
        if not isinstance(stored, dict) or {**stored, **free} != {**wanted, **free}:
            raise InputError(f"{where} is of a run with another configuration; put the run's own files back together")
        if facts.get("data") != self.data.fingerprint:
            raise InputError(
                f"{where} is of a training on other examples than those of '{self.data.name}' now; put the data back as they "
                "were (--data-folder, if they were moved), or begin a new run"
            )
        try:
            self.net.load_state_dict(checkpoint.part("net"))
            self._learned.load_state_dict(checkpoint.part("estimator"))
            restore_optimizer(self._optimizer, checkpoint.part("optimizer"))
            stored_signs = checkpoint.part("signs")
            for name, signs in self._signs.items():
                if stored_signs[name].shape != signs.shape:
                    raise ValueError(f"the signs of {name} are {list(stored_signs[name].shape)}, not {list(signs.shape)}")
                signs.copy_(stored_signs[name])
            # Copies: a generator does not take a part of a tensor.
            mine = {name: tensor[self._processes.rank].clone() for name, tensor in checkpoint.part("process").items()}
            self._sums.copy_(mine["sums"])
            for name, source in self._random_sources().items():
                source.set_state(mine[f"random.{name}"])
            self.epoch, self.updates_done = int(facts["epoch"]), int(facts["update"])
            if not (0 <= self.epoch <= self.config.epochs and 0 <= self.updates_done <= self.updates):
                raise ValueError(f"it is at update {self.updates_done} of epoch {self.epoch}")
            self._began = time.perf_counter() - float(facts["seconds"])
        except (RuntimeError, KeyError, ValueError, TypeError, IndexError) as error:
            reason = str(error).replace("\n", " ")
            raise InputError(f"{where} does not fit the network that the configuration makes: {reason:.200}") from None
        self._order = self._drawn(None, Stream.ORDER, self.epoch)

    def check_weights(self) -> None:
        """Refuse weights that are not finite, naming the first layer that has one."""
        for name, parameters in self._layers.items():
            if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
                raise self._divergence(f"a weight of {name}")

    def _begin(self) -> None:
        """The first weights of the network and the estimator, the same in every process."""
        noise = self._generator(Stream.START, device=self._device)
        self.net.to(self._device).initialize(self._train.x[self._drawn(INITIAL_BATCH, Stream.START)], generator=noise)
        if isinstance(self._estimator, nn.Module):
            # Its parameters may depend on the network: an estimate makes them, before the optimizer asks.
            torch.manual_seed(stream_seed(self.config.seed, Stream.START))
            self._estimator.to(self._device).eval()
            x, objective = self._train.x[:1], CrossEntropy(self._train.y[:1])
            with torch.no_grad():
                self.net(x, objective, estimator=self._estimator, generator=noise, index=torch.zeros_like(self._train.y[:1]))
            self._estimator.train()

    def _generator(self, stream: Stream, *numbers: int, device: torch.device | str = "cpu") -> Generator:
        return torch.Generator(device).manual_seed(stream_seed(self.config.seed, stream, *numbers))

    def _drawn(self, count: int | None, stream: Stream, *numbers: int) -> Tensor:
        """``count`` training examples (None: all) in random order, the same in every process and whenever they are drawn."""
        order = torch.randperm(len(self._train), generator=self._generator(stream, *numbers))
        return order[:count].to(self._device)

    def _squared_norms(self) -> Tensor:
        """The squared gradient norm of every layer, [layers], without waiting for a GPU."""
        sums = torch.zeros(len(self._layers), dtype=torch.float64, device=self._device)
        squares = [
            (layer, parameter.grad.flatten())
            for layer, parameters in enumerate(self._layers.values())
            for parameter in parameters
            if parameter.grad is not None
        ]
        layers = torch.tensor([layer for layer, _ in squares], device=self._device)
        # The fastest of torch's ways by far, on processors.
        dots = torch.stack([torch.dot(gradient, gradient).double() for _, gradient in squares])
        return sums.index_add_(0, layers, dots)

    def _rate(self) -> float:
        """The learning rate of the update that was counted last."""
        return scheduled_rate(self.config, (self.total_done - 1) / (self.config.epochs * self.updates))

    def _check_sums(self) -> None:
        # Gradients are the same in all processes, so that all of them stop; losses are their own.
        watched = self._sums if self._processes.size == 1 else self._sums[:-1]
        if math.isfinite(float(watched.sum())):
            return
        finite = torch.isfinite(self._sums[:-1]).tolist()
        # Backpropagation begins at the end: the last layer that is not finite was the first to be so.
        broken = [name for name, good in zip(self._layers, finite, strict=True) if not good]
        self.check_weights()
        raise self._divergence(f"the gradient of {broken[-1]}" if broken else "the loss")

    def _divergence(self, what: str, fault: str = " is no longer finite") -> DivergenceError:
        place = f"in epoch {self.epoch + 1}, update {self.updates_done}"
        return DivergenceError(f"{what}{fault} {place}; lower the rate, e.g. --lr {self.config.rate / 3:.2g}")

    def _random_sources(self) -> dict[str, Generator]:
        """All generators that updates draw from, torch's own ones, too."""
        sources = {"noise": self._noise, "augment": self._augmenting, "torch": torch.default_generator}
        sources["weights"] = self._weight_noise
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            sources["cuda"] = torch.cuda.default_generators[index]
        return sources

    def _seconds(self) -> float:
        """Since the first update of the current epoch, without the time in which the run was interrupted."""
        return time.perf_counter() - self._began if self.updates_done else 0.0
