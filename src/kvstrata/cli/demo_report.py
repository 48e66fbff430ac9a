"""What the demo has measured, and whether it is as it should be."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from kvstrata.cli.demo_engine import Answered, Phase, PhaseEnded

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["TITLES", "Measured", "PhaseResult"]

TITLES: Final[Mapping[Phase, str]] = {
    "plain": "cold, without KVStrata",
    "cold": "cold",
    "device": "device hit",
    "host": "host hit",
    "disk": "disk hit, after a restart",
}
_COLD: Final[Sequence[Phase]] = ("plain", "cold")
_STEADY: Final = 1.25  # medians of cold prompts, the longer over the shorter
_TIERS_ASKED: Final[Mapping[Phase, frozenset[str]]] = {
    "host": frozenset({"host"}),
    "disk": frozenset({"disk"}),
}


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One row: medians over the prompts, without the warm-up."""

    phase: Phase
    first_token_seconds: list[float]  # one a prompt
    reused_tokens: int
    tokens_equal: int  # prompts, with the warm-up, whose output equals that without KVStrata
    prompts: int  # with the warm-up

    @property
    def median_seconds(self) -> float:
        return median(self.first_token_seconds)


@dataclass(slots=True)
class Measured:
    """Collects answers; the first prompt warms up and is not timed."""

    prompt_tokens: int
    tokens_per_block: int
    answers: dict[Phase, list[Answered]] = field(default_factory=dict)
    found_blocks: dict[Phase, dict[str, int]] = field(default_factory=dict)

    def add(self, event: Answered | PhaseEnded) -> None:
        if isinstance(event, Answered):
            self.answers.setdefault(event.phase, []).append(event)
        else:
            self.found_blocks[event.phase] = event.found_blocks

    @property
    def reusable_tokens(self) -> int:
        """Tokens of a prompt in whole blocks; one token at least is always computed."""
        return (self.prompt_tokens - 1) // self.tokens_per_block * self.tokens_per_block

    @property
    def cold_seconds(self) -> float:
        """What speed-ups are relative to: the median of all cold prompts, with KVStrata and without.

        They are of two engines at two times, so a moment in which the machine was slow counts less.
        """
        return median(
            answer.first_token_seconds
            for phase in _COLD
            for answer in self.answers.get(phase, [])[1:]
        )

    @property
    def is_steady(self) -> bool:
        """Whether cold prompts took both engines about as long."""
        medians = [r.median_seconds for r in self.results() if r.phase in _COLD]
        return max(medians) <= min(medians) * _STEADY

    def medians(self, phases: Collection[Phase]) -> str:
        """Return those of *phases*, which have ended, in one line."""
        return ", ".join(
            f"{TITLES[r.phase].partition(',')[0]} {r.median_seconds * 1000:.0f} ms"
            for r in self.results()
            if r.phase in phases
        )

    def results(self) -> list[PhaseResult]:
        reference = [answer.tokens for answer in self.answers["plain"]]
        return [
            PhaseResult(
                phase,
                [answer.first_token_seconds for answer in answers[1:]],
                int(median(answer.reused_tokens for answer in answers[1:])),
                sum(a.tokens == tokens for a, tokens in zip(answers, reference, strict=True)),
                len(answers),
            )
            for phase, answers in self.answers.items()
        ]

    def faults(self) -> list[str]:
        """Return what refutes KVStrata: tokens that differ, hits that did not hit."""
        return [*self._wrong_tokens(), *self._wrong_reuse(), *self._wrong_tiers()]

    def _wrong_tokens(self) -> Iterator[str]:
        for result in self.results():
            different = result.prompts - result.tokens_equal
            if different:
                yield (
                    f"{TITLES[result.phase]}: the tokens of {different} of {result.prompts} "
                    "prompts differ from those without KVStrata"
                )

    def _wrong_reuse(self) -> Iterator[str]:
        for phase, answers in self.answers.items():
            is_cold = phase in _COLD
            for answer in answers:
                if is_cold and answer.reused_tokens:
                    yield (
                        f"{TITLES[phase]}: prompt {answer.prompt} reused "
                        f"{answer.reused_tokens} tokens and should have reused none"
                    )
                elif not is_cold and answer.reused_tokens < self.reusable_tokens:
                    yield (
                        f"{TITLES[phase]}: prompt {answer.prompt} reused "
                        f"{answer.reused_tokens} of {self.reusable_tokens} tokens"
                    )

    def _wrong_tiers(self) -> Iterator[str]:
        for phase, wanted in _TIERS_ASKED.items():
            if phase not in self.answers:
                continue
            found = {tier for tier, blocks in self.found_blocks.get(phase, {}).items() if blocks}
            if found != wanted:
                seen = ", ".join(sorted(found)) or "nowhere"
                yield f"{TITLES[phase]}: blocks were found in: {seen}"

    def table(self) -> "Table":
        from rich.text import Text

        from kvstrata.cli.reporting import plain_table

        numbers = ("first token", "speed-up", "reused tokens")
        table = plain_table("", *numbers, "tokens", right=numbers)
        for result in self.results():
            equal = result.tokens_equal == result.prompts
            speed_up = f"{self.cold_seconds / result.median_seconds:.1f}x"
            table.add_row(
                TITLES[result.phase],
                f"{result.median_seconds * 1000:.1f} ms",
                "" if result.phase in _COLD else speed_up,
                f"{result.reused_tokens:,} of {self.prompt_tokens:,}",
                "equal"
                if equal
                else Text(f"{result.tokens_equal} of {result.prompts}", "bold red"),
            )
        return table

    def as_plain(self) -> dict[str, Any]:
        """Return results and faults as values that JSON has."""
        results = self.results()
        return {
            "prompts": results[0].prompts - 1,
            "prompt_tokens": self.prompt_tokens,
            "cold_seconds": self.cold_seconds,
            "phases": [
                {
                    "phase": result.phase,
                    "first_token_seconds": result.first_token_seconds,
                    "median_seconds": result.median_seconds,
                    "speed_up": self.cold_seconds / result.median_seconds,
                    "reused_tokens": result.reused_tokens,
                    "tokens_equal": result.tokens_equal == result.prompts,
                    "found_blocks": self.found_blocks.get(result.phase, {}),
                }
                for result in results
            ],
            "faults": self.faults(),
        }

    def series(self) -> Sequence[tuple[str, list[float]]]:
        """Return the title and the latencies, in milliseconds, of each row."""
        return [
            (TITLES[r.phase], [seconds * 1000 for seconds in r.first_token_seconds])
            for r in self.results()
        ]
