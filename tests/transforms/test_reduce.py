"""The data-parallel mean, on two processes over gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from npuamp_fn import DynamicLossScale, flatten, grad, mean_over, with_loss_scaling


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"start with torchrun and call init_process_group"):
        mean_over()({"w": torch.ones(2)})


def loss_fn(params, x):
    tree = params.unflatten() if hasattr(params, "unflatten") else params
    return (tree["w"] * x).sum() + tree["b"].sum() * x.mean()


def run_rank(rank, path, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    params = {"w": torch.ones(3), "b": torch.ones(2, 2), "steps": 4}
    x = torch.tensor([1.0, 2.0, 3.0]) * (1 + 2 * rank)  # ranks see other data; the mean is over both
    scale = DynamicLossScale.create(2.0**10)
    out = {}
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        step = with_loss_scaling(grad(loss_fn), reduce=mean_over(dtype=dtype))
        tree, flat = step(scale, params, x), step(scale, flatten(params), x)
        assert tree.grads["steps"] is None
        out[name] = (tree.grads["w"].tolist(), flat.grads.unflatten()["b"].tolist())
        assert tree.grads["w"].dtype == torch.float32
    broken = step(scale, flatten(params), x * (float("inf") if rank == 1 else 1.0))
    out["overflow"] = (bool(broken.finite), float(broken.loss_scale.value))
    results.put((rank, out))
    dist.destroy_process_group()


def test_ranks_agree_on_gradients_and_on_overflow(tmp_path):
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=run_rank, args=(rank, tmp_path / "store", results)) for rank in range(2)]
    for process in processes:
        process.start()
    outcomes = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["float32"] == ([2.0, 4.0, 6.0], [[4.0, 4.0], [4.0, 4.0]])
    assert outcomes[0]["bfloat16"] == outcomes[0]["float32"]
    assert outcomes[0]["overflow"] == (False, 2.0**9)  # only rank 1 overflowed
