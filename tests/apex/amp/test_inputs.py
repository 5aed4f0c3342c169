"""What goes into a half model: containers of every kind, packed sequences, float64."""

import collections
import types

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from npuamp_fn.apex import amp
from npuamp_fn.apex.amp.inputs import cast_values

HALF = torch.float16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_packed_token_ids_stay_integers(level):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, packed):
            self.seen = packed
            return self.out(self.embed(packed.data))

    packed = pack_sequence([torch.tensor([1, 2, 3]), torch.tensor([4])])
    model = Tagger()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    assert model(packed).dtype == torch.float32
    assert model.seen is packed


def test_packed_features_are_cast_and_their_order_is_kept():
    packed = pack_sequence([torch.ones(1, 2), torch.full((3, 2), 2.0)], enforce_sorted=False)
    low = cast_values(packed, HALF)
    assert type(low) is type(packed)
    assert low.data.dtype == HALF
    assert low.data.tolist() == packed.data.tolist()
    assert all(a is b for a, b in zip(low[1:], packed[1:], strict=True)), "batch sizes and both orders"
    assert packed.data.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda x: collections.deque([x, 1], maxlen=5), lambda new: new[0]),
        (lambda x: {"x": x}.values(), lambda new: next(iter(new))),
        (lambda x: {"x": x}.items(), lambda new: dict(new)["x"]),
        (lambda x: types.MappingProxyType({"x": x}), lambda new: new["x"]),
        (lambda x: {"deep": collections.deque([{"x": x}])}, lambda new: new["deep"][0]["x"]),
    ],
    ids=["deque", "values", "items", "mappingproxy", "nested"],
)
def test_tensors_are_cast_in_containers_that_cannot_be_assigned_to_or_copied(make, read):
    x = torch.tensor([1.5])
    given = make(x)
    low = cast_values(given, HALF)
    assert type(low) is type(given)
    assert (read(low).dtype, read(low).item()) == (HALF, 1.5)
    assert read(given) is x, "the caller's container is as it was"
    assert cast_values(given, torch.float32) is given


def test_a_deque_keeps_its_maximal_length():
    assert cast_values(collections.deque([torch.ones(1), 2], maxlen=5), HALF).maxlen == 5


class Marked(list):
    """A list that carries more than its items."""


def test_a_list_subclass_keeps_its_type_and_attributes():
    given = Marked([torch.ones(1), 2])
    given.size = (3, 4)
    low = cast_values(given, HALF)
    assert type(low) is Marked
    assert (low[0].dtype, low[1], low.size) == (HALF, 2, (3, 4))
    assert given[0].dtype == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_outputs_in_a_deque_are_float32(level):
    class Net(nn.Linear):
        def forward(self, x):
            return collections.deque([super().forward(x)])

    model = Net(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    assert model(torch.ones(1, 2))[0].dtype == torch.float32


@pytest.mark.parametrize(("level", "seen"), [("O0", torch.float64), ("O2", HALF), ("O3", HALF)])
def test_float64_inputs_become_half_where_the_model_is(level, seen):
    class Net(nn.Module):
        def forward(self, x):
            self.seen = x.dtype
            return x.sum(dtype=torch.float64)

    model = Net()
    amp.initialize(model, opt_level=level, verbosity=0)
    assert model(torch.ones(2, dtype=torch.float64)).dtype == torch.float64, "float64 outputs are left alone"
    assert model.seen == seen
