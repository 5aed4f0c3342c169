"""O1 casts operations inside the wrapped function only, as the table says, and touches nothing else."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from npuamp_fn import APEX_OPS, O1, O2, OpTable, cast_ops, cast_policy, full_precision
from npuamp_fn.transforms.op_cast import OpCasts, current, disable_casts, in_backward, with_current_casts

HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
o1 = cast_ops(APEX_OPS, HALF)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 4)


def product(x):
    return x @ x


# --- scope -----------------------------------------------------------------------------------------------------------


def test_operations_are_cast_inside_the_wrapped_function_only(x):
    linear, matmul = F.linear, torch.Tensor.__matmul__
    assert o1(product)(x).dtype == HALF
    assert product(x).dtype == F.linear(x, x).dtype == nn.Linear(4, 4)(x).dtype == FULL
    assert F.linear is linear
    assert torch.Tensor.__matmul__ is matmul
    assert current() is None


def test_values_are_those_of_the_half_operation(x):
    assert torch.equal(o1(product)(x), x.half() @ x.half())
    assert torch.equal(o1(lambda x: (x @ x).softmax(-1))(x), (x.half() @ x.half()).float().softmax(-1))


def test_an_exception_leaves_nothing_behind(x):
    def interrupted(x):
        raise KeyboardInterrupt

    for wrapped in (o1(interrupted), o1(lambda x: o1(interrupted)(x))):
        with pytest.raises(KeyboardInterrupt):
            wrapped(x)
        assert current() is None
        assert product(x).dtype == FULL


@pytest.mark.parametrize("inner", [APEX_OPS, APEX_OPS.full("matmul"), APEX_OPS.without("matmul"), OpTable("none")])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_of_nested_scopes_the_innermost_table_rules_alone(x, inner, dtype):
    seen = []

    @o1
    def outer(x):
        seen.append((x @ x).dtype)
        seen.append(cast_ops(inner, dtype)(product)(x).dtype)
        seen.append((x @ x).dtype)

    outer(x)
    assert seen == [HALF, dtype if inner is APEX_OPS else FULL, HALF]


def test_three_scopes_deep_the_innermost_rules(x):
    @o1
    def outer(x):
        return cast_ops(APEX_OPS, BF16)(lambda x: (cast_ops(APEX_OPS.without("matmul"), HALF)(product)(x), x @ x))(x)

    assert [out.dtype for out in outer(x)] == [FULL, BF16]


def test_full_precision_wins_inside_and_widens_what_is_half_already(x):
    @o1
    def outer(x):
        half = x @ x
        return full_precision(lambda y: (y @ y, y @ half, half + 0))(half), x @ x

    (first, mixed, _), after = outer(x)
    assert [first.dtype, mixed.dtype, after.dtype] == [FULL, FULL, HALF]
    half = (x.half() @ x.half()).float()
    assert torch.equal(first, half @ half)


def test_a_policy_with_a_compute_dtype_is_not_subject_to_the_casts_around_it(x):
    inner = cast_policy(O2.replace(output=None))(lambda x: (x.exp(), x @ x))
    assert [out.dtype for out in o1(lambda x: inner(x))(x)] == [HALF, HALF]


def test_cast_policy_o1_casts_operations_and_returns_float32(x):
    def inner(x):
        assert x.dtype == FULL
        assert (x @ x).dtype == HALF
        return {"out": x @ x, "ids": torch.arange(2)}

    out = cast_policy(O1)(inner)(x)
    assert (out["out"].dtype, out["ids"].dtype) == (FULL, torch.int64)
    bfloat16 = cast_policy(O1.with_half(BF16).replace(output=None))(product)(x)
    assert bfloat16.dtype == BF16
    assert torch.equal(bfloat16, x.bfloat16() @ x.bfloat16())


def test_disabled_casts_cast_nothing_and_come_back(x):
    @o1
    def fn(x):
        with disable_casts():
            assert current().table is None
            inside = x @ x
        return inside, x @ x

    assert [out.dtype for out in fn(x)] == [FULL, HALF]
    with disable_casts():
        assert product(x).dtype == FULL


def test_other_threads_are_not_affected_and_can_cast_at_the_same_time(x):
    seen, barrier = {}, threading.Barrier(3, timeout=30)

    def work(name, fn):
        def body(x):
            barrier.wait()
            out = x @ x
            barrier.wait()
            return out

        seen[name] = fn(body)(x).dtype

    jobs = {"plain": lambda fn: fn, "half": o1, "bfloat16": cast_ops(APEX_OPS, BF16)}
    threads = [threading.Thread(target=work, args=job) for job in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"plain": FULL, "half": HALF, "bfloat16": BF16}


def test_works_between_other_function_modes(x):
    class Count(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Count() as outside:
        assert o1(product)(x).dtype == HALF
    assert outside.calls > 0

    def inside(x):
        with Count(), torch.device("cpu"):
            return x @ x, torch.ones(2)

    assert [out.dtype for out in o1(inside)(x)] == [HALF, FULL]


def test_the_wrapper_is_a_value_that_looks_like_its_function(x):
    assert o1(product) == o1(product)
    assert (o1(product).table, o1(product).dtype, o1(product).fun) == (APEX_OPS, HALF, product)
    assert o1(product).__name__ == "product"

    class Model:
        scale = 2.0

        @o1
        def forward(self, x):
            return self.scale * (x @ x)

    assert Model().forward(x).dtype == HALF


@pytest.mark.parametrize(
    ("args", "message"),
    [((APEX_OPS.name,), "expected an OpTable, found 'apex'"), ((APEX_OPS, FULL), "the low dtype: expected")],
)
def test_wrong_arguments_are_type_errors(args, message):
    with pytest.raises(TypeError, match=f"cast_ops: {message}"):
        cast_ops(*args)


# --- which tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [DOUBLE, BF16, torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize("mine", [HALF, FULL])
@pytest.mark.parametrize("op", [torch.add, torch.mul, torch.eq, lambda a, b: torch.cat([a, b])])
def test_other_dtypes_follow_torchs_own_promotion(op, mine, other):
    a, b = torch.ones(3, dtype=mine), torch.ones(3, dtype=other)
    for args in ((a, b), (b, a)):
        plain = op(*args)
        out = o1(op)(*args)
        assert out.dtype == plain.dtype
        assert torch.equal(out, plain)


@pytest.mark.parametrize("dtype", [DOUBLE, BF16, torch.complex64, torch.int64])
def test_products_of_other_dtypes_stay_what_they_are(dtype):
    x = torch.ones(2, 2, dtype=dtype)
    assert o1(product)(x).dtype == dtype
    assert o1(lambda x: x.sum())(x).dtype == x.sum().dtype


def test_float64_metrics_inside_the_forward_pass(x):
    """Reported against apex: "do not know how to promote {Double, Float}"."""

    def metrics(x):
        y = x @ x
        return (y.double() - x).pow(2).mean(), x.double() @ x.double()

    assert [out.dtype for out in o1(metrics)(x)] == [DOUBLE, DOUBLE]


def test_mixed_double_and_float_products_raise_as_in_plain_torch(x):
    with pytest.raises(RuntimeError, match="dtype"):
        o1(lambda x: x @ x.double())(x)


@pytest.mark.parametrize("join", [torch.cat, torch.stack, torch.hstack, lambda ts: torch.cat(tensors=ts)])
@pytest.mark.parametrize("container", [list, tuple])
def test_sequences_of_half_and_float_widen(join, container):
    a, b = torch.ones(2, dtype=HALF), torch.ones(2)
    assert o1(lambda: join(container([a, b])))().dtype == FULL
    assert o1(lambda: join(container([a, a])))().dtype == HALF


def test_a_zero_dimensional_float_widens_too():
    half, scale = torch.ones(2, dtype=HALF), torch.tensor(2.0)
    assert (half * scale).dtype == HALF  # torch lets dimensions decide
    assert o1(lambda: half * scale)().dtype == o1(lambda: half / scale)().dtype == FULL
    assert o1(lambda: half * 2.0)().dtype == HALF


def test_index_tensors_are_not_touched(x):
    index = torch.tensor([0, 3])
    assert torch.equal(o1(lambda: F.embedding(index, x))(), x[index])
    assert o1(lambda: x[index])().dtype == FULL
    assert torch.equal(o1(lambda: torch.cumsum(index, 0))(), torch.tensor([0, 3]))


def test_out_arguments_are_left_to_torch(x):
    out = torch.empty(4, 4)
    result = o1(lambda: torch.mm(x, x, out=out))()
    assert result is out
    assert torch.equal(out, x @ x)
    total = torch.empty((), dtype=HALF)
    assert o1(lambda: torch.sum(x.half(), dim=(0, 1), out=total))() is total


def test_a_low_dtype_that_is_asked_for_is_given(x):
    assert o1(lambda: x.half().sum(dtype=HALF))().dtype == HALF
    assert o1(lambda: torch.linalg.vector_norm(x.half(), dtype=HALF))().dtype == HALF


def test_keyword_arguments_are_cast(x):
    assert o1(lambda: F.linear(input=x, weight=x, bias=x[0]))().dtype == HALF
    assert o1(lambda: torch.softmax(input=x.half(), dim=0))().dtype == FULL


def test_sparse_products_run_in_float32():
    dense = torch.eye(3)
    sparse = dense.to_sparse()
    assert torch.equal(o1(lambda: sparse @ dense.half())(), dense)
    assert torch.equal(o1(lambda: torch.sparse.mm(sparse, dense))(), dense)


def test_named_tuples_keep_their_type_when_cast():
    x = torch.eye(2, dtype=HALF)
    assert isinstance(o1(lambda: torch.linalg.slogdet(x))(), type(torch.linalg.slogdet(x.float())))


# --- in place --------------------------------------------------------------------------------------------------------


def test_half_plus_equals_float_stays_in_place():
    half, full = torch.ones(2, dtype=HALF), torch.full((2,), 0.5)

    def add(y):
        alias = y
        y += full
        y.mul_(full)
        assert y is alias
        return y

    assert o1(add)(half) is half
    assert torch.equal(half, torch.full((2,), 0.75, dtype=HALF))


def test_products_accumulate_into_float32_in_place(x):
    total = torch.ones(4, 4)
    result = o1(lambda: total.addmm_(x @ x, x.half()))()
    assert result is total
    torch.testing.assert_close(total, 1 + (x.half() @ x.half()).float() @ x.half().float())


def test_half_values_are_written_into_float32_tensors_by_index(x):
    target = torch.zeros(4, 4)

    def write(x):
        target[torch.tensor([1])] = (x @ x)[:1]
        target.index_add_(0, torch.tensor([2]), (x @ x)[:1])

    o1(write)(x)
    row = (x.half() @ x.half())[0].float()
    assert torch.equal(target, torch.stack([torch.zeros(4), row, row, torch.zeros(4)]))


def test_squaring_a_half_in_place_gives_a_new_float32_tensor_as_under_apex():
    half = torch.full((2,), 300.0, dtype=HALF)

    def square(y):
        y **= 2
        return y

    out = o1(square)(half)
    assert out.dtype == FULL
    assert torch.equal(out, torch.full((2,), 9e4))  # float16 ends at 65504
    assert torch.equal(half, torch.full((2,), 300.0, dtype=HALF))


def test_a_refused_in_place_operation_can_be_allowed():
    half = torch.zeros(2, dtype=HALF)
    with pytest.raises(NotImplementedError, match=r"table.without\('torch.Tensor.exp_'\)"):
        o1(lambda: half.exp_())()
    assert torch.equal(cast_ops(APEX_OPS.without("torch.Tensor.exp_"), HALF)(lambda: half.exp_())(), half)
    assert half.dtype == HALF


# --- binary_cross_entropy --------------------------------------------------------------------------------------------


def bce(x):
    return nn.BCELoss()(torch.sigmoid(x @ x), torch.ones(4, 4))


def test_binary_cross_entropy_on_half_says_what_to_use_instead(x):
    """Reported against apex: the message suggests a flag that users cannot find."""
    for advice in ("binary_cross_entropy_with_logits", r"table.full\('torch.nn.functional.binary_cross_entropy'\)"):
        with pytest.raises(NotImplementedError, match=advice):
            o1(bce)(x)


def test_binary_cross_entropy_runs_in_float32_where_it_is_allowed(x):
    probability = torch.sigmoid(x.half() @ x.half()).float()
    expected = F.binary_cross_entropy(probability, torch.ones(4, 4))
    allowed = APEX_OPS.full("torch.nn.functional.binary_cross_entropy")
    out = cast_ops(allowed, HALF)(bce)(x)
    assert out.dtype == FULL
    assert torch.equal(out, expected)
    logits = o1(lambda x: F.binary_cross_entropy_with_logits(x @ x, torch.ones(4, 4)))(x)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_binary_cross_entropy_is_free_outside_in_float32_and_in_disabled_regions(x):
    half = torch.sigmoid(x).half()
    target = torch.ones(4, 4)
    o1(product)(x)
    assert F.binary_cross_entropy(half, target.half()).dtype == HALF
    assert o1(lambda: F.binary_cross_entropy(torch.sigmoid(x), target))().dtype == FULL
    with OpCasts(APEX_OPS, HALF), disable_casts():
        assert F.binary_cross_entropy(half, target.half()).dtype == HALF
    assert o1(lambda: full_precision(F.binary_cross_entropy)(half, target))().dtype == FULL


# --- no cast outlives its weights ------------------------------------------------------------------------------------


def test_evaluating_after_loading_other_weights_uses_the_other_weights(x):
    """Reported against apex: evaluate, load a checkpoint, evaluate: the old weights are still used."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    run = o1(lambda x: model(x))
    with torch.no_grad():
        before = run(x)
        model.load_state_dict(other.state_dict())
        after = run(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, o1(other)(x))


def test_in_place_edits_of_weights_show_in_the_same_forward_pass(x):
    weight = torch.eye(4)

    def edit(x):
        first = x @ weight
        weight.mul_(2)
        return first, x @ weight

    first, second = o1(edit)(x)
    assert torch.equal(second, 2 * first)


def test_a_weight_used_without_and_with_gradients_in_one_forward_pass(x):
    weight = torch.eye(4, requires_grad=True)

    def both(x):
        with torch.no_grad():
            target = x @ weight
        return ((x @ weight - target.float() - 1) ** 2).sum()

    o1(both)(x).backward()
    torch.testing.assert_close(weight.grad, -2 * x.half().float().T @ torch.ones(4, 4), rtol=1e-2, atol=1e-2)
    assert weight.grad.dtype == FULL


# --- backward passes -------------------------------------------------------------------------------------------------


def block(y):
    return torch.relu(torch.tanh(y) @ y) + y.softmax(-1) @ y


def gradient(fn, x):
    x = x.clone().requires_grad_()
    fn(x).backward()
    return x.grad


@pytest.mark.parametrize("depth", [1, 2])
def test_a_checkpointed_block_recomputes_under_the_casts_of_its_forward_pass(x, depth):
    def checkpointed(fn, depth):
        return lambda y: checkpoint(fn if depth == 1 else checkpointed(fn, depth - 1), y, use_reentrant=False)

    fn = checkpointed(lambda y: block(block(y)), depth)
    plain = gradient(o1(lambda x: block(block(x)).sum()), x)
    assert torch.equal(gradient(o1(lambda x: fn(x).sum()), x), plain)
    assert plain.dtype == FULL


def test_a_reentrant_checkpoint_recomputes_under_the_casts_of_the_backward_pass(x):
    plain = gradient(o1(lambda x: block(x @ x).sum()), x)

    def train(x):
        checkpoint(block, x @ x, use_reentrant=True).sum().backward()

    for inside in (o1(train), None):
        y = x.clone().requires_grad_()
        if inside:
            inside(y)
        else:  # what scale_loss does: the backward pass alone is cast, the rest of the block is not
            loss = o1(lambda y: checkpoint(block, y @ y, use_reentrant=True).sum())(y)
            with OpCasts(APEX_OPS, HALF, backward_only=True):
                assert current() is None
                assert (x @ x).dtype == FULL
                loss.backward()
        assert torch.equal(y.grad, plain)


def test_backward_only_scopes_cast_inside_the_backward_pass(x):
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append((in_backward(), (x @ x).dtype))
            return g

    y = x.clone().requires_grad_()
    with OpCasts(APEX_OPS, HALF, backward_only=True):
        Watch.apply(y).sum().backward()
        torch.autograd.grad(Watch.apply(y).sum(), y)
    Watch.apply(y).sum().backward()
    assert seen == [(True, HALF), (True, HALF), (True, FULL)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["outside", "in disable_casts"])
def test_backward_only_scopes_leave_checkpoints_that_ran_without_casts_alone(x, where, reentrant):
    seen = []

    def watched(y):
        seen.append((y @ y).dtype)
        return y.sin() @ y

    def disabled(y):
        with disable_casts():
            return checkpoint(watched, y, use_reentrant=reentrant).sum()

    y = x.clone().requires_grad_()
    loss = disabled(y) if where == "outside" else o1(disabled)(y)
    with OpCasts(APEX_OPS, HALF, backward_only=True):
        loss.backward()
    assert seen == [FULL, FULL]
    assert torch.equal(y.grad, gradient(lambda y: (y.sin() @ y).sum(), x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_cast_function_casts_that_function_alone_again(x, reentrant):
    seen = []

    def around(y):
        seen.append((y @ y).dtype)
        return o1(block)(y).float().exp()

    y = x.clone().requires_grad_()
    loss = checkpoint(around, y, use_reentrant=reentrant).sum()
    with OpCasts(APEX_OPS, HALF, backward_only=True):
        loss.backward()
    assert seen == [FULL, FULL]
    assert torch.equal(y.grad, gradient(lambda y: o1(block)(y).float().exp().sum(), x))


def test_a_function_can_be_taken_along_with_the_casts_in_force(x):
    with OpCasts(APEX_OPS, BF16):
        later = with_current_casts(product)
    assert later(x).dtype == BF16
    assert with_current_casts(product) is product


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_keyword", [True, False])
def test_large_negative_masks_do_not_become_infinite_in_half(by_keyword):
    q = torch.ones(1, 1, 2, 4)
    mask = torch.tensor([[0.0, -1e9], [-1e9, -1e9]])  # the second row masks everything

    def attend(q, mask):
        if by_keyword:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return F.scaled_dot_product_attention(q, q, q, mask)

    out = o1(attend)(q, mask)
    assert out.dtype == HALF
    torch.testing.assert_close(out.float(), attend(q, mask), rtol=1e-3, atol=1e-3)
    infinite = o1(attend)(q, torch.tensor([[0.0, float("-inf")], [0.0, 0.0]]))
    torch.testing.assert_close(infinite.float(), q, rtol=1e-3, atol=1e-3)
