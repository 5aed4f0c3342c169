"""Fifty steps of every option combination that torch has, against torch.optim itself."""

import itertools

import pytest
import torch

from npuamp_fn import flatten, optim

STEPS = 50
SHAPES = {"matrix": (17, 16), "vector": (257,), "one": (1,), "scalar": (), "empty": (0,)}


def combinations(**options):
    names = list(options)
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*options.values())]


SGD = [
    case
    for case in combinations(
        lr=[0.1], momentum=[0.0, 0.9], dampening=[0.0, 0.3], weight_decay=[0.0, 0.1], nesterov=[False, True],
        maximize=[False, True],
    )
    if not case["nesterov"] or (case["momentum"] and not case["dampening"])
]  # fmt: skip
ADAM = combinations(
    lr=[1e-2], betas=[(0.9, 0.999), (0.8, 0.9)], eps=[1e-8], weight_decay=[0.0, 0.1], amsgrad=[False, True],
    maximize=[False, True],
)  # fmt: skip
CASES = [
    *((optim.sgd, torch.optim.SGD, case) for case in SGD),
    *((optim.adam, torch.optim.Adam, case) for case in ADAM),
    *((optim.adamw, torch.optim.AdamW, case) for case in ADAM),
    *(
        (optim.adadelta, torch.optim.Adadelta, case)
        for case in combinations(lr=[1.0, 0.1], rho=[0.9, 0.5], weight_decay=[0.0, 0.1], maximize=[False, True])
    ),
    *(
        (optim.adagrad, torch.optim.Adagrad, case)
        for case in combinations(
            lr=[0.1], lr_decay=[0.0, 0.1], weight_decay=[0.0, 0.1], initial_accumulator_value=[0.0, 0.5],
            maximize=[False, True],
        )
    ),
    *(
        (optim.rmsprop, torch.optim.RMSprop, case)
        for case in combinations(
            lr=[1e-2], alpha=[0.99, 0.5], weight_decay=[0.0, 0.1], momentum=[0.0, 0.9], centered=[False, True],
            maximize=[False, True],
        )
    ),
]  # fmt: skip


def label(case):
    factory, _, options = case
    return factory.__name__ + "-" + "-".join(f"{name}={value}" for name, value in options.items())


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)

    def draw(shape, scale):
        return torch.randn(shape, generator=generator, dtype=dtype) * scale

    return [{name: draw(shape, 10 ** (step % 5 - 2)) for name, shape in SHAPES.items()} for step in range(STEPS)]


def run_torch(cls, options, dtype=torch.float32):
    params = {name: value.requires_grad_() for name, value in make_params(dtype).items()}
    optimizer = cls(params.values(), foreach=False, **options)
    for grads in gradients(dtype):
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
    slots = {name: optimizer.state[param] for name, param in params.items()}
    return {name: param.detach() for name, param in params.items()}, slots


def run_ours(optimizer, flat, dtype=torch.float32):
    params = make_params(dtype)
    params = flatten(params) if flat else params
    state = optimizer.init(params)
    for grads in gradients(dtype):
        params, state = optimizer.update(params.layout.pack(grads) if flat else grads, state, params)
    slots = {name: slot.unflatten() if flat else slot for name, slot in state.slots.items()}
    return params.unflatten() if flat else params, slots, state


@pytest.mark.parametrize("case", CASES, ids=label)
def test_fifty_steps_equal_torch_bitwise(case):
    factory, cls, options = case
    expected, expected_slots = run_torch(cls, options)
    for flat in (False, True):
        params, slots, state = run_ours(factory(**options), flat)
        assert state.count.item() == STEPS
        for name in SHAPES:
            assert torch.equal(params[name], expected[name]), (name, flat)
            for slot in slots:
                assert torch.equal(slots[slot][name], expected_slots[name][slot]), (name, slot, flat)


@pytest.mark.parametrize("case", CASES[::5], ids=label)
def test_float64_parameters_are_updated_in_float64(case):
    factory, cls, options = case
    expected, _ = run_torch(cls, options, torch.float64)
    params, slots, _ = run_ours(factory(**options), flat=True, dtype=torch.float64)
    for name in SHAPES:
        assert params[name].dtype == torch.float64
        assert all(slot[name].dtype == torch.float64 for slot in slots.values())
        torch.testing.assert_close(params[name], expected[name], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("case", CASES[::3], ids=label)
def test_lr_as_tensor_gives_the_numbers_of_a_float(case):
    factory, cls, options = case
    expected, _ = run_torch(cls, options, torch.float64)
    lr = torch.tensor(options["lr"], dtype=torch.float64)
    params, _, _ = run_ours(factory(**{**options, "lr": lr}), flat=True, dtype=torch.float64)
    for name in SHAPES:
        torch.testing.assert_close(params[name], expected[name], rtol=1e-12, atol=1e-12)
