"""``amp.state_dict`` and ``amp.load_state_dict``: the loss scales as plain data."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from npuamp_fn.apex.amp._amp_state import _amp_state
from npuamp_fn.apex.amp.scaler import LossScaler

__all__ = ["load_state_dict", "state_dict"]


def state_dict(destination: Any = None) -> Any:
    """Return the loss scales as plain data: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    Those of the latest ``amp.initialize`` come first; those of earlier calls, whose optimizers are still there, follow
    in the order of the calls.

    Args:
        destination: A dictionary to fill; a new one by default.
    """
    destination = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_scalers("state_dict")):
        destination[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: Any) -> None:
    """Restore the loss scales from :func:`state_dict`, each by its key.

    Raises:
        RuntimeError: an entry is not that of a loss scale; nothing was loaded then.
    """
    scalers = _scalers("load_state_dict")
    if not _amp_state.opt_properties.enabled:
        return
    numbers = {key: _number(key) for key in state_dict}
    unexpected = [repr(key) for key, number in numbers.items() if number is None]
    if unexpected:
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {', '.join(unexpected)}. "
            "Nothing was loaded."
        )
    values = {key: _values(key, entry) for key, entry in state_dict.items()}
    if len(state_dict) != len(scalers):
        print(f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used")
    for key, number in numbers.items():
        if number is None or number >= len(scalers):
            print(f"Skipping loss_scaler[{number}], since num_losses was set to {len(scalers)}")
            continue
        scalers[number]._loss_scale, scalers[number]._unskipped = values[key]


def _scalers(name: str) -> list[LossScaler]:
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(f"amp.{name}: call amp.initialize first")
    return _amp_state.all_scalers() if _amp_state.opt_properties.enabled else []


def _number(key: Any) -> int | None:
    tail = key.removeprefix("loss_scaler") if isinstance(key, str) and key.startswith("loss_scaler") else ""
    return int(tail) if tail.isdigit() else None


def _values(key: str, entry: Any) -> tuple[float, int]:
    try:
        scale, unskipped = float(entry["loss_scale"]), int(entry["unskipped"])
    except (KeyError, TypeError, ValueError, OverflowError):
        scale, unskipped = math.nan, 0
    if not 0 < scale < math.inf or unskipped < 0:
        raise RuntimeError(
            f"Error(s) in loading state_dict. {key}: expected a dictionary with loss_scale, a positive number, and "
            f"unskipped, the clean steps since its last change, found {entry!r}. Nothing was loaded."
        )
    return scale, unskipped
