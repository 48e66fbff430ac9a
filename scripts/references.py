"""Write every file that is made from the code; with ``--check``, fail if one is not what is there.

`make references` runs it.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from scripts import (
    cli_reference,
    config_reference,
    dashboard,
    errors_reference,
    http_reference,
    metrics_reference,
)

ALL: Final[dict[Path, Callable[[], str]]] = {
    module.FILE: module.render
    for module in (
        cli_reference,
        config_reference,
        dashboard,
        errors_reference,
        http_reference,
        metrics_reference,
    )
}


def main() -> int:
    """Write or check the files; 1 if the check finds one stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    stale = {file: text for file, render in ALL.items() if (text := render()) != _there(file)}
    if parser.parse_args().check:
        sys.stderr.writelines(f"{file} is stale: run make references\n" for file in stale)
        return 1 if stale else 0
    for file, text in stale.items():
        file.write_text(text, encoding="utf-8")
        print(file)
    return 0


def _there(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
