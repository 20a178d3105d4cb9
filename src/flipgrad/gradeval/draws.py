"""One-draw gradients of an estimator, many at once.

A draw is the gradient of the mean loss of all data points with one draw of all noises. Many of them are one evaluation with
a leading dimension for the draws (``torch.vmap``): every draw has its own copy of the parameters, all equal, so that
ordinary backpropagation leaves every draw's gradient in its copy. The estimator's own code is what runs.
"""

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import final

import numpy
import torch
from torch import Tensor, nn
from torch.func import functional_call

from flipgrad import exact
from flipgrad.contract import Batch, LayerCall, Network
from flipgrad.errors import InputError
from flipgrad.estimators import Estimator
from flipgrad.latent import Variational
from flipgrad.machine import cores, threads
from flipgrad.network import StochasticModel, parameters_by_layer
from flipgrad.noise import Noise
from flipgrad.objectives import Objective
from flipgrad.sampling import Draw, Stream, fresh

# Bounds on the draws that are evaluated together: their pre-activations (enough that the work outweighs the calls, few enough
# for memory) and the entries of their gradients.
PREACTIVATIONS_AT_ONCE, GRADIENT_ENTRIES_AT_ONCE = 2**22, 2**24
# Few draws are still divided into this many parts, for the workers. It is no function of their number: that changes no draw.
PARTS = 8


@final
@dataclass(frozen=True)
class Problem:
    """What is differentiated: the mean of the objective over the data points ``x`` [B, ...].

    A latent-variable model has its own objective, and none is given.
    """

    net: StochasticModel
    x: Tensor
    objective: Objective | None

    def evaluation(self, draw: Draw) -> tuple[Network, Batch]:
        """The network, and the batch of all data points."""
        net, index = self.net.network(), torch.arange(len(self.x), device=self.x.device)
        objective = self.net.objective(self.x, net) if isinstance(self.net, Variational) else self.objective
        if objective is None:
            raise InputError("objective: give one, e.g. fg.CrossEntropy(labels); only a flipgrad.Variational has its own")
        return net, Batch(self.x, objective, draw, index)

    def exact_losses(self) -> Tensor:
        """The expected losses [B]."""
        net, batch = self.evaluation(fresh(None))
        return exact.expected_loss(net, batch.x, batch.objective)

    def parameters(self) -> dict[str, Tensor]:
        """The parameters whose gradient is wanted, in the order of :meth:`layers`."""
        groups = parameters_by_layer(self.net)
        return {name: parameter for group in groups.values() for name, parameter in group.items()}

    def layers(self) -> dict[str, slice]:
        """Which entries of the whole gradient [P] belong to "front", "layer 1", ..., "head", and, last, "all" of them."""
        parts, start = {}, 0
        for name, group in parameters_by_layer(self.net).items():
            end = start + sum(parameter.numel() for parameter in group.values())
            parts[name] = slice(start, end)
            start = end
        return {**parts, "all": slice(0, start)}

    @torch.no_grad()
    def size(self) -> int:
        """The number of pre-activations of one evaluation."""
        sizes = []

        def visit(call: LayerCall) -> Tensor:
            a = call.affine(call.x)
            sizes.append(a.numel())
            return call.sample(a)

        net = self.net.network()
        net.run(net.front(self.x), visit, fresh(torch.Generator(self.x.device)))
        return sum(sizes)


@final
class Sampler:
    """Draws gradients of one estimator, vectorised where its code allows that, else one by one.

    The estimator is copied, and its own parameters are not trained. The same seed gives the same draws, however many workers,
    threads that draw side by side, there are.
    """

    def __init__(self, problem: Problem, estimator: Estimator, seed: Sequence[int], workers: int) -> None:
        self.problem = problem
        self.seed = seed
        self.estimator = copy.deepcopy(estimator)
        # An ordinary estimate: reports what is wrong in the ordinary way, and lets the estimator build what it needs.
        one_by_one(problem, self.estimator, 1, self._stream(0))
        if isinstance(self.estimator, nn.Module):
            self.estimator.requires_grad_(False)
        self.vectorised = self._can_vectorise()
        self.workers = workers if self.vectorised else 1

    def draws(self, samples: int, tell: Callable[[int], None] | None = None) -> Iterator[Tensor]:
        """``samples`` gradients, [n, P] at a time; when n of them were used, ``tell`` is called with n."""
        by_size = PREACTIVATIONS_AT_ONCE // max(1, self.problem.size())
        by_gradient = GRADIENT_ENTRIES_AT_ONCE // self.problem.layers()["all"].stop
        rows = max(1, min(by_size, by_gradient, -(-samples // PARTS)))
        method = vectorised if self.vectorised else one_by_one
        # Modules are changed while they are evaluated with other parameters, so every worker has its own.
        idle = [copy.deepcopy((self.problem, self.estimator)) for _ in range(self.workers)]

        def work(start: int) -> Tensor:
            mine = idle.pop()
            try:
                return method(*mine, min(rows, samples - start), self._stream(start // rows + 1))
            finally:
                idle.append(mine)

        with _side_by_side(self.workers), ThreadPoolExecutor(self.workers) as pool:
            submitted = (pool.submit(work, start) for start in range(0, samples, rows))
            waiting = deque(islice(submitted, 2 * self.workers))
            try:
                while waiting:
                    gradients = waiting.popleft().result()
                    yield gradients
                    if tell is not None:
                        tell(len(gradients))
                    waiting.extend(islice(submitted, 1))
            finally:
                pool.shutdown(cancel_futures=True)

    def _stream(self, number: int) -> Stream:
        return stream([*self.seed, number], self.problem.x.device)

    def _can_vectorise(self) -> bool:
        try:
            with _side_by_side(1):
                vectorised(self.problem, copy.deepcopy(self.estimator), 2, self._stream(0))
        except (RuntimeError, NotImplementedError, InputError):
            # It, or the objective, does something that torch cannot do for many draws at once, such as to remember each one.
            return False
        return True


def stream(seed: Sequence[int], device: torch.device) -> Stream:
    """The noise that belongs to a seed of several numbers."""
    (state,) = numpy.random.SeedSequence(seed).generate_state(1, numpy.uint64)
    return Stream(int(state) >> 1, device)


def vectorised(problem: Problem, estimator: Estimator, count: int, draw: Draw, noise: Sequence[Tensor] = ()) -> Tensor:
    """``count`` gradients [count, P] at once.

    Every time the estimator asks for noise it is given the next of ``noise``, each with a leading dimension for the draws, and
    what comes from ``draw`` where that is used up.
    """
    loss = _Loss(problem, estimator)
    names, parameters = zip(*problem.parameters().items(), strict=True)
    # One number in memory for all draws.
    copies = [parameter.detach().expand(count, *parameter.shape).requires_grad_() for parameter in parameters]

    def one(copies: Sequence[Tensor], noise: Sequence[Tensor]) -> Tensor:
        named = {f"net.{name}": copy for name, copy in zip(names, copies, strict=True)}
        value: Tensor = functional_call(loss, named, (draw, noise))
        return value

    losses = torch.vmap(one, randomness="different")(copies, list(noise))
    gradients = torch.autograd.grad(losses.sum(), copies, materialize_grads=True)
    return torch.cat([gradient.flatten(1) for gradient in gradients], 1)


def one_by_one(problem: Problem, estimator: Estimator, count: int, draw: Draw, noise: Sequence[Tensor] = ()) -> Tensor:
    """The same as :func:`vectorised`, one draw after the other."""
    loss, parameters = _Loss(problem, estimator), problem.parameters()
    return torch.stack([whole_gradient(loss(draw, [z[i] for z in noise]), parameters) for i in range(count)])


def whole_gradient(loss: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """The gradient [P] of a ``loss`` in all ``parameters``."""
    gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


class _Loss(nn.Module):
    """The mean loss whose gradient is one draw."""

    def __init__(self, problem: Problem, estimator: Estimator) -> None:
        super().__init__()
        self.problem = problem
        # By this name its parameters are replaced.
        self.net = problem.net
        # In a list, so that the parameters of an estimator are none of this module.
        self.rule = [estimator]

    def forward(self, draw: Draw, noise: Sequence[Tensor]) -> Tensor:
        remaining = iter(noise)

        def source(distribution: Noise, a: Tensor) -> Tensor:
            z = next(remaining, None)
            return draw(distribution, a) if z is None else z

        return self.rule[0].losses(*self.problem.evaluation(source if noise else draw)).mean()


def default_workers(device: torch.device) -> int:
    """All the cores that this process may use; one thread is enough to keep another device busy."""
    return cores() if device.type == "cpu" else 1


@contextmanager
def _side_by_side(workers: int) -> Iterator[None]:
    """Where several workers draw side by side, each of them uses one thread; torch is not to warn of slow operations."""
    with threads(1 if workers > 1 else torch.get_num_threads()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        yield
