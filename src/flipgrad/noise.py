r"""The noise :math:`Z` injected in front of every sign: :math:`x = \mathrm{sign}(a - Z)`.

With cdf :math:`F` a unit is +1 with probability :math:`F(a)` and has the conditional mean
:math:`m(a) = 2F(a) - 1`. Every noise here is symmetric about zero, so :math:`P(x = -1) = F(-a)` keeps its
relative precision in the tails, and the noise's median is 0.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Generator, Tensor

from flipgrad.errors import InputError
from flipgrad.guards import capturing, only_computes
from flipgrad.native import library, sampling

# Differences and curvatures at several steps.
Parts = tuple[list[Tensor], list[Tensor]]


def sign(t: Tensor) -> Tensor:
    """The sign as a state: +1 where ``t >= 0``, else -1 (never 0, unlike ``torch.sign``).

    >>> sign(torch.tensor([-0.5, 0.0, 2.0]))
    tensor([-1.,  1.,  1.])
    """
    return (t >= 0).to(t.dtype).mul_(2).sub_(1)


@dataclass(frozen=True)
class Noise(ABC):
    """A symmetric distribution of the injected noise, scaled by ``scale``.

    Subclasses give the functions of the standard distribution (scale 1); this class rescales them.

    Args:
        scale: the factor on the standard noise, positive and finite.
    """

    # Whether :meth:`flip_parts` has a closed form, in which no digits cancel however small the steps are.
    closed_form: ClassVar[bool] = False

    # Whether compiled code and the kernel for GPUs know its cdf: sums over flips of other noises are in tensor operations.
    compiled: ClassVar[bool] = False

    # The median of Z, by symmetry. The deterministic net replaces Z by it.
    median: ClassVar[float] = 0.0

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InputError(f"{type(self).__name__}(scale={self.scale}): the scale must be positive and finite, e.g. 1.0")

    @property
    def variance(self) -> float:
        """The variance of Z."""
        return self.scale**2 * self._variance()

    def cdf(self, a: Tensor) -> Tensor:
        """The probability F(a) that a unit with pre-activation ``a`` is +1."""
        return self._cdf(self._standard(a))

    def log_cdf(self, a: Tensor) -> Tensor:
        """log F(a), finite for abs(a) up to 1e18 scales; an impossible state gets the log of the smallest normal number."""
        return self._log_cdf(self._standard(a))

    def log_prob(self, x: Tensor, a: Tensor) -> Tensor:
        """log P(state x | pre-activation a) of states ``x`` in {-1, +1}; finite, see :meth:`log_cdf`."""
        return self.log_cdf(x * a)

    def log_odds(self, a: Tensor) -> Tensor:
        """log F(a) / F(-a): how much likelier +1 is than -1."""
        return self._log_odds(self._standard(a))

    def negative_entropy(self, a: Tensor) -> Tensor:
        """-H of a state with pre-activation ``a``: F(a) log F(a) + F(-a) log F(-a)."""
        return self.cdf(a) * self.log_cdf(a) + self.cdf(-a) * self.log_cdf(-a)

    def score(self, x: Tensor, a: Tensor) -> Tensor:
        """d log P(state x | pre-activation a) / da of states ``x`` in {-1, +1}; 0 for an impossible state."""
        return x * self._log_slope(self._standard(x * a)) / self.scale

    def pdf(self, a: Tensor) -> Tensor:
        """The density F'(a)."""
        standard = self._pdf(self._standard(a), 0)
        return standard if self.scale == 1 else standard / self.scale

    def mean_gradient(self, a: Tensor, grad: Tensor) -> Tensor:
        """2F'(a) times ``grad``: the gradient in pre-activations ``a`` of their units' means, for the gradient in these."""
        return (self.pdf(a) * grad).mul_(2)

    def pdf_derivative(self, a: Tensor, order: int = 1) -> Tensor:
        """The density's derivative of order 1, 2 or 3: F'', F''' and F''''.

        Where it does not exist (the kink of Laplace, the edges of Uniform) it is the mean of its limits from both sides.
        """
        if order not in (1, 2, 3):
            raise InputError(f"pdf_derivative(order={order}): the order must be 1, 2 or 3")
        return self._pdf(self._standard(a), order) / self.scale ** (order + 1)

    def derivatives(self, a: Tensor, order: int) -> list[Tensor]:
        """The derivatives of F up to an ``order``: F', F'', ... at ``a``."""
        return [self.pdf(a), *(self.pdf_derivative(a, k) for k in range(1, order))]

    def icdf(self, u: Tensor) -> Tensor:
        """The inverse of the cdf, for ``u`` in (0, 1)."""
        return self._icdf(u) * self.scale

    def mean_sign(self, a: Tensor) -> Tensor:
        """The conditional mean m(a) = 2F(a) - 1 of a unit's state."""
        return self._mean_sign(self._standard(a))

    def sample(
        self,
        shape: Sequence[int],
        *,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Independent draws of Z, reproducible from the ``generator``; always finite."""
        dtype = dtype or torch.get_default_dtype()
        # Half precision has too few bits for a uniform variable whose logarithm is taken.
        options: dict[str, Any] = {"dtype": dtype if dtype == torch.float64 else torch.float32, "device": device}
        # Graphs know the operator without a generator better.
        if generator is not None:
            if capturing():
                raise InputError(
                    "a generator cannot be part of a compiled or exported graph: leave it out, and torch.manual_seed decides; "
                    "or hand in noise=, drawn outside"
                )
            options["generator"] = generator
        return (self._sample(tuple(shape), **options) * self.scale).to(dtype)

    def sample_like(self, a: Tensor, *, generator: Generator | None = None) -> Tensor:
        """Draws of Z with the shape, dtype and device of the pre-activations ``a``."""
        return self.sample(a.shape, generator=generator, dtype=a.dtype, device=a.device)

    def sample_sign(self, a: Tensor, generator: Generator | None = None) -> Tensor:
        """Sampled states sign(a - Z), without a gradient."""
        return sign(a.detach() - self.sample_like(a, generator=generator))

    def compiled_sign(self, a: Tensor, seed: int, offset: int = 0) -> Tensor:
        """Sampled states from counter-based random numbers, in compiled code: see :mod:`flipgrad.native.sampling`."""
        return sampling.states_from_probability(self.cdf(a), seed, offset)

    def flip_parts(self, a: Tensor, grad: Tensor, steps: Sequence[float], curvature_nodes: Sequence[int]) -> Parts:
        """How F changes over steps s both ways, times ``grad``, up to a factor that depends on the step alone.

        In the tails of ``a`` the results keep their relative precision. The ``steps`` are in units of the scale; the curvature
        is wanted at those of them whose indices are the ``curvature_nodes``.

        Returns:
            The differences F(a + s) - F(a - s) at all steps, which are odd in s and even in a, and the curvatures
            2F(a) - F(a + s) - F(a - s), which are even in s and odd in a.
        """
        # By these symmetries in a: on the lower tail probabilities are small and precise.
        below = a.abs().neg_()
        sides = [(self.cdf(below + step * self.scale), self.cdf(below - step * self.scale)) for step in steps]
        curvatures = []
        if curvature_nodes:
            middle, mirrored = self.cdf(below).mul_(-2), a.sign().mul_(grad)
            curvatures = [torch.add(middle, sides[k][0]).add_(sides[k][1]).mul_(mirrored) for k in curvature_nodes]
        return [upper.sub_(lower).mul_(grad) for upper, lower in sides], curvatures

    def log_parts(self, a: Tensor, states: Tensor, steps: Sequence[float], curvature_nodes: Sequence[int]) -> Parts:
        """How log F(ya) of ``states`` y changes over steps s both ways, like :meth:`flip_parts`.

        Returns:
            The differences y [log F(ya - s) - log F(ya + s)] / 2 at all steps, and the curvatures
            [log F(ya + s) + log F(ya - s)] / 2 - log F(ya).
        """
        t = a * states
        middle = self.log_cdf(t)
        sides = [(self.log_cdf(t + step * self.scale), self.log_cdf(t - step * self.scale)) for step in steps]
        differences = [(below - above).mul_(states).div_(2) for above, below in sides]
        return differences, [(sides[k][0] + sides[k][1]).div_(2).sub_(middle) for k in curvature_nodes]

    def change(self, a: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """How F changes over steps s that have two directions t = ±1: E and O with F(a) - F(a - ts) = E t + O.

        E is odd in the ``step``, which broadcasts to ``a``, and O even. In the tails both keep their relative precision.
        """
        # E is even in a and O odd: on the lower tail probabilities are small and precise.
        below, size = a.abs().neg_(), step.abs()
        upper, lower = self.cdf(below + size), self.cdf(below - size)
        curvature = self.cdf(below).sub_((upper + lower).div_(2))
        return upper.sub_(lower).mul_(step.sign() / 2), curvature.mul_(a.sign().neg_())

    def log_change(self, a: Tensor, states: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """The same of log p(y | a) of ``states`` y: E and O with log p(y | a - ts) - log p(y | a) = E t + O."""
        t, size = a * states, step.abs()
        above, below = self.log_cdf(t + size), self.log_cdf(t - size)
        curvature = (above + below).div_(2).sub_(self.log_cdf(t))
        return below.sub_(above).mul_(states).mul_(step.sign() / 2), curvature

    def _sample(self, shape: tuple[int, ...], **options: Any) -> Tensor:
        u: Tensor = torch.rand(shape, **options)
        return self._icdf(u.clamp(min=torch.finfo(u.dtype).tiny))

    def _standard(self, a: Tensor) -> Tensor:
        # Hot code calls cdf with the default scale: spare it a pass over the tensor.
        return a if self.scale == 1 else a / self.scale

    @abstractmethod
    def _cdf(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def _log_cdf(self, t: Tensor) -> Tensor: ...

    def _log_odds(self, t: Tensor) -> Tensor:
        """Subclasses may know a closed form."""
        return self._log_cdf(t) - self._log_cdf(-t)

    def _log_slope(self, t: Tensor) -> Tensor:
        """F'/F, the derivative of log F; subclasses may know a closed form."""
        transform: Any = torch.func.vjp(self._log_cdf, t)
        slope: Tensor = transform[1](torch.ones_like(t))[0]
        return slope

    @abstractmethod
    def _pdf(self, t: Tensor, order: int) -> Tensor: ...

    @abstractmethod
    def _icdf(self, u: Tensor) -> Tensor: ...

    @abstractmethod
    def _mean_sign(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def _variance(self) -> float: ...


@final
@dataclass(frozen=True)
class Logistic(Noise):
    """Logistic noise: F is the sigmoid. The paper's choice, and the default.

    >>> Logistic().cdf(torch.tensor(0.0))
    tensor(0.5000)
    """

    closed_form: ClassVar[bool] = True
    compiled: ClassVar[bool] = True

    def compiled_sign(self, a: Tensor, seed: int, offset: int = 0) -> Tensor:
        # The probability is computed in the same pass.
        return sampling.logistic_states(a, self.scale, seed, offset)

    def mean_gradient(self, a: Tensor, grad: Tensor) -> Tensor:
        if not (only_computes((a, grad)) and library.takes_alike(a, grad) and a.shape == grad.shape):
            return super().mean_gradient(a, grad)
        # In one pass over memory.
        slopes = torch.empty_like(a)
        library.call("slopes", torch.float32, a, grad, slopes, count=a.numel(), scale=self.scale)
        return slopes

    def flip_parts(self, a: Tensor, grad: Tensor, steps: Sequence[float], curvature_nodes: Sequence[int]) -> Parts:
        # With t = a / scale the difference is D = sinh(s) / (cosh(t) + cosh(s)), the curvature (2F - 1) tanh(s / 2) D. Far out
        # cosh is inf, and D is 0. Every pass over memory counts, and every new tensor as much as two: the last node takes
        # cosh's own memory.
        t = self._standard(a)
        cosh = torch.cosh(t)
        differences = [cosh + math.cosh(step) for step in steps[:-1]]
        differences.append(cosh.add_(math.cosh(steps[-1])))
        for d in differences:
            torch.div(grad, d, out=d)
        if not curvature_nodes:
            return differences, []
        above = torch.sigmoid(t)
        # (1 - 2F) times the difference.
        curvatures = [torch.addcmul(differences[k], above, differences[k], value=-2) for k in curvature_nodes[:-1]]
        last = differences[curvature_nodes[-1]]
        return differences, [*curvatures, torch.addcmul(last, above, last, value=-2, out=above)]

    def log_parts(self, a: Tensor, states: Tensor, steps: Sequence[float], curvature_nodes: Sequence[int]) -> Parts:
        # With m = tanh(t / 2), t = ya / scale, the difference is y [atanh(m tanh(s / 2)) - s / 2] and the curvature
        # -log(1 + (1 - m^2)(cosh s - 1) / 2) / 2.
        m = torch.tanh(a * states / self.scale / 2)
        half = torch.tensor(steps, dtype=torch.float64, device="cpu") / 2
        pairs = zip(half.tanh().tolist(), steps, strict=True)
        differences = [torch.atanh(m * h).sub_(s / 2).mul_(states) for h, s in pairs]
        variance = (m * m).neg_().add_(1)
        heights = (2 * half.sinh().square()).tolist()
        return differences, [torch.log1p(variance * (heights[k] / 2)).div_(-2) for k in curvature_nodes]

    def change(self, a: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        # No digits cancel in F(t + s) - F(t - s) = F(t + s) F(s - t) (1 - exp(-2s)), s > 0; O is E times the unit's mean and
        # that of a unit at s.
        t, s = self._standard(a), self._standard(step)
        size = s.abs()
        difference = torch.sigmoid(t + size).mul_(torch.sigmoid(size - t)).mul_(torch.expm1(-2 * size) * s.sign() / -2)
        curvature = torch.sigmoid(t).mul_(2).sub_(1).mul_(difference).mul_(torch.tanh(s / 2))
        return difference, curvature

    def derivatives(self, a: Tensor, order: int) -> list[Tensor]:
        if order > 2:
            return super().derivatives(a, order)
        # In few passes over memory, and accurate in both tails: F' = F(a) F(-a), F'' = F' (F(-a) - F(a)).
        t = a if self.scale == 1 else a / self.scale
        below, above = torch.sigmoid(t), torch.sigmoid(-t)
        standard = [below * above]
        if order == 2:
            standard.append(standard[0] * (above - below))
        return standard if self.scale == 1 else [slope / self.scale**k for k, slope in enumerate(standard, 1)]

    def _cdf(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t)

    def _log_cdf(self, t: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(t)

    def _log_odds(self, t: Tensor) -> Tensor:
        return t

    def _log_slope(self, t: Tensor) -> Tensor:
        return torch.sigmoid(-t)

    def _pdf(self, t: Tensor, order: int) -> Tensor:
        if order == 0 and not (torch.is_grad_enabled() and t.requires_grad):
            # The smaller one of F(t) and F(-t), so that no digits are lost, in as few passes over memory as there can be.
            p = t.abs().neg_().sigmoid_()
            return torch.addcmul(p, p, p, value=-1)
        f = torch.sigmoid(t) * torch.sigmoid(-t)
        if order == 0:
            return f
        if order == 2:
            return f * (1 - 6 * f)
        slope = -f * torch.tanh(t / 2)
        return slope if order == 1 else slope * (1 - 12 * f)

    def _icdf(self, u: Tensor) -> Tensor:
        return torch.logit(u)

    def _mean_sign(self, t: Tensor) -> Tensor:
        return torch.tanh(t / 2)

    def _variance(self) -> float:
        return math.pi**2 / 3


@final
@dataclass(frozen=True)
class Normal(Noise):
    """Gaussian noise with standard deviation ``scale``."""

    def _cdf(self, t: Tensor) -> Tensor:
        # Not torch.special.ndtr, which is (1 + erf) / 2 and rounds the lower tail away.
        return torch.erfc(t * -math.sqrt(0.5)) / 2

    def _log_cdf(self, t: Tensor) -> Tensor:
        log_probability: Tensor = torch.special.log_ndtr(t)
        return log_probability

    def _log_odds(self, t: Tensor) -> Tensor:
        # log F(-|t|) as in _log_slope, and log F(|t|) = log(1 - F(-|t|)).
        size = t.abs()
        scaled: Tensor = torch.special.erfcx(size * math.sqrt(0.5))
        lower = torch.log(scaled / 2) - size * size / 2
        return t.sign() * (torch.log1p(-torch.erfc(size * math.sqrt(0.5)) / 2) - lower)

    def _log_slope(self, t: Tensor) -> Tensor:
        # F(t) = exp(-t^2 / 2) erfcx(-t / sqrt 2) / 2: the ratio has no exponentials left, which would vanish together.
        scaled: Tensor = torch.special.erfcx(t * -math.sqrt(0.5))
        return math.sqrt(2 / math.pi) / scaled

    def _pdf(self, t: Tensor, order: int) -> Tensor:
        # Beyond |t| = 40 the density is 0 even in float64: the clamp only keeps t**3 from meeting it as inf * 0.
        t = t.clamp(-1e3, 1e3)
        phi = torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)
        if order == 0:
            return phi
        return phi * (-t, t * t - 1, t * (3 - t * t))[order - 1]

    def _icdf(self, u: Tensor) -> Tensor:
        quantile: Tensor = torch.special.ndtri(u)
        return quantile

    def _mean_sign(self, t: Tensor) -> Tensor:
        return torch.erf(t / math.sqrt(2))

    def _sample(self, shape: tuple[int, ...], **options: Any) -> Tensor:
        # Much faster than the inverse cdf.
        return torch.randn(shape, **options)

    def _variance(self) -> float:
        return 1.0


@final
@dataclass(frozen=True)
class Laplace(Noise):
    """Laplace noise with density ``exp(-abs(z) / scale) / (2 scale)``."""

    def _cdf(self, t: Tensor) -> Tensor:
        # One-sided clamps, not |t|: their derivative at 0 is the density's value there, that of |t| is 0.
        lower = torch.exp(t.clamp(max=0)) / 2
        upper = 1 - torch.exp(-t.clamp(min=0)) / 2
        return torch.where(t < 0, lower, upper)

    def _log_cdf(self, t: Tensor) -> Tensor:
        lower = t.clamp(max=0) - math.log(2)
        upper = torch.log1p(-torch.exp(-t.clamp(min=0)) / 2)
        return torch.where(t < 0, lower, upper)

    def _log_slope(self, t: Tensor) -> Tensor:
        half = torch.exp(-t.clamp(min=0)) / 2
        return half / (1 - half)

    def _pdf(self, t: Tensor, order: int) -> Tensor:
        f = torch.exp(-t.abs()) / 2
        return f if order % 2 == 0 else -torch.sign(t) * f

    def _icdf(self, u: Tensor) -> Tensor:
        lower = torch.log(2 * u.clamp(max=0.5))
        upper = -torch.log(2 * (1 - u.clamp(min=0.5)))
        return torch.where(u < 0.5, lower, upper)

    def _mean_sign(self, t: Tensor) -> Tensor:
        lower = torch.expm1(t.clamp(max=0))
        upper = -torch.expm1(-t.clamp(min=0))
        return torch.where(t < 0, lower, upper)

    def _variance(self) -> float:
        return 2.0


@final
@dataclass(frozen=True)
class Uniform(Noise):
    """Noise uniform on [-scale, scale]: F is linear there, so PSA and ST agree (math: F has no curvature)."""

    def _cdf(self, t: Tensor) -> Tensor:
        return ((t + 1) / 2).clamp(0, 1)

    def _log_cdf(self, t: Tensor) -> Tensor:
        return torch.log(self._cdf(t).clamp(min=torch.finfo(t.dtype).tiny))

    def _log_slope(self, t: Tensor) -> Tensor:
        inside = (t > -1) & (t <= 1)
        return torch.where(inside, 1 / torch.where(inside, 1 + t, 1), 0)

    def _pdf(self, t: Tensor, order: int) -> Tensor:
        if order > 0:
            return torch.zeros_like(t)
        return (t.abs() <= 1).to(t.dtype) / 2

    def _icdf(self, u: Tensor) -> Tensor:
        return 2 * u - 1

    def _mean_sign(self, t: Tensor) -> Tensor:
        return t.clamp(-1, 1)

    def _variance(self) -> float:
        return 1 / 3


# By name, for configurations.
NOISES: dict[str, type[Noise]] = {"logistic": Logistic, "normal": Normal, "laplace": Laplace, "uniform": Uniform}


def noise_by_name(specification: str) -> Noise:
    """One of the noises, with scale 1 or the one that is given.

    >>> noise_by_name("normal"), noise_by_name("logistic:0.5")
    (Normal(scale=1.0), Logistic(scale=0.5))
    """
    name, colon, scale = specification.partition(":")
    if name not in NOISES:
        raise InputError(f"noise {specification!r}: choose {', '.join(NOISES)}, with a scale if wanted, e.g. logistic:0.5")
    try:
        number = float(scale) if colon else 1.0
    except ValueError:
        raise InputError(f"noise {specification!r}: its scale is no number; give one, e.g. {name}:0.5") from None
    return NOISES[name](number)
