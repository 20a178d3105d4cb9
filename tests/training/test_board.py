import sys
import warnings

import pytest

import flipgrad as fg
from flipgrad.training.board import board

RECORD = {"epoch": 2, "objective": 0.5, "split": "test", "saturated": {"layer 1": 0.25}}


def test_metrics_are_written_for_tensorboard(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        with board(tmp_path, epoch=1) as write:
            write(RECORD)
        events = accumulator.EventAccumulator(str(tmp_path))
        events.Reload()
    assert set(events.Tags()["scalars"]) == {"epoch", "objective", "saturated/layer 1"}
    (event,) = events.Scalars("saturated/layer 1")
    assert (event.step, event.value) == (2, 0.25)


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with (
        pytest.raises(fg.InputError, match=r"TensorBoard is not installed: pip install 'flipgrad\[tensorboard\]'"),
        board(tmp_path),
    ):
        pass
