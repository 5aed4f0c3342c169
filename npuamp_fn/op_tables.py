"""Operation tables: which operations run in low precision, in float32, or in their widest input's dtype.

A table is data. ``cast_ops`` and ``cast_policy(O1)`` will apply it; the names below are the facts of apex.amp.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["APEX_OPS", "OpTable", "table_named"]


@dataclass(frozen=True)
class OpTable:
    """Name operations by the precision they run in; a name stands in every namespace that has it.

    Args:
        name: What ``Policy.parse`` calls this table.
        low: Operations whose inputs are cast to the low dtype (matrix products, convolutions).
        full: Operations whose inputs are cast to float32 (exponentials, reductions, losses).
        promote: Operations whose mixed inputs are cast to the widest of them.
        banned: Operations refused on low-precision inputs.

    >>> "matmul" in APEX_OPS.low, "softmax" in APEX_OPS.full
    (True, True)
    """

    name: str
    low: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    promote: frozenset[str] = frozenset()
    banned: frozenset[str] = frozenset()


APEX_OPS = OpTable(
    "apex",
    low=frozenset(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu "
        "addmm addmv addr matmul mm mv addbmm baddbmm bmm".split()
    ),
    full=frozenset(
        "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm "
        "normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div "
        "l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss "
        "nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss "
        "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod "
        "std sum var renorm".split()
    ),
    promote=frozenset(
        "addcdiv addcmul atan2 cross bilinear dot add sub div mul eq equal ge gt le lt ne cat stack".split()
    ),
    banned=frozenset({"binary_cross_entropy"}),
)


def table_named(name: str) -> OpTable:
    """Return a table of this module by its name.

    Raises:
        ValueError: no table has this name.

    >>> table_named("apex") is APEX_OPS
    True
    """
    tables = {table.name: table for table in (APEX_OPS,)}
    if name not in tables:
        raise ValueError(f"unknown operation table {name!r}; known: {sorted(tables)}")
    return tables[name]
