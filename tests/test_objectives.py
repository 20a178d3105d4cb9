"""Objectives against torch's losses, with extra leading dimensions, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import flipgrad as fg
from flipgrad.objectives import evaluate

B, K = 5, 4


def per_example(loss, outputs: Tensor, *targets: Tensor) -> Tensor:
    """Torch's ``loss`` of every example by itself, in a loop over all leading dimensions."""
    rows = outputs.reshape(-1, B, outputs.shape[-1])
    losses = [[loss(row[i : i + 1], *(t[i : i + 1] for t in targets)) for i in range(B)] for row in rows]
    return torch.tensor(losses, dtype=outputs.dtype).view(outputs.shape[:-1])


LABELS = torch.tensor([0, 3, 1, 1, 2])
P_STAR = torch.rand(B, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(1)
SIGNS = torch.tensor([1.0, -1, -1, 1, -1], dtype=torch.float64)
TARGET = torch.randn(B, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
SCALE = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)

# name: (the objective, the outputs per example, torch's loss, its targets)
OBJECTIVES = {
    "CrossEntropy": (fg.CrossEntropy(LABELS), K, functional.cross_entropy, (LABELS,)),
    "SoftCrossEntropy": (fg.SoftCrossEntropy(P_STAR), K, functional.cross_entropy, (P_STAR,)),
    "LogisticLoss": (
        fg.LogisticLoss(SIGNS),
        1,
        lambda out, sign: functional.binary_cross_entropy_with_logits(out[:, 0], (sign + 1) / 2),
        (SIGNS,),
    ),
    "SquaredError": (
        fg.SquaredError(TARGET),
        K,
        lambda out, target: functional.mse_loss(out, target, reduction="sum"),
        (TARGET,),
    ),
    "BernoulliLikelihood": (
        fg.BernoulliLikelihood(P_STAR),
        K,
        lambda out, target: functional.binary_cross_entropy_with_logits(out, target, reduction="sum"),
        (P_STAR,),
    ),
    "GaussianLikelihood": (
        fg.GaussianLikelihood(TARGET, scale=SCALE),
        K,
        lambda out, target: functional.gaussian_nll_loss(
            out, target, SCALE.square().expand_as(out), full=True, reduction="sum"
        ),
        (TARGET,),
    ),
}
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def outputs_of(name: str, *leading: int, batch: int = B) -> Tensor:
    return 3 * torch.randn(*leading, batch, OBJECTIVES[name][1], dtype=torch.float64)


@every_objective
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)])
def test_is_torchs_loss_of_every_example(name, leading):
    objective, _, loss, targets = OBJECTIVES[name]
    outputs = outputs_of(name, *leading)
    torch.testing.assert_close(objective(outputs), per_example(loss, outputs, *targets), rtol=1e-12, atol=1e-12)


@every_objective
@pytest.mark.parametrize("leading", [(), (2,)])
def test_gradient_is_the_derivative(name, leading):
    assert torch.autograd.gradcheck(OBJECTIVES[name][0], outputs_of(name, *leading).requires_grad_())


@every_objective
@pytest.mark.parametrize("index", [slice(1, 4), slice(0, 0), slice(None, None, 2), torch.tensor([4, 0, 0])], ids=str)
def test_select_is_the_objective_of_part_of_the_batch(name, index):
    objective = OBJECTIVES[name][0]
    outputs = outputs_of(name, 2)
    part = objective.select(index)
    assert type(part) is type(objective)
    torch.testing.assert_close(part(outputs[:, index]), objective(outputs)[:, index], rtol=1e-14, atol=1e-14)


@every_objective
def test_far_outputs_are_finite(name):
    objective = OBJECTIVES[name][0]
    for scale in (1e4, -1e4):
        outputs = (scale * torch.randn(B, OBJECTIVES[name][1], dtype=torch.float64)).requires_grad_()
        losses = objective(outputs)
        (gradient,) = torch.autograd.grad(losses.sum(), outputs)
        assert bool(losses.isfinite().all() & gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.bool], ids=str)
def test_labels_of_any_integer_type(dtype):
    labels = torch.tensor([0, 1, 1], dtype=dtype)
    outputs = torch.randn(3, 2)
    expected = functional.cross_entropy(outputs, labels.long(), reduction="none")
    torch.testing.assert_close(fg.CrossEntropy(labels)(outputs), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32], ids=str)
def test_signs_of_any_type(dtype):
    outputs = torch.tensor([[2.0], [-1.0]])
    assert torch.equal(fg.LogisticLoss(torch.ones(2, dtype=dtype))(outputs), functional.softplus(-outputs[:, 0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fg.CrossEntropy(torch.ones(3)), r"takes class indices \[B\], got torch\.float32 of shape \[3\]; for label"),
        (lambda: fg.CrossEntropy(torch.ones(3, 1).long()), r"takes class indices \[B\], got torch\.int64 of shape \[3, 1\]"),
        (lambda: fg.CrossEntropy(torch.tensor([0, -2])), "CrossEntropy: label -2 is negative; labels count from 0"),
        (
            lambda: fg.SoftCrossEntropy(torch.ones(3).long()),
            r"takes probabilities \[B, K\], got torch\.int64 of shape \[3\]",
        ),
        (lambda: fg.SoftCrossEntropy(torch.ones(3)), r"takes probabilities \[B, K\], got torch\.float32 of shape \[3\]"),
        (lambda: fg.SoftCrossEntropy(torch.tensor([[1.5, -0.5]])), "row of p_star must be non-negative and sum to 1; norm"),
        (lambda: fg.SoftCrossEntropy(torch.ones(1, 2)), "every row of p_star must be non-negative and sum to 1"),
        (lambda: fg.SoftCrossEntropy(torch.full((1, 2), torch.nan)), "every row of p_star must be non-negative and sum to 1"),
        (lambda: fg.LogisticLoss(torch.tensor([0.0, 1.0])), r"takes labels -1 or \+1 of shape \[B\], got shape \[2\]; map 0"),
        (lambda: fg.LogisticLoss(torch.tensor([True, True])), r"takes labels -1 or \+1 of shape \[B\]"),
        (lambda: fg.LogisticLoss(torch.ones(2, 1)), r"takes labels -1 or \+1 of shape \[B\], got shape \[2, 1\]"),
        (lambda: fg.SquaredError(torch.ones(3)), r"takes a target \[B, K\], got shape \[3\]; use target\[:, None\] for K = 1"),
        (lambda: fg.BernoulliLikelihood(torch.ones(3)), r"takes targets \[B, K\], got shape \[3\]; use targets\[:, None\] for"),
        (
            lambda: fg.BernoulliLikelihood(torch.ones(3, 1).long()),
            r"targets of floating point, got torch.int64: give targets\.fl",
        ),
        (lambda: fg.BernoulliLikelihood(torch.full((2, 1), 1.5)), "targets must be from 0 to 1; scale or binarise them first"),
        (lambda: fg.BernoulliLikelihood(torch.full((2, 1), torch.nan)), "targets must be from 0 to 1"),
        (lambda: fg.GaussianLikelihood(torch.ones(3)), r"GaussianLikelihood takes targets \[B, K\], got shape \[3\]"),
        (lambda: fg.GaussianLikelihood(torch.ones(3, 2), scale=0), "the scale must be a positive number, or 2 of them"),
        (lambda: fg.GaussianLikelihood(torch.ones(3, 2), scale=torch.ones(3)), r"one per output; got shape \[3\]"),
    ],
)
def test_bad_targets_are_refused(make, message):
    with pytest.raises(fg.InputError, match=message):
        make()


@every_objective
@pytest.mark.parametrize("batch", [B - 1, 1, 0])
def test_outputs_of_another_batch_are_refused(name, batch):
    with pytest.raises(fg.InputError, match=rf"{name} has targets for {B} examples, the head's output has shape \[2, {batch}"):
        OBJECTIVES[name][0](outputs_of(name, 2, batch=batch))
    with pytest.raises(fg.InputError, match=rf"{name} has targets for {B} examples, the head's output has shape \[{B}\]"):
        OBJECTIVES[name][0](torch.zeros(B))


@pytest.mark.parametrize(
    ("name", "outputs", "message"),
    [
        ("CrossEntropy", 3, "CrossEntropy: label 3 but the head has 3 outputs; labels count from 0"),
        ("SoftCrossEntropy", 1, "SoftCrossEntropy: p_star has 4 classes, the head 1 outputs"),
        ("SoftCrossEntropy", 5, "SoftCrossEntropy: p_star has 4 classes, the head 5 outputs"),
        ("LogisticLoss", 2, "LogisticLoss takes one output per example, the head has 2; use CrossEntropy"),
        ("SquaredError", 1, "SquaredError: the target has 4 values per example, the head 1"),
        ("BernoulliLikelihood", 3, "BernoulliLikelihood: the target has 4 values per example, the head 3"),
    ],
)
def test_wrong_number_of_outputs_is_refused(name, outputs, message):
    with pytest.raises(fg.InputError, match=message):
        OBJECTIVES[name][0](torch.zeros(2, B, outputs, dtype=torch.float64))


def test_one_class_is_not_spread_over_several_outputs():
    with pytest.raises(fg.InputError, match="p_star has 1 classes, the head 4 outputs"):
        fg.SoftCrossEntropy(torch.ones(B, 1))(torch.zeros(B, 4))


def test_evaluate_takes_any_function_of_the_right_shape():
    outputs = torch.randn(2, 3, 4)
    assert torch.equal(evaluate(lambda out: out.square().sum(-1), outputs), outputs.square().sum(-1))


@pytest.mark.parametrize(
    ("objective", "came"),
    [
        (lambda out: out.sum(), r"shape \[\]"),
        (lambda out: out, r"shape \[2, 3, 4\]"),
        (lambda out: out.sum(-1, keepdim=True), r"shape \[2, 3, 1\]"),
        (lambda out: out.sum(0), r"shape \[3, 4\]"),
        (lambda out: out.sum().item(), "float"),
    ],
)
def test_evaluate_refuses_another_shape(objective, came):
    message = rf"must map outputs \[2, 3, 4\] to one loss per example, \[2, 3\], got {came}: reduce over the last"
    with pytest.raises(fg.InputError, match=message):
        evaluate(objective, torch.randn(2, 3, 4))


def _linear_loss(outputs: Tensor) -> Tensor:
    return outputs @ torch.ones(7)


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (torch.nn.CrossEntropyLoss(), r"CrossEntropyLoss failed on outputs \[4, 2, 3\] .*missing 1 required positional"),
        (lambda out: functional.cross_entropy(out, torch.tensor([0, 1]), reduction="none"), r"<lambda> failed .*batch_size"),
        (_linear_loss, r"_linear_loss failed on outputs \[4, 2, 3\] "),
        (lambda out: out[..., 5], r"<lambda> failed .*out of bounds"),
    ],
    ids=["torchs", "no broadcast", "size", "index"],
)
def test_what_fails_inside_an_objective_is_told_in_one_line(objective, told):
    with pytest.raises(
        fg.InputError, match=told + r".*with any dimensions in front, and returns one loss per example"
    ) as caught:
        evaluate(objective, torch.zeros(4, 2, 3))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_lack_of_memory_inside_an_objective_is_called_that():
    def loss(outputs: Tensor) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes.")

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        evaluate(loss, torch.zeros(2, 3))
