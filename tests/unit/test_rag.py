"""examples/rag.py, with a server that is made up; tests/cli/test_serve_http.py has a real one."""

from typing import Any

import pytest
from examples import rag


@pytest.mark.parametrize(
    ("details", "shown"),
    [({"cached_tokens": 0}, "0 of 830 tokens cached"), (None, "? of 830 tokens cached")],
)
def test_a_server_that_does_not_tell_what_it_reused_is_not_taken_for_one_that_reused_nothing(
    details: dict[str, int] | None,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answered(url: str, body: dict[str, Any]) -> dict[str, Any]:
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": details}
        return {"choices": [{"text": ""}], "usage": usage}

    monkeypatch.setattr(rag, "post", answered)
    monkeypatch.setattr("sys.argv", ["rag.py", "model", "--random", "2"])
    rag.main()
    out = capsys.readouterr().out
    assert out.count(shown) == 3
    assert ("start it with --enable-prompt-tokens-details" in out) == (details is None)
