"""Modules of torch.nn under O1: forward and backward, in training and evaluation, with whatever dtypes arrive."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from npuamp_fn import APEX_OPS, cast_ops, functionalize, grad

HALF, FULL = torch.float16, torch.float32
o1 = cast_ops(APEX_OPS, HALF)
TOLERANCE = {"rtol": 1e-2, "atol": 1e-2}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def first(tree):
    return first(tree[0]) if isinstance(tree, tuple) else tree


def train_and_compare(module, *args, low):
    """Run forward and backward plainly and under O1; compare the output and every gradient."""
    plain = copy.deepcopy(module)
    rng = torch.get_rng_state()
    expected = first(plain(*[a.float() if torch.is_tensor(a) and a.dtype == HALF else a for a in args]))
    expected.square().mean().backward()
    torch.set_rng_state(rng)
    out = first(o1(module)(*args))
    assert out.dtype == (HALF if low else FULL)
    out.float().square().mean().backward()
    torch.testing.assert_close(out.float(), expected, **TOLERANCE)
    for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert ours.dtype == ours.grad.dtype == FULL, name
        torch.testing.assert_close(ours.grad, theirs.grad, **TOLERANCE)


# --- recurrent networks (reported against apex and torch.amp: "expected Half but found Float") ------------------------


def state(kind, dtype):
    if dtype is None:
        return ()
    h = torch.zeros(2, 3, 4, dtype=dtype)
    return ((h, h),) if kind is nn.LSTM else (h,)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("inputs", [FULL, HALF])
@pytest.mark.parametrize("hidden", [None, FULL, HALF])
def test_recurrent_layers_take_any_mixture_of_input_and_hidden_state(kind, inputs, hidden):
    module = kind(4, 4, num_layers=2, batch_first=True)
    x = torch.randn(3, 5, 4).to(inputs)
    plain = kind(4, 4, num_layers=2, batch_first=True)
    plain.load_state_dict(module.state_dict())
    expected = plain(x.float(), *state(kind, None if hidden is None else FULL))[0]
    expected.square().mean().backward()
    out, new = o1(module)(x, *state(kind, hidden))
    assert out.dtype == first(new).dtype == HALF
    out.float().square().mean().backward()
    torch.testing.assert_close(out.float(), expected, **TOLERANCE)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad.dtype == FULL
        torch.testing.assert_close(ours.grad, theirs.grad, **TOLERANCE)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("inputs", [FULL, HALF])
def test_recurrent_layers_take_packed_sequences(kind, inputs):
    module = kind(4, 4, batch_first=True, bidirectional=True)
    x = torch.randn(3, 5, 4)
    expected = module(pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True))[0].data
    packed = pack_padded_sequence(x.to(inputs), torch.tensor([5, 3, 2]), batch_first=True)
    out = o1(module)(packed)[0]
    assert isinstance(out, PackedSequence)
    assert out.data.dtype == HALF
    torch.testing.assert_close(out.data.float(), expected, **TOLERANCE)
    out.data.float().sum().backward()
    assert all(p.grad.dtype == FULL for p in module.parameters())


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("inputs", [FULL, HALF])
@pytest.mark.parametrize("hidden", [None, FULL, HALF])
def test_cells_in_a_loop_with_a_hidden_state_made_in_float32(kind, inputs, hidden):
    module, head = kind(4, 4), nn.Linear(4, 4)
    x = torch.randn(5, 3, 4).to(inputs)

    def run(x, dtype):
        h = None if dtype is None else torch.zeros(3, 4, dtype=dtype)
        h = (h, h) if kind is nn.LSTMCell and h is not None else h
        for step in x:
            h = module(head(step), h)
        return first(h)

    out = o1(run)(x, hidden)
    assert out.dtype == HALF
    torch.testing.assert_close(out.float(), run(x.float(), None if hidden is None else FULL), **TOLERANCE)
    out.float().sum().backward()
    assert module.weight_ih.grad.dtype == head.weight.grad.dtype == FULL


def test_linear_then_every_recurrent_layer():
    """Reported against apex: Linear -> LSTM raises ValueError because the layer compares dtypes first."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.lstm, self.rnn, self.gru = nn.Linear(4, 4), nn.LSTM(4, 4), nn.RNN(4, 4), nn.GRU(4, 4)

        def forward(self, x):
            return self.gru(self.rnn(self.lstm(self.inp(x))[0])[0])[0]

    train_and_compare(Net(), torch.randn(3, 2, 4), low=True)


def test_outside_the_transform_recurrent_layers_check_dtypes_as_ever():
    with pytest.raises(ValueError, match="does not match weight dtype"):
        nn.LSTM(4, 4)(torch.randn(3, 2, 4).half())


def test_gradients_of_a_functional_recurrent_network():
    apply, params, buffers = functionalize(nn.LSTM(4, 4))
    x = torch.randn(3, 2, 4)
    gradients = grad(o1(lambda p: apply(p, buffers, x)[0][0].float().square().mean()))(params)
    expected = grad(lambda p: apply(p, buffers, x)[0][0].square().mean())(params)
    assert {g.dtype for g in gradients.values()} == {FULL}
    torch.testing.assert_close(gradients, expected, **TOLERANCE)


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("inputs", [FULL, HALF])
def test_multihead_attention(need_weights, training, inputs):
    """Reported against apex: need_weights=True mixes dtypes."""
    module = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x = torch.randn(2, 3, 8)
    mask = torch.tensor([[False, False, True], [False, False, False]])

    def run(x):
        return module(x, x, x, key_padding_mask=mask, need_weights=need_weights)

    expected, expected_weights = run(x)
    out, weights = o1(run)(x.to(inputs))
    assert out.dtype == HALF
    torch.testing.assert_close(out.float(), expected, **TOLERANCE)
    if need_weights:
        torch.testing.assert_close(weights.float(), expected_weights, **TOLERANCE)
    out.float().sum().backward()
    assert all(p.grad.dtype == FULL for p in module.parameters())


def test_multihead_attention_with_a_large_negative_float_mask():
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x, mask = torch.randn(1, 3, 8), torch.full((3, 3), -1e9)
    out = o1(lambda x: module(x, x, x, attn_mask=mask, need_weights=True)[0])(x)
    torch.testing.assert_close(out.float(), module(x, x, x, attn_mask=mask)[0], **TOLERANCE)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer(norm_first, training):
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=norm_first)
    # normalisation runs in float32, and its output is what the layer returns (norm_first: a float32 residual sum)
    module.train(training)
    if training:
        for name in ("dropout", "dropout1", "dropout2"):
            getattr(module, name).p = 0.0  # half and float32 draw different masks
        module.self_attn.dropout = 0.0
    train_and_compare(module, torch.randn(2, 3, 8), low=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_encoder_in_evaluation_does_not_leave_the_casts_by_its_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    seen = []
    layer.linear1.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    module.layers[0].linear1.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with torch.no_grad():
        out = o1(lambda x: module(x, src_key_padding_mask=padding))(x)
        expected = module(x, src_key_padding_mask=padding)
    assert seen[0] == HALF
    assert out.dtype == FULL
    torch.testing.assert_close(out[~padding], expected[~padding], **TOLERANCE)


# --- normalisation ---------------------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.conv(x))))


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_variants(options, training):
    """Reported against apex: affine=False and frozen layers fail."""
    net = Conv(nn.BatchNorm2d(4, **options))
    seen = []
    net.norm.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    train_and_compare(net.train(training), torch.randn(4, 3, 6, 6), low=True)
    assert seen[-1] == (HALF, HALF)


def test_batch_norm_statistics_stay_float32_and_near_those_of_float32_training():
    net = Conv(nn.BatchNorm2d(4))
    plain = copy.deepcopy(net)
    for _ in range(10):
        x = torch.randn(4, 3, 6, 6)
        o1(net)(x)
        plain(x)
    for (name, ours), theirs in zip(net.named_buffers(), plain.buffers(), strict=True):
        assert ours.dtype == theirs.dtype, name
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert net.norm.num_batches_tracked == 10


@pytest.mark.parametrize(
    ("norm", "low"),
    [
        (nn.GroupNorm(2, 4), False),
        (nn.LayerNorm([4, 4, 4]), False),
        (nn.RMSNorm([4, 4, 4]), False),
        (nn.InstanceNorm2d(4, affine=True), True),
        (nn.LocalResponseNorm(2), False),
    ],
)
def test_other_norms_run_in_float32_on_half_inputs(norm, low):
    net = Conv(norm)
    seen = []
    norm.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    train_and_compare(net, torch.randn(2, 3, 6, 6), low=True)
    assert seen[-1] == (HALF, HALF if low else FULL)


def test_a_subclass_of_a_norm_sees_its_own_float32_weights_and_buffers_keep_their_values():
    class Norm(nn.LayerNorm):
        def __init__(self):
            super().__init__(8)
            self.register_buffer("positions", torch.arange(4096.0))  # beyond 2048 halves skip integers

        def forward(self, x):
            assert self.weight.dtype == self.positions.dtype == FULL
            return super().forward(x) + self.positions[4095] - 4095

    net = nn.Sequential(nn.Linear(8, 8), Norm())
    train_and_compare(net, torch.randn(2, 8), low=False)
    assert torch.equal(net[1].positions, torch.arange(4096.0))


# --- parametrized weights --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("wrap", [spectral_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 5), lambda: nn.Conv2d(3, 4, 3)])
def test_spectral_norm_trains_and_keeps_the_weights_norm(wrap, make):
    """Reported against apex and torch.amp: dtype errors, u and v in half, wrong norm."""
    module = wrap(make(), n_power_iterations=3)
    x = torch.randn(4, 6) if isinstance(module, nn.Linear) else torch.randn(4, 3, 5, 5)
    run = o1(lambda x: module(x))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(5):
        out = run(x)
        assert out.dtype == HALF
        optimizer.zero_grad()
        out.float().square().mean().backward()
        assert all(p.grad.dtype == FULL for p in module.parameters())
        optimizer.step()
    assert {b.dtype for b in module.buffers()} == {FULL}
    module.eval()
    run(x)
    sigma = torch.linalg.matrix_norm(module.weight.detach().double().flatten(1), 2)
    torch.testing.assert_close(sigma, torch.tensor(1.0).double(), rtol=2e-2, atol=0)
    copied = wrap(make(), n_power_iterations=3).eval()
    copied.load_state_dict(module.state_dict())
    assert torch.equal(o1(copied)(x), run(x))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("wrap", [weight_norm, parametrizations.weight_norm])
@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 5), lambda: nn.Conv2d(3, 4, 3)])
def test_weight_norm_trains_with_float32_length_and_direction(wrap, make):
    module = wrap(make())
    x = torch.randn(4, 6) if isinstance(module, nn.Linear) else torch.randn(4, 3, 5, 5)
    out = o1(lambda x: module(x))(x)
    torch.testing.assert_close(out.float(), module(x), **TOLERANCE)
    assert out.dtype == HALF
    out.float().square().mean().backward()
    assert {p.grad.dtype for p in module.parameters()} == {FULL}


# --- a mixed bag -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_with_half_weights_per_sample(mode):
    module = nn.EmbeddingBag(5, 4, mode=mode)
    ids = torch.tensor([[0, 1], [3, 4]])
    per_sample = torch.rand(2, 2).half() if mode == "sum" else None
    out = o1(lambda: module(ids, per_sample_weights=per_sample))()
    assert out.dtype == FULL
    out.sum().backward()
    assert module.weight.grad.dtype == FULL


def test_losses_on_half_predictions_are_float32():
    x, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])

    def losses(x):
        logits = x @ torch.eye(3)
        assert logits.dtype == HALF
        return F.cross_entropy(logits, labels), F.mse_loss(logits, x), F.huber_loss(logits, x), F.l1_loss(logits, x)

    assert [loss.dtype for loss in o1(losses)(x)] == [FULL] * 4
