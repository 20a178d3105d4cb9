"""Trained networks for other programs: as plain modules, as ``torch.export`` programs, and as ONNX files.

A network is first made a plain module, which has no estimators and cannot be trained: :func:`deterministic` (no noise),
:func:`member` (one draw of all noise, held fixed) or :func:`sampled` (noise as inputs). :func:`program` captures it as a graph
for batches of any size, :func:`write_onnx` writes it as a file of standard ONNX operators.

>>> import torch
>>> import flipgrad as fg
>>> net, images = fg.zoo.load("digits-binary"), torch.randn(20, 1, 8, 8)
>>> program = fg.export.program(fg.export.deterministic(net), images)
>>> bool(torch.allclose(program.module()(images), net.deterministic(images), atol=1e-5))
True

``torch.export.save`` writes such a program to a file, and ``torch.export.load`` reads it. Both use pickle, so that a file from
somebody else can run anything: load only your own. Flipgrad never loads one; an ONNX file holds numbers and names alone.
"""

from flipgrad.export.onnx_files import OPSET, OnnxSession, write_onnx
from flipgrad.export.plain import FixedNet, SampledNet, deterministic, member, sampled
from flipgrad.export.programs import program

__all__ = ["OPSET", "FixedNet", "OnnxSession", "SampledNet", "deterministic", "member", "program", "sampled", "write_onnx"]
