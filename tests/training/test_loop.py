import json
import math
from dataclasses import asdict, replace

import pytest
import safetensors.torch
import torch
from problems import StopAfter, blobs, config, resume, run, small_net
from torch import nn

import flipgrad as fg
from flipgrad.data import Split, digits
from flipgrad.errors import StorageError
from flipgrad.estimators.names import for_training
from flipgrad.training import DivergenceError, RunFolder, TrainConfig, Trainer, digits_net, make_net, train
from flipgrad.training.trainer import draws_pairs
from torture.runs import records, timeless


@pytest.mark.parametrize("estimator", ["psa", "st"])
def test_a_run_learns_and_leaves_configuration_metrics_weights_and_summary(tmp_path, estimator):
    updates = []
    report = {"report": lambda done, total, _: updates.append((done, total))}
    evaluation, net = run(tmp_path / "run", arguments=report, estimator=estimator, epochs=8)
    metrics = records(tmp_path / "run")
    assert updates == [(done, 32) for done in range(1, 33)]
    assert [record["epoch"] for record in metrics] == list(range(1, 9))
    assert metrics[-1]["objective"] < metrics[0]["objective"] / 2
    assert evaluation.accuracy_n == 1
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert TrainConfig.from_json(stored["config"]).estimator == estimator
    assert stored["versions"]["torch"] == torch.__version__
    assert asdict(evaluation).items() <= json.loads((tmp_path / "run/summary.json").read_text()).items()
    weights = safetensors.torch.load_file(tmp_path / "run/weights.safetensors")
    assert weights.keys() == net.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
    assert not list((tmp_path / "run").glob(".*"))


def test_the_metrics_of_an_epoch(tmp_path):
    run(tmp_path / "run", data=blobs().with_validation(0.25), epochs=1, augment="none")
    (record,) = records(tmp_path / "run")
    assert record["split"] == "validation"
    assert record["lr"] == 0.15
    assert record["images_per_second"] == pytest.approx(30 / record["seconds"])
    assert record["saturated"].keys() == {"layer 1", "layer 2"}
    assert record["gradient_norm"].keys() == {"layer 1", "layer 2", "head"}
    assert all(0 <= share <= 1 for share in record["saturated"].values())
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["validation"]["expected_loss"] == record["expected_loss"]
    assert summary["expected_loss"] != record["expected_loss"]


def test_training_images_are_evaluated_if_wanted_and_change_nothing_else(tmp_path):
    for images in (0, 20):
        run(tmp_path / str(images), epochs=2, augment="shift", eval_train=images)
    without, watched = (records(tmp_path / str(images)) for images in (0, 20))
    for one, other in zip(without, watched, strict=True):
        assert "training" not in one
        names = ("accuracy", "saturated", "samples", "undecided", "expected_loss", "marginal_loss")
        assert other["training"].keys() == {key for key in one if key.startswith(names)}
        assert one["expected_loss"] == other["expected_loss"]
        assert 0 < other["training"]["expected_loss"] != other["expected_loss"]
    weights = [(tmp_path / str(images) / "weights.safetensors").read_bytes() for images in (0, 20)]
    assert weights[0] == weights[1]


def test_gradient_norms_are_root_mean_squares_over_updates(monkeypatch):
    trainer = Trainer(config(lr=1e-9, augment="none"), small_net(), blobs())
    squares = []
    for _ in range(trainer.updates):
        trainer.update()
        squares.append(sum(float(p.grad.square().sum()) for p in trainer.net.head.parameters()))
    assert trainer.finish_epoch()["gradient_norm"]["head"] == pytest.approx(math.sqrt(sum(squares) / len(squares)))


def test_a_gradient_of_many_draws_is_the_mean_of_theirs():
    trainer = Trainer(config(samples=400, augment="none", estimator="st"), small_net(), blobs())
    examples = torch.arange(10)
    gradients = []
    for _ in range(2):
        trainer.net.zero_grad()
        trainer.backward(examples, 0.1)
        gradients.append(trainer.net.head.weight.grad.clone())
    x, y = blobs().train.x[:10], blobs().train.y[:10]
    single = []
    for _ in range(400):
        trainer.net.zero_grad()
        trainer.net(x, fg.CrossEntropy(y), estimator=fg.ST()).mean().backward()
        single.append(trainer.net.head.weight.grad.clone())
    single = torch.stack(single)
    # Each is the mean of 400 draws: five standard errors of a difference, for 16 numbers a false alarm in 100,000.
    error = 5 * single.std(0) * math.sqrt(2 / 400)
    assert bool(((gradients[0] - single.mean(0)).abs() < error).all())
    assert bool(((gradients[1] - single.mean(0)).abs() < error).all())
    assert not torch.equal(*gradients)


def test_same_seed_same_weights_and_another_seed_others(tmp_path):
    weights = [run(tmp_path / str(i), seed=seed)[1].state_dict() for i, seed in enumerate((0, 0, 1))]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["head.weight"], weights[2]["head.weight"])


def test_a_run_leaves_the_global_generator_alone(tmp_path):
    net = small_net()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    run(tmp_path / "run", net=net, estimator="relax")
    assert torch.equal(torch.rand(1), expected)


# Stopped in the first epoch, in the second and at its end: one setting at all of them, each of the others at one.
@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({}, 1),
        ({}, 6),
        ({}, 8),
        ({"estimator": "reinforce+running"}, 6),
        ({"estimator": "relax"}, 6),
        ({"estimator": "rebar", "optimizer": "adam", "lr": 0.01, "schedule": "cosine"}, 6),
        ({"samples": 2, "augment": "none", "schedule": "step", "weight_decay": 1e-3, "warmup": 0.5, "label_smoothing": 0.1}, 8),
        ({"samples": 2, "objective": "bound", "eval_train": 7}, 1),
        ({"samples": 2, "draws": "antithetic"}, 6),
        ({"momentum": 0.0, "precision": "bfloat16"}, 6),
    ],
    ids=str,
)
def test_going_on_is_exact(tmp_path, options, updates):
    # Dropout draws from the global generator.
    whole = run(tmp_path / "whole", net=small_net(0, nn.Dropout(0.1)), **options)[1]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", net=small_net(0, nn.Dropout(0.1)), arguments={"stop": StopAfter(updates)}, **options)
    torch.manual_seed(1)
    parts = resume(tmp_path / "parts", net=small_net(5, nn.Dropout(0.1)), **options)[1]
    assert all(torch.equal(value, parts.state_dict()[name]) for name, value in whole.state_dict().items())
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")
    for name in ("weights.safetensors", "summary.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_antithetic_draws_train_otherwise_than_independent_ones(tmp_path):
    nets = [run(tmp_path / draws, net=small_net(0), samples=2, draws=draws)[1] for draws in ("independent", "antithetic")]
    assert not all(torch.equal(value, nets[1].state_dict()[name]) for name, value in nets[0].state_dict().items())


def test_draws_that_share_layers_train_otherwise_than_whole_ones_and_go_on_exactly(tmp_path):
    whole, apart = (run(tmp_path / f"{shared}", net=small_net(0), samples=2, shared=shared)[1] for shared in (1, 0))
    assert not all(torch.equal(value, apart.state_dict()[name]) for name, value in whole.state_dict().items())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", net=small_net(0), arguments={"stop": StopAfter(6)}, samples=2, shared=1)
    parts = resume(tmp_path / "parts", net=small_net(5), samples=2, shared=1)[1]
    assert all(torch.equal(value, parts.state_dict()[name]) for name, value in whole.state_dict().items())


def test_more_shared_layers_than_there_are_is_refused_before_the_training():
    with pytest.raises(fg.InputError, match=r"shared=9: of the 2 binary layers .* share at most 1"):
        make_net(config(data="digits", samples=2, shared=9), digits())


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({"samples": 2}, True),
        ({"samples": 4, "estimator": "st"}, True),
        ({"samples": 2, "draws": "independent"}, False),
        ({"samples": 2, "estimator": "disarm", "draws": "antithetic"}, True),
        ({"samples": 2, "estimator": "disarm"}, False),
        ({"samples": 3}, False),
        ({}, False),
        ({"samples": 2, "objective": "bound"}, False),
    ],
    ids=str,
)
def test_an_even_number_of_draws_by_psa_or_st_is_antithetic_pairs(options, pairs):
    config = TrainConfig(**options)
    assert draws_pairs(config, small_net(0), for_training(config.estimator, 1)[1]) == pairs


def test_a_graph_without_halves_draws_independently():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = fg.BinaryLinear(2, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.layer(x.transpose(0, 1)).mean(0))

    net = fg.Graph(TimeFirst(), torch.zeros(3, 4, 2))
    assert not draws_pairs(TrainConfig(samples=2), net, fg.PSA())


def test_pairs_are_what_an_even_number_of_draws_trains_with(tmp_path):
    nets = [run(tmp_path / draws, net=small_net(0), samples=2, draws=draws)[1] for draws in ("auto", "antithetic")]
    assert all(torch.equal(value, nets[1].state_dict()[name]) for name, value in nets[0].state_dict().items())


def test_a_run_can_be_made_longer(tmp_path):
    whole = run(tmp_path / "whole", epochs=3)[1]
    run(tmp_path / "parts", epochs=2)
    parts = resume(tmp_path / "parts", epochs=3)[1]
    assert all(torch.equal(value, parts.state_dict()[name]) for name, value in whole.state_dict().items())
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")


def test_lines_without_a_checkpoint_are_dropped(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", arguments={"stop": StopAfter(6)})
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "objective": 0.5}\n{"epoch": 3, "tra')
    resume(tmp_path / "run")
    run(tmp_path / "whole")
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "run")


def test_checkpoints_are_stored_as_time_passes(tmp_path, monkeypatch):
    positions = []
    save = RunFolder.save_checkpoint

    def note(self, checkpoint):
        positions.append((checkpoint.facts["epoch"], checkpoint.facts["update"]))
        save(self, checkpoint)

    monkeypatch.setattr(RunFolder, "save_checkpoint", note)
    run(tmp_path / "often", arguments={"minutes": 1e-9}, epochs=1)
    assert positions == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]
    positions.clear()
    run(tmp_path / "rarely", epochs=1)
    assert positions == [(0, 0), (1, 0)]


def poisoned_at(update, net, value):
    def poison(done, total, record):
        if done == update:
            with torch.no_grad():
                value(net).fill_(math.nan)

    return {"report": poison}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            lambda net: net.head.bias,
            r"a weight of head is no longer finite in epoch 2, update 3; lower the rate, e.g. --lr 0.05",
        ),
        (lambda net: net[1].weight, r"a weight of layer 2 is no longer finite in epoch 2"),
    ],
)
def test_divergence_stops_with_the_place_and_advice_and_keeps_the_last_good_state(tmp_path, value, message):
    net = small_net()
    with pytest.raises(DivergenceError, match=message):
        run(tmp_path / "run", net=net, arguments=poisoned_at(6, net, value))
    for name in ("weights", "checkpoint"):
        tensors = safetensors.torch.load_file(tmp_path / f"run/{name}.safetensors")
        assert all(bool(torch.isfinite(value.float()).all()) for value in tensors.values())
    resume(tmp_path / "run")
    run(tmp_path / "whole")
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "run")


def test_a_gradient_that_is_not_finite_names_the_layer_where_it_began_and_changes_no_weight():
    net = small_net()
    trainer = Trainer(config(augment="none"), net, blobs())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net[1].weight.register_hook(lambda gradient: gradient * math.inf)
    net[0].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(DivergenceError, match=r"the gradient of layer 2 is no longer finite in epoch 1, update 1"):
        trainer.update()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_an_infinite_loss_is_divergence():
    data = blobs()
    trainer = Trainer(config(augment="none"), small_net(), data)
    for _ in range(trainer.updates):
        trainer.update()
    trainer._sums[-1] = math.inf
    with pytest.raises(DivergenceError, match="the loss is no longer finite in epoch 1"):
        trainer.finish_epoch()


def test_a_real_divergence_is_caught(tmp_path):
    with pytest.raises(DivergenceError, match="no longer finite in epoch"):
        run(tmp_path / "run", lr=3e38, epochs=3)


def test_a_loss_that_explodes_is_divergence():
    """Binary units hide it: all numbers stay finite."""
    data = blobs()
    trainer = Trainer(config(augment="none"), small_net(), data)
    for _ in range(trainer.updates):
        trainer.update()
    trainer._sums[-1] = 2e4 * len(data.train)
    message = (
        r"the loss is 2e\+04 on average, with the largest gradient in (layer \d|head) in epoch 1, update \d+; lower the rate"
    )
    with pytest.raises(DivergenceError, match=message):
        trainer.finish_epoch()


def test_a_full_disk_is_told_and_loses_nothing(tmp_path, monkeypatch):
    def full_at(update):
        def report(done, total, record):
            if done == update:
                monkeypatch.setattr("flipgrad.files.os.fsync", no_space)

        return report

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"cannot write '.*metrics.jsonl': No space left on device; what was stored"):
        run(tmp_path / "run", arguments={"report": full_at(6)})
    monkeypatch.undo()
    assert not list((tmp_path / "run").glob(".*"))
    resume(tmp_path / "run")
    run(tmp_path / "whole")
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "run")


def test_the_schedules_of_the_rate(tmp_path, monkeypatch):
    rates = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))
    run(tmp_path / "cosine", schedule="cosine", lr=0.2, epochs=2)
    assert rates == pytest.approx([0.1 * (1 + math.cos(math.pi * i / 8)) for i in range(8)])
    rates.clear()
    run(tmp_path / "step", schedule="step", lr=0.2, epochs=2)
    assert rates == pytest.approx([0.2] * 4 + [0.02] * 2 + [0.002] * 2)
    rates.clear()
    run(tmp_path / "warm", schedule="cosine", warmup=0.5, lr=0.2, epochs=2)
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.15] + [0.1 * (1 + math.cos(math.pi * i / 4)) for i in range(4)])
    rates.clear()
    run(tmp_path / "constant", schedule="constant", warmup=0.25, lr=0.2, epochs=2)
    assert rates == pytest.approx([0.0, 0.1] + [0.2] * 6)


def test_smoothed_labels_give_the_gradient_of_torchs_own():
    trainer = Trainer(config(augment="none", estimator="st", label_smoothing=0.2), small_net(), blobs())
    net, x, y = trainer.net, blobs().train.x[:10], blobs().train.y[:10]
    noise = [torch.zeros(10, 4, 2, 2), torch.zeros(10, 4, 1, 1)]
    trainer.backward(torch.arange(10), 1.0, noise)
    found = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()

    def smoothed(outputs):
        return nn.functional.cross_entropy(outputs, y, label_smoothing=0.2, reduction="none")

    net(x, smoothed, estimator=fg.ST(), noise=noise).sum().backward()
    for gradient, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_rate_that_was_not_searched_for_is_refused():
    with pytest.raises(fg.InputError, match="search for it first"):
        Trainer(config(lr="auto"), small_net(), blobs())


def test_images_of_one_class_first_are_no_trouble_for_the_initialisation():
    data = blobs()
    order = data.train.y.argsort()
    trainer = Trainer(config(), small_net(), replace(data, train=Split(data.train.x[order], data.train.y[order])))
    assert bool(torch.isfinite(trainer.net[0].weight).all())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_reaches_its_accuracy(tmp_path, seed):
    torch.manual_seed(seed)
    settings = TrainConfig(seed=seed, schedule="cosine", validation=0.0)
    with RunFolder(tmp_path / "run") as folder:
        evaluation = train(settings, digits_net(), digits(), folder)
    assert evaluation.accuracy_n >= 0.975
