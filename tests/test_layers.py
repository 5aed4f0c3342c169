"""The package's frame: imports point down the layers, nothing heavy is imported, the public surface is pinned."""

import ast
import pathlib
import subprocess
import sys

import pytest

import npuamp_fn

PACKAGE = pathlib.Path(npuamp_fn.__file__).parent

# From the bottom up; a module may import those of its own layer and below.
LAYERS = [
    {"tree", "device", "tracing"},
    {"tree_math", "placement", "flat", "loss_scale", "policy", "op_names", "op_tables", "modules", "state_dict"},
    {"kernels"},
    {"optim"},
    {"transforms"},
    {"debug"},
    {"apex"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
SURFACE_FROM = RANK["debug"]  # from here up the public names may be imported from the package itself

PUBLIC = [
    # policies and casts
    "APEX_OPS",
    "O0",
    "O1",
    "O2",
    "O3",
    "OpTable",
    "Policy",
    "batch_norm_paths",
    "cast",
    "cast_like",
    "cast_ops",
    "cast_policy",
    "float_function",
    "full_precision",
    "half_function",
    "promote_function",
    # gradients and loss scaling
    "DynamicLossScale",
    "GradFn",
    "NoOpLossScale",
    "ScaledGrads",
    "StaticLossScale",
    "SupportsLossScaling",
    "accumulate",
    "all_finite",
    "global_norm",
    "grad",
    "grad_and_value",
    "mean_over",
    "remat",
    "scaled_grad",
    "tree_where",
    "with_loss_scaling",
    # parameters
    "FlatTree",
    "Layout",
    "flatten",
    "functionalize",
    "load_state_dict",
    "state_dict",
    # optimizers
    "Optimizer",
    "explain",
    "fused_update",
    "optim",
]


def imports_of(path):
    """Return (module, imported name or None, at top level) for every import of a file, type-checking ones included."""
    tree = ast.parse(path.read_text())
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, None, id(node) not in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
                base = ".".join((*parts[: len(parts) - node.level], *([base] if base else [])))
            found += [(base, alias.name, id(node) not in lazy) for alias in node.names]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def layer_of(path):
    """Return the name that places a file in a layer, or None for the package's own __init__."""
    parts = path.relative_to(PACKAGE).parts
    return None if parts == ("__init__.py",) else parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_the_layers(path):
    own = layer_of(path)
    if own is None or own == "__main__":
        return
    assert own in RANK, f"{own} has no layer: give it one in LAYERS"
    for module, name, _ in imports_of(path):
        parts = module.split(".")
        if parts[0] != "npuamp_fn":
            continue
        target = parts[1] if len(parts) > 1 else name
        if len(parts) == 1 and name not in RANK:
            assert RANK[own] >= SURFACE_FROM, f"{path.name} imports the public name {name} from above its layer"
            continue
        assert target in RANK, f"{path.name} imports npuamp_fn.{target}, which has no layer"
        assert RANK[target] <= RANK[own], f"{path.name} ({own}) imports {target}, a higher layer"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_npu_is_imported_lazily_in_two_files_only(path):
    allowed = path.relative_to(PACKAGE).as_posix() in ("device.py", "kernels/ascend.py")
    for module, _, top_level in imports_of(path):
        if module.split(".")[0] == "torch_npu":
            assert allowed
            assert not top_level


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_validated_by_assert(path):
    # torchopt's check of its arguments was gone under python -O.
    found = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert found == []


def test_tree_layer_imports_torch_and_optree_only():
    standard = sys.stdlib_module_names
    for name in ("tree.py", "tracing.py"):
        for module, _, top_level in imports_of(PACKAGE / name):
            root = module.split(".")[0]
            assert root in standard or root in ("torch", "optree", "npuamp_fn", "typing_extensions") or not top_level


def test_import_brings_nothing_heavy():
    code = (
        "import sys, npuamp_fn\n"
        "heavy = ('torch._dynamo', 'torch._inductor', 'matplotlib', 'torch_npu', 'functorch', 'rich')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


def test_public_surface():
    assert sorted(npuamp_fn.__all__) == sorted(PUBLIC)
    assert len(set(npuamp_fn.__all__)) == len(npuamp_fn.__all__)
    for name in npuamp_fn.__all__:
        assert hasattr(npuamp_fn, name)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    value = getattr(npuamp_fn, name)
    if callable(value) or name == "optim":
        assert value.__doc__
        assert value.__doc__.strip().splitlines()[0].endswith((".", ":"))
    if callable(value):
        documented = (
            value.__doc__
            + "".join(getattr(value, member).__doc__ or "" for member in vars(value) if not member.startswith("_"))
            if isinstance(value, type)
            else value.__doc__
        )
        assert ">>>" in documented, f"{name} has no doctest"
