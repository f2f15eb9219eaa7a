"""The rules of docs/architecture.md and CONTRIBUTING.md, as tests."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "strop"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    p for folder in ("strop", "tests", "examples", "benchmarks") for p in (REPOSITORY / folder).rglob("*.py")
)

# A layer may import itself and those of smaller rank. Callbacks and runs stand side by side.
RANKS = {
    "losses": 0,
    "models": 1,
    "data": 2,
    "rewards": 3,
    "rollout": 4,
    "evals": 5,
    "callbacks": 6,
    "runs": 6,
    "trainer": 7,
    "cli": 8,
}
OUTERMOST = {"experimental", "scripts", "__init__.py", "__main__.py"}
"""Import paths that users know; they may import everything and hold no logic."""
ANYWHERE = {"compat.py"}
"""May be imported from everywhere, so it may import no layer when it is loaded."""

# Each is imported by one module only, and only inside a function, so that strop works without it.
OPTIONAL = {
    "bitsandbytes",
    "deepspeed",
    "flash_attn",
    "gguf",
    "jsonschema",
    "liger_kernel",
    "lm_eval",
    "math_verify",
    "matplotlib",
    "tensorboard",
    "trackio",
    "vllm",
    "wandb",
}

FORBIDDEN_NAMES = re.compile(r"^_?(get|maybe)_|(^|_)tmp(_|$)")
GIVEN_NAMES = {
    *("get_batch_samples", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_output_dir"),
    *("_get_eval_sampler", "_get_train_sampler"),
    *("get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"),
    *("get_dataset", "get_kbit_device_map", "get_peft_config", "get_quantization_config"),
    *("maybe_apply_chat_template", "maybe_convert_to_chatml"),
    *("maybe_extract_prompt", "maybe_unpair_preference_dataset"),
}
"""Methods of transformers' that are overridden, and public names that users know."""
FORBIDDEN_TEXT = re.compile(r"\bTODO\b|\bFIXME\b|\bXXX\b|/(home|root|tmp)/")


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST) -> set[str]:
    """Full names of the modules that `tree` imports, wherever in it; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_when_loaded(tree: ast.Module) -> set[str]:
    """Like `imports`, without those inside functions and `if TYPE_CHECKING`."""
    names = set()
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= imports(node)
        waiting.extend(ast.iter_child_nodes(node))
    return names


def layers_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("strop.")} & RANKS.keys()


LAYERED = [p for p in MODULES if layer(p) not in OUTERMOST | ANYWHERE]


@pytest.mark.parametrize("path", LAYERED, ids=relative)
def test_imports_point_one_way(path):
    own = layer(path)
    assert own in RANKS, f"a new part of the package, {own}: give it a rank here and a line in docs/architecture.md"
    wrong = {other for other in layers_of(imports(parse(path))) - {own} if RANKS[other] >= RANKS[own]}
    assert not wrong, f"{relative(path)} is in {own} and may not import {sorted(wrong)}"


@pytest.mark.parametrize("path", [p for p in MODULES if layer(p) in ANYWHERE], ids=relative)
def test_what_everybody_imports_loads_no_layer(path):
    assert not layers_of(imports_when_loaded(parse(path)))


@pytest.mark.parametrize("path", [p for p in MODULES if layer(p) == "losses"], ids=relative)
def test_losses_know_only_torch(path):
    tops = {name.split(".")[0] for name in imports(parse(path))} - {"strop"}
    assert tops <= {"torch"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", [p for p in LAYERED if RANKS.get(layer(p), 0) < RANKS["trainer"]], ids=relative)
def test_nothing_left_of_trainer_knows_the_trainer_of_transformers(path):
    wrong = {
        n for n in imports(parse(path)) if n.startswith("transformers.") and n.split(".")[1] in {"trainer", "Trainer"}
    }
    assert not wrong


def test_an_optional_dependency_has_one_module_and_is_imported_when_used():
    users: dict[str, list[str]] = {}
    for path in MODULES:
        tree = parse(path)
        loaded = {name.split(".")[0] for name in imports_when_loaded(tree)} & OPTIONAL
        assert not loaded, (
            f"{relative(path)} imports {sorted(loaded)} when loaded; import it in the function that uses it"
        )
        for name in {name.split(".")[0] for name in imports(tree)} & OPTIONAL:
            users.setdefault(name, []).append(relative(path))
    shared = {name: paths for name, paths in users.items() if len(paths) > 1}
    assert not shared, "an optional dependency belongs in one module"


def test_every_import_is_a_declared_dependency():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    modules = {re.split(r"[\[<>=!~;]", line)[0].strip().lower().replace("-", "_") for line in declared}
    modules |= {"yaml"} if "pyyaml" in modules else set()
    modules |= {"tokenizers", "huggingface_hub"} if "transformers" in modules else set()
    modules |= {"pandas", "pyarrow", "fsspec"} if "datasets" in modules else set()
    used = {name.split(".")[0] for path in MODULES for name in imports(parse(path))}
    assert used <= modules | sys.stdlib_module_names | {"strop"}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_and_functions_are_short(path):
    source = path.read_text()
    assert source.count("\n") <= 600, "split the file by responsibility"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert num_lines < 60, f"{node.name} (line {node.lineno}) has {num_lines} lines: it does several things"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_every_module_opens_with_its_job(path):
    opening = ast.get_docstring(parse(path))
    assert opening, "a module opens with a sentence on its job"
    assert re.search(r"[.:?!]$", opening.split("\n\n")[0].strip()), "a sentence ends"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_names_say_what_they_name(path):
    tree = parse(path)
    names = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    names |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assert not {n for n in names - GIVEN_NAMES if FORBIDDEN_NAMES.search(n)}


def test_nothing_is_left_for_later():
    here = Path(__file__).name
    texts = [*SOURCES, *REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("tools/*")]
    assert not {relative(p) for p in texts if p.name != here and FORBIDDEN_TEXT.search(p.read_text())}


@pytest.mark.parametrize("statement", ["import strop", "import strop.cli.main"])
def test_heavy_libraries_are_loaded_when_used(statement):
    heavy = {"torch", "transformers", "datasets", "peft", "accelerate", "numpy", "pyarrow"}
    code = f"{statement}; import sys; print(*({heavy!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY)
    assert not found.stdout.split()


TREE_LINE = re.compile(r"^(?P<indent> +)(?P<names>(?:[\w.]+/?(?:, )?)+)(?:\s{2,}.*)?$")


def documented_tree(markdown: str) -> set[str]:
    """Paths of the tree that is drawn under `strop/`, two spaces a level."""
    lines = markdown[markdown.index("    strop/\n") :].splitlines()
    paths, parents = set(), {4: ""}
    for line in lines[1:]:
        match = TREE_LINE.match(line)
        if not match or len(match["indent"]) <= 4:
            break
        indent = len(match["indent"])
        for name in match["names"].rstrip(", ").split(", "):
            path = parents[indent - 2] + name
            paths.add(path)
            if name.endswith("/"):
                parents[indent] = path
    return paths


def test_the_tree_in_the_docs_is_the_tree_on_disk():
    documented = documented_tree((REPOSITORY / "docs" / "architecture.md").read_text())
    files = {p.relative_to(PACKAGE).as_posix() for p in MODULES if p.name != "__init__.py"}
    folders = {f"{p.parent.relative_to(PACKAGE).as_posix()}/" for p in MODULES if p.parent != PACKAGE}
    missing = {p for p in documented if p not in files | folders and not any((PACKAGE / p).glob("*"))}
    silent = {f for f in folders if f not in documented}
    silent |= {f for f in files if f not in documented and f.split("/")[0] not in OUTERMOST}
    assert not missing, "docs/architecture.md draws what does not exist"
    assert not silent, "docs/architecture.md does not draw"
