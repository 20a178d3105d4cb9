from contextlib import suppress
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import blobs, config, small_net
from torch import nn

import flipgrad as fg
from flipgrad.training import Checkpoint, Trainer

CHECKPOINT = Checkpoint(
    {
        "net.weight": torch.randn(3, 2),
        "net.count": torch.tensor(3),
        "half": torch.randn(2).bfloat16(),
        "none": torch.empty(0, 2),
    },
    {"epoch": 3, "seconds": 0.25},
)


def test_what_was_written_is_read(tmp_path):
    (tmp_path / "c").write_bytes(CHECKPOINT.to_bytes())
    read = Checkpoint.read(tmp_path / "c")
    assert read.facts == CHECKPOINT.facts
    assert read.tensors.keys() == CHECKPOINT.tensors.keys()
    assert all(torch.equal(value, CHECKPOINT.tensors[name]) for name, value in read.tensors.items())
    assert read.part("net").keys() == {"weight", "count"}


@given(st.data())
def test_a_damaged_file_is_never_read_as_something_else(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("damage") / "checkpoint.safetensors"
    content = bytearray(CHECKPOINT.to_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    # What no error tells has to be read as it was: blanks may be anywhere in JSON.
    with suppress(fg.InputError):
        read = Checkpoint.read(file)
        assert read.facts == CHECKPOINT.facts
        assert all(torch.equal(value, CHECKPOINT.tensors[name]) for name, value in read.tensors.items())


def test_damage_is_told_with_the_file_and_the_fix(tmp_path):
    content = bytearray(CHECKPOINT.to_bytes())
    content[-1] ^= 1
    for damaged, fault in ((content, "is damaged: its checksum is wrong"), (content[:-9], "is truncated or damaged")):
        (tmp_path / "c").write_bytes(damaged)
        with pytest.raises(fg.InputError, match=f"c' {fault}.*; put the whole file back, or train anew with --overwrite$"):
            Checkpoint.read(tmp_path / "c")


def test_a_missing_or_foreign_file_is_refused(tmp_path):
    with pytest.raises(fg.InputError, match=r"c' is missing; put the whole file back, or train anew with --overwrite"):
        Checkpoint.read(tmp_path / "c")
    safetensors.torch.save_file({"weight": torch.randn(3)}, tmp_path / "c")
    with pytest.raises(fg.InputError, match="c' is damaged, or no checkpoint of this version of flipgrad"):
        Checkpoint.read(tmp_path / "c")
    with pytest.raises(fg.InputError, match="is a folder, expected a file"):
        Checkpoint.read(tmp_path)


def test_the_state_of_another_training_is_refused():
    state = Trainer(config(), small_net(), blobs()).state()
    other = Trainer(config(seed=1), small_net(), blobs())
    with pytest.raises(fg.InputError, match="'run/c' is of a run with another configuration"):
        other.restore(state, "'run/c'")
    wider = fg.Sequential(fg.BinaryConv2d(1, 5, 3), nn.Flatten(), head=nn.Linear(20, 2))
    with pytest.raises(fg.InputError, match="'run/c' does not fit the network that the configuration makes: Error"):
        Trainer(config(), wider, blobs()).restore(state, "'run/c'")
    for wrong in ({"epoch": None}, {"epoch": 4}, {"epoch": -1}, {"update": 99}):
        with pytest.raises(fg.InputError, match="does not fit"):
            Trainer(config(), small_net(), blobs()).restore(replace(state, facts={**state.facts, **wrong}))
    with pytest.raises(fg.InputError, match="another configuration"):
        Trainer(config(), small_net(), blobs()).restore(replace(state, facts={**state.facts, "config": "none"}))
    fewer = {name: value for name, value in state.facts["config"].items() if name != "weights"}
    with pytest.raises(fg.InputError, match="'run/c' is of another version of flipgrad; go on with that one, or begin a new"):
        Trainer(config(), small_net(), blobs()).restore(replace(state, facts={**state.facts, "config": fewer}), "'run/c'")
    with pytest.raises(
        fg.InputError,
        match=r"'run/c' is of a training on other examples than those of 'blobs' now; put the data back as they were \(",
    ):
        Trainer(config(), small_net(), blobs(62)).restore(state, "'run/c'")
    # Files may be moved.
    Trainer(config(data_folder="elsewhere"), small_net(), blobs()).restore(state)
    two = replace(state, facts={**state.facts, "processes": 2})
    with pytest.raises(
        fg.InputError, match=r"is of 2 processes, and there are 1: go on with as many, torchrun --nproc-per-node 2"
    ):
        Trainer(config(), small_net(), blobs()).restore(two)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("0.momentum_buffer", torch.zeros(7, 7), r"'0.momentum_buffer' is not like its parameter \[4, 1, 3, 3\]"),
        ("0.momentum_buffer", torch.zeros(4, 1, 3, 3).double(), "is not like its parameter"),
        ("99.momentum_buffer", torch.zeros(1), "'99.momentum_buffer' belongs to no parameter"),
        ("x.momentum_buffer", torch.zeros(1), "belongs to no parameter"),
    ],
)
def test_an_optimizer_is_given_nothing_that_it_would_read_beyond(name, tensor, message):
    trainer = Trainer(config(), small_net(), blobs())
    trainer.update()
    state = trainer.state()
    wrong = replace(state, tensors={**state.tensors, f"optimizer.{name}": tensor})
    with pytest.raises(fg.InputError, match=message):
        Trainer(config(), small_net(), blobs()).restore(wrong)
