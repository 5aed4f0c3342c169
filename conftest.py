"""Doctests see torch and the public names; all tests use one thread."""

import pytest
import torch

import npuamp_fn

torch.set_num_threads(1)  # small tensors: on a busy machine waiting for other threads costs twenty times the work


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace["torch"] = torch
    for name in npuamp_fn.__all__:
        doctest_namespace.setdefault(name, getattr(npuamp_fn, name))
