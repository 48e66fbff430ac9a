"""What any client could say to a server, chosen by atheris by the code that it reaches.

    python -m tests.fuzz.fuzz_frames -max_total_time=60 [libFuzzer's options] [corpus folder]

Ends with an error at the first input after which the server is not as it was, and writes it to a
file that can be given as an argument to try it again.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvstrata.server", "kvstrata.manager"]):
    from tests.fuzz.script import said
    from tests.fuzz.victim import Victim


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        victim = Victim(Path(folder))

        def one_input(data: bytes) -> None:
            victim.hear(partial(said, data))

        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
