"""What the documentation site has besides docs/: pages made of the code, and of Markdown elsewhere in the repository.

Owns: hooks of mkdocs (mkdocs.yml). The references of commands and keys are written anew at each build, from what
`rally --help` and `rally config --explain` print, so that they cannot lag behind the code.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rallypoint.cli.main import app
from rallypoint.config import RunConfig, leaves, shipped_recipes, shown
from rallypoint.config.fields import sections_in
from rallypoint.config.load import expected
from rallypoint.config.source import describe

ROOT = Path(__file__).parents[1]
REPOSITORY = "repository"
"""Folder of the site for Markdown that is not in docs/."""
_ITEM = re.compile(r"(-|\d+\.) ")
_LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s]+)\)")


def outside() -> list[str]:
    """Return the Markdown files of the repository that are not in docs/ and belong on the site."""
    return [
        str(path.relative_to(ROOT))
        for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("benchmarks/README.md"), *ROOT.glob("examples/*/README.md")])
    ]


def commands_page() -> str:
    """Return a page with every command, its arguments and its options."""
    lines = ["# Commands", "", "Every command of `rally`, as `rally COMMAND --help` says it."]
    for name, command in sorted(_commands(typer.main.get_command(app), "rally")):
        usage = " ".join([name, *(_usage(one) for one in command.params)])
        lines += ["", f"## {name}", "", command.help or "", "", "```", usage, "```", ""]
        lines += ["| argument or option | meaning |", "|---|---|"] if command.params else []
        lines += [f"| {_names(one)} | {_cell(_said(one))} |" for one in command.params]
    return "\n".join(lines) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group with their whole names; groups themselves do nothing."""
    inside = command.commands if "commands" in vars(command) else {}
    for word, one in inside.items():
        yield from _commands(one, f"{name} {word}")
    if not inside:
        yield name, command


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return f"[{max(parameter.opts, key=len)}]"
    return (parameter.metavar or parameter.name.upper()) + ("..." if parameter.nargs == -1 else "")


def _names(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    return f"`{parameter.metavar or names[0]}`" if parameter.param_type_name == "argument" else f"`{', '.join(names)}`"


def _said(parameter: Any) -> str:
    default = parameter.default
    known = default is None or isinstance(default, bool | list) or callable(default)
    return (parameter.help or "") + ("" if known else f" Default: `{default}`.")


def config_page() -> str:
    """Return a page with every key of a config: default, what it takes, and what it means."""
    by_section: dict[str, list[str]] = {}
    for key, info in leaves(RunConfig).items():
        default = "required" if info.is_required() else shown(info.get_default(call_default_factory=True))
        cells = (f"`{key}`", f"`{_cell(default)}`", _cell(expected(info)), _cell(info.description or ""))
        by_section.setdefault(key.rpartition(".")[0], []).append(f"| {' | '.join(cells)} |")
    abouts = sections_in(RunConfig)
    lines = ["# Keys of a config", "", "Every key, as `rally config RECIPE --explain` says it; a recipe shows its own."]
    for section, rows in sorted(by_section.items()):
        about = abouts[section].description if section in abouts else None
        lines += ["", f"## {section or 'At the top'}", "", about or "", ""]
        lines += ["| key | default | takes | meaning |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def recipes_page() -> str:
    """Return a page with every shipped recipe and what it is for."""
    lines = [
        "# Shipped recipes",
        "",
        "`rally train NAME`, or `base: NAME` in a file.",
        "",
        "| name | what |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {_cell(describe(path))} |" for name, path in shipped_recipes().items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


GENERATED = {
    "reference/commands.md": commands_page,
    "reference/config.md": config_page,
    "reference/recipes.md": recipes_page,
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Order the pages: start, guides, references, then the repository's own and the decisions."""
    guides = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "index.md"]
    decisions = [f"decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    config.nav = [
        {"Start": ["index.md", f"{REPOSITORY}/README.md"]},
        {"Guides": guides},
        {"Reference": [*GENERATED]},
        {"Repository": [f"{REPOSITORY}/{path}" for path in outside() if path != "README.md"]},
        {"Decisions": decisions},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made at each build."""
    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    for path in outside():
        files.append(File.generated(config, f"{REPOSITORY}/{path}", content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where a file is on the site; those to files that are not there become plain text."""
    del config
    here = page.file.src_uri
    source = here.removeprefix(f"{REPOSITORY}/") if here.startswith(REPOSITORY) else f"docs/{here}"

    def moved(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        at = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        uri = at.removeprefix("docs/") if at.startswith("docs/") else f"{REPOSITORY}/{at}"
        if files.get_file_from_path(uri) is None and (ROOT / at).exists():
            return "" if picture else text  # one that leads nowhere stays, so that the build fails
        there = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{picture}[{text}]({there}{'#' if anchor else ''}{anchor})"

    return spaced(_LINK.sub(moved, markdown))


def spaced(markdown: str) -> str:
    """Put an empty line before each list, which Python's Markdown needs and others do not."""
    lines, is_code, before = list[str](), False, ""
    for line in markdown.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if not is_code and _ITEM.match(line) and before.strip() and not re.match(r" |-|\d+\.", before):
            lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines)
