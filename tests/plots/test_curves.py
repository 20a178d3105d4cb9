import json

import matplotlib.image
import numpy
import pytest

from flipgrad.plots import training_curve


@pytest.mark.parametrize("epochs", [1, 5])
def test_a_curve_is_drawn_from_the_metrics_alone(tmp_path, epochs):
    keys = ("train_loss", "expected_loss", "marginal_loss", "accuracy_1", "accuracy_n", "accuracy_deterministic")
    lines = [json.dumps({"epoch": e, "samples": 10, **dict.fromkeys(keys, 1 / (e + 1))}) for e in range(1, epochs + 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    training_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    image = matplotlib.image.imread(tmp_path / "curve.png")
    assert image.shape[:2] == (540, 1350)
    colours = {tuple(pixel) for pixel in numpy.unique((image[..., :3] * 255).round().astype(int).reshape(-1, 3), axis=0)}
    assert {(0, 114, 178), (213, 94, 0), (0, 158, 115)} <= colours
