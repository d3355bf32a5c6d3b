"""Nothing in the package turns data into code: no eval, exec, pickle, or torch.load that may unpickle."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "rallypoint"
FORBIDDEN = {"eval", "exec"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

ALLOWED: dict[str, str] = {
    "user_code.py: exec": "runs a file that the user has named, as an import does",
    "cluster/ray_process.py: pickle": "exceptions of our own workers, as Ray itself sends them",
    "environments/given.py: pickle": "the function given to `rally.train`, in a process that it started",
    "environments/given.py: cloudpickle": "sends that function; nothing of it comes from a disk",
    "environments/child.py: pickle": "calls on their way to a process that this one has started",
    "environments/worker.py: pickle": "reads these calls; its answers go back as JSON",
    "environments/sandbox/inside.py: exec": "runs the program inside of the sandbox, after all rights are given up",
}
"""`path: what` -> why it may."""


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def weights_only(node: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in node.keywords
    )


def uses(tree: ast.AST) -> set[str]:
    """What a module has of what is forbidden."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN:
                found.add(name)
            case ast.Call() if called(node).split(".")[-2:] == ["torch", "load"] and not weights_only(node):
                found.add("torch.load")
            case ast.Attribute(value=ast.Name(id="builtins"), attr=name) if name in FORBIDDEN:
                found.add(name)
            case ast.Import(names=names):
                found |= {one.name for one in names if one.name.split(".")[0] in PICKLES}
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                found.add(module)
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found.add("allow_pickle")
    return found


def test_nothing_turns_data_into_code_but_what_is_on_the_list():
    found = {
        f"{path.relative_to(PACKAGE)}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in uses(ast.parse(path.read_text()))
    }
    assert found == set(ALLOWED)


def test_the_rule_sees_what_it_forbids():
    text = "eval(x); exec(x); import pickle; from marshal import loads; torch.load(f); numpy.load(f, allow_pickle=True)"
    expected = {"eval", "exec", "pickle", "marshal", "torch.load", "allow_pickle"}
    assert uses(ast.parse(text)) == expected
    assert uses(ast.parse("torch.load(f, weights_only=True); model.eval(); literal_eval(x)")) == set()
