"""ONNX files hold standard operators alone, and onnxruntime gives the network's outputs and hidden bits from them."""

from __future__ import annotations

import pytest
import torch
from exported_nets import BINARY, MAKERS, WAYS, trained
from torch import nn

import flipgrad as fg
from flipgrad.export import onnx_files

onnx = pytest.importorskip("onnx", reason="ONNX files need pip install 'flipgrad[onnx]'")
pytest.importorskip("onnxscript", reason="ONNX files need pip install 'flipgrad[onnx]'")
pytest.importorskip("onnxruntime", reason="pip install onnxruntime, and ONNX files are run")

# In one process: the first export of a process takes seconds, the others less than one.
pytestmark = pytest.mark.xdist_group("export")

# Every layer once, and every way.
QUICK = {
    ("fully connected", "sampled"),
    ("convolutions", "deterministic"),
    ("residual images", "deterministic"),
    ("by hand, shared", "member"),
}
CASES = [
    pytest.param(make, way, id=f"{name}, {kind}", marks=[] if (name, kind) in QUICK else pytest.mark.slow)
    for name, make in MAKERS.items()
    for kind, way in WAYS.items()
]


def shape(value):
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize(("make", "way"), CASES)
def test_onnxruntime_gives_the_outputs_of_the_network(make, way, tmp_path):
    net, x = trained(make)
    plain, noise, own = way(net, x)
    file = tmp_path / "net.onnx"
    fg.export.write_onnx(plain, x, file)
    session = fg.export.OnnxSession(file)
    torch.testing.assert_close(session(x, *noise), own(x).detach(), rtol=1e-5, atol=1e-5)
    if not noise:
        torch.testing.assert_close(session(x[:1]), own(x[:1]).detach(), rtol=1e-5, atol=1e-5)
    model = onnx.load(file)
    assert {node.domain for node in onnx_files._nodes(model.graph)} == {""}
    assert not any(node.op_type == "Sign" for node in onnx_files._nodes(model.graph))
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", fg.export.OPSET)]
    assert not model.functions
    assert shape(model.graph.input[0]) == ["batch", *x.shape[1:]]
    assert shape(model.graph.output[0]) == ["batch", own(x).shape[1]]
    assert b"site-packages" not in file.read_bytes()


def test_hidden_bits_are_right_where_sums_are_exactly_the_threshold(tmp_path):
    """Often that is 0: there ONNX's own sign is 0, and a state is +1; scales in the weights would leave a rounding error."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16)
    layers = [
        fg.BinaryConv2d(4, 16, 3, padding=1, bias=False, **BINARY),
        fg.BinaryConv2d(16, 16, 3, bias=False, norm=norm, **BINARY),
        nn.Flatten(),
        fg.BinaryLinear(256, 64, bias=False, norm=fg.ScaleShift(64), **BINARY),
    ]
    net = fg.Sequential(*layers, head=nn.Identity()).eval()
    with torch.no_grad():
        # The running mean is a whole number, and so is the sum that becomes 0.
        norm.running_mean.copy_(2.0 * torch.randint(-4, 5, (16,)))
        norm.running_var.uniform_(0.1, 9)
        norm.weight.copy_(torch.randn(16))
        layers[0].weight_scale.copy_(0.3 * torch.randn(16))
        layers[3].norm.scale.copy_(torch.randn(64))
        layers[3].norm.scale[:4] = 0
        layers[3].norm.shift[:2] = -1
    x = torch.randint(0, 2, (500, 4, 6, 6)) * 2.0 - 1
    fg.export.write_onnx(fg.export.deterministic(net), x, tmp_path / "net.onnx")
    found, expected = fg.export.OnnxSession(tmp_path / "net.onnx")(x), net.deterministic(x)
    assert torch.equal(found, expected)
    assert torch.equal(expected[:, :4], torch.tensor([-1.0, -1, 1, 1]).expand(500, 4))
    # Runtimes would be wrong without thresholds: sums at them are common.
    sums = nn.functional.conv2d(x, layers[0].effective_weight().sign(), padding=1)
    assert 0.05 < float((sums == 0).double().mean()) < 0.5


def test_names_and_metadata_are_those_asked_for(tmp_path, monkeypatch):
    net, x = trained(MAKERS["fully connected"])
    file = tmp_path / "net.onnx"
    fg.export.write_onnx(fg.export.sampled(net), x, file, batch_size=3, metadata={"classes": "a b c"})
    session = fg.export.OnnxSession(file)
    assert session.names == ["inputs", *(f"noise_{k}" for k in range(1, 7)), "weight_noise_1"]
    assert session.metadata == {"classes": "a b c", "flipgrad": fg.__version__}
    model = onnx.load(file)
    assert model.producer_name == "flipgrad"
    assert [shape(value) for value in (*model.graph.input[:2], *model.graph.output)] == [[3, 5], [3, 20], [3, 3]]
    monkeypatch.setattr(onnx_files, "_model", lambda *_: model)
    monkeypatch.setattr(onnx_files, "LARGEST_FILE", 1000)
    with pytest.raises(fg.InputError, match=r"the network has .* bytes, and a file of ONNX at most 1,000"):
        fg.export.write_onnx(fg.export.sampled(net), x, file)


class Odd(nn.Module):
    """Gives what ONNX has no operator for."""

    def forward(self, x):
        return torch.special.bessel_j0(x)


def test_what_cannot_be_written_is_refused_with_the_way_out(tmp_path, monkeypatch):
    net, x = trained(MAKERS["fully connected"])
    plain, file = fg.export.deterministic(net), tmp_path / "net.onnx"
    with pytest.raises(fg.InputError, match=r"fg.export takes a plain module, got Sequential"):
        fg.export.write_onnx(net, x, file)
    with monkeypatch.context() as patch:
        patch.setattr(onnx_files, "find_spec", lambda name: None)
        with pytest.raises(
            fg.InputError, match=r"this needs onnx and onnxscript, not installed here: pip install 'flipgrad\[onnx\]'"
        ):
            fg.export.write_onnx(plain, x, file)
        with pytest.raises(fg.InputError, match="this needs onnxruntime, not installed here: pip install onnxruntime"):
            fg.export.OnnxSession(file)
    assert not file.exists()


def test_operators_that_are_not_standard_are_refused():
    node = onnx.helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    graph = onnx.helper.make_graph([node], "g", [], [])
    with pytest.raises(
        fg.InputError, match=r"becomes com.microsoft::Gelu, which is no standard operator of ONNX: replace that"
    ):
        onnx_files._check_standard(onnx.helper.make_model(graph))
    inside = onnx.helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=graph)
    with pytest.raises(fg.InputError, match=r"com.microsoft::Gelu"):
        onnx_files._check_standard(onnx.helper.make_model(onnx.helper.make_graph([inside], "g", [], [])))
    function = onnx.helper.make_function("own", "Odd", ["x"], ["y"], [], [])
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []), functions=[function])
    with pytest.raises(fg.InputError, match="becomes the function Odd, which is none of ONNX's own"):
        onnx_files._check_standard(model)


@pytest.mark.slow
def test_what_onnx_has_no_operator_for_is_refused_by_name(tmp_path):
    x = torch.randn(4, 5)
    odd = fg.Sequential(fg.BinaryLinear(5, 3), head=nn.Sequential(nn.Linear(3, 2), Odd()))
    with pytest.raises(
        fg.InputError, match=r"ONNX has no operator for what a module of the network computes \(prims.bessel_j0\): replace"
    ):
        fg.export.write_onnx(fg.export.deterministic(odd), x, tmp_path / "net.onnx")
