"""REINFORCE with a learned control variate.

Grathwohl, Choi, Wu, Roeder, Duvenaud. Backpropagation through the Void: Optimizing control variates for black-box gradient
estimation. ICLR 2018.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from flipgrad.errors import InputError
from flipgrad.estimators._paths import Path
from flipgrad.estimators.rebar import REBAR

# Hidden units of the surrogates that are built here.
HIDDEN = 16


@final
class RELAX(REBAR):
    r"""REBAR with a free-form network added to its control variate, at every layer.

    The control variate of layer k is, in the notation of :class:`flipgrad.REBAR`,

    .. math:: c_k(s) = \eta f(s) + r_k(s),

    with :math:`r_k` any differentiable network on the layer's flattened relaxed states; it is used just as
    :math:`\eta f` is there. Unbiased for the same reason, whatever the networks. One path and two relaxed passes for every
    layer.

    The networks and the logarithms of temperature and scale are parameters, trained as those of REBAR. Surrogates that are
    not given are built when the first estimate, or ``load_state_dict``, tells the layers' sizes: make the optimizer after it.
    They have one hidden layer and start at 0, where this is REBAR.

    Args:
        surrogate: a module for every binary layer in order, or the module of the only one, from [B, units] to [B] or
            [B, 1] in the network's dtype; it treats the examples separately. By default built here.
        temperature: at the start, positive.
        scale: :math:`\eta` at the start, positive.

    >>> import torch, flipgrad as fg
    >>> net = fg.Sequential(fg.BinaryLinear(2, 4), head=torch.nn.Linear(4, 2))
    >>> x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))
    >>> relax = fg.RELAX(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    >>> net(x, objective, estimator=relax).mean().backward()
    >>> relax.variance_loss(net, x, objective).backward()
    """

    citation = "Grathwohl et al. 2018"

    def __init__(
        self, surrogate: nn.Module | Sequence[nn.Module] | None = None, temperature: float = 0.5, scale: float = 1.0
    ) -> None:
        super().__init__(temperature, scale)
        given = [surrogate] if isinstance(surrogate, nn.Module) else surrogate
        if given is not None and not given:
            raise InputError("RELAX(surrogate=[]): give one module for every binary layer, or None to have them built")
        self.surrogates = nn.ModuleList(given)

    def estimate(self, path: Path) -> Sequence[Tensor]:
        if not self.surrogates:
            self.surrogates.extend(_network(a.flatten(1).shape[1]).to(a) for a in path.a)
        if len(self.surrogates) != len(path.a):
            raise InputError(
                f"RELAX has {len(self.surrogates)} surrogates for {len(path.a)} binary layers; give one each, and use an "
                "estimator of its own for every network"
            )
        return super().estimate(path)

    def control(self, k: int, states: Tensor, scaled: Tensor) -> Tensor:
        units = states.flatten(1).shape[1]
        try:
            values: Tensor = self.surrogates[k](states.flatten(1))
        except RuntimeError as error:
            raise InputError(
                f"RELAX: surrogate {k} fails on the {units} {states.dtype} units of layer {k + 1} ({error}); use an "
                "estimator of its own for every network, in the network's dtype and on its device"
            ) from error
        if values.shape not in ((len(states),), (len(states), 1)):
            raise InputError(
                f"RELAX: surrogate {k} gave {list(values.shape)} for states {list(states.flatten(1).shape)}; it must give one "
                "value for each example, [B] or [B, 1]"
            )
        return scaled + values.flatten()

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        first = [f"{prefix}surrogates.{k}.0.weight" for k in range(len(state_dict))]
        if not self.surrogates:
            saved = [state_dict[name] for name in first if name in state_dict]
            self.surrogates.extend(_network(weight.shape[1]).to(weight) for weight in saved)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _network(units: int) -> nn.Module:
    last = nn.Linear(HIDDEN, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(units, HIDDEN), nn.Tanh(), last)
