"""Trainings of latent-variable models: the recipe's models, updates, states to go on from, and variances."""

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.training.latents import (
    DEPTHS,
    ElboTraining,
    baseline_network,
    binarised,
    encoder_gradients,
    gradient_variance,
    latent_model,
)


def images() -> torch.Tensor:
    return torch.rand(40, 16, generator=torch.Generator().manual_seed(0)) ** 2


@pytest.mark.parametrize("name", DEPTHS)
def test_models_start_as_the_recipe_says(name):
    mean = images().mean(0)
    model = latent_model(name, mean, units=5)
    assert len(model.binary_layers) == DEPTHS[name]
    assert float(model.prior.detach().abs().max()) == 0
    # Without latents, pixels have their mean.
    with torch.no_grad():
        for module in model.decoder.modules():
            if isinstance(module, nn.Linear):
                module.weight.zero_()
    torch.testing.assert_close(model.sample(2), mean.expand(2, -1))
    assert model(binarised(images(), None), estimator=fg.ST()).shape == (40,)


def test_unknown_models_are_refused():
    with pytest.raises(fg.InputError, match="no latent-variable model 'deep'; choose linear, nonlinear"):
        latent_model("deep", torch.full((4,), 0.5))


def test_the_encoder_sees_images_less_their_mean():
    mean = images().mean(0)
    model = latent_model("linear", mean, units=5)
    torch.testing.assert_close(model.network().front(mean[None]), torch.zeros(1, 16))
    assert "encoder.0.mean" in model.state_dict()


RULES = {
    "psa": fg.PSA,
    "relax": fg.RELAX,
    "learned": lambda: fg.REINFORCE(fg.LearnedBaseline(baseline_network(16, 10.0))),
    "running": lambda: fg.REINFORCE(fg.RunningBaseline(40)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_training_goes_on_as_if_it_had_not_stopped(name):
    def begin() -> ElboTraining:
        torch.manual_seed(0)
        return ElboTraining(latent_model("linear", images().mean(0), units=4), RULES[name](), images(), batch=5, rate=1e-2)

    whole = begin()
    expected = [whole.update() for _ in range(6)]
    first = begin()
    for _ in range(3):
        first.update()
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    second = begin()
    second.load(state)
    assert second.steps == 3
    assert [second.update() for _ in range(3)] == expected[3:]
    for name, tensor in second.state().items():
        torch.testing.assert_close(tensor, whole.state()[name], rtol=0, atol=0)


def test_a_state_of_another_training_is_refused():
    training = ElboTraining(latent_model("linear", images().mean(0), units=4), fg.ST(), images())
    other = ElboTraining(latent_model("linear", images().mean(0), units=3), fg.ST(), images())
    with pytest.raises(fg.InputError, match=r"the state of a training lacks 'model\.prior', or has it in another shape"):
        training.load(other.state())


def test_training_raises_the_elbo():
    training = ElboTraining(latent_model("linear", images().mean(0), units=4), fg.PSA(), images().round(), batch=20, rate=3e-2)
    losses = [training.update() for _ in range(200)]
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])


def test_the_variance_is_that_of_gradients():
    model, x = latent_model("linear", images().mean(0), units=4), images().round()
    generator = torch.Generator().manual_seed(0)
    drawn = encoder_gradients(model, x, fg.DisARM(), 50, generator)
    assert drawn.shape == (50, 16 * 4 + 4)
    found = gradient_variance(model, x, fg.DisARM(), 50, torch.Generator().manual_seed(0))
    assert found == pytest.approx(float((drawn - drawn.mean(0)).square().sum() / 49), rel=1e-5)
    assert gradient_variance(model, x, fg.PSA(), 50, generator) < 0.2 * found
    with pytest.raises(fg.InputError, match="give at least 2 draws"):
        gradient_variance(model, x, fg.PSA(), 1, generator)
