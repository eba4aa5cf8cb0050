"""Copies for a checkpoint stay as they are while the training goes on, and take memory once."""

from __future__ import annotations

import torch

from memfit.training.runs.state import HostBuffers


def test_copies_stay_as_they_are_and_are_contiguous() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    given = {
        "a": {"turned": base.T, "part": base[1:, :2], "none": torch.empty(0, 3)},
        "b": {"part": base[0].bfloat16()},
    }
    expected = {file: {key: t.clone() for key, t in tensors.items()} for file, tensors in given.items()}
    copies = HostBuffers().copied(given)
    base.zero_()
    given["b"]["part"].zero_()
    assert copies.keys() == given.keys() and all(copies[file].keys() == given[file].keys() for file in given)
    for file, tensors in copies.items():
        for key, copy in tensors.items():
            assert copy.dtype is expected[file][key].dtype and torch.equal(copy, expected[file][key])
            assert copy.is_contiguous() and not copy.requires_grad
    assert copies["a"]["part"].untyped_storage().data_ptr() != copies["a"]["turned"].untyped_storage().data_ptr()


def test_memory_is_used_again_for_what_has_the_same_shape_and_let_go_for_what_is_gone() -> None:
    buffers = HostBuffers()
    first = buffers.copied({"a": {"x": torch.ones(3), "y": torch.ones(3), "gone": torch.ones(3)}})["a"]
    second = buffers.copied({"a": {"x": torch.zeros(3), "y": torch.zeros(4), "new": torch.zeros(1)}})["a"]
    assert second["x"] is first["x"] and second["y"] is not first["y"]
    assert all(torch.equal(copy, torch.zeros_like(copy)) for copy in second.values())
    assert {key for _, key in buffers._buffers} == {"x", "y", "new"}


def test_gradients_are_not_recorded() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    copy = HostBuffers().copied({"a": {"x": parameter}})["a"]["x"]
    assert copy.grad_fn is None and not copy.requires_grad
