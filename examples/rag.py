"""Questions about the same documents in another order each time, exactly and blended.

    kvstrata serve MODEL --blend --enable-prompt-tokens-details
    python examples/rag.py MODEL guide.txt faq.txt manual.txt --question "How is it installed?"

Needs nothing but Python. A document is tokenized by itself, so that its tokens are the same wherever
it stands: reuse finds equal tokens, not equal text. What vLLM calls cached are all tokens up to the
end of what is blended, those computed anew, too: `kvstrata_blend_tokens_total` in its metrics says how
many were reused. `--random 6` makes up six documents instead, of token ids, for a model without a tokenizer.

All questions are asked twice: for their answers, which are shown, and then for the first token alone, which is
timed, since a server is slow the first time it does anything. Each time has a `cache_salt` of its own, so that
nothing is found that was asked before. Of blended prompts 1 % are audited, that is, also computed whole: where
the blended one took longest, run it again.
"""

import argparse
import json
import random
import secrets
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

QUESTIONS = (  # about documents in which order, forwards or backwards, and whether blended
    ("once, computed", 1, False),
    ("another order, blended", -1, True),
    ("the same again, computed exactly", -1, False),
)


class Failed(Exception):
    """The server did not do what it was asked; the message says what to do."""


class Answer(NamedTuple):
    text: str
    seconds: float
    cached_tokens: int | None  # None: the server does not tell
    prompt_tokens: int
    approximate_from: int | None  # the token from which on it has blended KV


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            found: dict[str, Any] = json.load(reply)
    except urllib.error.HTTPError as e:
        raise Failed(f"{url} answers {e.code}: {reason(e)}") from e
    except (OSError, ValueError) as e:
        raise Failed(
            f"no vLLM answers at {url}: {getattr(e, 'reason', e)}\n"
            "  hint: start one with 'kvstrata serve MODEL --blend', or name another with --url"
        ) from e
    return found


def reason(error: urllib.error.HTTPError) -> str:
    """What vLLM says of it, with what to do about a model that it does not serve."""
    text = error.read().decode(errors="replace")
    try:
        said = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = text.strip() or error.reason
    if error.url.endswith("/tokenize"):
        return f"{said}\n  hint: a model without a tokenizer is asked with --random 6"
    if error.code == 404:
        return f"{said}\n  hint: the first argument is a model that GET /v1/models names"
    return said


def ask(url: str, model: str, prompt: list[int], salt: str, tokens: int, *, blend: bool) -> Answer:
    """The first ``tokens`` of an answer; ``blend`` is all that a client has to say."""
    started = time.perf_counter()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "cache_salt": salt,
        "kv_transfer_params": {"blend": blend},
    }
    reply = post(f"{url}/v1/completions", body)
    usage = reply["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    seconds = time.perf_counter() - started
    taint = (reply.get("kv_transfer_params") or {}).get("taint_from")
    return Answer(reply["choices"][0]["text"], seconds, cached, usage["prompt_tokens"], taint)


def tokenized(url: str, model: str, text: str) -> list[int]:
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    tokens: list[int] = post(f"{url}/tokenize", body)["tokens"]
    return tokens


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="as the server calls it")
    parser.add_argument("documents", nargs="*", type=Path, help="files of text, two or more")
    parser.add_argument("--question", default="Summarise the documents.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--random", type=int, default=0, help="so many made-up documents")
    parser.add_argument("--seed", type=int, default=0, help="of these")
    options = parser.parse_args()
    if options.documents and options.random:
        parser.error("documents are given, and --random makes some up: give one of them")
    if max(len(options.documents), options.random) < 2:
        parser.error("another order takes two documents: name files, or give --random 6")
    if not options.url.startswith(("http://", "https://")):
        parser.error(f"--url {options.url!r} is no address, for example http://127.0.0.1:8000")
    options.texts = []
    for file in options.documents:
        try:
            options.texts.append(f"\n\n{file.read_text()}\n\n")
        except (OSError, UnicodeDecodeError) as e:
            parser.error(f"{file} cannot be read as text: {e}")
    return options


def tokens_of(options: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """The documents and the question."""
    if options.random:
        rng = random.Random(options.seed)
        documents = [[rng.randrange(1, 1000) for _ in range(400)] for _ in range(options.random)]
        return documents, [rng.randrange(1, 1000) for _ in range(30)]
    documents = [tokenized(options.url, options.model, text) for text in options.texts]
    return documents, tokenized(options.url, options.model, options.question)


def asked(options: argparse.Namespace, answer_tokens: int) -> list[Answer]:
    """What is answered to each of ``QUESTIONS``."""
    documents, question = tokens_of(options)
    salt = secrets.token_hex(8)
    answers = []
    for _, step, blend in QUESTIONS:
        prompt = [token for document in documents[::step] for token in document] + question
        answers.append(ask(options.url, options.model, prompt, salt, answer_tokens, blend=blend))
        time.sleep(1.0)  # until the KV of this one is saved
    return answers


def main() -> None:
    options = parsed()
    try:
        answers = asked(options, 16)
        timings = asked(options, 1)
    except Failed as e:
        sys.exit(f"error: {e}")
    for (what, *_), answer, timing in zip(QUESTIONS, answers, timings, strict=True):
        cached = "?" if timing.cached_tokens is None else timing.cached_tokens
        first = answer.approximate_from
        approximate = "" if first is None else f", approximate from token {first} on"
        print(
            f"{what:34} {timing.seconds:6.2f} s to the first token, "
            f"{cached} of {answer.prompt_tokens} tokens cached{approximate}  {answer.text!r}"
        )
    if all(answer.cached_tokens is None for answer in timings):
        print("The server does not tell: start it with --enable-prompt-tokens-details")
    if all(answer.approximate_from is None for answer in answers + timings):
        print(
            "Nothing was blended: start it with 'kvstrata serve MODEL --blend'; its log may say why"
        )


if __name__ == "__main__":
    main()
