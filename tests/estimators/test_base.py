"""The facts that every estimator states about itself."""

from __future__ import annotations

import pytest
from unbiasedness import assert_caught, random_net

import flipgrad as fg
import reference
from flipgrad.contract import Batch, Network
from flipgrad.estimators import ESTIMATORS
from reference import assert_same, batch, chain, fully_connected, gradients, mean_gradient

each = pytest.mark.parametrize("kind", ESTIMATORS.values(), ids=ESTIMATORS.keys())


@each
def test_states_its_facts(kind):
    assert issubclass(kind, fg.Estimator)
    assert isinstance(kind.unbiased, bool)
    assert isinstance(kind.relaxed_objective, bool)
    assert kind.citation
    # Saying where a biased estimator is unbiased makes sense for a biased one only.
    assert not (kind.unbiased and kind.unbiased_in)


@each
@pytest.mark.parametrize("depth", [1, 3])
def test_passes_are_counted_truly(kind, depth, monkeypatch):
    net = fully_connected(2, *[3] * depth, 3)
    x, objective = batch((2, 2))
    evaluations = []
    run = Network.run
    monkeypatch.setattr(Network, "run", lambda *args: (evaluations.append(1), run(*args))[1])
    net(x, objective, estimator=kind()).sum().backward()
    assert len(evaluations) == kind().passes(depth)


LOCAL = [kind for kind in ESTIMATORS.values() if issubclass(kind, fg.LocalEstimator)]


def enumerable(kind):
    """Whether the estimate depends on the noise only through the sampled states, so that its mean is a sum over these."""
    return not kind.relaxed_objective and kind is not fg.GumbelRao


@pytest.mark.parametrize("kind", [kind for kind in ESTIMATORS.values() if kind is not fg.Exact])
def test_value_is_the_sampled_loss_unless_relaxed(kind):
    net = fully_connected(2, 3, 3, 3)
    x, objective = batch((4, 2))
    graph = chain(net)
    z = reference.noise_like(graph, x)
    remaining = iter(z)

    # The first draws for one state of every unit are the given ones, further ones and several at a time are new.
    def draw(noise, a):
        given = next(remaining, None) if a.dim() == 2 else None
        return noise.sample_like(a) if given is None else given

    losses = kind().losses(net.network(), Batch(x, objective, draw))
    assert losses.shape == (4,)
    sampled = objective(graph.outputs(reference.sample(graph, x, z)))
    assert kind.relaxed_objective != bool((losses - sampled).abs().max() < 1e-12)


@pytest.mark.parametrize("kind", [kind for kind in LOCAL if enumerable(kind)])
def test_bias_of_local_estimators_is_as_stated(kind):
    net = fully_connected(2, 2, 2, 2, 3, scale=1.0)
    x, objective = batch((1, 2))
    exact = gradients(reference.expected_loss(chain(net), x, objective).sum(), net)
    mean = mean_gradient(net, chain(net), x, objective, kind())
    if kind.unbiased:
        assert_same(mean, exact)
    else:
        assert (mean["0.weight"] - exact["0.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [kind for kind in LOCAL if not enumerable(kind)])
def test_bias_of_local_estimators_with_further_noise_is_as_stated(kind):
    assert not kind.unbiased
    assert_caught(*random_net((3, 4), fg.Logistic()), kind(), draws=500)


def test_local_estimators_work_in_any_graph_and_others_are_refused_there():
    class Whole(fg.Estimator):
        unbiased, citation = True, "none"

        def passes(self, depth):
            return 1

        def losses(self, net, batch):
            return batch.objective(net(batch.x))

    with pytest.raises(fg.InputError, match=r"Whole needs the whole network; pass it to fg\.Sequential"):
        fg.use(fully_connected(2, 2, 2), Whole())
    for kind in LOCAL:
        assert fg.use(fully_connected(2, 2, 2), kind()).binary_layers[0].estimator is not None


def test_a_path_estimator_without_a_gradient_is_refused_when_used():
    class Nothing(fg.PathEstimator):
        unbiased, citation = True, "none"

    net = fully_connected(2, 2, 2)
    with pytest.raises(fg.InputError, match=r"^Nothing has no gradient: write gradient\(path, k\).*or gradients"):
        net(*batch((3, 2), classes=2), estimator=Nothing())
