import math
import pickle
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from npuamp_fn import flatten, optim

schedules = optim.schedules
STEPS = 30


def values(schedule, steps=STEPS):
    found = [schedule(torch.tensor(count, dtype=torch.int32)) for count in range(steps)]
    assert all(value.dtype == torch.float64 and value.shape == () for value in found)
    return [value.item() for value in found]


def torch_values(make, lr=0.4, steps=STEPS):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls a deprecated form of step itself
        scheduler = make(optimizer)
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (schedules.constant(0.4), lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        (schedules.linear(0.4, 0.1, 12), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, 12)),
        (schedules.linear(0.1, 0.4, 12), lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 12)),
        (schedules.polynomial(0.4, 0.0, 20, 2.5), lambda o: lr_scheduler.PolynomialLR(o, 20, 2.5)),
        (
            schedules.warmup(5, schedules.polynomial(0.4, 0.0, 20, 2.0), start=0.04),
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 5), lr_scheduler.PolynomialLR(o, 20, 2.0)], [5]
            ),
        ),
    ],
    ids=["constant", "linear-falling", "linear-rising", "polynomial", "warmup"],
)
def test_values_are_those_of_torch(schedule, make):
    assert values(schedule) == pytest.approx(torch_values(make), rel=1e-12, abs=1e-15)


def test_cosine_is_that_of_torch_until_its_end_and_stays_there():
    expected = torch_values(lambda o: lr_scheduler.CosineAnnealingLR(o, 20, 0.1), steps=21)
    assert values(schedules.cosine(0.4, 20, 0.1)) == pytest.approx(expected + [0.1] * 9, rel=1e-12)


def test_warmups_in_closed_form():
    rise = [count / 5 for count in range(5)]
    fall = [max(1 - (count - 5) / 20, 0) for count in range(5, STEPS)]
    wave = [0.5 * (1 + math.cos(math.pi * min((count - 5) / 20, 1))) for count in range(5, STEPS)]
    assert values(schedules.warmup_constant(2.0, 5)) == pytest.approx([2 * r for r in rise] + [2.0] * 25)
    assert values(schedules.warmup_linear(2.0, 5, 25, 0.5)) == pytest.approx(
        [2 * r for r in rise] + [0.5 + 1.5 * f for f in fall]
    )
    assert values(schedules.warmup_cosine(2.0, 5, 25, 0.5)) == pytest.approx(
        [2 * r for r in rise] + [0.5 + 1.5 * w for w in wave]
    )


def test_join_counts_each_schedule_from_its_own_beginning():
    joined = schedules.join([schedules.constant(1.0), lambda count: count * 10.0, schedules.constant(7.0)], [2, 5])
    assert values(joined, 7) == [1.0, 1.0, 0.0, 10.0, 20.0, 7.0, 7.0]
    assert [schedules.join([schedules.constant(3.0)], [])(torch.tensor(9)).item()] == [3.0]


def test_schedules_print_compare_and_pickle_as_values():
    schedule = schedules.warmup_cosine(0.1, 10, 100)
    assert schedule == schedules.warmup_cosine(0.1, 10, 100)
    assert hash(schedule) == hash(schedules.warmup_cosine(0.1, 10, 100))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert repr(schedule) == (
        "Join(schedules=(Polynomial(start=0.0, end=0.1, steps=10, power=1.0), Cosine(start=0.1, steps=90, end=0.0)), "
        "boundaries=(10,))"
    )


def test_one_graph_serves_all_counts_and_vectors_of_counts():
    torch._dynamo.reset()
    schedule = schedules.warmup_cosine(0.1, 3, 9)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(schedule, backend=backend, fullgraph=True)
    expected = values(schedule, 12)
    assert [compiled(torch.tensor(c, dtype=torch.int32)).item() for c in range(12)] == pytest.approx(
        expected, rel=1e-12
    )
    assert len(graphs) == 1
    assert schedule(torch.arange(12)).tolist() == expected


def test_any_hyper_parameter_follows_its_schedule_by_the_count_of_steps_applied():
    optimizer = optim.sgd(schedules.linear(1.0, 0.0, 4), weight_decay=schedules.constant(0.5))
    for flat in (False, True):
        params = {"w": torch.ones(3, dtype=torch.float64)}
        params = flatten(params) if flat else params
        state = optimizer.init(params)
        zeros = {"w": torch.zeros(3, dtype=torch.float64)}
        expected = 1.0
        for lr in (1.0, 0.75, 0.5, 0.25, 0.0):
            grads = params.layout.pack(zeros) if flat else zeros
            params, state = optimizer.update(grads, state, params)
            expected -= lr * 0.5 * expected
            found = params.unflatten() if flat else params
            assert found["w"].tolist() == pytest.approx([expected] * 3, rel=1e-12)


def test_schedule_with_a_count_per_tensor_gives_each_its_own_value():
    optimizer = optim.sgd(schedules.linear(1.0, 0.0, 4))
    for flat in (False, True):
        params = {"a": torch.zeros(3), "b": torch.zeros(300)}
        params = flatten(params) if flat else params
        state = optimizer.init(params, count_per_tensor=True)
        state = state._replace(count=torch.tensor([1, 3], dtype=torch.int32))
        grads = {"a": torch.ones(3), "b": torch.ones(300)}
        params, _ = optimizer.update(params.layout.pack(grads) if flat else grads, state, params)
        found = params.unflatten() if flat else params
        assert torch.equal(found["a"], torch.full((3,), -0.75))
        assert torch.equal(found["b"], torch.full((300,), -0.25))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: schedules.constant(math.inf), ValueError, "constant: value: expected a finite number, found inf"),
        (lambda: schedules.linear(1.0, 0.0, 0), ValueError, "steps: expected at least 1, found 0"),
        (lambda: schedules.polynomial(1.0, 0.0, 5, 0.0), ValueError, "power: expected a positive number"),
        (lambda: schedules.cosine(math.nan, 5), ValueError, "cosine: start: expected a finite number"),
        (lambda: schedules.join([schedules.constant(1.0)], [3]), ValueError, "expected 0 boundaries .* found 1"),
        (lambda: schedules.join([], []), ValueError, "join: expected at least one schedule"),
        (lambda: schedules.join([1.0, 2.0], [3]), TypeError, r"found 1.0 of type float; .* write constant\(value\)"),
        (
            lambda: schedules.join([schedules.constant(1.0)] * 3, [5, 5]),
            ValueError,
            r"positive, rising boundaries, found \[5, 5\]",
        ),
        (lambda: schedules.warmup(5, "linear"), TypeError, "expected a schedule or a number, found str"),
        (
            lambda: schedules.warmup_cosine(1.0, 5, 5),
            ValueError,
            "expected more steps than the 5 of the warm-up, found 5",
        ),
    ],
)
def test_what_makes_no_schedule_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
