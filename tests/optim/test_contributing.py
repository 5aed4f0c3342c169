"""The optimizer that the contributing notes show is complete, short, and the one in the package."""

import inspect
import re
from pathlib import Path

import torch

from npuamp_fn import flatten, optim

NOTES = Path(__file__).parents[2] / "docs" / "contributing-an-optimizer.md"


def shown():
    text = re.search(r"```python\n(.*?)```", NOTES.read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {}
    exec(compile(text, str(NOTES), "exec"), names)
    return text, names["lars"]


def test_one_file_of_under_forty_lines_is_enough():
    text, lars = shown()
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) <= 120
    assert not [p for p in inspect.signature(lars).parameters.values() if p.default is p.empty]


def test_the_shown_optimizer_is_the_one_in_the_package_bit_for_bit():
    _, lars = shown()
    options = {"lr": 2.0, "weight_decay": 0.1, "trust_coefficient": 0.01}
    torch.manual_seed(0)
    tree, grads = {"w": torch.randn(7, 50), "b": torch.randn(7)}, {"w": torch.randn(7, 50), "b": torch.randn(7)}
    for params, gradients in ((tree, grads), (flatten(tree), flatten(grads))):
        results = []
        for optimizer in (lars(**options), optim.lars(**options)):
            new, state = optimizer.update(gradients, optimizer.init(params), params)
            new, state = optimizer.update(gradients, state, new)
            results.append(new.unflatten() if hasattr(new, "layout") else new)
        for name in tree:
            assert torch.equal(results[0][name], results[1][name])
            assert not torch.equal(results[0][name], tree[name])
