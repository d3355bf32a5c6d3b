"""Every `rally ...` line and every config that the documentation shows is one that works."""

import ast
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from rallypoint.cli.main import app
from rallypoint.config import RECIPES, RunConfig, leaves, load_config, shipped_recipes
from rallypoint.errors import ConfigError

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
GROUP = typer.main.get_command(app)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language, content) of every fenced block."""
    yield from re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return every `rally ...` in fenced blocks (a line each) and in inline code."""
    lines = [line for _, block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = (re.match(r"^(?:\$ )?(?:\S*bin/)?(rally(?: .*)?)$", piece.strip()) for piece in (*lines, *inline))
    return [match.group(1) for match in found if match]


def problem_with(line: str) -> str | None:
    """Say why a command line does not parse: its command, its options, its config keys."""
    name, *rest = shlex.split(line, comments=True)[1:] or ["--help"]
    if name.startswith("-"):
        return None if name in {"--help", "-h", "--version"} else f"no option {name}"
    command = GROUP.commands.get(name)
    if command is None:
        return f"no command {name}"
    arguments = [argument for argument in rest if not re.fullmatch(r"\[.*\]\.*|\.\.\.|…", argument)]
    if not arguments:
        return None  # the command is only mentioned
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    wrong = [a for a in arguments if a.startswith("-") and a.split("=")[0] not in {*options, "--help", "-h"}]
    if wrong:
        return f"{name} has no option {wrong[0]}"
    if set(arguments) <= options:
        return None  # an option is only mentioned
    return problem_with_values(name, arguments)


def problem_with_values(name: str, arguments: list[str]) -> str | None:
    try:
        GROUP.commands[name].make_context(name, list(arguments))
    except Exception as error:  # noqa: BLE001 - typer may bring a click of its own, with its own errors
        return f"{type(error).__name__} {error}"
    recipe = arguments[0]
    if recipe.startswith("--from-"):  # keys of others
        return None
    overrides = [a for a in arguments if re.match(r"[a-z][\w.]*=", a)] if name in {"train", "config"} else []
    if recipe == "digits":  # it is whole, so that values can be checked as well
        try:
            load_config(recipe, overrides)
        except ConfigError as error:
            return str(error)
        return None
    known = leaves(RunConfig)
    for override in overrides:
        key = override.partition("=")[0]
        if not (key in known or any(k.startswith(f"{key}.") for k in known) or key.startswith("cluster.pools.")):
            return f"no key {key}"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_line_in_the_documentation_parses(document: Path):
    problems = {line: problem_with(line) for line in commands(document.read_text())}
    assert {line: problem for line, problem in problems.items() if problem} == {}


def test_the_readme_shows_commands():
    assert len(commands((ROOT / "README.md").read_text())) >= 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_in_the_documentation_loads(document: Path, tmp_path: Path):
    for language, content in blocks(document.read_text()):
        if language == "yaml" and re.search(r"^(base|recipe):", content, flags=re.MULTILINE):
            (tmp_path / "shown.yaml").write_text(content)
            assert load_config(str(tmp_path / "shown.yaml"))


def test_every_config_of_the_examples_loads():
    configs = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "apiVersion:" not in path.read_text()]
    assert configs
    for path in configs:
        assert load_config(str(path)), path


def test_every_shipped_recipe_parses():
    for name in shipped_recipes():
        own = (
            "model.path=m",
            "data.train=d.jsonl",
            "reward.function=r.py:f",
            "model.create=null",
            "data.generate=null",
        )
        spec = RECIPES[load_config(name, draft=True).config.recipe]
        own = [key for key in own if spec.reads("reward") or not key.startswith("reward.")]
        assert load_config(name, [*own, "teacher.path=t"] if spec.reads("teacher") else own)
    assert load_config("digits")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("rally train digits actor.optimizer.lr=3e-4 --dry-run  # a comment", None),
        ("rally train RECIPE [KEY=VALUE]...", None),
        ("rally train mine.yaml 'cluster.pools={main: [1], second: [1]}' critic.placement.pool=second", None),
        ("rally train --resume", None),
        ("rally --help", None),
        ("rally trian digits", "no command trian"),
        ("rally train digits --fast", "no option --fast"),
        ("rally train digits actor.lr=1", "actor.optimizer.lr"),
        ("rally train digits trainer.num_steps=0", "at least 1"),
        ("rally train mine.yaml actor.lr=1", "no key actor.lr"),
        ("rally eval CHECKPOINT", "MissingParameter"),
        ("rally eval CHECKPOINT DATA --num-samples 0", "BadParameter"),
    ],
)
def test_this_very_check_finds_what_it_is_for(line: str, problem: str | None):
    found = problem_with(line)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_nothing_tells_people_to_install_from_an_index_where_rallypoint_is_not():
    texts = [*DOCUMENTS, *ROOT.glob("src/**/*.py"), *ROOT.glob("examples/**/*.ipynb")]
    assert [str(path) for path in texts if re.search(r"pip install.*rallypoint\b *[\['\"`]", path.read_text())] == []
    extras = re.findall(r"\.\[([\w,]+)\]", "".join(path.read_text() for path in texts))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {one for extra in extras for one in extra.split(",")} <= known.keys()


def test_every_decision_has_a_number_of_its_own_and_a_line_in_the_index():
    pages = sorted(path.name for path in (ROOT / "docs" / "decisions").iterdir())
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    assert re.findall(r"\]\(decisions/(.+?)\)", (ROOT / "docs" / "index.md").read_text()) == pages


def phrases_without_a_noun(source: str) -> list[str]:
    """Return attribute docstrings that only continue the attribute's name."""
    bodies = [node.body for node in ast.walk(ast.parse(source)) if isinstance(getattr(node, "body", None), list)]
    return [
        after.value.value
        for body in bodies
        for attribute, after in itertools.pairwise(body)
        if isinstance(attribute, ast.Assign | ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and re.match(r"(Of|That|Whose|Which)\b", str(after.value.value))
    ]


def test_attribute_docstrings_begin_with_a_noun():
    assert phrases_without_a_noun('port: int\n"""Of the server."""\nname: str\n"""Official name."""') == [
        "Of the server."
    ]
    found = {path: phrases_without_a_noun(path.read_text("utf-8")) for path in sorted(ROOT.glob("src/**/*.py"))}
    assert {str(path.relative_to(ROOT)): phrases for path, phrases in found.items() if phrases} == {}
