"""Files of packed networks: what is in them, and that damage and malice are refused in one line, with little memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from hostile_files import Attack, damaged, damaged_with_right_checksums, file_content, hostile, joined, network, split
from torch import nn

import flipgrad as fg
from flipgrad.packed import Facts, PackedNetwork, archive, load, pack, parts

LONGEST_MESSAGE = 500
# Bytes that reading a file may take for every byte of it, most of all as JSON, and besides.
READING, BESIDES = 40, 2**20


@pytest.fixture(scope="module")
def content() -> bytes:
    return file_content()


def read(path: Path, content: bytes) -> PackedNetwork | None:
    """The network, or None if it was refused with one line that says what to do."""
    path.write_bytes(content)
    try:
        return load(path, engine="numpy")
    except fg.InputError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message.replace(str(path), "")) < LONGEST_MESSAGE
        assert message.isprintable()
        assert archive.AGAIN in message
    return None


def peak_of(work: object) -> int:
    """Bytes that ``work`` holds at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def attack(content: bytes, path: Path, make: Attack, count: int, seed: int, *, measured: int) -> int:
    """Reads files, and evaluates what is read; returns how many were refused. One in ``measured`` has its memory measured."""
    refused = 0
    for number in range(count):
        changed = make(content, random.Random(f"{seed}/{number}"))
        net = read(path, changed)
        refused += net is None
        if number % measured == 0:
            assert peak_of(partial(read, path, changed)) < READING * len(changed) + BESIDES, number
        if net is not None:
            x = np.ones((1, *net.inputs), np.float32)
            evaluated(net, x)
            evaluated_alike(net, x)
            # Values of double precision: the input of a part, with padding, its result and one more; and weights.
            limit = 4 * 8 * parts.GROWTH * (x.size + len(changed)) + 130 * len(changed) + BESIDES
            assert number % measured or peak_of(partial(evaluated, net, x)) < limit, number
    return refused


def evaluated(net: PackedNetwork, x: np.ndarray) -> None:
    try:
        assert net(x).shape == (1, net.outputs)
        assert net(x, samples=1).shape == (1, net.outputs)
    except fg.InputError as error:
        assert "not finite" in str(error)  # noqa: PT017


def evaluated_alike(net: PackedNetwork, x: np.ndarray) -> None:
    """Compiled code, where it is there and runs the network, survives it as well, with the same result."""
    net.engine = "auto"
    with suppress(fg.InputError):
        found = net(x)
        net.engine = "numpy"
        np.testing.assert_allclose(found, net(x), rtol=1e-4, atol=1e-4)
    net.engine = "numpy"


QUICK = [(damaged, 200, 0.9), (damaged_with_right_checksums, 100, 0.3), (hostile, 200, 0.5)]
MANY = [(damaged, 7000, 0.9), (damaged_with_right_checksums, 3000, 0.3), (hostile, 3000, 0.5)]


@pytest.mark.parametrize(("make", "count", "share"), QUICK, ids=lambda each: getattr(each, "__name__", None))
def test_damaged_and_hostile_files(content, tmp_path, make, count, share):
    assert attack(content, tmp_path / "net", make, count, 0, measured=5) > share * count


@pytest.mark.slow
@pytest.mark.parametrize(("make", "count", "share"), MANY, ids=lambda each: getattr(each, "__name__", None))
def test_10000_damaged_and_3000_hostile_files(content, tmp_path, make, count, share):
    assert attack(content, tmp_path / "net", make, count, 1, measured=4) > share * count


def program(*chain: dict[str, object], inputs: object = (1, 4, 4), arrays: dict[str, np.ndarray] | None = None) -> bytes:
    """A file of these parts, ended by a linear layer "w" of 2 outputs where they give one number."""
    arrays = {"w": np.ones((2, 1), np.float32), **(arrays or {})}
    entries, facts, data = split(archive.to_bytes(arrays, {}))
    facts = dict.fromkeys(Facts.__dataclass_fields__) | {"made_by": ""}
    end = [{"part": "linear", "weight": "w", "bias": None}]
    return joined(entries, {"inputs": inputs, "program": [*chain, *end], **facts}, data)


SIGN = {"part": "sign", "noise": "logistic", "noise_scale": 1.0}
ONE = np.ones((1, 1, 1, 1), np.float32)
BITS = np.zeros(1, np.uint8)


def convolution(**options: object) -> dict[str, object]:
    plain = {"stride": [1, 1], "padding": [0] * 4, "padding_mode": "zeros", "padding_value": 0, "dilation": [1, 1], "groups": 1}
    return {"part": "convolution", "weight": "c", "bias": None, **plain, **options}


def sums(**options: object) -> dict[str, object]:
    plain = {"stride": [1, 1], "padding": [0] * 4, "padding_value": 0, "dilation": [1, 1], "groups": 1}
    return {"part": "sums", "bits": "b", "outputs": 1, "filter": [1, 1, 1], **plain, **options}


def pool(kind: str, kernel: int, stride: int, padding: int = 0, **options: object) -> dict[str, object]:
    return {"part": kind, "kernel": [kernel] * 2, "stride": [stride] * 2, "padding": [padding] * 2, **options}


FLAT = {"part": "reshape", "shape": [1]}
HELD = "an evaluation would hold [0-9,]+ numbers, for a network of its size at most"
HOSTILE = {
    "a pad of terabytes": ([{"part": "pad", "sides": [2**20] * 4, "value": 0}], "pad gives [0-9,]+ numbers, and an example"),
    "a pad that the file's size does not explain": (
        [{"part": "pad", "sides": [300] * 4, "value": 0.0}, pool("max_pool", 604, 604, ceil=False), FLAT],
        HELD,
    ),
    "padding that the stride hides": ([convolution(padding=[2000] * 4, stride=[4004] * 2), FLAT], HELD),
    "the same of states": ([SIGN, sums(padding=[2000] * 4, stride=[4004] * 2), FLAT], HELD),
    "a window of terabytes": ([pool("max_pool", 2**20, 2**20, ceil=True), FLAT], HELD),
    "padding of such a window": ([pool("window_sum", 2**20, 2**20, 2**19), FLAT], HELD),
    "integers that overflow": ([SIGN, *[pool("window_sum", 1024, 1024, 512)] * 2], "integers up to [0-9,]+, the largest are"),
    "no groups": ([convolution(groups=0)], "convolution.groups must be a whole number from 1 to 1048576"),
    "groups that divide nothing": ([convolution(groups=3)], r"convolution of \[1, 4, 4\] needs 3 channels"),
    "no stride": ([convolution(stride=[0, 1])], "convolution.stride must be 2 whole numbers from 1"),
    "negative padding": ([convolution(padding=[-1, 0, 0, 0])], "convolution.padding must be 4 whole numbers from 0"),
    "a float for a whole number": ([{"part": "repeat", "times": 2.0}], "repeat.times must be a whole number"),
    "a bool for a whole number": ([{"part": "repeat", "times": True}], "repeat.times must be a whole number"),
    "a word for a number": ([{"part": "factor", "factor": "1"}], "factor.factor must be a finite number"),
    "a number beyond all floats": ([{"part": "factor", "factor": 10**400}], "factor.factor must be a finite number"),
    "nan": ([{"part": "factor", "factor": float("nan")}], "factor.factor must be a finite number"),
    "a negative factor": ([{"part": "factor", "factor": -1}], "factor.factor must be a positive number"),
    "channels of terabytes": ([{"part": "repeat", "times": 2**20}] * 2, "repeat gives [0-9,]+ numbers"),
    "sizes whose product overflows": ([SIGN, sums(outputs=2**20, filter=[2**20] * 3)], "sums of .* needs the bits of"),
    "mirrored padding of no image": (
        [{"part": "reshape", "shape": [16]}, convolution(padding_mode="reflect", padding=[1] * 4)],
        r"convolution of \[16\] needs images",
    ),
    "mirrored padding that is too large": (
        [convolution(padding_mode="reflect", padding=[4] * 4)],
        "padding that is smaller than the image",
    ),
    "weights of an image without one": (
        [SIGN, {"part": "reshape", "shape": [16]}, sums(filter=[16], groups=2)],
        "the bits of 16 weights",
    ),
    "weights of a row": ([SIGN, {"part": "reshape", "shape": [1, 16]}, sums(filter=[1, 1])], "sums of .* needs images"),
    "groups without an image": (
        [SIGN, pool("max_pool", 2, 2, ceil=False), {"part": "reshape", "shape": [4]}, sums(filter=[4], groups=2)],
        "needs no stride, padding, dilation and groups where states are no images",
    ),
    "no chains": ([{"part": "concat", "branches": [], "dim": 0}], "concat of .* needs at least one chain"),
    "one chain": ([{"part": "add", "branches": [[]]}], "add of .* needs two chains or more"),
    "chains that do not agree": ([{"part": "add", "branches": [[], [{"part": "repeat", "times": 2}]]}], "alike in shape"),
    "bits of real numbers": ([sums()], "sums of .* needs states"),
    "an unknown part": ([{"part": "system", "command": "ls"}], "it has a part that this version of flipgrad does not know"),
    "no part": (["sign"], "it has a part that this version of flipgrad does not know"),
    "a field too few": ([{"part": "sign", "noise": "logistic"}], "part 'sign' must have the fields noise, noise_scale"),
    "a field too many": ([{**SIGN, "seed": 1}], "part 'sign' must have the fields noise, noise_scale"),
    "an unknown noise": ([{**SIGN, "noise": "cauchy"}], "sign.noise must be one of logistic, normal"),
    "bits for real weights": ([convolution(weight="b")], "convolution.weight must name an array of float32 with 4 dimensions"),
    "an array that is not there": ([convolution(weight="d")], "convolution.weight must name an array"),
    "an array without a name": ([convolution(weight=None)], "convolution.weight must name an array"),
    "too many parts": ([SIGN] * 10_001, "a chain must be a list of at most 10,000 parts"),
    "parts that do not fit": ([{"part": "reshape", "shape": [3, 5]}], r"reshape of \[1, 4, 4\] needs 15 numbers"),
    "a factor that does not divide": ([{"part": "pixel_shuffle", "factor": 3, "back": True}], "that 3 divides"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_parts(name, tmp_path):
    chain, message = HOSTILE[name]
    arrays = {key: values for key, values in {"c": ONE, "b": BITS}.items() if f'"{key}"' in json.dumps(chain)}
    content = program(*chain, arrays=arrays)
    path = tmp_path / "net"

    def refused() -> None:
        assert read(path, content) is None
        with pytest.raises(fg.InputError, match=f"^'{path}' is no right network: .*{message}"):
            load(path)

    assert peak_of(refused) < READING * len(content) + BESIDES


def test_the_simplest_program_is_read(tmp_path):
    assert read(tmp_path / "net", program({"part": "reshape", "shape": [1]}, inputs=[1, 1, 1])) is not None


def test_nesting_that_is_too_deep(content, tmp_path):
    entries, facts, data = split(content)
    chain: list[object] = []
    for _ in range(10):
        chain = [{"part": "add", "branches": [chain, chain]}]
    facts["program"] = chain
    assert read(tmp_path / "net", joined(entries, facts, data)) is None
    with pytest.raises(fg.InputError, match="at most 8 chains deep"):
        load(tmp_path / "net")
    for text in ("[" * 500_000, '{"a":' * 500_000, json.dumps({"__metadata__": {"flipgrad": "[" * 500_000}})):
        assert read(tmp_path / "net", len(text).to_bytes(8, "little") + text.encode()) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": [2**21]}, "its inputs must be 1 to 3 whole numbers from 1 to"),
        ({"inputs": [2**20, 2**20, 2**20]}, "a network's inputs must have from 1 to 33,554,432 numbers"),
        ({"inputs": [10**400] * 3}, "its inputs must be 1 to 3 whole numbers"),
        ({"inputs": True}, "its inputs must be 1 to 3 whole numbers"),
        ({"inputs": [2, 5, 5]}, "the parts of the network do not fit together: window_sum|needs"),
        ({"classes": ["a", "b"]}, "the network has 3 outputs, and 2 names of classes"),
        ({"classes": "abc"}, "its classes must be a list of names"),
        ({"classes": ["a", "b", 3]}, "must be words that can be printed, of at most 200 letters each"),
        ({"classes": ["a", "b", "\x1b[2J"]}, "must be words that can be printed"),
        ({"classes": ["a", "b", "c" * 201]}, "must be words that can be printed"),
        ({"data": 3}, "must be words that can be printed"),
        ({"made_by": None}, "must be words that can be printed"),
        ({"accuracy": {"test": float("nan")}}, "pixel_scale, pixel_shift and accuracies must be finite numbers"),
        ({"accuracy": [1]}, "its accuracy numbers by name"),
        ({"pixel_scale": 10**400}, "pixel_scale, pixel_shift and accuracies must be finite numbers"),
        ({"pixel_scale": None}, "pixel_scale and pixel_shift must both be given, or none of them"),
        ({"more": 1}, "its facts must be accuracy, classes, data, made_by, pixel_scale, pixel_shift"),
        ({"program": None}, "a chain must be a list"),
        ({"program": []}, "it holds arrays that no part uses"),
    ],
)
def test_hostile_facts(content, tmp_path, change, message):
    entries, facts, data = split(content)
    assert read(tmp_path / "net", joined(entries, {**facts, **change}, data)) is None
    with pytest.raises(fg.InputError, match=message):
        load(tmp_path / "net")


def test_networks_that_end_with_images(tmp_path):
    entries, facts, data = split(program(convolution(), arrays={"c": ONE}))
    facts["program"] = facts["program"][:1]
    del entries["w"]
    entries["c"]["data_offsets"] = [0, 4]
    assert read(tmp_path / "net", joined(entries, facts, data[:4])) is None
    with pytest.raises(fg.InputError, match=r"a network must end with outputs \[K\], this one ends with \[1, 4, 4\]"):
        load(tmp_path / "net")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(content, tmp_path, value):
    entries, facts, data = split(content)
    place = entries["head.weight"]["data_offsets"][0]
    data = data[:place] + np.float32(value).tobytes() + data[place + 4 :]
    assert read(tmp_path / "net", joined(entries, facts, data)) is None
    with pytest.raises(fg.InputError, match=r"linear\.weight holds numbers that are not finite"):
        load(tmp_path / "net")


def test_weights_that_overflow_are_told_at_the_first_evaluation(tmp_path):
    big = {"part": "linear", "weight": "big", "bias": None}
    content = program(*[big] * 20, inputs=[1], arrays={"big": np.full((1, 1), 3e38, np.float32)})
    net = read(tmp_path / "net", content)
    with pytest.raises(fg.InputError, match="the outputs are not finite: the inputs or the network's weights are too large"):
        net(np.ones((1, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F64"}, "is not described as ours are"),
        ({"dtype": ["F32"]}, "is not described as ours are"),
        ({"shape": [0, 8]}, "is not described as ours are"),
        ({"shape": [True, 8]}, "is not described as ours are"),
        ({"shape": [2**31, 2**31, 2**31, 2**31]}, "does not lie where it should"),
        ({"shape": [8, 8]}, "does not lie where it should"),
        ({"shape": [2**63]}, "is not described as ours are"),
        ({"data_offsets": [0]}, "is not described as ours are"),
        ({"data_offsets": [0, 2**31]}, "does not lie where it should"),
        ({"data_offsets": [4, 0]}, "does not lie where it should"),
        ({"data_offsets": [-4, 92]}, "is not described as ours are"),
    ],
)
def test_hostile_arrays(content, tmp_path, change, message):
    entries, facts, data = split(content)
    entries["head.weight"].update(change)
    assert read(tmp_path / "net", joined(entries, facts, data)) is None
    with pytest.raises(fg.InputError, match=f"is damaged: array .* {message}; pack the network again"):
        load(tmp_path / "net")


def test_files_of_another_kind(content, tmp_path):
    path = tmp_path / "net"
    length = int.from_bytes(content[:8], "little")
    for wrong, message in [
        (b"", "it is no safetensors file, or ends too early"),
        (b"\xff" * 100, "it is no safetensors file, or ends too early"),
        (content[: length - 1], "it is no safetensors file, or ends too early"),
        (content[:-1], "its checksum is wrong"),
        (content + b"\0", "its checksum is wrong"),
        (content.replace(b"packed 1", b"packed 2"), "its checksum is wrong"),
        (b"\x02" + bytes(7) + b"{}", "is no packed network of flipgrad"),
        (b"\x02" + bytes(7) + b"[]", "is no packed network of flipgrad"),
        (b"\x02" + bytes(7) + b"{{", "its header is no JSON"),
    ]:
        assert read(path, wrong) is None
        with pytest.raises(fg.InputError, match=message):
            load(path)
    entries, facts, data = split(content)
    assert read(path, joined(entries, facts, data + b"\0")) is None
    with pytest.raises(fg.InputError, match="it is longer than its arrays"):
        load(path)
    told = {"flipgrad": json.dumps(fg.files.with_checksum({"kind": "run 3"}))}
    header = json.dumps({"__metadata__": told}).encode()
    assert read(path, len(header).to_bytes(8, "little") + header) is None
    with pytest.raises(fg.InputError, match=r"is no packed network of this version of flipgrad \(packed 1\)"):
        load(path)
    with pytest.raises(fg.InputError, match=r"cannot be read \(No such file or directory\); give a file of flipgrad pack"):
        load(tmp_path / "nothing")
    with pytest.raises(fg.InputError, match="is a folder, expected a file"):
        load(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "net"
    with path.open("wb") as file:
        # It takes no room on the disk.
        file.truncate(archive.LARGEST_FILE + 1)

    def refused() -> None:
        with pytest.raises(fg.InputError, match="has more than 2,147,483,648 bytes"):
            load(path)

    assert peak_of(refused) < BESIDES


def test_a_large_header_takes_little_memory(tmp_path):
    for filler in ("0,", "{},", '"a",'):
        count = 2**18 // (len(json.dumps(filler)) - 2)
        told = '{"a":[' + filler * count + "0]}"
        header = json.dumps({"__metadata__": {"flipgrad": told}}).encode()
        content = len(header).to_bytes(8, "little") + header
        assert peak_of(partial(read, tmp_path / "net", content)) < READING * len(content) + BESIDES
        # All of it was read.
        with pytest.raises(fg.InputError, match="its description has no checksum"):
            load(tmp_path / "net")


def test_the_same_network_is_the_same_file_and_survives_it(tmp_path):
    net, x = network()
    packed = pack(net, x)
    content, size = packed.to_bytes()
    assert packed.save(tmp_path / "net") == size == fg.summary(net, x).packed_bytes
    assert (tmp_path / "net").read_bytes() == content == pack(*network()).to_bytes()[0]
    again = load(tmp_path / "net")
    assert again.to_bytes()[0] == content
    assert again.facts == packed.facts
    images = torch.randn(20, 2, 6, 6).numpy()
    np.testing.assert_array_equal(again(images), packed(images))
    np.testing.assert_array_equal(again.members(images, 4, seed=1), packed.members(images, 4, seed=1))
    length = int.from_bytes(content[:8], "little")
    assert len(content) == 8 + length + size
    with safetensors.safe_open(tmp_path / "net", "numpy") as file:
        assert "flipgrad" in file.metadata()
        names = set(file.keys())
    assert {"0.weight", "1.running_mean", "3.branch.bits", "3.norm.scale", "3.prelu.weight", "10.bits", "10.shift"} < names
    assert {"head.weight", "head.bias"} < names


def test_facts_are_kept(content, tmp_path):
    (tmp_path / "net").write_bytes(content)
    facts = load(tmp_path / "net").facts
    assert facts == Facts(("cat", "dog", "fish"), 1 / 255, 0.0, {"test": 0.5}, "pets", "1.0")


def test_arrays_that_are_not_aligned_are_read(tmp_path):
    net, x = network()
    content = pack(net, x).to_bytes()[0]
    entries, facts, data = split(content)
    for extra in range(4):
        entries.pop("\0" * extra, None)
        facts["made_by"] = "x" * extra
        packed = read(tmp_path / "net", joined(entries, facts, data))
        np.testing.assert_array_equal(packed(x.numpy()), pack(net, x)(x.numpy()))


def test_networks_made_by_hand_have_numbered_names():
    chain = (parts.Linear(np.ones((3, 2), np.float32)), parts.Sign("logistic", 1.0), parts.Linear(np.ones((2, 3), np.float32)))
    net = PackedNetwork(chain, (2,))
    assert net.to_bytes()[0].count(b"0.linear.weight") == 2
    # One name for two arrays.
    both = PackedNetwork(chain, (2,), names={id(chain[0].weight): "w", id(chain[2].weight): "w"})
    entries, _, data = split(both.to_bytes()[0])
    assert set(entries) == {"w", "1.linear.weight"}
    assert len(data) == 48
    with pytest.raises(fg.InputError, match="the network has 2 outputs, and 3 names"):
        PackedNetwork(chain, (2,), Facts(("a", "b", "c")))


def test_one_output_has_two_classes():
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 1))
    assert pack(net, torch.zeros(1, 2), Facts(("no", "yes"))).outputs == 1
