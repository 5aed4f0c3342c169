"""Lists of gradients in one pass: against hand-computed values and the plain operations."""

import math

import pytest
import torch

from npuamp_fn import DynamicLossScale, NoOpLossScale, StaticLossScale, flatten
from npuamp_fn.apex.grads import finite_flags, gather, unscale_all

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ALL = [f16, bf16, f32, f64, torch.complex64]


def finite(flags):
    assert all(flag.dtype == torch.bool and flag.shape == () for flag in flags)
    return all(bool(flag) for flag in flags)


@pytest.mark.parametrize("dtype", ALL)
def test_gradients_are_divided_in_place_and_keep_their_dtype(dtype):
    grads = [torch.tensor([8.0, -4.0], dtype=dtype), torch.tensor([[2.0]], dtype=dtype)]
    assert finite(unscale_all(grads, DynamicLossScale.create(4.0).on_host()))
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    assert [grad.tolist() for grad in grads] == [[2.0, -1.0], [[0.5]]]


def test_dtypes_may_be_mixed():
    grads = [torch.tensor([4.0], dtype=dtype) for dtype in ALL]
    assert finite(unscale_all(grads, StaticLossScale.create(2.0)))
    assert [grad.item() for grad in grads] == [2.0] * len(ALL)
    grads[2].fill_(math.nan)
    assert not finite(unscale_all(grads, NoOpLossScale.create()))


@pytest.mark.parametrize("check", [unscale_all, finite_flags])
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 63, 100])
def test_one_bad_element_anywhere_is_seen(check, dtype, bad, position):
    grads = [torch.ones(5, dtype=dtype), torch.ones(101, dtype=dtype)]
    assert finite(check(grads, StaticLossScale.create(2.0)))
    grads[1][position] = bad
    assert not finite(check(grads, StaticLossScale.create(2.0)))
    assert not finite(check(grads, NoOpLossScale.create()))


@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_the_largest_finite_numbers_are_no_false_alarm(dtype):
    largest = torch.finfo(dtype).max
    for check in (finite_flags, unscale_all):
        assert finite(check([torch.full((9,), largest, dtype=dtype)], StaticLossScale.create(1024.0)))


def test_a_scale_below_one_overflows_what_was_finite():
    grads = [torch.tensor([1.0, 3e38])]
    assert not finite(finite_flags(grads, StaticLossScale.create(0.5)))
    assert grads[0].tolist() == torch.tensor([1.0, 3e38]).tolist()
    assert not finite(unscale_all(grads, StaticLossScale.create(0.5)))
    assert grads[0][0].item() == 2.0


@pytest.mark.parametrize("dtype", [f16, f32])
def test_the_test_alone_changes_no_bit(dtype):
    values = torch.randn(1000).to(dtype)
    values[:3] = torch.tensor([-0.0, math.nan, torch.finfo(dtype).tiny])
    grads = [values.clone()]
    finite_flags(grads, DynamicLossScale.create(2.0**16).on_host())
    bits = torch.int16 if dtype == f16 else torch.int32
    assert torch.equal(grads[0].view(bits), values.view(bits))


@pytest.mark.parametrize("dtype", [f16, f32])
def test_tensors_lie_in_their_places_and_zero_elsewhere(dtype):
    tensors = [torch.randn(3, 100), torch.randn(256), torch.randn(2, 3).T, torch.zeros(0), torch.tensor(5.0)]
    layout = flatten(tensors).layout
    for given in (
        [tensor.half() for tensor in tensors],  # the buffer's dtype or another one
        [None if i in (1, 4) else tensor.half() for i, tensor in enumerate(tensors)],
        [tensor.half().to_sparse() if i == 0 else tensor.half() for i, tensor in enumerate(tensors)],
        [None] * len(tensors),
    ):
        flat = gather(layout, given, dtype, torch.device("cpu"))
        (buffer,) = flat.buffers
        assert buffer is not None
        assert (buffer.dtype, buffer.shape, buffer.requires_grad) == (dtype, (layout.buckets[0].size,), False)
        for view, tensor, like in zip(flat.tensors(), given, tensors, strict=True):
            expected = torch.zeros(like.shape) if tensor is None else tensor.to_dense()
            assert torch.equal(view, expected.to(dtype))
        real = sum(float(t.to_dense().abs().double().sum()) for t in given if t is not None)
        assert float(buffer.double().abs().sum()) == pytest.approx(real)  # padding is zero
