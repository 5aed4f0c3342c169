"""Doctests see torch and the public names."""

import pytest
import torch

import npuamp_fn


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace["torch"] = torch
    for name in npuamp_fn.__all__:
        doctest_namespace.setdefault(name, getattr(npuamp_fn, name))
