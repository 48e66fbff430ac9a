"""Engines with each of the rules that choose what is computed anew, by its name in the settings."""

from pathlib import Path

import pytest
from tests.machines import is_nightly
from tests.vllm.blended import blending, whole_blocks
from tests.vllm.oracle import Oracle

pytestmark = pytest.mark.vllm

RULES = ["query", "hkvd", "boundary"]
if is_nightly():  # these run nothing that those, and other tests, do not
    RULES += ["two_round_query", "random", "full"]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_blends_and_answers_as_vllm_alone_where_it_computes_everything(
    rule: str, tiny_llama: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """The boundaries of a document here are all of it; what others choose at 0.3 answers otherwise."""
    extra = {"blend_rule": rule, "recompute_boundary": 256, "blend_audit_share": 1}
    with blending(tiny_llama, oracle, tmp_path, extra=extra) as subject:
        for ratio in (1.0, 0.3):
            ask = subject.ask(subject.prompt(2, 0, 3), {"ratio": ratio})
            answers = subject.run([ask])
            assert answers[ask.id].cached_tokens == whole_blocks(ask.prompt)
            computes_all = ratio == 1.0 or rule in {"full", "boundary"}
            if computes_all:
                oracle.check([ask], answers)
            assert (subject.count("audit_divergence_total") < 1e-6) == computes_all
        assert subject.count("requests_total", "blended") == 2
        assert subject.count("audits_total") == 2
