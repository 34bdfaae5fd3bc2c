"""What the user sees on stderr while the demo works: live bars on a terminal, plain lines elsewhere.

It shows what it is told and decides nothing. It never writes to stdout, which belongs to the result.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["Display", "open_display"]


class Display(Protocol):
    """Where the coordinator reports to. All calls return at once; news of a prompt that has not begun is not shown."""

    def note(self, text: str) -> None:
        """A line that stays: a notice, or what a worker printed on its stderr."""

    def stage(self, text: str) -> None:
        """What is going on now."""

    def begin(self, prompt: str, layers: int) -> None:
        """A prompt is being prefilled and streamed."""

    def arrived(self, prompt: str, layers: int) -> None:
        """So many of its layers are on the decode side."""

    def state(self, prompt: str, text: str) -> None:
        """What happens to it now."""


@contextmanager
def open_display() -> Generator[Display]:
    """On stderr: live bars where it is a terminal and rich is installed, else plain lines."""
    stream = sys.stderr
    if stream.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
        except ImportError:
            pass
        else:
            console = Console(file=stream, highlight=False)
            progress = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                console=console,
                # Rendering takes a share of the cores on which the workers are being measured.
                refresh_per_second=8,
            )
            with progress:
                yield _Bars(console, progress)
            return
    yield _Lines(stream)


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._known: set[str] = set()

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def stage(self, text: str) -> None:
        self.note(text)

    def begin(self, prompt: str, layers: int) -> None:
        self._known.add(prompt)

    def arrived(self, prompt: str, layers: int) -> None:
        pass

    def state(self, prompt: str, text: str) -> None:
        if prompt in self._known:
            self.note(f"{prompt}: {text}")


class _Bars:
    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._stage = progress.add_task("", total=None, state="")
        self._tasks: dict[str, TaskID] = {}

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def stage(self, text: str) -> None:
        self._progress.update(self._stage, description=text)

    def begin(self, prompt: str, layers: int) -> None:
        self._progress.update(self._stage, visible=False)
        self._tasks[prompt] = self._progress.add_task(f"{prompt:<8}", total=layers, state="")

    def arrived(self, prompt: str, layers: int) -> None:
        if prompt in self._tasks:
            self._progress.update(self._tasks[prompt], completed=layers)

    def state(self, prompt: str, text: str) -> None:
        if prompt in self._tasks:
            self._progress.update(self._tasks[prompt], state=text)
