"""Verbs of `kvstrata top`: a key begins a command of `kvstrata`, which is typed on and then run."""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

__all__ = ["VERBS", "Line", "run"]

VERBS: Final = {"c": "clear", "p": "pin", "u": "unpin", "w": "warm", "d": "drain"}
_ENTER: Final = "\r\n"
_ESCAPE: Final = "\x1b"
_RUB_OUT: Final = "\x7f\x08"
_ARROWS: Final = re.compile(r"\x1b[\[O][0-?]*[ -/]*[@-~]")  # ECMA-48, 5.4


@dataclass(slots=True)
class Line:
    """What has been typed of a command so far. *verb* is empty where none is begun."""

    verb: str = ""
    typed: str = ""
    refusal: str = ""  # why the last one was not run

    def feed(self, said: str) -> list[str] | None:
        """Take keys; the arguments of ``kvstrata`` once the line is whole.

        Escape gives it up. Arrows and their like, which begin as Escape does, do nothing.
        """
        for key in _ARROWS.sub("", said):
            if not self.verb:
                self.verb = VERBS.get(key, "")
                self.refusal = "" if self.verb else self.refusal
            elif key in _ENTER:
                return self._whole()
            elif key == _ESCAPE:
                self._leave()
            elif key in _RUB_OUT:
                self.typed = self.typed[:-1]
            elif key.isprintable():
                self.typed += key
        return None

    def _whole(self) -> list[str] | None:
        verb, typed = self.verb, self.typed
        self._leave()
        try:
            return [verb, *shlex.split(typed)]
        except ValueError as e:
            self.refusal = f"kvstrata {verb} {typed}: {e}"
            return None

    def _leave(self) -> None:
        self.verb = self.typed = ""


def run(arguments: list[str], socket: Path) -> None:
    """Run a command as from a shell, in the terminal that this process has, and wait for its end.

    It asks the server at *socket* if the arguments name no other. Ctrl-C ends the command alone:
    handlers of SIGINT, unlike those that ignore it, do not outlive an exec.
    """
    command = [sys.executable, "-m", "kvstrata", *arguments]
    typer.echo(f"$ kvstrata {shlex.join(arguments)}")
    before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        subprocess.run(command, env=os.environ | {"KVSTRATA_SOCKET": str(socket)}, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
