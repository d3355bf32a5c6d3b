"""The panel as a terminal shows it: of three sizes, with Ctrl-C, with what is typed and printed, and resized."""

import dataclasses
import io
import re
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import played_panel
import pytest
from rich.cells import cell_len
from rich.console import Console
from terminals import Terminal

from rallypoint.display.frame import render
from rallypoint.display.state import NEW_S, Board

NOTE = (
    "rollout rank 0: the vLLM server died (exit status -9: the kernel killed it, out of memory) and was started again; "
    "37 requests were sent again, and 40 s were lost. Lower rollout.cache_tokens if it happens again."
)
SIZES = [(80, 24), (120, 40), (200, 50)]


class Played(Terminal):
    """A terminal with the played panel in it."""

    def __init__(self, columns: int, rows: int, commands: Path, **environment: str) -> None:
        self.commands = commands
        commands.touch()
        program = [sys.executable, played_panel.__file__, str(commands)]
        super().__init__(columns, rows, program, **environment)

    def play(self, *lines: str) -> None:
        with self.commands.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def is_whole(self) -> bool:
        """Whether there is one frame, all of it, and nothing beside it but what stands above."""
        lines = self.lines()
        corners = [(at, line[0]) for at, line in enumerate(lines) if line[:1] in ("╭", "╰")]
        if [corner for _, corner in corners] != ["╭", "╰"]:
            return False
        (top, _), (bottom, _) = corners
        inside = lines[top + 1 : bottom]
        width = self.screen.columns
        is_framed = all(len(line) == width and line[0] == line[-1] == "│" for line in inside)
        return is_framed and not any(lines[bottom + 1 :])

    def words(self) -> str:
        """What stands inside the frame, in one line."""
        return re.sub(r"\s+", " ", " ".join(line.strip("│") for line in self.lines()))


@contextmanager
def played(columns: int, rows: int, folder: Path, **environment: str) -> Iterator[Played]:
    with Played(columns, rows, folder / "commands", **environment) as terminal:
        yield terminal


@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_one_frame_stands_through_ctrl_c_typing_printing_notes_and_new_sizes(columns: int, rows: int, tmp_path: Path):
    with played(columns, rows, tmp_path) as shown:
        shown.play("start", "wait starting ray", "step 12")
        shown.wait(lambda: shown.shows("12/300", "013459", "score 0.670") and shown.is_whole())

        # What a library prints stands above, and a note can be read to its end.
        shown.play("print UserWarning: something odd", f"note {NOTE}")
        shown.wait(lambda: NOTE in shown.words() and shown.is_whole())
        shown.wait(lambda: "UserWarning: something odd" in [*shown.history(), *shown.lines()])

        # A Ctrl-C says what happens now, until it has happened; what is typed leaves no trace.
        shown.type("\x03")
        shown.wait(lambda: shown.shows("ending"))
        shown.type("\n\nls -l\n")
        shown.play("step 13")
        shown.wait(lambda: shown.shows("13/300", "ending") and shown.is_whole())
        assert "ls -l" not in shown.words()
        assert not any("╭" in line for line in shown.history())

        # Narrower, lower, and back: nothing of the old frame is left. (One that was on its way may have left the top.)
        for size in ((columns - 25, rows), (columns - 25, rows - 6), (columns, rows)):
            shown.resize(*size)
            shown.wait(shown.is_whole)
            assert shown.shows("13/300")

        shown.play("finish")
        assert shown.end() == 0
        assert shown.shows("finished", "validation    0.100 → 0.900")
        assert not any("╭" in line or "╰" in line for line in shown.lines())
        assert shown.raw.rindex(b"\x1b[?25h") > shown.raw.rindex(b"\x1b[?25l")


def frame(columns: int, rows: int, board: Board) -> list[str]:
    """The frame as a terminal of that size would show it."""
    paper = Console(file=io.StringIO(), width=columns, color_system=None)
    paper.print(render(board, columns, rows))
    lines = paper.file.getvalue().splitlines()
    assert len(lines) <= rows - 1
    assert {cell_len(line) for line in lines} == {columns}
    return lines


def board_of(*, is_real: bool) -> Board:
    board = Board(lambda: 0.0)
    board.start(played_panel.RUN)
    board.step(played_panel.report(12, is_real=is_real))
    return board


def words_of(lines: list[str]) -> str:
    return re.sub(r"\s+", " ", " ".join(line.strip("│") for line in lines))


@pytest.mark.parametrize(("columns", "rows"), SIZES[1:])
def test_real_text_is_shown_whole_where_there_is_room(columns: int, rows: int):
    words = words_of(frame(columns, rows, board_of(is_real=True))).replace(" score 1.00 ", " ")
    assert " ".join(played_panel.QUESTION.split()) in words
    assert " ".join(played_panel.REASONING.split()) in words


@pytest.mark.parametrize(("columns", "rows"), [(60, 20), *SIZES])
def test_no_word_of_the_footer_is_cut(columns: int, rows: int):
    footer = frame(columns, rows, board_of(is_real=False))[-1]
    parts = [part.strip("╰─╯ ") for part in footer.split(" · ")]
    run = played_panel.RUN
    assert re.fullmatch(r"\d:\d\d:\d\d elapsed", parts[0])
    assert set(parts[1:]) <= {str(run.run_dir), run.run_dir.name, *run.detail.split("; ")}
    assert parts[1].endswith(run.run_dir.name)


@pytest.mark.parametrize(("columns", "rows"), [(80, 12), (80, 18), *SIZES])
@pytest.mark.parametrize("is_real", [True, False])
def test_a_new_note_can_be_read_whole_at_once_and_the_height_stays(columns: int, rows: int, is_real: bool):
    now = [0.0]
    board = Board(lambda: now[0])
    board.start(played_panel.RUN)
    board.step(played_panel.report(12, is_real=is_real))
    board.note(NOTE)
    lines = frame(columns, rows, board)
    assert NOTE in words_of(lines).replace("▲ note ", "")
    now[0] = NEW_S + 1
    board.step(played_panel.report(13, is_real=is_real))
    board.note("short")
    if rows >= 24:
        assert len(frame(columns, rows, board)) == len(lines)


@pytest.mark.parametrize("rows", [4, 8, 12, 16, 20, 24, 30, 60])
@pytest.mark.parametrize("columns", [20, 60, 80, 200])
def test_a_frame_is_never_higher_than_the_terminal_and_shows_step_and_reward_first(columns: int, rows: int):
    board = board_of(is_real=True)
    board.note(NOTE)
    text = "\n".join(frame(columns, rows, board))
    assert rows < 8 or ("step" in text and "reward" in text)


@pytest.mark.parametrize("rows", [16, 20, 24, 40])
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_chart_has_the_numbers_of_its_axis_and_is_whole(columns: int, rows: int):
    board = Board(lambda: 0.0)
    board.start(dataclasses.replace(played_panel.RUN, course=[0.4 + 0.1 * at / 200 for at in range(200)]))
    board.step(dataclasses.replace(played_panel.report(12, is_real=True), scalars={"reward/mean": 0.5}))
    lines = frame(columns, rows, board)
    bottom = next(at for at, line in enumerate(lines) if line.strip("│ ").startswith("reward"))
    assert lines[bottom].endswith("  0.395  │")
    assert any(re.search("[▄▅▆▇█]  0.505  │$", line) for line in lines)
    assert set("▁▂▃") & set(lines[bottom]), "the low end of a narrow band is low"


def test_what_is_typed_is_echoed_again_when_the_panel_has_gone_and_after_an_error(tmp_path: Path):
    with played(80, 24, tmp_path) as shown:

        def echoes() -> bool:
            return bool(termios.tcgetattr(shown.file)[3] & termios.ECHO)

        assert echoes()
        shown.play("start", "step 1")
        shown.wait(shown.is_whole)
        assert not echoes()
        shown.play("raise it broke")
        shown.wait(lambda: shown.shows("RuntimeError: it broke"))
        assert echoes()
        assert shown.end() == 1


def test_a_notebooks_terminal_gets_plain_lines_without_codes(tmp_path: Path):
    with played(80, 24, tmp_path, JPY_PARENT_PID="1", FORCE_COLOR="1") as shown:
        shown.play("start", "step 12", "finish")
        assert shown.end() == 0
        assert b"\x1b" not in shown.raw
        assert b"step  12/300" in shown.raw
