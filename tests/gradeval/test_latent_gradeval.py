"""Gradeval on latent-variable models: against the exact gradient, layer by layer."""

import pytest
import torch
from torch import nn

import flipgrad as fg


def small_model() -> fg.Variational:
    torch.manual_seed(0)
    model = fg.Variational(
        [nn.Linear(5, 4), nn.Tanh(), fg.BinaryLinear(4, 4), fg.BinaryLinear(4, 3)], [nn.Linear(4, 5), nn.Linear(3, 4)]
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def test_every_layer_is_measured_against_the_exact_gradient():
    model, x = small_model(), torch.randint(2, (6, 5)).float()
    rules = {"PSA": fg.PSA(), "ST": fg.ST(), "DisARM": fg.DisARM(), "RELAX": fg.RELAX()}
    result = fg.gradeval.evaluate(model, x, None, rules, samples=2000)
    assert result.reference.kind == "exact"
    assert [layer.name for layer in result.reference.layers] == [
        "front", "layer 1", "layer 2", "decoder 1", "decoder 2", "prior", "all",
    ]  # fmt: skip
    for name in rules:
        assert result.estimators[name].vectorised
    assert result.accuracy("DisARM").bias_low == 0
    assert result.accuracy("PSA", "layer 1").bias < result.accuracy("ST", "layer 1").bias
    assert result.accuracy("PSA", "layer 1").rmse[0] < 0.3 * result.accuracy("DisARM", "layer 1").rmse[0]


def test_what_is_not_right_is_refused():
    model, x = small_model(), torch.randint(2, (6, 5)).float()
    with pytest.raises(fg.InputError, match=r"a flipgrad\.Variational has its own, the negative ELBO; give None"):
        fg.gradeval.evaluate(model, x, fg.BernoulliLikelihood(x), [fg.PSA()], samples=10)
    with pytest.raises(fg.InputError, match="ADF propagates means"):
        fg.gradeval.evaluate(model, x, None, [fg.ADF()], samples=10)
    net = fg.Sequential(fg.BinaryLinear(5, 3), head=nn.Linear(3, 2))
    with pytest.raises(fg.InputError, match=r"only a flipgrad\.Variational has its own"):
        fg.gradeval.evaluate(net, x, None, [fg.PSA()], samples=10)
