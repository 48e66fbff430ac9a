"""Blended requests of a real engine: what they reuse, and what nobody else ever sees of it."""

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.machines import is_nightly
from tests.vllm.blended import BLOCK_TOKENS, Prompt, Subject, blending, whole_blocks
from tests.vllm.engine import LOGITS, Act, Ask, EngineFailed, report_at_rest
from tests.vllm.oracle import Oracle

pytestmark = pytest.mark.vllm

CHUNK_TOKENS = 64  # ``blend_chunk_size``


@pytest.fixture(scope="module")
def subject(
    tiny_llama: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("blend")
    with blending(tiny_llama, oracle, folder, LOGITS, extra={"blend_again": True}) as made:
        yield made


def test_everything_computed_anew_is_what_vllm_alone_answers(subject: Subject) -> None:
    for documents in ((2, 0), (3, 1, 0)):
        ask = subject.ask(subject.prompt(*documents), {"ratio": 1.0})
        answers = subject.run([ask])
        subject.oracle.check([ask], answers)
        assert answers[ask.id].cached_tokens == whole_blocks(ask.prompt)


def test_documents_in_another_order_are_reused(subject: Subject) -> None:
    prompt = subject.prompt(2, 0, 3)
    assert subject.one(prompt, True).cached_tokens == whole_blocks(prompt)


def test_nobody_else_sees_what_was_blended(subject: Subject) -> None:
    prompt = subject.prompt(3, 2)
    assert subject.one(prompt, {"ratio": 0.0}).cached_tokens == whole_blocks(prompt)
    found = subject.exact(prompt).cached_tokens  # of the device's cache, and of ours
    assert found == len(subject.system + subject.documents[3]) // BLOCK_TOKENS * BLOCK_TOKENS
    subject.engine.reset_prefix_cache()
    assert subject.exact(prompt).cached_tokens == len(prompt) // 64 * 64  # it was computed since


def test_a_request_that_does_not_ask_is_exact(subject: Subject) -> None:
    prompt = subject.prompt(1, 3)
    subject.exact(prompt)
    other = subject.prompt(0, 3)
    ask = Ask("says-nothing", other, 8)
    subject.oracle.check([ask], subject.run([ask]))


def test_a_prompt_that_is_known_whole_has_nothing_to_blend(subject: Subject) -> None:
    prompt = subject.system + subject.text(4 * BLOCK_TOKENS)
    subject.exact(prompt)
    subject.engine.reset_prefix_cache()
    ask = subject.ask(prompt, True)
    answers = subject.run([ask])
    subject.oracle.check([ask], answers)
    assert answers[ask.id].cached_tokens == len(prompt)


def test_blended_tokens_are_counted_as_of_the_host_tier(subject: Subject) -> None:
    host, unknown = (
        f"vllm:prompt_tokens_cached_by_source{{{tier}}}"
        for tier in ("host", "external_unspecified")
    )
    subject.engine.reset_prefix_cache()
    before = subject.engine.counters()
    cached = subject.one(subject.prompt(1, 3), True).cached_tokens
    after = subject.engine.counters()
    assert cached > 0
    assert after[host] - before.get(host, 0) == cached
    assert after.get(unknown, 0) == before.get(unknown, 0)


def test_an_answer_says_from_which_token_on_its_kv_is_approximate(subject: Subject) -> None:
    prompt = subject.prompt(2, 0)
    known = len(subject.system + subject.documents[2])
    assert known == 9 * BLOCK_TOKENS  # and 3 tokens behind it, the first in another place begins
    subject.exact(subject.system + subject.documents[2] + subject.text(3))
    assert subject.one(prompt, True).transfer == {"taint_from": known}
    assert subject.exact(prompt).transfer is None
    received = Ask("passed-on", prompt, 4, transfer={"taint_from": known + 40})
    answers = subject.run([received])
    assert answers[received.id].transfer == {"taint_from": known + BLOCK_TOKENS}


def test_kv_that_its_sender_calls_approximate_is_found_by_nobody(subject: Subject) -> None:
    prompt = subject.system + subject.text(300)
    subject.run([Ask("received", prompt, 4, transfer={"taint_from": len(subject.system)})])
    assert subject.exact(prompt).cached_tokens == len(subject.system)
    subject.engine.reset_prefix_cache()
    other = subject.system + subject.text(300)
    subject.run([Ask("nonsense", other, 4, transfer={"taint_from": 1 << 40})])
    assert subject.exact(other).cached_tokens == len(other) // BLOCK_TOKENS * BLOCK_TOKENS


def test_what_is_not_understood_is_not_blended(subject: Subject) -> None:
    ask = subject.ask(subject.prompt(0, 2), {"ratio": 2})
    subject.oracle.check([ask], subject.run([ask]))


def exact_tokens(subject: Subject, prompt: Prompt) -> int:
    """As far as others have the blocks of *prompt*: its system prompt and its first document.

    The tokens behind it are its own.
    """
    behind = prompt[len(subject.system) :]
    first = next(d for d in subject.documents if behind[: len(d)] == d)
    return len(subject.system + first) // BLOCK_TOKENS * BLOCK_TOKENS


PARTS, MIXES = (20, 50) if is_nightly() else (1, 3)


@pytest.mark.parametrize("part", range(PARTS))
def test_mixes_of_blended_exact_preempted_and_aborted_requests(subject: Subject, part: int) -> None:
    """Exact answers stay those of vLLM alone, and so do blended ones that compute everything.

    So do the distributions of their tokens.
    """
    rng, subject.rng = subject.rng, random.Random(part)
    before = subject.engine.counters()
    counts, most = Counter[str](), 0.0
    for _ in range(MIXES):
        asks, acts = subject.mix(8, resets=subject.rng.randrange(3), logits=True)
        answers = subject.run(asks, *acts)
        aborted = {act.what for act in acts if act.kind == "abort"}
        kept = [ask for ask in asks if ask.id not in aborted]
        exact = [ask for ask in kept if ask.logits]
        most = max(most, subject.oracle.check_distributions(exact, answers))
        for ask in exact:
            if dict(ask.transfer or {})["blend"] is False:
                counts["exact"] += 1
                assert answers[ask.id].cached_tokens <= exact_tokens(subject, ask.prompt)
        blended = [ask for ask in kept if ask not in exact]
        for ask in blended[:1]:  # of what they have computed nobody finds anything
            cached = subject.exact(ask.prompt).cached_tokens
            assert cached >= len(subject.system)
            if answers[ask.id].cached_tokens > exact_tokens(subject, ask.prompt):
                counts["blended, then exact"] += 1
                assert cached <= exact_tokens(subject, ask.prompt)
        counts["requests"] += len(asks)
        counts["aborted"] += len(aborted)
        counts["everything computed anew"] += len(exact)
        counts["blended"] += len(blended)
    counts["everything computed anew"] -= counts["exact"]
    after = subject.engine.counters()
    counts["preemptions"] = round(after["vllm:num_preemptions"] - before["vllm:num_preemptions"])
    print(f"part {part}: {MIXES} mixes, {dict(counts)}, KL at most {most:.1g}")  # noqa: T201 - for pytest -rP
    subject.rng = rng
    seen = ["exact", "everything computed anew", "blended, then exact", "aborted"]
    seen += ["preemptions"] if is_nightly() else []  # of a few mixes the machine's speed decides it
    assert [each for each in seen if not counts[each]] == []


def test_nothing_is_saved_of_a_request_that_is_aborted_while_it_is_blended(
    subject: Subject,
) -> None:
    """Its first tokens are in no run: nothing approximate is before them, and they are not there."""
    for step in (1, 2, 3):  # of four at least: each computes 256 tokens
        prompt = subject.system + subject.text(900) + subject.documents[3] + subject.text(20)
        ask = subject.ask(prompt, {"ratio": 0.0})
        assert ask.id not in subject.run([ask], Act("abort", ask.id, at_step=step))
        subject.engine.reset_prefix_cache()
        assert subject.exact(prompt).cached_tokens == len(subject.system)


def test_afterwards_nothing_is_held(subject: Subject) -> None:
    subject.engine.reset_prefix_cache()
    report_at_rest(subject.engine.transfer["engine_id"])  # type: ignore[index]


def test_audits_find_how_far_answers_are_and_stop_what_is_too_far(
    tiny_llama: Path, oracle: Oracle, tmp_path: Path
) -> None:
    extra = {"blend_audit_share": 1, "blend_audit_limit": 1e-3, "blend_salts": ["tenant"]}
    with blending(tiny_llama, oracle, tmp_path, extra=extra) as subject:
        for documents in ((2, 0), (3, 1)):
            ask = subject.ask(subject.prompt(*documents), {"ratio": 1.0})
            oracle.check([ask], subject.run([ask]))
        assert (subject.count("audits_total", "same"), subject.count("audits_total", "other")) == (
            2,
            0,
        )
        assert subject.count("audit_divergence_total") < 1e-6
        for number in range(6):  # eight audits are enough
            prompt = subject.prompt(number % 4, (number + 1) % 4)
            assert subject.one(prompt, {"ratio": 0.0}).cached_tokens == whole_blocks(prompt)
        assert subject.count("audit_divergence_total") > 1e-2
        assert subject.count("requests_total", "blended") == 8
        assert subject.count("switched_off") == 1

        ask = subject.ask(subject.prompt(2, 3), {"ratio": 0.0})
        oracle.check([ask], subject.run([ask]))
        assert subject.count("requests_total", "switched_off") == 1
        tenant_is_blended(subject, (0, 1))  # whose audits are its own
        assert subject.count("switched_off") == 1

        subject.engine.reset_prefix_cache(connector=True)
        tenant_is_blended(subject, (1, 2))
        assert subject.count("switched_off") == 0


def tenant_is_blended(subject: Subject, documents: tuple[int, int]) -> None:
    """Also where all others have been switched off."""
    for document in subject.documents:
        subject.run([Ask(f"of-{len(document)}", document, 4, salt="tenant")])
    subject.engine.reset_prefix_cache()
    prompt = subject.prompt(*documents)
    salted = Ask("salted", prompt, 4, salt="tenant")
    assert subject.run([salted])["salted"].cached_tokens == whole_blocks(prompt)


def test_a_later_turn_reuses_a_question_and_an_answer_behind_reused_documents(
    tiny_llama: Path, oracle: Oracle, tmp_path: Path
) -> None:
    extra = {"blend_again": True, "tokens_per_block": BLOCK_TOKENS}
    with blending(tiny_llama, oracle, tmp_path, extra=extra) as subject:
        question = subject.prompt(2, 0) + subject.text(90)
        ask = subject.ask(question, {"ratio": 0.0}, tokens=100)
        said = question + tuple(subject.run([ask])[ask.id].tokens)
        of_documents = subject.reused_tokens()
        subject.engine.reset_prefix_cache()

        later = said + subject.text(40)
        assert subject.one(later, {"ratio": 0.0}).cached_tokens == whole_blocks(later)
        behind = len(question) - 133  # three tokens, 40 and 90 behind the last document
        blocks = (len(said) - 1) // BLOCK_TOKENS - -(-behind // BLOCK_TOKENS)
        assert blocks == 7
        again = subject.reused_tokens() - 2 * of_documents
        assert blocks * BLOCK_TOKENS - CHUNK_TOKENS < again <= blocks * BLOCK_TOKENS
        known = subject.system + subject.documents[2]
        assert subject.exact(later).cached_tokens == len(known) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_document_that_was_new_behind_a_reused_one_is_reused(
    tiny_llama: Path, oracle: Oracle, tmp_path: Path
) -> None:
    extra = {"blend_again": True, "tokens_per_block": BLOCK_TOKENS}
    with blending(tiny_llama, oracle, tmp_path, extra=extra) as subject:
        new, unknown = subject.text(200), subject.text(200)
        before, behind = (subject.documents[d] for d in (2, 0))
        prompt = subject.text(5) + before + new + behind + subject.text(40)
        assert subject.one(prompt, {"ratio": 0.0}).cached_tokens == whole_blocks(prompt)
        subject.engine.reset_prefix_cache()

        reused = [subject.reused_tokens()]
        for document in (unknown, new):
            later = subject.text(9) + subject.documents[3] + document + subject.text(40)
            assert subject.one(later, {"ratio": 0.0}).cached_tokens == whole_blocks(later)
            reused.append(subject.reused_tokens())
        start = 5 + len(before)
        whole = ((start + len(new)) // BLOCK_TOKENS - -(-start // BLOCK_TOKENS)) * BLOCK_TOKENS
        of_the_other, of_both = reused[1] - reused[0], reused[2] - reused[1]
        assert whole - CHUNK_TOKENS < of_both - of_the_other <= len(new)
        ask = subject.ask(later, {"ratio": 1.0})
        oracle.check([ask], subject.run([ask]))
        subject.exact(prompt)


def test_a_rope_that_is_not_the_models_is_an_error_at_start(
    tiny_llama: Path, oracle: Oracle, tmp_path: Path
) -> None:
    with (
        pytest.raises(EngineFailed, match="rope_theta is set to 12345, and the model"),
        blending(tiny_llama, oracle, tmp_path, extra={"rope_theta": 12345}),
    ):
        pass


def test_a_server_that_dies_costs_a_prefill_and_no_request(
    tiny_llama: Path, oracle: Oracle, tmp_path: Path
) -> None:
    with blending(tiny_llama, oracle, tmp_path) as subject:
        pid = subject.engine.server_pid()
        assert pid is not None
        asks = [subject.ask(subject.prompt(*d), {"ratio": 1.0}) for d in ((0, 1), (2, 3))]
        kill = Act("call", "kill", at_step=1)
        answers = subject.engine.run([*asks, kill], {"kill": lambda: os.kill(pid, signal.SIGKILL)})
        oracle.check(asks, answers)
