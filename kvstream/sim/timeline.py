"""A run as a picture: Chrome's trace format, for chrome://tracing and Perfetto.

Owns the translation of the log's events; it keeps them in memory until they are written, and changes nothing in a run.
"""

from __future__ import annotations

import msgspec

__all__ = ["Timeline"]


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of `traceEvents`; times in microseconds."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float
    cat: str = ""
    id: str = ""
    s: str = ""
    args: dict[str, str] = {}


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]
    displayTimeUnit: str = "ms"


class Timeline:
    """`note` is a listener of the ledger."""

    def __init__(self) -> None:
        self._events: list[_Event] = []
        self._numbers: dict[str, int] = {}
        self._open: dict[tuple[str, str], None] = {}

    def note(self, now: float, kind: str, fields: tuple[object, ...]) -> None:
        """Streams become spans of their worker, everything else a mark."""
        words = [str(field) for field in fields]
        ts = now * 1e6
        if kind == "open":
            stream, process = words
            self._open[stream, process] = None
            self._add("b", stream, process, ts, id=f"{stream} {process}", cat="stream")
        elif kind == "end":
            stream, process, code, *rest = words
            if self._open.pop((stream, process), "") is None:
                args = {"end": code, "peer": rest[0]}
                self._add("e", stream, process, ts, id=f"{stream} {process}", cat="stream", args=args)
            else:
                self._add("i", f"{stream} {code}", process, ts, s="p", cat="end")
        elif kind in ("fault", "undo", "violation", "lease"):
            self._add("i", f"{kind} {words[0]}", "world", ts, tid=kind, s="g", args={"what": " ".join(words)})
        elif kind in ("up", "left", "killed", "not up"):
            self._add("i", kind, words[0], ts, s="p", cat="life")
        else:
            self._add("i", kind, "network", ts, tid=f"connection {words[0]}", s="t", args={"what": " ".join(words)})

    def _add(
        self,
        ph: str,
        name: str,
        pid: str,
        ts: float,
        *,
        tid: str = "streams",
        id: str = "",
        cat: str = "",
        s: str = "",
        args: dict[str, str] | None = None,
    ) -> None:
        process, thread = self._number(pid, "process_name"), self._number(f"{pid} {tid}", "thread_name", pid, tid)
        self._events.append(
            _Event(name=name, ph=ph, pid=process, tid=thread, ts=ts, cat=cat, id=id, s=s, args=args or {})
        )

    def _number(self, key: str, what: str, pid: str = "", tid: str = "") -> int:
        """The format wants numbers, and the names once beside them."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers) + 1
            process = self._numbers[pid] if pid else number
            self._events.append(_Event(name=what, ph="M", pid=process, tid=number, ts=0.0, args={"name": tid or key}))
        return number

    def encode(self) -> bytes:
        """What a trace file holds."""
        return msgspec.json.encode(_Trace(self._events))
