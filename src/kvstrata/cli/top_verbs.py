"""Verbs of `kvstrata top`: a key begins a command of `kvstrata`, which is typed on and then run."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

__all__ = ["VERBS", "Line", "run"]

VERBS: Final = {"c": "clear", "p": "pin", "u": "unpin", "w": "warm", "d": "drain"}
_QUIT: Final = "qQ"
_END: Final = "\x03\x04"  # Ctrl-C and Ctrl-D, where the terminal makes no signal of them
_ENTER: Final = "\r\n"
_ESCAPE: Final = "\x1b"
_RUB_OUT: Final = "\x7f\x08"
# Arrows and their like (ECMA-48, 5.4), and letters with Alt.
_NO_TEXT: Final = re.compile(r"\x1b(?:[\[O][0-?]*[ -/]*[@-~]|.)")
_LOOK_SECONDS: Final = 0.2


@dataclass(slots=True)
class Line:
    """What has been typed of a command so far. *verb* is empty where none is begun."""

    verb: str = ""
    typed: str = ""
    refusal: str = ""  # why it is not run as it stands
    quits: bool = False

    def feed(self, said: str) -> list[str] | None:
        """Take keys; the arguments of ``kvstrata`` once the line is whole. Escape gives it up."""
        for key in _NO_TEXT.sub("", said):
            self.refusal = ""
            if key in _END or (key in _QUIT and not self.verb):
                self.quits = True
                return None
            if not self.verb:
                self.verb = VERBS.get(key, "")
            elif key in _ENTER:
                try:
                    return [self.verb, *shlex.split(self.typed)]
                except ValueError as e:
                    self.refusal = str(e)
            elif key == _ESCAPE:
                self.verb = self.typed = ""
            elif key in _RUB_OUT:
                self.typed = self.typed[:-1]
            elif key.isprintable():
                self.typed += key
        return None


def run(arguments: list[str], socket: Path, *, is_over: Callable[[], bool]) -> None:
    """Run a command as from a shell, in the terminal that this process has, until it ends.

    It asks the server at *socket* if the arguments name no other. Ctrl-C ends the command alone:
    handlers of SIGINT, unlike those that ignore it, do not outlive an exec. Once *is_over* the
    command is told to end.
    """
    typer.echo(f"$ kvstrata {shlex.join(arguments)}")
    command = [sys.executable, "-P", "-m", "kvstrata", *arguments]
    before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        with subprocess.Popen(command, env=os.environ | {"KVSTRATA_SOCKET": str(socket)}) as child:
            while child.poll() is None:
                if is_over():
                    child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_SECONDS)
    finally:
        signal.signal(signal.SIGINT, before)
