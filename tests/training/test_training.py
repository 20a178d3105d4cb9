import json
import math
from dataclasses import asdict

import pytest
import safetensors.torch
import torch
from torch import nn

import flipgrad as fg
from flipgrad import exact
from flipgrad.data import DataSet, Split, digits
from flipgrad.training import DivergenceError, RunFolder, TrainConfig, digits_net, evaluate, train


def problem(n=60):
    """Two well separated classes of 4x4 images."""
    y = torch.arange(n) % 2
    x = torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)) / 3 + (2 * y - 1).view(-1, 1, 1, 1)
    return DataSet("blobs", Split(x[:40], y[:40]), Split(x[40:], y[40:]), classes=2, background=0.0)


def small_net(seed=0):
    torch.manual_seed(seed)
    return fg.Sequential(fg.BinaryConv2d(1, 4, 3), fg.BinaryConv2d(4, 4, 2), nn.Flatten(), head=nn.Linear(4, 2))


def run(path, net=None, report=lambda done, record: None, **options):
    net = net or small_net()
    folder = RunFolder(path)
    return train(TrainConfig(**{"epochs": 3, "batch_size": 10, **options}), net, problem(), folder, report), net


@pytest.mark.parametrize("estimator", ["psa", "st"])
def test_a_run_learns_and_leaves_configuration_metrics_weights_and_summary(tmp_path, estimator):
    updates = []
    evaluation, net = run(tmp_path / "run", report=lambda done, _: updates.append(done), estimator=estimator, epochs=8)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert updates == list(range(1, 33))
    assert [record["epoch"] for record in records] == list(range(1, 9))
    assert records[-1]["train_loss"] < records[0]["train_loss"] / 2
    assert evaluation.accuracy_n == 1
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["config"]["estimator"] == estimator
    assert config["versions"]["torch"] == torch.__version__
    assert asdict(evaluation).items() <= json.loads((tmp_path / "run/summary.json").read_text()).items()
    weights = safetensors.torch.load_file(tmp_path / "run/weights.safetensors")
    assert weights.keys() == net.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
    assert not list((tmp_path / "run").glob(".*"))


def test_same_seed_same_weights_and_another_seed_others(tmp_path):
    weights = [run(tmp_path / str(i), seed=seed)[1].state_dict() for i, seed in enumerate((0, 0, 1))]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["head.weight"], weights[2]["head.weight"])


def test_an_interruption_keeps_every_whole_epoch(tmp_path):
    kept = {}

    def stop(done, record):
        if done == 10:
            kept.update(record)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", report=stop)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [1, 2]
    assert records[-1] == kept
    assert safetensors.torch.load_file(tmp_path / "run/weights.safetensors")
    assert not (tmp_path / "run/summary.json").exists()


def test_divergence_stops_with_the_epoch_and_advice_and_keeps_the_last_whole_epoch(tmp_path):
    net = small_net()

    def poison(done, record):
        if done == 6:
            with torch.no_grad():
                net.head.bias.fill_(math.nan)

    with pytest.raises(DivergenceError, match=r"loss is nan in epoch 2; lower the rate, e.g. --lr 0.05"):
        run(tmp_path / "run", net=net, report=poison)
    weights = safetensors.torch.load_file(tmp_path / "run/weights.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def test_evaluation_agrees_with_the_exact_expectation():
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=nn.Linear(4, 3))
    data = Split(torch.randn(30, 2), torch.randint(3, (30,)))
    samples = 1000
    result = evaluate(net, data, samples, generator=torch.Generator().manual_seed(0), batch_size=16)
    objective = fg.CrossEntropy(data.y)
    truth = exact.expected_loss(net, data.x, objective)
    spread = fg.bounds.sampled_losses(net, data.x, objective, 200).var(0).mean().item()
    # Five standard errors of a mean over 30 * 1000 draws: a false alarm in two million.
    assert abs(result.expected_loss - truth.mean().item()) < 5 * math.sqrt(spread / (30 * samples))
    assert result.marginal_loss == pytest.approx(exact.marginal_loss(net, data.x, objective).mean().item(), abs=0.01)
    assert result.accuracy_n == (exact.predictive(net, data.x).argmax(1) == data.y).double().mean().item()
    assert result.accuracy_deterministic == (net.deterministic(data.x).argmax(1) == data.y).double().mean().item()
    assert 0 < result.accuracy_1 < 1


def test_evaluation_leaves_the_mode_of_the_network_alone():
    net = small_net().train()
    evaluate(net, problem().test, 2)
    assert net.training


def test_the_cosine_schedule_ends_near_zero(tmp_path, monkeypatch):
    rates = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))
    run(tmp_path / "run", schedule="cosine", lr=0.2, epochs=2)
    assert rates == pytest.approx([0.1 * (1 + math.cos(math.pi * i / 8)) for i in range(8)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "foo"}, "unknown estimator 'foo'; choose from "),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"samples": 0}, "samples is 0"),
        ({"shift": -1}, "shift is -1"),
        ({"lr": math.nan}, "learning rate is nan"),
        ({"lr": 0.0}, "learning rate is 0.0"),
        ({"schedule": "wild"}, "unknown schedule 'wild'; choose from constant, cosine"),
        ({"threads": 0}, "threads is 0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"device": "nonsense"}, "device 'nonsense' is not available"),
    ],
)
def test_a_bad_configuration_is_refused(options, message):
    with pytest.raises(fg.InputError, match=message):
        TrainConfig(**options)


def test_a_run_folder_is_not_overwritten_unless_asked(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("keep")
    with pytest.raises(fg.InputError, match=r"exists and is not empty; give another --output, or --overwrite"):
        RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run/mine.txt").read_text() == "keep"
    with pytest.raises(fg.InputError, match="is a file; give a folder"):
        RunFolder(tmp_path / "run/mine.txt")
    with pytest.raises(fg.InputError, match="cannot write to output folder"):
        RunFolder(tmp_path / "run/mine.txt/inside")


def test_a_failed_write_leaves_the_earlier_file_whole(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    net = small_net()
    folder.save_weights(net)
    before = (tmp_path / "run/weights.safetensors").read_bytes()

    def full(self, content):
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        folder.save_weights(net)
    assert (tmp_path / "run/weights.safetensors").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_reaches_its_accuracy(tmp_path, seed):
    torch.manual_seed(seed)
    config = TrainConfig(seed=seed, schedule="cosine")
    evaluation = train(config, digits_net(), digits(), RunFolder(tmp_path / "run"), lambda done, record: None)
    assert evaluation.accuracy_n >= 0.975
