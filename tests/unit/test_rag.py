"""examples/rag.py, with a server that is made up; tests/cli/test_serve_http.py has a real one."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.ports import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "rag.py"


class Server(BaseHTTPRequestHandler):
    """Answers a prompt as vLLM does; has neither another model nor a tokenizer."""

    asked: ClassVar[list[dict[str, Any]]] = []
    details: ClassVar[dict[str, int] | None] = None
    seconds_per_token: ClassVar[float] = 0.0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._answer(400, {"error": {"message": "no tokenizer here"}})
        elif body["model"] != "model":
            self._answer(
                404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
            )
        else:
            self.asked.append(body)
            time.sleep(body["max_tokens"] * self.seconds_per_token)
            usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": self.details}
            said = f"answer {len(self.asked)}"
            self._answer(200, {"choices": [{"text": said}], "usage": usage})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *args: object) -> None:
        """To nobody."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Server, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def rag(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize(
    ("details", "shown"),
    [({"cached_tokens": 0}, "0 of 830 tokens cached"), (None, "? of 830 tokens cached")],
)
def test_a_server_that_does_not_tell_what_it_reused_is_not_taken_for_one_that_reused_nothing(
    url: str, details: dict[str, int] | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "details", details)
    out = rag("model", "--url", url, "--random", "2").stdout
    assert out.count(shown) == 3
    assert ("start it with --enable-prompt-tokens-details" in out) == (details is None)
    assert "Nothing was blended: start it with 'kvstrata serve MODEL --blend'" in out


def test_first_tokens_are_timed_when_all_was_asked_once_and_nothing_is_found_of_that(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first round answers is shown."""
    monkeypatch.setattr(Server, "seconds_per_token", 0.1)
    out = rag("model", "--url", url, "--random", "2").stdout
    assert [f"answer {number}" in out for number in range(1, 7)] == [True] * 3 + [False] * 3
    seconds = [float(each) for each in re.findall(r"(\d+\.\d+) s to the first token", out)]
    assert len(seconds) == 3
    assert max(seconds) < 1.6  # of an answer
    answered, timed = Server.asked[:3], Server.asked[3:]
    assert [each["prompt"] for each in answered] == [each["prompt"] for each in timed]
    assert [each["max_tokens"] for each in Server.asked] == [16] * 3 + [1] * 3
    assert len({each["cache_salt"] for each in answered}) == 1
    assert len({each["cache_salt"] for each in Server.asked}) == 2


def test_what_the_server_refuses_is_said_with_a_remedy(url: str, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for file in files:
        Path(file).write_text("a text")
    missing = rag("other", "--url", url, "--random", "2")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == (
        f"error: {url}/v1/completions answers 404: The model `other` does not exist.\n"
        "  hint: the first argument is a model that GET /v1/models names\n"
    )
    wordless = rag("model", *files, "--url", url)
    assert wordless.returncode == 1
    assert "/tokenize answers 400: no tokenizer here\n  hint: a model without" in wordless.stderr
    nobody = rag("model", "--url", f"http://127.0.0.1:{free_port()}", "--random", "2")
    assert nobody.returncode == 1
    assert "Connection refused\n  hint: start one with 'kvstrata serve MODEL" in nobody.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: model"),
        (["model"], "name files, or give --random 6"),
        (["model", "--random", "1"], "another order takes two documents"),
        (["model", "a", "b", "--random", "2"], "give one of them"),
        (["model", "/no/a", "/no/b"], "/no/a cannot be read as text"),
        (["model", sys.executable, sys.executable], f"{sys.executable} cannot be read as text"),
        (["model", "--random", "2", "--url", "localhost"], "--url 'localhost' is no address"),
    ],
)
def test_wrong_arguments_end_it_with_2(arguments: list[str], complaint: str) -> None:
    done = rag(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
