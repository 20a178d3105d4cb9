"""The configuration of a training run, whose every option is stated here alone, and the data set and network it asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from reprlib import repr as brief
from typing import Any, cast

import torch
from torch import Tensor, nn

from flipgrad.bounds import MeanOfDraws, bound_losses, mean_losses
from flipgrad.connections import WeightKind
from flipgrad.data import AUGMENTATIONS, SOURCES, DataSet
from flipgrad.errors import InputError
from flipgrad.estimators import ESTIMATORS
from flipgrad.estimators.names import for_training, is_user_estimator
from flipgrad.graph import Graph, as_network
from flipgrad.guards import keeping_buffers
from flipgrad.network import BinaryNetwork, layers_with_binary_weights
from flipgrad.noise import NOISES, Noise, noise_by_name
from flipgrad.objectives import CrossEntropy
from flipgrad.training.latents import DEPTHS
from flipgrad.training.models import MODELS, NORMS, WEIGHTS, NormName, model
from flipgrad.user_code import call_user_function, check_runs, is_user_function

# What is wanted is found by the run itself: the data set's own choice, or a search.
AUTO = "auto"
# Options that say nothing to a latent-variable model.
ELBO_IGNORES = (
    *("image_size", "norm", "noise", "weights", "weight_noise", "label_smoothing", "samples", "draws", "shared", "schedule"),
    *("warmup", "weight_decay", "device", "precision", "eval_train"),
)
# What is minimised, by name: losses [B] of a batch from some draws.
LOSSES: dict[str, Callable[..., Tensor]] = {"expected": mean_losses, "bound": bound_losses}
# Binary weights are signs, and not drawn.
NO_NOISE = "none"
# What 64 bits hold, and torch takes as a seed.
LARGEST_INT = 2**63 - 1
# As much as a path may have.
LONGEST_TEXT = 4096
# More than any processor has; torch crashes where the system refuses them.
MOST_THREADS = 1024
# They could make a terminal show something else than what a file says.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# What a field's type allows; whole numbers are numbers, too.
TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,), "None": (type(None),)}
# Options that are a share of something.
SHARES = {"warmup": "all updates", "label_smoothing": "the label", "validation": "the training images"}

# The panels of options in the command's help.
PROBLEM, METHOD, MACHINE, STORED = "Problem", "Method", "Machine", "What is stored"
NEED_FOLDER = [name for name, source in SOURCES.items() if source.needs_folder]
BUILT_IN = [name for name, source in SOURCES.items() if not source.needs_folder]


def _option(
    default: Any, panel: str, text: str, *, choices: Sequence[str] = (), least: int | None = None, most: int = LARGEST_INT
) -> Any:
    """A field of the configuration, of which the help shows ``text`` in a ``panel``; whole numbers have a least and a most."""
    return field(default=default, metadata={"panel": panel, "text": text, "choices": choices, "least": least, "most": most})


def _choice(panel: str, text: str, *choices: str) -> Any:
    """A field that is one of some words, by default the first."""
    return _option(choices[0], panel, text, choices=choices)


@dataclass(frozen=True)
class TrainConfig:
    """What determines a run: the same configuration gives the same weights on the same machine.

    Every field is an option of ``flipgrad train``, which shows these texts.
    """

    data: str = _choice(PROBLEM, f"Data set: {', '.join(SOURCES)} (a folder by class).", *SOURCES)
    data_folder: str | None = _option(
        None, PROBLEM, f"Where the files of {', '.join(NEED_FOLDER[:-1])} or {NEED_FOLDER[-1]} are."
    )
    image_size: int | None = _option(None, PROBLEM, "Resize a folder's images to squares of this many pixels a side.", least=1)
    model: str = _option(
        AUTO,
        PROBLEM,
        f"auto (the data set's own), {', '.join(MODELS)}, widths such as 200-200, or package.module:function, called with the "
        "data set: your own, a flipgrad.Sequential or a model of binary layers written by hand.",
    )
    width: float = _option(1.0, PROBLEM, "Factor on the channels or units of our networks.")
    norm: str = _choice(PROBLEM, "Before every sign: none, batch (BatchNorm), affine (a learned scale and shift).", *NORMS)
    noise: str = _option("logistic", PROBLEM, f"Of all units: {', '.join(NOISES)}; with a scale, logistic:0.5.")
    weights: str = _choice(
        PROBLEM,
        "real or binary, of all binary layers but the first, whose inputs are real and whose weights stay so.",
        *WEIGHTS,
    )
    weight_noise: str = _option(
        NO_NOISE,
        PROBLEM,
        f"Of binary weights: {NO_NOISE} (signs of the latent ones), or drawn anew every update: logistic:0.1 and the like.",
    )
    validation: float = _option(
        0.1,
        PROBLEM,
        "Share of the training images held out for the metrics of every epoch; with 0 these are on the test images.",
    )
    augment: str = _choice(
        PROBLEM, f"Augmentation: {', '.join((AUTO, *AUGMENTATIONS))} (the data set's usual).", AUTO, *AUGMENTATIONS
    )
    estimator: str = _option(
        "psa",
        METHOD,
        f"Gradient estimator: {', '.join(ESTIMATORS)}; psa:sampled (the paper's), arms:8, reinforce+running too; or your own, "
        "mine:Mix.",
    )
    label_smoothing: float = _option(
        0.0, METHOD, "Share of every label that is spread evenly over all classes while training, e.g. 0.1."
    )
    objective: str = _choice(
        METHOD,
        "What to minimise: the expected loss, the multi-sample bound, or, for a latent-variable model of grey images, the "
        f"negative elbo; that has the models {', '.join(DEPTHS)}.",
        *("expected", "bound", "elbo"),
    )
    samples: int = _option(1, METHOD, "Draws of all noises per update.", least=1)
    draws: str = _choice(
        METHOD,
        "Several draws: independent, or antithetic, pairs with opposite noise, less variance; auto is antithetic for an even "
        "number by psa or st.",
        AUTO,
        "independent",
        "antithetic",
    )
    shared: int = _option(
        0, METHOD, "Of several draws: how many of the first binary layers are drawn once, for all of them.", least=0
    )
    epochs: int = _option(45, METHOD, "Passes over the training images.", least=1)
    batch_size: int = _option(64, METHOD, "Images per update, of all processes together.", least=1)
    lr: float | str = _option(0.15, METHOD, "Learning rate, or auto to search for it.")
    search_trials: int = _option(10, METHOD, "Rates that --lr auto tries.", least=2)
    search_epochs: int = _option(5, METHOD, "Epochs of each.", least=1)
    search_images: int | None = _option(None, METHOD, "Training images of each (default: all).", least=2)
    schedule: str = _choice(
        METHOD,
        "Learning rate: constant, cosine (down to 0), step (a tenth after 1/2 and 3/4); auto is cosine with --weights binary, "
        "as signs never settle at a constant rate, else constant.",
        AUTO,
        "constant",
        "cosine",
        "step",
    )
    warmup: float = _option(
        0.0,
        METHOD,
        "Share of all updates in which the learning rate rises from 0, before its schedule; 0.1 suits large batches.",
    )
    optimizer: str = _choice(METHOD, "sgd (with Nesterov momentum) or adam.", "sgd", "adam")
    momentum: float = _option(0.9, METHOD, "Of SGD.")
    weight_decay: float = _option(
        0.0, METHOD, "Factor of the weights in their gradient; binary weights that are not drawn have none."
    )
    seed: int = _option(0, METHOD, "Same seed, same run.", least=0)
    device: str = _option("cpu", MACHINE, "Torch device: cpu, cuda, ...")
    # One thread for small networks gives the same numbers everywhere; the command takes all cores for the others.
    threads: int = _option(
        1, MACHINE, f"CPU threads (default: 1 for {' and '.join(BUILT_IN)}, else all cores).", least=1, most=MOST_THREADS
    )
    precision: str = _choice(MACHINE, "float32, or bfloat16 for mixed precision.", "float32", "bfloat16")
    eval_samples: int = _option(10, STORED, "Draws per image for the reported numbers.", least=1)
    eval_train: int = _option(0, STORED, "Report the numbers on this many training images, too.", least=0)

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_field(each, getattr(self, each.name))
        # A user's own is imported where it is used: a configuration may come from a file.
        if not is_user_estimator(self.estimator):
            for_training(self.estimator, points=1)
        noise_by_name(self.noise)
        if self.noise_of_weights is not None and self.weights == "real":
            raise InputError(f"weight_noise {self.weight_noise!r} is for binary weights; give --weights binary, too")
        if self.lr != AUTO and not (isinstance(self.lr, float | int) and math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"the learning rate is {self.lr}; it must be positive and finite, e.g. 0.1, or auto")
        if not (math.isfinite(self.width) and self.width > 0):
            raise InputError(f"width is {self.width}; the factor on the channels must be positive, e.g. 0.25")
        if not 0 <= self.momentum < 1:
            raise InputError(f"the momentum is {self.momentum}; it must be in [0, 1), e.g. 0.9")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise InputError(f"weight_decay is {self.weight_decay}; it must be 0 or more and finite, e.g. 1e-4")
        for name, whole in SHARES.items():
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a share of {whole} in [0, 1), e.g. 0.1")
        self._check_objective()
        check_device(self.device)

    def _check_elbo(self) -> None:
        """Refuse what a latent-variable model would ignore."""
        if self.model != AUTO and self.model not in DEPTHS:
            raise InputError(f"model {brief(self.model)}: with the objective elbo choose {', '.join((AUTO, *DEPTHS))}")
        if self.lr == AUTO or self.optimizer != "adam":
            raise InputError("the objective elbo is trained by Adam at a given rate: give --optimizer adam and --lr, e.g. 1e-3")
        for name in ELBO_IGNORES:
            if getattr(self, name) != getattr(TrainConfig, name):
                option = "--" + name.replace("_", "-")
                raise InputError(f"{name} is not for the objective elbo: leave {option} out")
        if augmentation(self) != "none":
            raise InputError("augment is not for the objective elbo: give --augment none")

    def _check_objective(self) -> None:
        if self.objective == "elbo":
            self._check_elbo()
        if self.objective == "bound" and self.samples < 2:
            raise InputError("the bound of one sample is the expected loss; give more, e.g. --samples 5")
        if self.objective == "bound" and self.label_smoothing:
            raise InputError(
                "label_smoothing is for the expected loss; the bound is on the likelihood of labels: leave one out"
            )
        if self.draws == "antithetic" and (self.samples % 2 or self.objective == "bound"):
            raise InputError("antithetic draws are pairs for the expected loss; give an even number of them, e.g. --samples 2")

        if self.shared and (self.samples < 2 or self.objective == "bound"):
            raise InputError("shared layers are for several draws of the expected loss; give e.g. --samples 2 with --shared")

    @property
    def noise_of_weights(self) -> Noise | None:
        """What binary weights are drawn with; None where they are signs."""
        try:
            return None if self.weight_noise == NO_NOISE else noise_by_name(self.weight_noise)
        except InputError as error:
            raise InputError(f"weight_noise: {error}; or {NO_NOISE} for weights that are not drawn") from None

    @property
    def rate_schedule(self) -> str:
        """The schedule of the learning rate, by its name."""
        return self.schedule if self.schedule != AUTO else "cosine" if self.weights == "binary" else "constant"

    @property
    def rate(self) -> float:
        """The learning rate as a number."""
        if isinstance(self.lr, str):
            raise InputError("the learning rate is 'auto': search for it first, and train with what was found")
        return self.lr

    def to_json(self) -> dict[str, object]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: object, where: str = "the configuration") -> TrainConfig:
        """The configuration of fields by name, as :meth:`to_json` gives them; those that are missing have their default.

        Raises:
            InputError: if a name is unknown or a value is not what it should be; it begins with ``where`` they come from.

        >>> TrainConfig.from_json({"epochs": 3}).epochs
        3
        """
        if not isinstance(values, Mapping):
            raise InputError(f"{where} must hold fields by name, got {values!r:.60}")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"{where} has an unknown field {brief(name)}; the fields are {', '.join(known)}")
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def _check_field(option: Field[Any], value: object) -> None:
    """Refuse a value that is not of the field's type, or not among those that it may have: one from a file may be anything."""
    name, least, most, choices = option.name, *(option.metadata[key] for key in ("least", "most", "choices"))
    types = tuple(kind for part in str(option.type).split(" | ") for kind in TYPES[part])
    if isinstance(value, bool) or not isinstance(value, types):
        raise InputError(f"{name} is {brief(value)}, expected {option.type}")
    if isinstance(value, int) and abs(value) > most:
        raise InputError(f"{name} is {brief(value)}; it must be at most {most}")
    if isinstance(value, int) and least is not None and value < least:
        raise InputError(f"{name} is {value}; it must be at least {least}")
    if isinstance(value, str) and (len(value) > LONGEST_TEXT or CONTROL_CHARACTERS.search(value)):
        raise InputError(f"{name} is {brief(value)}; it must have at most {LONGEST_TEXT} characters, and no control characters")
    if choices and value not in choices:
        raise InputError(f"unknown {name} {brief(value)}; choose from {', '.join(choices)}")


def check_device(device: str) -> None:
    """Refuse a device that is not there, or that cannot draw random numbers and give them back."""
    try:
        float(torch.rand(1, device=device, generator=torch.Generator(device)))
    # Each backend fails in its own way, also by not finding its own modules.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"device {brief(device)} is not available ({reason:.200}); use cpu") from None


def load_data(config: TrainConfig) -> DataSet:
    """The data set, with its validation part if one is wanted."""
    source = SOURCES[config.data]
    if source.needs_folder and config.data_folder is None:
        raise InputError(f"the data set '{config.data}' is read from files: give their folder with --data-folder")
    if not source.needs_folder and config.data_folder is not None:
        raise InputError(f"the data set '{config.data}' has no files; leave --data-folder out")
    if not source.resizes and config.image_size is not None:
        raise InputError(f"image_size is for a folder of images; the data set '{config.data}' has its own size")
    data = source.read(Path(config.data_folder or ""), config.image_size, config.seed)
    if data.train.x.dim() != 4 and augmentation(config) != "none":
        raise InputError(
            f"augment '{config.augment}' is for images; the data set '{config.data}' has none: leave --augment out"
        )
    return data.with_validation(config.validation, seed=config.seed) if config.validation else data


def make_net(config: TrainConfig, data: DataSet) -> BinaryNetwork:
    """The network with its first weights, which only the seed decides.

    A function that ``config.model`` names is imported and called: :func:`flipgrad.training.read_config` returns no such
    configuration from a file unless the caller names the function, too.
    """
    if config.objective == "elbo":
        raise InputError(
            "the run is of a latent-variable model, objective elbo, and not of a network: its numbers are in summary.json and "
            "report.html; in Python flipgrad.training.load_model reads it"
        )
    name = SOURCES[config.data].model if config.model == AUTO else config.model
    if name is None:
        raise InputError(f"there is no network for '{config.data}': give --model, e.g. 200-200 or package.module:function")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if is_user_function(name):
            net: BinaryNetwork = _user_net(config, data)
        else:
            net = model(
                name,
                data,
                config.width,
                noise=noise_by_name(config.noise),
                norm=cast(NormName, config.norm),
                weights=cast(WeightKind, config.weights),
                weight_noise=config.noise_of_weights,
            )
        _check_estimator(config, net, data)
    return net


def augmentation(config: TrainConfig) -> str:
    """The name of the augmentation that a run uses."""
    return SOURCES[config.data].augment if config.augment == AUTO else config.augment


def _user_net(config: TrainConfig, data: DataSet) -> BinaryNetwork:
    for name in ("width", "norm", "noise", "weights", "weight_noise"):
        if getattr(config, name) != getattr(TrainConfig, name):
            option = "--" + name.replace("_", "-")
            raise InputError(f"{name} is for our own networks; {config.model!r} decides itself: leave {option} out")
    made = call_user_function(config.model, data)
    if not isinstance(made, nn.Module):
        raise InputError(
            f"--model {config.model!r} must return a flipgrad.Sequential, or a model of binary layers written by hand, for the "
            f"data set, got {brief(made)}"
        )
    return check_runs(config.model, made, data.train.x[:2], as_network, data.classes)


def _check_estimator(config: TrainConfig, net: BinaryNetwork, data: DataSet) -> None:
    """Refuse an estimator that cannot train the binary weights of ``net``, or a model by hand, before anything is stored.

    One without a rule for them, or for their bound, has an error of its own; the exact gradient is 0 in weights that are not
    drawn.
    """
    latent = [layer.weight for layer in layers_with_binary_weights(net).values()]
    if config.shared:
        rule = for_training(config.estimator, len(data.train))[1]
        MeanOfDraws(rule, config.samples, shared=config.shared).check_shared(net.network(), rule)
    if not latent and not isinstance(net, Graph):
        return
    train = data.train.to(next(net.parameters()).device)
    index = torch.arange(2, device=train.y.device)
    label, rule = for_training(config.estimator, len(train))
    how = {"estimator": rule, "index": index}
    with torch.enable_grad(), keeping_buffers(net):
        loss = LOSSES[config.objective](net, train.x[:2], CrossEntropy(train.y[:2]), config.samples, **how).sum()
    learned = [weight for weight in latent if weight.requires_grad]
    if learned and any(each is None for each in torch.autograd.grad(loss, learned, allow_unused=True)):
        raise InputError(
            f"{label} gives binary weights that are not drawn no gradient: draw them, e.g. --weight-noise logistic:0.1, or "
            "give --estimator psa, st or hard-st"
        )
