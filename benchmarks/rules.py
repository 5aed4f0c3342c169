"""Every update rule: against the memory bus, against torch.optim, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.plain import PLAIN
from benchmarks.timing import Bar, Finding, Run, Setup, compare
from benchmarks.work import OurState, count, flat_adamw, gradients, torch_step, weights
from npuamp_fn import Optimizer, optim

__all__ = ["best_torch", "elementwise_rates", "norm_rates", "plain_rules"]


class _Case(NamedTuple):
    make: Callable[[], Optimizer]
    bytes: int  # per parameter: gradient read, parameter and each slot read and written, in float32
    limit: float | None


ELEMENTWISE = {
    "sgd, momentum": _Case(lambda: optim.sgd(1e-3, 0.9), 20, 0.85),
    "adam": _Case(lambda: optim.adam(1e-3), 28, 0.85),
    "adam, amsgrad": _Case(lambda: optim.adam(1e-3, amsgrad=True), 36, 0.85),
    "adamw": _Case(lambda: optim.adamw(1e-3), 28, 0.85),
    "bert_adam": _Case(lambda: optim.bert_adam(1e-3), 28, 0.85),
    "adadelta": _Case(lambda: optim.adadelta(1.0), 28, 0.85),
    "adagrad": _Case(lambda: optim.adagrad(1e-2), 20, 0.80),
    "rmsprop, momentum": _Case(lambda: optim.rmsprop(1e-3, momentum=0.9), 28, 0.85),
    "rmsprop, centered, momentum": _Case(lambda: optim.rmsprop(1e-3, momentum=0.9, centered=True), 36, 0.85),
    "rmsprop_tf, momentum": _Case(lambda: optim.rmsprop_tf(1e-3, momentum=0.9), 28, 0.85),
}
WITH_NORMS = {
    "novograd": _Case(lambda: optim.novograd(1e-3, weight_decay=0.01), 20, 0.75),
    "lamb": _Case(lambda: optim.lamb(1e-3, weight_decay=0.01), 28, 0.55),
    "adamp": _Case(lambda: optim.adamp(1e-3, weight_decay=0.01), 28, 0.45),
    "lars": _Case(lambda: optim.lars(1e-3, momentum=0.9), 20, None),
}


def elementwise_rates(setup: Setup) -> list[Finding]:
    """Every element-wise rule on its minimal bytes, against the bytes per second of flat _fused_adamw_."""
    return _rates(ELEMENTWISE, setup)


def norm_rates(setup: Setup) -> list[Finding]:
    """Rules with norms per tensor, likewise."""
    return _rates(WITH_NORMS, setup)


def best_torch(setup: Setup) -> list[Finding]:
    """Time of sgd with momentum, adadelta, rmsprop with momentum, against the best of torch single, foreach, fused."""
    ways = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    cases: list[tuple[str, Any, Any, dict[str, Any], tuple[str, ...], float]] = [
        ("sgd, momentum", optim.sgd(1e-3, 0.9), torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, tuple(ways), 1.02),
        ("adadelta", optim.adadelta(1.0), torch.optim.Adadelta, {"lr": 1.0}, ("single", "foreach"), 0.34),
        (
            "rmsprop, momentum",
            optim.rmsprop(1e-3, momentum=0.9),
            torch.optim.RMSprop,
            {"lr": 1e-3, "momentum": 0.9},
            ("single", "foreach"),
            0.42,
        ),
    ]
    findings = []
    for name, ours, theirs, options, has, limit in cases:
        peers = {f"{theirs.__name__}({way})": torch_step(setup, theirs, **options, **ways[way]) for way in has}
        runs = [Run(name, OurState(setup, ours).step), *(Run(peer, step) for peer, step in peers.items())]
        findings += compare(runs, [Bar(name, tuple(peers), limit)], setup)
    return findings


def plain_rules(setup: Setup) -> list[Finding]:
    """Time of lamb, adamp, bert_adam, novograd, against a plain implementation per tensor."""
    cases = [
        ("lamb", WITH_NORMS["lamb"].make(), 0.34),
        ("adamp", WITH_NORMS["adamp"].make(), 0.38),
        ("bert_adam", optim.bert_adam(1e-3), 0.33),
        ("novograd", WITH_NORMS["novograd"].make(), 0.38),
    ]
    findings = []
    for name, ours, limit in cases:
        plain = Run("plain", PLAIN[name](weights(setup), gradients(setup)))
        findings += compare([Run(name, OurState(setup, ours).step), plain], [Bar(name, ("plain",), limit)], setup)
    return findings


def _rates(cases: dict[str, _Case], setup: Setup) -> list[Finding]:
    findings = []
    for name, (make, size, limit) in cases.items():
        runs = [
            Run(name, OurState(setup, make()).step, size * count(setup)),
            Run("flat _fused_adamw_", flat_adamw(setup), 28 * count(setup)),
        ]
        findings += compare(runs, [Bar(name, ("flat _fused_adamw_",), limit, "rate")], setup)
    return findings
