"""The compiled kernels: flip products against the definition, and sampling against Philox and its distribution."""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from flip_layers import (
    PRECISION,
    SIZES,
    GridLayer,
    assert_log_ratios_of_large_numbers,
    channels,
    convolutions,
    far_layer,
    grid_options,
    precise_product,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flipgrad.errors import InputError
from flipgrad.estimators._draws import conditional
from flipgrad.flips import Geometry, compiled, naive, rank_one
from flipgrad.flips._arguments import flat
from flipgrad.flips.form import BLOCK, Form, compiled_moments
from flipgrad.flips.separable import fused_product
from flipgrad.native import library, loading, sampling
from flipgrad.noise import Laplace, Logistic, Normal, Uniform
from random_tensors import channels_last, layouts, normal, strided

needs_library = pytest.mark.skipif(not library.available(), reason=library.reason() or "compiled")


@pytest.fixture(params=[0, 1, 2], ids=["fastest", "portable", "without AVX-512"])
def path(request, monkeypatch):
    """The sets of instructions, one after the other."""
    monkeypatch.setattr(library, "PORTABLE", request.param)


@pytest.fixture(autouse=True)
def _poison():
    """Fills every torch.empty with NaN, so that an element that is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


class Case(GridLayer):
    """Computed by the compiled kernels."""

    def actual(self, dtype: torch.dtype, layout=lambda t: t) -> Tensor:
        x, a, grad = (layout(t.to(dtype)) for t in (self.x, self.a, self.grad))
        return self.function(compiled)(x, a, grad, self.weight.to(dtype), Logistic(self.scale), self.geometry)


@st.composite
def linear_cases(draw) -> Case:
    batch, inputs, outputs = draw(st.sampled_from([0, 1, 2, 9, 20])), draw(channels), draw(channels)
    return Case((batch, inputs), (outputs, inputs), **{name: draw(value) for name, value in grid_options.items()})


@st.composite
def conv_cases(draw) -> Case:
    # The reference evaluates the layer once per unit.
    shape, weight, geometry = draw(
        convolutions(st.sampled_from([0, 1, 2, 10]), channels, channels, largest_kernel=5, most_units=120)
    )
    return Case(shape, weight, geometry=geometry, **{name: draw(value) for name, value in grid_options.items()})


def on_all_paths(check) -> None:
    """Runs a check with every set of instructions: hypothesis does not go with fixtures."""
    chosen = library.PORTABLE
    try:
        for library.PORTABLE in (0, 1, 2):
            check()
    finally:
        library.PORTABLE = chosen


@needs_library
@pytest.mark.parametrize("cases", [linear_cases(), conv_cases()], ids=["linear", "convolution"])
@settings(max_examples=3 * settings().max_examples)
@given(st.data(), layouts)
def test_kernels_are_naive(cases, data, layout):
    layer = data.draw(cases)
    on_all_paths(lambda: layer.assert_right(*PRECISION, layout=layout))


@needs_library
def test_terms_of_either_sign_may_be_large_beside_their_sum():
    on_all_paths(lambda: Case((1, 1), (33, 1), size=2.0, seed=104).assert_right(*PRECISION))


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reach", [1.0, 20.0, 100.0])
def test_far_pre_activations_keep_their_digits(reach, dtype):
    for size in SIZES:
        tensors = far_layer(reach, size, dtype)
        u = compiled.flip_product(*tensors, Logistic()).double()
        expected = precise_product(*(t.double() for t in tensors))
        assert float((u - expected).norm() / expected.norm()) < PRECISION[dtype], size


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_tiny_term_is_right(dtype):
    x, grad = torch.tensor([[1.0, -1.0]], dtype=dtype), torch.ones(1, 1, dtype=dtype)
    for side, weight in product((-100.0, -40.0, 40.0, 100.0), (0.5, 3.0, 20.0)):
        # One output, far out: the term is tiny, and the whole result.
        a, weights = torch.tensor([[side]], dtype=dtype), torch.full((1, 2), weight, dtype=dtype)
        expected = precise_product(*(t.double() for t in (x, a, grad, weights)))
        u = compiled.flip_product(x, a, grad, weights, Logistic())
        # Near the smallest normal number, 1e-38 in float32, there are no digits.
        torch.testing.assert_close(u.double(), expected, rtol=PRECISION[dtype], atol=10 * torch.finfo(dtype).tiny)


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_beyond_the_kernels_are_right(dtype):
    # Flipped, a stays far, or crosses to the other side, or goes further.
    a = torch.tensor([[1000.0], [-1000.0]], dtype=dtype)
    x, grad = torch.ones(2, 4, dtype=dtype), torch.full((2, 1), 3.0, dtype=dtype)
    weight = torch.tensor([[0.5, 1000.0, -1000.0, 450.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 3, 0, 0], [0, 0, -3, 0]], dtype=dtype)
    torch.testing.assert_close(compiled.flip_product(x, a, grad, weight, Logistic()), expected, rtol=1e-6, atol=1e-30)
    image = [t[:, :, None, None] for t in (x, a, grad, weight)]
    u = compiled.flip_product(*image, Logistic(), Geometry())[..., 0, 0]
    torch.testing.assert_close(u, expected, rtol=1e-6, atol=1e-30)


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reach", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("units", [(1, 1), (16, 5), (70, 300)])
def test_log_ratios_of_large_numbers(units, reach, dtype):
    for size in (*SIZES, 10.0, 80.0, 1000.0):
        assert_log_ratios_of_large_numbers(partial(compiled.log_ratio, noise=Logistic()), units, reach, size, dtype)


@needs_library
@pytest.mark.usefixtures("path")
def test_log_ratio_is_that_of_probabilities():
    # By hand: y = 1 has probability F(a), and F(a - 2wx) when x is flipped.
    x, a, states = torch.tensor([[1.0, -1.0, 0.0]]), torch.tensor([[0.5]]), torch.tensor([[1.0]])
    weight = torch.tensor([[0.75, 0.75, 0.75]])
    likely, less, more = (1 / (1 + math.exp(-t)) for t in (0.5, -1.0, 2.0))
    expected = torch.tensor([[math.log(less / likely), math.log(more / likely), 0.0]])
    torch.testing.assert_close(compiled.log_ratio(x, a, states, weight, Logistic()), expected)
    expected = torch.tensor([[math.log((1 - less) / (1 - likely)), math.log((1 - more) / (1 - likely)), 0.0]])
    torch.testing.assert_close(compiled.log_ratio(x, a, -states, weight, Logistic()), expected)


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("units", [3, 40])
@pytest.mark.parametrize("size", [0.1, 30.0])
def test_log_ratios_of_what_is_no_number_are_none(size, units):
    x, a, states, weight = torch.ones(2, units), torch.ones(2, 5), torch.ones(2, 5), torch.full((5, units), size)
    a[1, 3] = torch.nan
    log_ratio = compiled.log_ratio(x, a, states, weight, Logistic())
    assert not log_ratio[0].isnan().any()
    assert log_ratio[1].isnan().all()
    weight[2, 1] = torch.nan
    assert compiled.log_ratio(x, a, states, weight, Logistic())[:, 1].isnan().all()


def large_case(*, ratio: bool = False) -> Case:
    """Large enough that all threads get work."""
    geometry = Geometry(stride=(2, 1), padding=(1, 0), groups=2)
    return Case((20, 40, 9, 7), (34, 20, 3, 2), 0.3, 0, geometry=geometry, ratio=ratio)


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0.3, 20.0])
@pytest.mark.parametrize("ratio", [False, True])
def test_threads_give_the_same_bits(ratio, dtype, size):
    layer = large_case(ratio=ratio)
    layer.weight *= size / 0.3
    alone = layer.actual(dtype)
    assert not alone.isnan().any()
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert torch.equal(layer.actual(dtype), alone)


@needs_library
def test_many_callers_at_once():
    layer = large_case()
    alone = layer.actual(torch.float32)
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: layer.actual(torch.float32), range(12)))
    assert all(torch.equal(result, alone) for result in results)


FORKED = """
import os, torch
from flipgrad.flips import compiled
from flipgrad.noise import Logistic
torch.set_num_threads(2)
# What torch itself computes with its threads does not survive a fork: the tensors are ready before it.
x, a, g, w = torch.ones(200, 64), torch.ones(200, 64), torch.ones(200, 64), torch.full((64, 64), 0.1)
before = compiled.flip_product(x, a, g, w, Logistic()).tolist()
child = os.fork()
if child == 0:
    os._exit(0 if compiled.flip_product(x, a, g, w, Logistic()).tolist() == before else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert compiled.flip_product(x, a, g, w, Logistic()).tolist() == before
"""


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_child_of_a_fork_has_its_own_threads():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=120)


@needs_library
@pytest.mark.parametrize("ratio", [False, True])
def test_results_have_the_memory_format_of_the_states(ratio):
    layer = large_case(ratio=ratio)
    whole = layer.actual(torch.float32)
    last = layer.actual(torch.float32, channels_last)
    assert whole.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, whole)
    assert layer.actual(torch.float32, strided).is_contiguous()


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ratio", [False, True])
def test_half_precision_is_computed_in_float32(ratio, dtype):
    layer = Case((4, 3, 5, 4), (7, 3, 2, 2), 0.3, 0, ratio=ratio)
    tensors = [t.to(dtype) for t in (layer.x, layer.a, layer.grad, layer.weight)]
    u = layer.function(compiled)(*tensors, Logistic(), layer.geometry)
    assert u.dtype == dtype
    assert torch.equal(u, layer.function(compiled)(*(t.float() for t in tensors), Logistic(), layer.geometry).to(dtype))


@needs_library
def test_gradient_without_memory_of_its_own():
    layer = Case((3, 2, 5, 4), (3, 2, 2, 3), 1.0, 0)
    grad = torch.ones((), dtype=torch.float64).expand_as(layer.a)
    expected = naive.flip_product(layer.x, layer.weight, layer.bias, grad, Logistic(), layer.geometry)
    u = compiled.flip_product(layer.x, layer.a, grad, layer.weight, Logistic(), layer.geometry)
    torch.testing.assert_close(u, expected, rtol=1e-10, atol=1e-12)


@needs_library
def test_operators_pass_opcheck():
    layer, image = Case((3, 5), (4, 5), 0.3, 0), Case((2, 3, 5, 4), (3, 3, 3, 2), 0.3, 0)
    operators = torch.ops.flipgrad
    for layout in (torch.Tensor.contiguous, channels_last):
        for case in (layer, image):
            tensors = [layout(t) for t in (case.x, case.a, case.grad.sign())]
            for operator in (operators.flip_product, operators.log_ratio):
                torch.library.opcheck(operator.default, (*tensors, case.weight, "Logistic", 1.0, 0.0, flat(case.geometry)))
        torch.library.opcheck(operators.sample_states_native.default, (tensors[1].float(), 1.0, 3, 4))
        torch.library.opcheck(operators.sample_states_from_probability_native.default, (tensors[1].sigmoid(), 3, 4))
        torch.library.opcheck(operators.mean_slopes_native.default, (tensors[1].float(), 1.0, 0.5, 3, 4, 5))


@needs_library
@pytest.mark.usefixtures("path")
def test_a_weight_that_is_no_number_leaves_the_other_units_right():
    # All others stay far from 0 when they are flipped.
    x, a, grad = torch.ones(1, 3), torch.tensor([[-1000.0]]), torch.ones(1, 1)
    u = compiled.flip_product(x, a, grad, torch.tensor([[100.0, torch.nan, -100.0]]), Logistic())
    assert u[0, 1].isnan()
    assert not u[0, ::2].any()


@needs_library
def test_bad_input_is_refused():
    x, a, grad, weight = (torch.ones(2, 2) for _ in range(4))
    with pytest.raises(InputError, match=r"Normal.*Logistic"):
        compiled.flip_product(x, a, grad, weight, Normal())
    with pytest.raises(InputError, match=r"a is on meta.*CPU"):
        compiled.flip_product(x, a.to("meta"), grad, weight, Logistic())
    with pytest.raises(InputError, match=r"weight is torch.sparse_coo.*weight.to_dense\(\)"):
        compiled.flip_product(x, a, grad, weight.to_sparse(), Logistic())
    with pytest.raises(InputError, match=r"x has dtype torch.int64"):
        compiled.flip_product(x.long(), a, grad, weight, Logistic())
    with pytest.raises(InputError, match=r"weight has dtype torch.float64, but x has torch.float32"):
        compiled.flip_product(x, a, grad, weight.double(), Logistic())
    with pytest.raises(InputError, match=r"grad has shape \(2, 3\).*\(2, 2\)"):
        compiled.flip_product(x, a, torch.ones(2, 3), weight, Logistic())
    images = [torch.ones(shape) for shape in ((1, 2, 4, 4), (1, 4, 3, 4), (1, 4, 4, 4), (4, 2, 1, 1))]
    with pytest.raises(InputError, match=r"a has shape \(1, 4, 3, 4\).*\(1, 4, 4, 4\)"):
        compiled.flip_product(*images, Logistic(), Geometry())
    with pytest.raises(InputError, match=r"x has shape \(1, 2, 4, 4\), not \[B, in\]"):
        compiled.flip_product(*images, Logistic())
    with pytest.raises(InputError, match=r"x has shape \(2, 2\), not \[B, C, H, W\]"):
        compiled.log_ratio(x, a, grad, weight, Logistic(), Geometry())
    with pytest.raises(InputError, match=r"Normal.*Logistic"):
        compiled.log_ratio(x, a, grad, weight, Normal())
    with pytest.raises(InputError, match=r"states has shape \(2, 3\).*\(2, 2\)"):
        compiled.log_ratio(x, a, torch.ones(2, 3), weight, Logistic())
    with pytest.raises(InputError, match="seed=-1"):
        Logistic().compiled_sign(a, -1)
    with pytest.raises(InputError, match=r"offset=-2"):
        sampling.mean_slopes(a, x, 1.0, 1.0, 10, 0, -2)


def test_structures_are_those_of_the_header():
    header = (Path(library.__file__).parent.parent / "csrc" / "flipgrad.h").read_text()
    text = re.sub(r"//.*", "", header)
    structures = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        for declaration in body.split(";")[:-1]:
            kind, names = re.match(r"\s*(?:const )?(\w+)(.*)", declaration, re.DOTALL).groups()
            # The type, a star for a pointer, and the length of an array.
            fields = re.findall(r"(\*?)\s*(\w+)(?:\[(\d)\])?", names)
            pointer = "*" if names.startswith("*") else ""
            structures.setdefault(name, []).extend((field, kind + (star or pointer), size) for star, field, size in fields)
    functions = dict(re.findall(r"int flipgrad_(\w+)_f32\(const (\w+)\*", text))
    assert set(functions) == set(library._PROBLEMS)
    types = {ctypes.c_int64: "int64_t", ctypes.c_uint64: "uint64_t", ctypes.c_double: "double"}
    types |= {ctypes.POINTER(ctypes.c_float): "float*", ctypes.POINTER(ctypes.c_int64): "int64_t*"}
    # "in" is a word of Python.
    renamed = {"in": "inputs", "out": "outputs"}
    for function, name in functions.items():
        ours = [
            (field, types.get(kind, "int64_t"), "" if kind in types else str(kind._length_))
            for field, kind in library._PROBLEMS[function]._fields_
        ]
        assert ours == [(renamed.get(field, field), *rest) for field, *rest in structures[name]], name


def test_missing_library_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "LIBRARY", tmp_path / "_native.so")
    found, reason = loading.load([])
    assert found is None
    assert "does not exist" in reason
    loading.LIBRARY.write_text("no library")
    found, reason = loading.load([])
    assert found is None
    assert "cannot be loaded" in reason
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_reason", reason)
    assert not library.available()
    with pytest.raises(InputError, match="cannot be loaded"):
        compiled.flip_product(*(torch.ones(2, 2) for _ in range(4)), Logistic())


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10, as its paper writes it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & 0xFFFFFFFF, (first >> 32) ^ c3 ^ k1, first & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def words(count: int, seed: int, offset: int) -> Tensor:
    """The random number of 32 bits of every element: eight Philox counters of four words make 32 of them."""
    key, upper = [seed % 2**32, seed >> 32], [offset % 2**32, offset >> 32]
    return torch.tensor([philox([8 * (i // 32) + i % 8, 0, *upper], key)[i % 32 // 8] for i in range(count)])


# The known answers of Random123.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@needs_library
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, answer):
    out = (ctypes.c_uint32 * 4)()
    library._library.flipgrad_philox((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
    assert list(out) == answer
    assert philox(counter, key) == answer


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_states_compare_philox_with_the_probability(dtype):
    seed, offset, count = 2**40 + 5, 2**33 + 9, 150
    a = 3 * normal(count).to(dtype)
    u = words(count, seed, offset).double() / 2**32
    p = torch.sigmoid(a.double() / 2)
    # None is so close to its probability that rounding decides.
    assert float((u - p).abs().min()) > 1e-6
    expected = torch.where(u < p, 1.0, -1.0).to(dtype)
    assert torch.equal(Logistic(2.0).compiled_sign(a, seed, offset), expected)
    assert torch.equal(sampling.states_from_probability(p.to(dtype), seed, offset), expected)


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("noise", [Logistic(), Logistic(3.0), Normal(), Laplace(0.8), Uniform(2.0)], ids=repr)
def test_states_have_their_probability(noise):
    count = 200_000
    # 5 standard errors: one false alarm in two million, over 12 values of a and the seed fixed.
    for i, a in enumerate([-7.0, -4.0, -2.0, -1.0, -0.3, 0.0, 0.0, 0.3, 1.0, 2.0, 4.0, 7.0]):
        p = float(noise.cdf(torch.tensor(a, dtype=torch.float64)))
        states = noise.compiled_sign(torch.full((count,), a), seed=1, offset=i)
        assert states.abs().eq(1).all()
        error = math.sqrt(p * (1 - p) / count)
        assert abs(float((states > 0).double().mean()) - p) <= 5 * error


@needs_library
def test_small_probabilities_of_either_state_are_kept():
    # F(-14) is 8.3e-7: 14 of 2**24 expected, and between 1 and 40 but for once in a million.
    a = torch.full((2**24,), 14.0)
    for sign in (1, -1):
        rare = int((Logistic().compiled_sign(sign * a, seed=2) != sign).sum())
        assert 1 <= rare <= 40
    certain = torch.tensor([0.0, 1.0] * 1000)
    assert torch.equal(sampling.states_from_probability(certain, 3), 2 * certain - 1)


@needs_library
@pytest.mark.usefixtures("path")
def test_states_of_one_draw_are_independent():
    # Chi-square of the 16 patterns of four neighbours, 15 degrees of freedom: above 50 once in 80,000.
    for step in (1, 8, 32):
        states = Logistic().compiled_sign(torch.zeros(2**18), seed=4).gt(0).view(-1, 4 * step)
        bits = torch.stack([states[:, step * k] for k in range(4)])
        counts = torch.bincount((bits * torch.tensor([[1], [2], [4], [8]])).sum(0), minlength=16).double()
        expected = counts.sum() / 16
        assert float(((counts - expected) ** 2 / expected).sum()) < 50


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("count", [0, 1, 31, 33, 100_003])
def test_states_depend_on_seed_offset_and_index_alone(count):
    a = normal(count).float()
    states = Logistic().compiled_sign(a, 5, 6)
    assert states.abs().eq(1).all()
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert torch.equal(Logistic().compiled_sign(a, 5, 6), states)
    half = count // 2
    assert torch.equal(Logistic().compiled_sign(a[:half], 5, 6), states[:half])
    apart = torch.stack([a, a], 1)[:, 1]
    assert torch.equal(Logistic().compiled_sign(apart, 5, 6), states)
    if count > 1000:
        for seed, offset in ((4, 6), (5, 7)):
            other = Logistic().compiled_sign(torch.zeros(count), seed, offset)
            same = float((other == Logistic().compiled_sign(torch.zeros(count), 5, 6)).double().mean())
            assert abs(same - 0.5) < 5 * 0.5 / math.sqrt(count)


@needs_library
def test_states_of_half_precision():
    a = normal(100).bfloat16()
    states = Logistic().compiled_sign(a, 1)
    assert states.dtype == torch.bfloat16
    assert torch.equal(states.float(), Logistic().compiled_sign(a.float(), 1))


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("scale", "t"), [(1.0, 1.0), (2.5, 2.5), (1.0, 0.02), (3.0, 0.5), (0.7, 20.0)])
def test_mean_slopes_are_their_formula_of_the_same_numbers(scale, t):
    samples, seed, offset, noise = 3, 2**40 + 5, 2**32 - 2, Logistic(scale)
    size = torch.tensor([0.0, 1e-3, 0.1, 0.7, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 80.0, 100.0]).repeat(4)
    a = scale * torch.cat([size, -size])
    x = torch.tensor([1.0, 1.0, -1.0]).repeat(len(a) // 3)
    u = torch.stack([words(len(a), seed, offset + k) >> 1 for k in range(samples)]).double().add(0.5) / 2**31
    z = conditional(noise, a.double(), x.double(), noise.icdf(u))
    expected = 2 * Logistic(t).pdf(a.double() - z).mean(0)
    slopes = sampling.mean_slopes(a, x, noise.scale, t, samples, seed, offset)
    # Rounding moves the exponent (a - z) / t. Near the smallest normal number there are no digits.
    tolerance = 1e-6 + 2e-7 * (scale + a.abs() + z.abs().max(0).values) / t
    assert bool(((slopes - expected).abs() <= tolerance * expected + 1e-36 / t).all())
    # Not only those that vanish.
    assert int((expected > 1e-30).sum()) > len(a) / 2


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("t", [1.0, 0.6])
@pytest.mark.parametrize("count", [0, 1, 31, 33, 100_003])
def test_mean_slopes_depend_on_seed_offset_and_index_alone(count, t):
    a = 3 * normal(count).float()
    x = Logistic().compiled_sign(a, 1)

    def slopes(a: Tensor, x: Tensor, seed: int = 5, offset: int = 6) -> Tensor:
        return sampling.mean_slopes(a, x, 1.0, t, 4, seed, offset)

    whole = slopes(a, x)
    assert bool(((whole > 0) & (whole <= 1 / (2 * t) * (1 + 1e-6))).all())
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert torch.equal(slopes(a, x), whole)
    half = count // 2
    assert torch.equal(slopes(a[:half], x[:half]), whole[:half])
    assert torch.equal(slopes(torch.stack([a, a], 1)[:, 1], x), whole)
    draws = torch.vmap(slopes)(a[: 2 * half].view(2, half), x[: 2 * half].view(2, half))
    assert torch.equal(draws.flatten(), whole[: 2 * half])
    # The mean over consecutive offsets.
    one_by_one = [sampling.mean_slopes(a, x, 1.0, t, 1, 5, offset) for offset in range(6, 10)]
    torch.testing.assert_close(torch.stack(one_by_one).mean(0), whole)
    if count > 1:
        assert not torch.equal(slopes(a, x, seed=4), whole)
        assert not torch.equal(slopes(a, x, offset=7), whole)


@needs_library
def test_mean_slopes_of_other_precisions_are_computed_in_float32():
    a = normal(100)
    x = a.sign()
    for dtype in (torch.bfloat16, torch.float64):
        slopes = sampling.mean_slopes(a.to(dtype), x.to(dtype), 1.0, 0.5, 2, 1)
        assert slopes.dtype == dtype
        assert torch.equal(slopes, sampling.mean_slopes(a.to(dtype).float(), x.float(), 1.0, 0.5, 2, 1).to(dtype))


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("t", [1.0, 0.5, 1e-12])
def test_mean_slopes_of_extreme_pre_activations(t):
    a = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, 0.0, torch.nan])
    for x in (torch.ones(6), -torch.ones(6)):
        slopes = sampling.mean_slopes(a, x, 1.0, t, 1000, 1)
        assert bool(torch.isfinite(slopes[:5]).all())
        assert bool(slopes[5].isnan())


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 100_001])
@pytest.mark.parametrize("most", [300, 10**6])
def test_moments(count, most):
    t = torch.randn(count, generator=torch.Generator().manual_seed(count))
    every = max(1, count // most)
    some = torch.cat([t[:0], *t.split(BLOCK)[::every]]).double()
    expected = [some.square().max(), some.square().mean(), (some**4).mean()] if count else [0.0] * 3
    assert compiled_moments(t, most) == pytest.approx([float(e) for e in expected], rel=1e-6)
    torch.set_num_threads(4)
    assert compiled_moments(t, most) == pytest.approx([float(e) for e in expected], rel=1e-6)


@needs_library
def test_moments_of_what_is_no_number():
    assert math.isnan(compiled_moments(torch.tensor([1.0, math.nan]), 10)[1])
    assert compiled_moments(torch.tensor([1.0, math.inf]), 10)[0] == math.inf


DIFFERENCE = ((0.5, 0.1, -0.2, 0.03), (1.0,), (0.2, -0.7))
CURVATURE = ((0.3, -0.2), (0.6, 0.1, 0.05))


def form(difference, curvature, limit) -> Form:
    """With these polynomials: the product asks for no more."""
    nodes = tuple(range(len(difference)))
    return Form(0.1, 0.0, limit, tuple(float(n) for n in nodes), difference, curvature, nodes[: len(curvature)])


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("ranks", [(1, 0), (1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize(
    "shape", [(0, 3, 3), (1, 1, 1), (5, 7, 3), (6, 256, 16), (13, 257, 33), (259, 30, 130), (300, 520, 291)]
)
def test_product_is_its_formula(shape, ranks):
    batch, outputs, inputs = shape
    difference, curvature = DIFFERENCE[-ranks[0] :], CURVATURE[: ranks[1]]
    x = normal(batch, inputs).sign().float()
    x[normal(batch, inputs, seed=1) > 1] = 0
    weight = normal(outputs, inputs, seed=2).clamp(-2, 2).float()
    differences = normal(batch, len(difference) * outputs, seed=3).float()
    curvatures = normal(batch, len(curvature) * outputs, seed=4).float()
    w = weight.double()
    centred = 2 * (w / 2.0) ** 2 - 1

    def part(features: Tensor, functions: tuple[tuple[float, ...], ...], power: int) -> Tensor:
        values = [w**power * sum(c * centred**k for k, c in enumerate(f)) for f in functions]
        return features.double() @ torch.cat([w[:0], *values])

    expected = x.double() * (x.double() * part(differences, difference, 1) + part(curvatures, curvature, 2))
    u = fused_product(x, differences, curvatures, weight, form(difference, curvature, 2.0))
    assert u.dtype == torch.float32
    assert not u[x == 0].any()
    assert float((u - expected).norm()) <= 1e-6 * float(expected.norm())
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert torch.equal(fused_product(x, differences, curvatures, weight, form(difference, curvature, 2.0)), u)


@needs_library
def test_product_of_one_example_is_that_of_many():
    x, weight = normal(70, 40).sign().float(), normal(300, 40, seed=1).float()
    differences, curvatures = normal(70, 300, seed=2).float(), normal(70, 300, seed=3).float()
    first = form(DIFFERENCE[:1], CURVATURE[:1], 4.0)
    u = fused_product(x, differences, curvatures, weight, first)
    for i in (0, 5, 69):
        one = slice(i, i + 1)
        assert torch.equal(fused_product(x[one], differences[one], curvatures[one], weight, first), u[one])


def of_rank_one(block: tuple[int, int], steps: float, far: float, noise: Logistic) -> tuple[Tensor, ...]:
    """Pre-activations up to ``far`` scales, gradients, other numbers and states of 3 images, and steps of 6 channels."""
    a, grad, sums = (normal(3, 6, *block, seed=seed).float() for seed in range(3))
    step = steps * noise.scale * torch.tensor([1.0, -1.1, 0.9, -1.2, 1.3, -0.8])
    return a * far * noise.scale, grad, sums, torch.where(grad > 0, 1.0, -1.0), step


@needs_library
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("steps", [1e-3, 0.1, 0.27, 2.0, 40.0, 300.0])
@pytest.mark.parametrize("noise", [Logistic(), Logistic(0.3)], ids=repr)
def test_compiled_flips_of_rank_one_are_those_of_tensors(steps, noise):
    """Against float64, relative to the largest term of every channel: tails, either sign of a step, groups, any block."""
    for block, far, groups, threads in (((1, 1), 1, 1, 1), ((3, 5), 3, 3, 2), ((7, 9), 100, 2, 3), ((4, 4), 10, 6, 1)):
        torch.set_num_threads(threads)
        a, grad, sums, states, step = of_rank_one(block, steps, far, noise)
        wide = [t.double() for t in (a, grad, sums, states, step)]
        found = rank_one.changes(a, grad, sums, step, noise, groups)
        expected = rank_one.changes(*wide[:3], wide[4], noise, groups)
        logs = rank_one.log_changes(a, states, step, noise, groups)
        expected_logs = rank_one.log_changes(wide[0], wide[3], wide[4], noise, groups)
        pairs = [
            (getattr(found, name), getattr(expected, name))
            for name in ("odd", "spread", "even", "by_example", "slopes", "scaled")
        ]
        pairs += [(logs.odd, expected_logs.odd), (logs.spread, expected_logs.spread)]
        for one, other in pairs:
            assert ((one - other).abs() <= 3e-6 * other.abs().max() + 1e-30).all()
        without = rank_one.changes(a, grad, sums, step, noise, groups, keep_even=False)
        assert without.even is None
        assert torch.equal(without.odd, found.odd)
        assert torch.equal(without.spread, found.spread)


@needs_library
@pytest.mark.usefixtures("path")
def test_compiled_flips_of_rank_one_keep_their_digits_in_the_tails():
    """Every term by itself, not only next to the largest: up to 60 scales out, where probabilities are 1e-26."""
    a = torch.linspace(-60, 60, 481).view(1, 1, 13, 37)
    for step in (0.01, 0.5, 5.0, -30.0):
        arguments = a, torch.ones_like(a), a, torch.tensor([step])
        found = rank_one.changes(*arguments, Logistic())
        expected = rank_one.changes(*(t.double() for t in arguments), Logistic())
        torch.testing.assert_close(found.odd.double(), expected.odd, rtol=2e-5, atol=0)
        torch.testing.assert_close(found.even.double(), expected.even, rtol=2e-5, atol=0)


@needs_library
def test_compiled_flips_of_rank_one_pass_nan_on():
    a, grad, sums, states, step = of_rank_one((2, 3), 0.5, 1, Logistic())
    a[1, 2, 0, 1] = math.nan
    for parts in (rank_one.changes(a, grad, sums, step, Logistic()), rank_one.log_changes(a, states, step, Logistic())):
        assert parts.odd.isnan().sum() == 1
        assert parts.spread.isnan().sum() == 1


@needs_library
def test_layouts_that_compiled_flips_of_rank_one_do_not_take_are_computed_by_tensors():
    a, grad, sums, _, step = of_rank_one((4, 5), 0.5, 1, Logistic())
    whole = rank_one.changes(a, grad, sums, step, Logistic(), keep_even=False)
    other = rank_one.changes(channels_last(a), channels_last(grad), sums, step, Logistic(), keep_even=False)
    assert other.even is not None
    torch.testing.assert_close(other.odd, whole.odd)
    torch.testing.assert_close(other.spread, whole.spread)
    torch.testing.assert_close(other.scaled, whole.scaled)
