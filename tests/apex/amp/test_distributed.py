"""Two gloo processes: combine_ddp alone, and amp under torch's DistributedDataParallel."""

import contextlib
import multiprocessing
import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from npuamp_fn.apex import amp, optimizers
from npuamp_fn.apex.amp._amp_state import _amp_state


def make_net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def data(step, rank, ranks=2):
    x = torch.randn(8 * ranks, 4, generator=torch.Generator().manual_seed(step))
    return x[rank::ranks]


def train(model, optimizer, rank, steps, poison=None):
    for step in range(steps):
        x = data(step, rank)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2])
        if poison == (rank, step):
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def gathered(tensors):
    everyone = [None, None]
    dist.all_gather_object(everyone, [t.detach().clone() for t in tensors])
    return everyone


def assert_ranks_agree(*tensors):
    left, right = gathered(tensors)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def combine_ddp_keeps_ranks_equal_and_equals_the_mean(rank):
    for level in ("O0", "O1", "O2"):
        for made in (optimizers.NpuFusedSGD, torch.optim.SGD):
            model = make_net(seed=rank)
            model[1].running_mean.fill_(rank)
            optimizer = made(model.parameters(), lr=0.1, momentum=0.9)
            options = {"loss_scale": 8.0, "combine_ddp": True, "verbosity": 0}
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
            assert_ranks_agree(*model.state_dict().values())
            model.eval()  # statistics of the local batch would differ
            train(model, optimizer, rank, 3)
            assert_ranks_agree(*model.parameters(), *amp.master_params(optimizer))
            reference = make_net(seed=0).eval()
            sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                sgd.zero_grad()
                x = torch.cat([data(step, 0), data(step, 1)])
                F.mse_loss(reference(x), x[:, :2]).backward()
                sgd.step()
            tolerance = {"rtol": 1e-5, "atol": 1e-6} if level == "O0" else {"rtol": 2e-2, "atol": 2e-3}
            for p, q in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
                torch.testing.assert_close(p, q, **tolerance)


def an_overflow_on_one_rank_is_skipped_by_both(rank):
    model = make_net(seed=0)
    optimizer = optimizers.NpuFusedAdamW(model.parameters())
    options = {"dynamic_init_scale": 16.0, "combine_ddp": True, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", **options)
    train(model, optimizer, rank, 1)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    train(model, optimizer, rank, 1, poison=(1, 0))
    assert _amp_state.loss_scalers[0].loss_scale() == 8.0
    assert optimizer._amp_stash.last_step_skipped
    assert all(torch.equal(p, q) for p, q in zip(amp.master_params(optimizer), before, strict=True))
    train(model, optimizer, rank, 1)
    assert_ranks_agree(*amp.master_params(optimizer))


def parameters_unused_on_one_rank_do_not_hang(rank):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x, which):
            return (self.a, self.b)[which](x)

    model = Branches()
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=1.0)
    options = {"loss_scale": 8.0, "combine_ddp": True, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", **options)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    for delay in (True, False):  # no reduction while gradients accumulate
        with amp.scale_loss(model(torch.ones(1, 2), rank).sum() / 2, optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
    optimizer.step()
    for p, q in zip(amp.master_params(optimizer), before, strict=True):
        torch.testing.assert_close(p.detach(), q - 0.5)
    assert_ranks_agree(*model.parameters())


def ranks_that_differ_are_refused_by_name(rank):
    model = nn.Linear(4 + rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"parameter weight: \(2, 4\).*parameter weight: \(2, 5\)"):
        amp.initialize(model, optimizer, opt_level="O2", combine_ddp=True, verbosity=0)
    assert model.weight.dtype == torch.float32
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    with pytest.raises(RuntimeError, match=r"lr=0.1`.*lr=1.1`"):
        amp.initialize(model, optimizer, opt_level="O2", combine_ddp=True, verbosity=0)


def an_optimizer_changed_on_one_rank_is_caught(rank):
    model = make_net(seed=0)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.1)
    options = {"loss_scale": 8.0, "combine_ddp": True, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", **options)
    train(model, optimizer, rank, 1)
    if rank == 0:
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(RuntimeError, match=r"rank 0 and rank 1 differ.*group 1: parameters.*nothing more"):
        train(model, optimizer, rank, 1)


def torch_ddp_gives_every_rank_the_same_masters(rank):
    for made in (optimizers.NpuFusedAdam, torch.optim.Adam):
        model = make_net(seed=rank)
        optimizer = made(model.parameters(), lr=0.01)
        options = {"loss_scale": 8.0, "combine_ddp": False, "verbosity": 0}
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", **options)
        wrapped = nn.parallel.DistributedDataParallel(model)
        train(wrapped, optimizer, rank, 5)
        assert_ranks_agree(*model.parameters(), *amp.master_params(optimizer))


X = torch.arange(24.0).reshape(2, 3, 4) / 10  # rank, micro-batch


def ddp_mean_gradient():
    """The gradient of the mean over ranks of the sum over micro-batches, without amp and without DDP."""
    torch.manual_seed(0)
    reference = nn.Linear(4, 2)
    (sum(reference(X[rank, i : i + 1]).square().mean() for rank in range(2) for i in range(3)) / 2).backward()
    return reference.weight.grad


def small_ddp(level, made=torch.optim.SGD, combine=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = made(model.parameters(), lr=0.1)
    options = {"loss_scale": None if level == "O0" else 128.0, **options}
    amp.initialize(model, optimizer, opt_level=level, combine_grad=combine, verbosity=0, **options)
    return model, optimizer


def pass_over(wrapped, optimizer, rank, i, **options):
    with amp.scale_loss(wrapped(X[rank, i : i + 1]).square().mean(), optimizer, **options) as scaled:
        scaled.backward()


def ddp_accumulation_equals_the_mean_with_bucket_views_and_no_sync(rank):
    expected = ddp_mean_gradient()
    for level in ("O0", "O1", "O2"):
        for made in (torch.optim.SGD, optimizers.NpuFusedSGD):
            for combine in (None,) if level == "O0" else (None, True):
                for views in (False, True):
                    for local in ((), (0,), (1,), (0, 1)):  # passes inside no_sync(); 2 is always reduced
                        model, optimizer = small_ddp(level, made, combine)
                        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
                        for i in range(3):
                            with wrapped.no_sync() if i in local else contextlib.nullcontext():
                                pass_over(wrapped, optimizer, rank, i)
                        grad = next(amp.master_params(optimizer)).grad
                        assert grad.dtype == torch.float32
                        torch.testing.assert_close(grad, expected, rtol=2e-3, atol=2e-3)
                        assert_ranks_agree(grad)


def ddp_gradients_zeroed_in_place_do_not_come_back_from_bucket_views(rank):
    for level in ("O1", "O2"):
        model, optimizer = small_ddp(level)
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        grads = []
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            pass_over(wrapped, optimizer, rank, 0)
            grads.append(next(amp.master_params(optimizer)).grad.clone())
        assert torch.equal(grads[0], grads[1])
        assert torch.equal(grads[0], grads[2])


def ddp_no_sync_with_two_losses_is_reduced_and_blames_both(rank):
    model, optimizer = small_ddp("O1", num_losses=2, loss_scale="dynamic", dynamic_init_scale=128.0)
    _amp_state.loss_scalers[1]._loss_scale = 64.0
    wrapped = nn.parallel.DistributedDataParallel(model)
    for poison in (1.0, float("inf")):
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss = wrapped(X[rank, :1]).square().mean() * (poison if rank else 1.0)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        pass_over(wrapped, optimizer, rank, 1, loss_id=1)
        if poison == 1.0:
            pass_over(wrapped, optimizer, rank, 2)
            torch.testing.assert_close(model.weight.grad, ddp_mean_gradient(), rtol=2e-3, atol=2e-3)
    optimizer.step()
    assert amp.last_step_skipped(optimizer)
    assert [scaler.loss_scale() for scaler in _amp_state.loss_scalers] == [64.0, 32.0]


def ddp_no_sync_overflow_on_one_rank_is_skipped_by_both(rank):
    for level in ("O1", "O2"):
        model, optimizer = small_ddp(level, loss_scale="dynamic", dynamic_init_scale=128.0)
        wrapped = nn.parallel.DistributedDataParallel(model)
        with wrapped.no_sync():
            loss = wrapped(torch.ones(1, 4)).square().mean() * (float("inf") if rank else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled:  # what counts is where the forward pass ran
            scaled.backward()
        assert optimizer._amp_stash.params_have_scaled_gradients
        pass_over(wrapped, optimizer, rank, 1)
        optimizer.step()
        assert amp.last_step_skipped(optimizer)
        assert _amp_state.loss_scalers[0].loss_scale() == 64.0
        assert_ranks_agree(*amp.master_params(optimizer))


def no_sync_of_one_model_leaves_other_optimizers_alone(rank):
    model, optimizer = small_ddp("O1")
    wrapped = nn.parallel.DistributedDataParallel(model)
    with wrapped.no_sync():
        pass_over(wrapped, optimizer, rank, 0)
    other, its_own = small_ddp("O1")
    pass_over(other, its_own, rank, 0)
    assert not its_own._amp_stash.params_have_scaled_gradients


def an_optimizer_changed_on_one_rank_is_caught_under_torch_ddp(rank):
    for level in ("O1", "O2"):
        model, optimizer = small_ddp(level)
        wrapped = nn.parallel.DistributedDataParallel(model)
        if rank == 0:
            optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(RuntimeError, match=r"rank 0 and rank 1 differ: rank 0 has `group 0: lr=1.0`"):
            pass_over(wrapped, optimizer, rank, 0)


def torch_ddp_around_sub_modules_gives_every_rank_the_same_masters(rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    first = nn.parallel.DistributedDataParallel(model[0])
    rest = nn.parallel.DistributedDataParallel(nn.Sequential(*model[1]))  # a container of its own
    for i in range(2):
        optimizer.zero_grad()
        pass_over(lambda x: rest(first(x.half())).float(), optimizer, rank, i)
        optimizer.step()
    assert_ranks_agree(*amp.master_params(optimizer))


CASES = [
    ddp_accumulation_equals_the_mean_with_bucket_views_and_no_sync,
    ddp_gradients_zeroed_in_place_do_not_come_back_from_bucket_views,
    ddp_no_sync_with_two_losses_is_reduced_and_blames_both,
    ddp_no_sync_overflow_on_one_rank_is_skipped_by_both,
    no_sync_of_one_model_leaves_other_optimizers_alone,
    an_optimizer_changed_on_one_rank_is_caught_under_torch_ddp,
    torch_ddp_around_sub_modules_gives_every_rank_the_same_masters,
    combine_ddp_keeps_ranks_equal_and_equals_the_mean,
    an_overflow_on_one_rank_is_skipped_by_both,
    parameters_unused_on_one_rank_do_not_hang,
    ranks_that_differ_are_refused_by_name,
    an_optimizer_changed_on_one_rank_is_caught,
    torch_ddp_gives_every_rank_the_same_masters,
]


def work(rank, port, results):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for case in CASES:
        try:
            case(rank)
            results.put((case.__name__, rank, None))
        except BaseException:
            results.put((case.__name__, rank, traceback.format_exc()))
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, port, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=240) for _ in range(2 * len(CASES))]
    for process in processes:
        process.join(30)
    return found


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_two_processes(name, outcomes):
    failures = [text for case, _, text in outcomes if case == name and text]
    assert not failures, failures[0]


def test_combine_ddp_without_a_process_group_says_what_to_do():
    model = make_net(0)
    with pytest.raises(RuntimeError, match="init_process_group"):
        amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", combine_ddp=True, verbosity=0)
    assert model[0].weight.dtype == torch.float32
