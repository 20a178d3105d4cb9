import pytest
import torch
from torch import nn
from unbiasedness import ERRORS, ONE, THREE, TWO, Broken, assert_caught, assert_unbiased, random_conv_net, random_net

import flipgrad as fg

DRAWS = 6000


def surrogates(*widths):
    """Networks that are not 0: a control variate other than REBAR's."""
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(n, 8), nn.Tanh(), nn.Linear(8, 1)).double() for n in widths]


# Three layers are no other code than those of REBAR in test_unbiased.py.
@pytest.mark.parametrize(("widths", "noise"), [ONE, TWO, pytest.param(*THREE, marks=pytest.mark.slow)], ids=str)
def test_unbiased(widths, noise):
    assert_unbiased(
        *random_net(widths, noise),
        fg.RELAX(surrogates(*widths)).requires_grad_(False),
        draws=2000 if len(widths) == 2 else DRAWS,
    )


def test_unbiased_with_convolutions():
    assert_unbiased(*random_conv_net(fg.Logistic()), fg.RELAX(surrogates(4, 4)).requires_grad_(False), draws=DRAWS)


@ERRORS
def test_a_broken_variant_is_caught(error, share):
    broken = Broken(fg.RELAX(surrogates(3, 4)).requires_grad_(False), error)
    assert_caught(*random_net((3, 4), fg.Logistic()), broken, draws=2000 * share)


def estimate(estimator, net, x, objective):
    net.zero_grad(set_to_none=True)
    net(x, objective, estimator=estimator, generator=torch.Generator().manual_seed(3)).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def test_starts_as_rebar():
    net, x, y = random_net((3, 4), fg.Logistic())
    many, objective = x.expand(5, 2), fg.CrossEntropy(y.expand(5))
    rebar = estimate(fg.REBAR(), net, many, objective)
    assert torch.allclose(estimate(fg.RELAX(), net, many, objective), rebar)
    assert not torch.allclose(estimate(fg.RELAX(surrogates(3, 4)), net, many, objective), rebar)


def test_training_lowers_the_variance_and_reaches_every_parameter():
    net, x, y = random_net((3, 4), fg.Logistic())
    many, objective = x.expand(300, 2), fg.CrossEntropy(y.expand(300))
    relax = fg.RELAX(surrogates(3, 4))

    def variance(estimator):
        generator = torch.Generator().manual_seed(1)
        return sum(estimator.variance_loss(net, many, objective, generator=generator).item() for _ in range(10)) / 10

    start = variance(relax)
    optimizer = torch.optim.Adam(relax.parameters(), 0.03)
    generator = torch.Generator().manual_seed(0)
    for _ in range(80):
        optimizer.zero_grad()
        relax.variance_loss(net, many, objective, generator=generator).backward()
        assert all(bool((parameter.grad != 0).any()) for parameter in relax.parameters())
        optimizer.step()
    trained = variance(relax)
    assert trained < 0.9 * start
    # The surrogates take off more than REBAR does.
    assert trained < 0.9 * variance(fg.REBAR())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_state_dict_round_trip():
    net, x, y = random_net((3, 4), fg.Logistic())
    many, objective = x.expand(5, 2), fg.CrossEntropy(y.expand(5))
    for trained, empty in ((fg.RELAX(), fg.RELAX()), (fg.RELAX(surrogates(3, 4)), fg.RELAX(surrogates(3, 4)))):
        estimate(trained, net, many, objective)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        # The surrogates that were built are built again from what was saved.
        empty.load_state_dict(trained.state_dict())
        assert torch.equal(estimate(empty, net, many, objective), estimate(trained, net, many, objective))
        assert set(empty.state_dict()) == set(trained.state_dict())


def test_one_module_is_that_of_the_only_layer():
    net, x, y = random_net((4,), fg.Logistic())
    (module,) = surrogates(4)
    one, listed = (estimate(fg.RELAX(s), net, x, fg.CrossEntropy(y)) for s in (module, [module]))
    assert torch.equal(one, listed)


def test_refuses_surrogates_that_do_not_fit():
    net, x, y = random_net((3, 4), fg.Logistic())
    with pytest.raises(fg.InputError, match=r"RELAX has 1 surrogates for 2 binary layers; give one each"):
        net(x, fg.CrossEntropy(y), estimator=fg.RELAX(surrogates(3)))
    wide = [nn.Linear(n, 2).double() for n in (3, 4)]
    with pytest.raises(fg.InputError, match=r"surrogate 0 gave \[1, 2\] for states \[1, 3\]; it must give one value"):
        net(x, fg.CrossEntropy(y), estimator=fg.RELAX(wide))
    with pytest.raises(fg.InputError, match=r"RELAX\(surrogate=\[\]\): give one module"):
        fg.RELAX([])


def test_facts():
    assert fg.RELAX.unbiased
    assert fg.RELAX().passes(3) == 7


def test_another_network_than_the_first_is_refused():
    relax = fg.RELAX()
    x, objective = torch.randn(3, 2), fg.CrossEntropy(torch.tensor([0, 1, 1]))

    def net(units, dtype=torch.float32):
        return fg.Sequential(fg.BinaryLinear(2, units), head=nn.Linear(units, 2)).to(dtype)

    net(4)(x, objective, estimator=relax)
    with pytest.raises(
        fg.InputError, match=r"surrogate 0 fails on the 6 torch.float32 units .* an estimator of its own for every"
    ):
        net(6)(x, objective, estimator=relax)
    with pytest.raises(fg.InputError, match=r"surrogate 0 fails on the 4 torch.float64 units"):
        net(4, torch.float64)(x.double(), objective, estimator=relax)
    with pytest.raises(fg.InputError, match=r"RELAX.variance_loss takes a flipgrad.Sequential or a flipgrad.Graph, got Linear"):
        relax.variance_loss(nn.Linear(2, 2), x, objective)
