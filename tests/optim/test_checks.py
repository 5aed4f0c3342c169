"""What the functional surface says where a reader of the README goes wrong."""

import pytest
import torch
from torch import nn

from npuamp_fn import FlatTree, flatten, fused_update, optim

FACTORIES = {
    name: getattr(optim, name)
    for name in ("sgd", "adam", "adamw", "adamp", "bert_adam", "adadelta", "adagrad", "lamb", "lars", "novograd")
}


@pytest.mark.parametrize("name", FACTORIES)
def test_parameters_in_place_of_the_learning_rate_are_refused(name):
    module = nn.Linear(1, 1)
    for params in (module, module.parameters(), list(module.parameters()), dict(module.named_parameters())):
        with pytest.raises(TypeError, match=rf"^{name}: lr: expected a number.*write `state = optim.{name}\(1e-3\)"):
            FACTORIES[name](params)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_learning_rate_that_is_a_string_is_refused(name):
    with pytest.raises(
        TypeError, match=rf"^{name}: lr: expected a number.*found '1e-3' of type str; write float\('1e-3'\)$"
    ):
        FACTORIES[name]("1e-3")


def test_other_numbers_that_are_none_are_refused_by_name():
    with pytest.raises(
        TypeError, match=r"^adam: beta1: expected a number, a 0-dim tensor or a schedule, found a NoneType$"
    ):
        optim.adam(betas=(None, 0.9))
    with pytest.raises(
        TypeError, match=r"^rmsprop: alpha: expected a number, a 0-dim tensor or a schedule, found a NoneType$"
    ):
        optim.rmsprop(alpha=None)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_state_made_for_other_parameters_or_another_optimizer_is_refused_and_nothing_changes(donate):
    tree = {"a": torch.ones(2), "b": torch.ones(3)}
    flat, other = flatten(tree), flatten({"b": torch.ones(3), "a": torch.ones(2)})
    adam, sgd = fused_update(optim.adam(0.5), donate=donate), optim.sgd(0.5, momentum=0.9)
    grads = flat.map(torch.ones_like)
    cases = [
        (adam.init(tree), flat, grads, "'exp_avg' is a dict, params are a FlatTree"),
        (adam.init(flat), tree, tree, "'exp_avg' is a FlatTree, params are a dict"),
        (adam.init(other), flat, grads, "layouts differ, first at `a`"),
        (sgd.init(flat), flat, grads, r"it has no 'exp_avg', only \['momentum_buffer'\]"),
    ]
    for state, params, given, problem in cases:
        with pytest.raises(
            ValueError, match=f"the state was not made for these.*{problem}.*write state = optimizer.init"
        ):
            adam.update(given, state, params)
        assert state.count.item() == 0
    assert isinstance(flat, FlatTree)
    assert all(torch.equal(leaf, torch.ones_like(leaf)) for leaf in flat.unflatten().values())
