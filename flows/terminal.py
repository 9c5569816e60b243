"""Write progress and tables to the terminal; results go to stdout, progress to stderr."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

QUIET_SECONDS = 10.0  # between progress lines where stderr is no terminal
WIDTH = 240  # of tables where stdout is no terminal
TEXT_WIDTH = 120  # of texts there
EXCERPT = 100  # characters of a text in a table
SHOWN_CHARACTERS = 20_000  # of one text on the terminal


def progress_listener() -> Callable[[Mapping[str, Any]], None]:
    """Make a listener that shows committed steps as lines and progress in place."""
    live = sys.stderr.isatty()
    last = 0.0

    def listen(event: Mapping[str, Any]) -> None:
        nonlocal last
        if event["event"] == "step":
            _line(live, _step_line(event), end="\n")
        elif event["event"] == "warning":
            _line(live, f"warning {plain(event['message'])}", end="\n")
        elif event["event"] == "waiting":
            _line(live, f"waiting {plain(event['message'])}", end="\n")
        elif event["event"] == "failed":
            _line(live, f"failed  {event['task']}: {plain(event['message'])}", end="\n")
        elif event["event"] == "progress" and (live or time.monotonic() - last > QUIET_SECONDS):
            last = time.monotonic()
            _line(live, _progress_line(event), end="" if live else "\n")

    return listen


def _line(live: bool, text: str, *, end: str) -> None:
    sys.stderr.write(f"\r\x1b[2K{text}{end}" if live else f"{text}{end}")
    sys.stderr.flush()


def _where(event: Mapping[str, Any]) -> str:
    label = f" {event['label']}" if event["label"] else ""
    return f"iteration {event['iteration']} · {event['step']}{label}"


def _step_line(event: Mapping[str, Any]) -> str:
    return f"{'reused ' if event['reused'] else 'done   '} {_where(event)}  {event['key'][:12]}"


def _progress_line(event: Mapping[str, Any]) -> str:
    parts = [f"        {_where(event)} {event['done']}/{event['total']} {event['unit']}"]
    if event.get("tokens_per_second"):
        parts.append(f"{event['tokens_per_second']:.0f} tok/s")
    if event.get("loss") is not None:
        parts.append(f"loss {event['loss']:.3f}")
    if event.get("eta") is not None:
        minutes, seconds = divmod(int(event["eta"]), 60)
        parts.append(f"ETA {minutes}:{seconds:02d}")
    return " · ".join(parts)


def print_json(value: Any) -> None:
    """Print a value as JSON; what a terminal might obey (escapes, direction marks) is written by its number."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    print("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
    """Print a table; cells are shown as plain text, never as markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(Text(plain(name)), no_wrap=name == "id")  # ids are copied
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if title:
        console.print(Text(plain(title)), soft_wrap=True)
    console.print(table)


def print_text(title: str, text: str) -> None:
    """Print a text of many lines under its title, cut where it would fill the terminal."""
    _print_panel([(title, text)])


def print_side_by_side(left: tuple[str, str], right: tuple[str, str]) -> None:
    """Print two titled texts beside each other."""
    _print_panel([left, right])


def _print_panel(texts: Sequence[tuple[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else TEXT_WIDTH, highlight=False)
    table = Table(box=box.ROUNDED, expand=True)
    for title, _ in texts:
        table.add_column(Text(plain(title)), ratio=1, overflow="fold")
    table.add_row(*(Text(_shown(text)) for _, text in texts))
    console.print(table)


def _shown(text: str) -> str:
    """Keep the lines of a text; what is not printable is written by its number, what is too long is counted."""
    left = len(text) - SHOWN_CHARACTERS
    more = f"\n… {left} more characters; --json has them" if left > 0 else ""
    return _escaped(text[:SHOWN_CHARACTERS].expandtabs(4), keep="\n") + more


def plain(cell: Any) -> str:
    """Turn a cell into one line of visible characters: stored text may hold escapes and direction marks."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.3f}"
    return _escaped(str(cell))


def excerpt(text: str, length: int = EXCERPT) -> str:
    """Cut a text to what a cell of a table holds."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _escaped(text: str, keep: str = "") -> str:
    r"""Write what a terminal might obey, or not show, by its number: `\x1b`, `\u202e`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )
