"""The flat storage of initialized optimizers: what lies in the buffers is what the weights have."""

import pytest
import torch
from torch import nn

from npuamp_fn.apex import amp, optimizers

MAKERS = [torch.optim.SGD, optimizers.NpuFusedSGD]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("cls", MAKERS)
def test_clipping_reaches_gradients_that_only_an_earlier_context_made(cls, level):
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    model = nn.ParameterList([a, b])
    optimizer = cls(model.parameters(), lr=1.0)
    scale = None if level == "O0" else 8.0
    amp.initialize(model, optimizer, opt_level=level, combine_grad=True, loss_scale=scale, verbosity=0)
    for weight, slope in ((a, 3), (b, 4)):
        with amp.scale_loss((weight * slope).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    torch.testing.assert_close(optimizer.clip_optimizer_grad_norm_fused(1.0), torch.tensor(5.0))
    first, second = (weight.grad for weight in amp.master_params(optimizer))
    assert first.dtype == second.dtype == torch.float32
    torch.testing.assert_close(torch.cat([first, second]), torch.tensor([0.6, 0.8]))
    optimizer.step()
    torch.testing.assert_close(torch.cat(list(amp.master_params(optimizer))).detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("change", ["a group is added", "a group is removed"])
@pytest.mark.parametrize("look", [False, True], ids=["step", "look and step"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("cls", MAKERS)
def test_gradients_survive_a_change_of_the_groups_before_the_step(cls, level, look, change):
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
    for layer in model:
        nn.init.zeros_(layer.weight)
    optimizer = cls([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    with amp.scale_loss((model[0].weight * 3).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    if change == "a group is added":
        optimizer.add_param_group({"params": list(model[2].parameters())})
    else:
        del optimizer.param_groups[1]
    if look:
        optimizer._amp_stash.buckets()
    optimizer.step()
    assert next(amp.master_params(optimizer)).item() == -3.0
