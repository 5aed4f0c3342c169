"""Operation tables: which operations run in low precision, in float32, or in their widest input's dtype.

A table is data: ``cast_ops`` and ``cast_policy(O1)`` apply it. :data:`APEX_OPS` holds the lists of apex.amp,
completed for the operations that torch has gained since.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from npuamp_fn.op_names import functions_of, name_of

__all__ = ["APEX_OPS", "OpTable", "table_named"]

RULES = {
    "low": "floating arguments are cast to the low dtype",
    "full": "low-precision arguments are cast to float32",
    "promote": "a mixture of low and float32 arguments is cast to float32",
    "narrow": "a mixture of low and float32 arguments is cast to the low dtype",
    "match": "in place: the other arguments are cast to the dtype of the tensor written to",
    "refuse": "in place: refused when the tensor written to is low",
    "banned": "refused on low-precision arguments",
}
Op = str | Callable[..., Any]
# {__name__: ((function, rule), ...)}: found by name and confirmed by identity, because Dynamo cannot guard a
# dictionary that is keyed by torch's wrapped operators.
Lookup = dict[str | None, tuple[tuple[Any, str], ...]]


@dataclass(frozen=True)
class OpTable:
    """Say in which precision each operation runs; operations without a rule are left alone.

    A key is one operation in all its forms: ``"torch.bmm"`` stands for ``torch.bmm`` and ``Tensor.bmm``,
    ``"torch.add"`` for ``+`` too. Keys are given by name (``"torch.bmm"``, ``"torch.linalg.norm"``, or short,
    ``"bmm"``), as the function itself, as a custom operator (``torch.ops.library.name``), or as a function that
    ``half_function`` and its siblings made. Tables never change: :meth:`low` and the others return edited ones.

    Args:
        name: What ``Policy.parse`` calls this table; edited tables are called ``<name>-edited``.
        rules: Pairs of key and rule, in the order of printing; see ``RULES``.

    >>> APEX_OPS["torch.bmm"], APEX_OPS[torch.softmax], APEX_OPS.get(torch.relu)
    ('low', 'full', None)
    >>> print(OpTable("mine").low("torch.bmm", torch.mm).full("exp"))
    mine-edited
      low  bmm mm
      full exp
    """

    name: str
    rules: tuple[tuple[Op, str], ...] = ()
    # Derived here and not on demand, because compiled regions could not compute them:
    lookup: Lookup = field(init=False, repr=False, compare=False)  # the rule of every function
    widened: OpTable = field(init=False, repr=False, compare=False)  # this table with float32 where it says low

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookup", _lookup(self.rules))
        widened = tuple((key, "full" if rule == "low" else rule) for key, rule in self.rules)
        same = widened == self.rules
        object.__setattr__(self, "widened", self if same else OpTable(f"{self.name}-widened", widened))

    def low(self, *ops: Op) -> OpTable:
        """Return a table in which these operations run in the low dtype.

        >>> APEX_OPS.low(torch.acos)["acos"]
        'low'
        """
        return self._edited("low", ops)

    def full(self, *ops: Op) -> OpTable:
        """Return a table in which these operations run in float32; this also allows a banned one.

        >>> APEX_OPS.full("torch.nn.functional.binary_cross_entropy")["binary_cross_entropy"]
        'full'
        """
        return self._edited("full", ops)

    def promote(self, *ops: Op) -> OpTable:
        """Return a table in which these operations widen mixed inputs to float32.

        >>> OpTable("mine").promote("torch.fmod")["fmod"]
        'promote'
        """
        return self._edited("promote", ops)

    def without(self, *ops: Op) -> OpTable:
        """Return a table that leaves these operations alone.

        Raises:
            ValueError: an operation has no rule to take away.

        >>> "torch.bmm" in APEX_OPS.without("torch.bmm")
        False
        """
        for op in ops:
            if op not in self:
                raise ValueError(f"OpTable.without: {self.name!r} has no rule for {op!r}")
        return self._edited(None, ops)

    def get(self, op: Op) -> str | None:
        """Return the rule of an operation, or ``None`` if it is left alone.

        Raises:
            ValueError: a name that no torch operation has; the message gives the nearest ones.
            TypeError: a function that cannot be cast from outside.

        >>> APEX_OPS.get("torch.batm_mm")
        Traceback (most recent call last):
        ValueError: unknown operation 'torch.batm_mm'; nearest: ['torch.baddbmm', 'torch.bmm', 'torch.mm']
        """
        return dict(self.rules).get(name_of(op))

    def __getitem__(self, op: Op) -> str:
        rule = self.get(op)
        if rule is None:
            raise KeyError(f"table {self.name!r} has no rule for {op!r}; it is left alone")
        return rule

    def __contains__(self, op: object) -> bool:
        return self.get(op) is not None  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Op]:
        return (key for key, _ in self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __str__(self) -> str:
        lines = [self.name]
        for rule in RULES:
            keys = sorted(key if isinstance(key, str) else _written(key) for key, r in self.rules if r == rule)
            width = max((len(r) for _, r in self.rules), default=0) + 3
            indent = f"  {rule}".ljust(width)
            if keys:
                lines += textwrap.wrap(
                    " ".join(keys), 120, initial_indent=indent, subsequent_indent=" " * width, break_on_hyphens=False
                )
        return "\n".join(lines)

    def __repr__(self) -> str:
        counts = {rule: sum(r == rule for _, r in self.rules) for rule in RULES}
        return f"<OpTable {self.name!r}: {', '.join(f'{n} {rule}' for rule, n in counts.items() if n)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return OpTable, (self.name, self.rules)  # the lookup holds functions that do not pickle

    def _edited(self, rule: str | None, ops: tuple[Op, ...]) -> OpTable:
        rules = dict(self.rules)
        for op in ops:
            key = name_of(op)
            rules.pop(key, None)
            if rule is not None:
                rules[key] = rule
        if rules == dict(self.rules):
            return self
        return OpTable(f"{self.name.removesuffix('-edited')}-edited", tuple(rules.items()))


def _lookup(rules: tuple[tuple[Op, str], ...]) -> Lookup:
    found: Lookup = {}
    for key, rule in rules:
        for function in functions_of(key):
            name = getattr(function, "__name__", None)
            found[name] = (*found.get(name, ()), (function, rule))
    return found


def _written(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


def _rules(**lists: str) -> tuple[tuple[Op, str], ...]:
    return tuple((name, rule) for rule, names in lists.items() for name in names.split())


APEX_OPS = OpTable(
    "apex",
    _rules(
        low=(
            # apex
            "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu "
            "addmm addmv addr matmul mm mv addbmm baddbmm bmm "
            "rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell "
            # torch since
            "chain_matmul einsum inner tensordot linalg.matmul linalg.multi_dot "
            "scaled_dot_product_attention multi_head_attention_forward"
        ),
        full=(
            # apex
            "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm "
            "local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy "
            "hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss "
            "multilabel_soft_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss "
            "soft_margin_loss triplet_margin_loss ctc_loss "
            "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm "
            "prod std sum var renorm cpu "
            # torch since: losses, normalisation and reductions
            "gaussian_nll_loss huber_loss linear_cross_entropy triplet_margin_with_distance_loss "
            "rms_norm native_layer_norm native_group_norm gumbel_softmax "
            "lp_pool1d lp_pool2d lp_pool3d cdist pdist pairwise_distance "
            "arccos arcsin log1p logaddexp logaddexp2 logcumsumexp logsumexp nansum std_mean var_mean "
            "nuclear_norm norm_except_dim linalg.norm linalg.matrix_norm linalg.vector_norm __rtruediv__ "
            # what has no low-precision kernel on some device
            "avg_pool3d affine_grid grid_sampler grid_sampler_2d grid_sampler_3d complex polar view_as_complex "
            "stft istft quantile nanquantile histogram histogramdd histc "
            "cholesky cholesky_inverse cholesky_solve det geqrf inverse logdet lu lu_solve lu_unpack "
            "matrix_exp matrix_power orgqr ormqr pinverse qr slogdet svd triangular_solve "
            "linalg.cholesky linalg.cholesky_ex linalg.cond linalg.det linalg.eig linalg.eigh linalg.eigvals "
            "linalg.eigvalsh linalg.householder_product linalg.inv linalg.inv_ex linalg.ldl_factor "
            "linalg.ldl_factor_ex linalg.ldl_solve linalg.lstsq linalg.lu linalg.lu_factor linalg.lu_factor_ex "
            "linalg.lu_solve linalg.matrix_exp linalg.matrix_power linalg.matrix_rank linalg.pinv linalg.qr "
            "linalg.slogdet linalg.solve linalg.solve_ex linalg.solve_triangular linalg.svd linalg.svdvals "
            "linalg.tensorinv linalg.tensorsolve linalg.vander "
            "fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 "
            "fft.hfft2 fft.ihfft2 fft.fftn fft.ifftn fft.rfftn fft.irfftn fft.hfftn fft.ihfftn "
            "special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1 special.erfcx "
            "special.i1 special.i1e special.chebyshev_polynomial_t special.chebyshev_polynomial_u "
            "special.chebyshev_polynomial_v special.chebyshev_polynomial_w special.hermite_polynomial_h "
            "special.hermite_polynomial_he "
            "special.laguerre_polynomial_l special.legendre_polynomial_p special.log_ndtr "
            "special.modified_bessel_i0 special.modified_bessel_i1 special.modified_bessel_k0 "
            "special.modified_bessel_k1 special.ndtri special.scaled_modified_bessel_k0 "
            "special.scaled_modified_bessel_k1 special.shifted_chebyshev_polynomial_t "
            "special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v "
            "special.shifted_chebyshev_polynomial_w special.spherical_bessel_j0 special.zeta"
        ),
        promote=(
            # apex
            "addcdiv addcmul atan2 cross bilinear dot add sub div mul eq equal ge gt le lt ne cat stack "
            # torch since
            "arctan2 concat concatenate hstack vstack dstack column_stack row_stack cartesian_prod meshgrid divide "
            "true_divide multiply subtract vdot linalg.cross linalg.vecdot lerp allclose isclose heaviside "
            "embedding_bag index_add index_copy index_put index_reduce masked_scatter put scatter scatter_add "
            "scatter_reduce"
        ),
        match=(
            "addmm_ addmv_ addr_ addbmm_ baddbmm_ lerp_ heaviside_ index_add_ index_copy_ index_put_ index_reduce_ "
            "masked_scatter_ put_ scatter_ scatter_add_ scatter_reduce_ __setitem__"
        ),
        refuse=(
            "acos_ asin_ cosh_ erfinv_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_ pow_ cumprod_ "
            "cumsum_ renorm_"
        ),
        banned="binary_cross_entropy",
    ),
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
        raise ValueError(
            f"unknown operation table {name!r}; known: {sorted(tables)}. An edited table cannot be read back from its "
            "name: parse the policy without it and pass the table, policy.replace(ops=table)"
        )
    return tables[name]
