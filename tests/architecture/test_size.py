"""The whole stays small: lines of code, and files that only one other file needs. Each bound falls when it can.

Run as a program, this file prints the numbers, by room, and the files with one importer:

    python tests/architecture/test_size.py
"""

import ast
import collections
import io
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

MAX_CODE_LINES = 57_440
MAX_SINGLE_IMPORTERS = 45

BLANK = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def num_code_lines(text: str) -> int:
    '''Count lines without docstrings, comments and blank ones.

    >>> num_code_lines('"""What it is."""\\n\\nx = 1  # why\\n# how\\n')
    1
    '''
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in BLANK for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def importers() -> dict[str, set[str]]:
    """Every module that is no room's face -> the modules that import it."""
    files = {module_of(path): path for path in SOURCE.rglob("*.py")}
    found: dict[str, set[str]] = {name: set() for name, path in files.items() if path.name != "__init__.py"}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for other in imported:
                if other in found and other != name:
                    found[other].add(name)
    return found


def single_importers() -> dict[str, str]:
    """Every module that one other file alone imports -> that file; a room's face counts as all who use the room."""
    faces = {module_of(path) for path in SOURCE.rglob("__init__.py")}
    single = {name: next(iter(by)) for name, by in importers().items() if len(by) == 1}
    return {name: by for name, by in single.items() if by not in faces}


def code_lines_by_room() -> dict[str, tuple[int, int]]:
    """Every folder of the package -> its files and its lines of code."""
    rooms: dict[str, tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        files, lines = rooms[room := parts[1] if len(parts) > 2 else ""]
        rooms[room] = files + 1, lines + num_code_lines(path.read_text())
    return rooms


def test_the_code_does_not_grow_without_a_decision():
    assert sum(lines for _, lines in code_lines_by_room().values()) <= MAX_CODE_LINES


def test_few_files_are_there_for_one_other_file():
    assert len(single_importers()) <= MAX_SINGLE_IMPORTERS


if __name__ == "__main__":
    rooms = code_lines_by_room()
    print(
        f"{sum(files for files, _ in rooms.values())} files, {sum(lines for _, lines in rooms.values())} lines of code"
    )
    for room, (files, lines) in sorted(rooms.items(), key=lambda item: -item[1][1]):
        print(f"  {room or 'rallypoint':14} {files:3} {lines:6}")
    print(f"{len(single_importers())} files with one importer")
    for name, by in sorted(single_importers().items()):
        print(f"  {name.removeprefix('rallypoint.')} <- {by.removeprefix('rallypoint.')}")
