import json
import math

import pytest

import flipgrad as fg
from flipgrad.training import TrainConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "faces"}, "unknown data 'faces'; choose from digits, toy, mnist, cifar10, images"),
        ({"estimator": "foo"}, "unknown estimator 'foo'; give one of adf"),
        ({"estimator": "reinforce+mean"}, "unknown estimator 'reinforce.mean'.*reinforce.running"),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"epochs": 2.5}, "epochs is 2.5, expected int"),
        ({"epochs": True}, "epochs is True, expected int"),
        ({"data_folder": 3}, "data_folder is 3, expected str | None"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"samples": 0}, "samples is 0"),
        ({"eval_samples": 0}, "eval_samples is 0"),
        ({"eval_train": -1}, "eval_train is -1; it must be at least 0"),
        ({"image_size": 0}, "image_size is 0"),
        ({"search_trials": 1}, "search_trials is 1; it must be at least 2"),
        ({"search_epochs": 0}, "search_epochs is 0"),
        ({"search_images": 1}, "search_images is 1"),
        ({"width": 0.0}, "width is 0.0"),
        ({"augment": "blur"}, "unknown augment 'blur'; choose from auto, none, shift"),
        ({"lr": math.nan}, "learning rate is nan"),
        ({"lr": 0.0}, "learning rate is 0.0"),
        ({"lr": "fast"}, "learning rate is fast; it must be positive and finite, e.g. 0.1, or auto"),
        ({"schedule": "wild"}, "unknown schedule 'wild'; choose from auto, constant, cosine, step"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'; choose from sgd, adam"),
        ({"threads": 0}, "threads is 0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"warmup": 1.0}, "warmup is 1.0; give a share of all updates in .0, 1., e.g. 0.1"),
        ({"warmup": -0.1}, "warmup is -0.1"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; give a share of the label in .0, 1., e.g. 0.1"),
        ({"label_smoothing": math.nan}, "label_smoothing is nan"),
        (
            {"label_smoothing": 0.1, "objective": "bound", "samples": 2},
            "label_smoothing is for the expected loss; the bound is",
        ),
        ({"weights": "ternary"}, "unknown weights 'ternary'; choose from real, binary"),
        ({"weight_noise": "logistic:0.1"}, "weight_noise 'logistic:0.1' is for binary weights; give --weights binary, too"),
        (
            {"weights": "binary", "weight_noise": "pink"},
            "weight_noise: noise 'pink': choose logistic.*; or none for weights that are not",
        ),
        ({"weights": "binary", "weight_noise": "normal:x"}, "weight_noise: noise 'normal:x': its scale is no number"),
        ({"weights": "binary", "weight_noise": "normal:0"}, r"weight_noise: Normal\(scale=0.0\): the scale must be positive"),
        ({"validation": 1.0}, "validation is 1.0"),
        ({"objective": "hope"}, "unknown objective 'hope'; choose from expected, bound"),
        ({"draws": "antithetic"}, "for the expected loss; give an even number of them, e.g. --samples 2"),
        ({"draws": "antithetic", "samples": 2, "objective": "bound"}, "antithetic draws are pairs for the expected loss"),
        ({"shared": 1}, "shared layers are for several draws of the expected loss; give e.g. --samples 2 with --shared"),
        ({"shared": 1, "samples": 2, "objective": "bound"}, "shared layers are for several draws of the expected loss"),
        ({"objective": "bound"}, "the bound of one sample is the expected loss; give more, e.g. --samples 5"),
        ({"precision": "int3"}, "unknown precision 'int3'; choose from float32, bfloat16"),
        ({"device": "nonsense"}, "device 'nonsense' is not available"),
        ({"threads": 1_000_000}, "threads is 1000000; it must be at most 1024"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be at most 9223372036854775807"),
        ({"width": 10**400}, r"width is 10+\.\.\.0+; it must be at most"),
    ],
)
def test_a_bad_configuration_is_refused(options, message):
    with pytest.raises(fg.InputError, match=message):
        TrainConfig(**options)


def test_the_rate_of_binary_weights_falls_by_default():
    assert TrainConfig().rate_schedule == "constant"
    assert TrainConfig(weights="binary").rate_schedule == "cosine"
    assert TrainConfig(weights="binary", schedule="constant").rate_schedule == "constant"


def test_json_and_back():
    config = TrainConfig(estimator="concrete:0.1", lr="auto", data="mnist", data_folder="somewhere", epochs=7)
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, "'run/config.json' has an unknown field 'epoch'; the fields are data, data_folder"),
        ([1, 2], "'run/config.json' must hold fields by name, got"),
        ({"epochs": "many"}, "'run/config.json': epochs is 'many', expected int"),
        ({"seed": None}, "seed is None, expected int"),
    ],
)
def test_bad_json_is_refused(values, message):
    with pytest.raises(fg.InputError, match=message):
        TrainConfig.from_json(values, "'run/config.json'")
