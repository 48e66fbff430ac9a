"""Questions about the same documents in another order each time, exactly and blended.

    kvstrata serve MODEL --blend --enable-prompt-tokens-details
    python examples/rag.py MODEL guide.txt faq.txt manual.txt --question "How is it installed?"

Needs nothing but Python. A document is tokenized by itself, so that its tokens are the same wherever
it stands: reuse finds equal tokens, not equal text. What vLLM calls cached are all tokens up to the
end of what is blended, those computed anew, too: `kvstrata_blend_tokens_total` in its metrics says how
many were reused. `--random 6` makes up six documents instead, of
token ids, for a model without a tokenizer.
"""

import argparse
import json
import random
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple


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
    with urllib.request.urlopen(request, timeout=600) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def ask(url: str, model: str, prompt: list[int], *, blend: bool) -> Answer:
    """The first tokens of an answer; ``blend`` is all that a client has to say."""
    started = time.perf_counter()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("documents", nargs="*", type=Path)
    parser.add_argument("--question", default="Summarise the documents.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--random", type=int, default=0, help="so many made-up documents")
    parser.add_argument("--seed", type=int, default=0, help="of these")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    if options.random:
        documents = [[rng.randrange(1, 1000) for _ in range(400)] for _ in range(options.random)]
        question = [rng.randrange(1, 1000) for _ in range(30)]
    else:
        texts = [f"\n\n{file.read_text()}\n\n" for file in options.documents]
        documents = [tokenized(options.url, options.model, text) for text in texts]
        question = tokenized(options.url, options.model, options.question)

    def told(what: str, order: list[list[int]], *, blend: bool) -> bool:
        prompt = [token for document in order for token in document] + question
        answer = ask(options.url, options.model, prompt, blend=blend)
        cached = "?" if answer.cached_tokens is None else answer.cached_tokens
        first = answer.approximate_from
        approximate = "" if first is None else f", approximate from token {first} on"
        print(
            f"{what:34} {answer.seconds:6.2f} s, {cached} of {answer.prompt_tokens} "
            f"tokens cached{approximate}  {answer.text!r}"
        )
        return answer.cached_tokens is not None

    turned = documents[::-1]
    tells = [
        told("once, computed", documents, blend=False),
        told("another order, blended", turned, blend=True),
        told("the same again, computed exactly", turned, blend=False),
    ]
    if not any(tells):
        print("The server does not tell: start it with --enable-prompt-tokens-details")


if __name__ == "__main__":
    main()
