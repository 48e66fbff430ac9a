"""A run: contenders are started, take turns through the rounds of every workload, and are ended."""

import os
import random
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from kvstrata.bench.contenders import CONTENDERS, Deployment
from kvstrata.bench.fleet import EngineFailed, Member, environment
from kvstrata.bench.limits import measure_rates
from kvstrata.bench.meter import Meter
from kvstrata.bench.models import Model
from kvstrata.bench.processes import Role, Usage
from kvstrata.bench.profiles import PROFILES
from kvstrata.bench.record import About, Begun, Machine, Measured, Options, Rates, RunFolder
from kvstrata.bench.restarts import run_with_restart
from kvstrata.bench.services import free_ports
from kvstrata.bench.traffic import Answer, Conversation, Counters, Ran, Traffic, Turn
from kvstrata.bench.workloads import workloads
from kvstrata.bench.workloads.workload import COLD_TOKENS, Scale, Step, Workload, one_prompt, tokens

__all__ = ["Progress", "Session", "deployment", "rounds_of"]

_DEVICE_TOKENS: Final = 12_288  # what the device caches hold, but that of "roomy"
_ROOMY_TOKENS: Final = 131_072
_HOST_TOKENS: Final = 87_381  # 512 MiB at 6 KiB a token: all of a round
_SMALL_HOST_PROMPTS: Final = 1.2  # host memory before a tier below holds so many of the longest
_BELOW_TOKENS: Final = 700_000
_ROUND_SEED: Final = "kvstrata"
_COLD_TIMES: Final = 3
_ONE_SECOND: Final = 1.0  # until it is measured
_WARM_TOKENS: Final = 8
_BLOCK_TOKENS: Final = 64  # KVStrata's


class Progress(Protocol):
    """Who is told how far the run is."""

    def say(self, doing: str) -> None: ...

    def advance(self, share: float) -> None:
        """So much of a round of one workload is done."""
        ...

    def end_round(self) -> None:
        """A round of one workload is done."""
        ...


def rounds_of(options: Options, workload: str) -> int:
    return options.rounds or PROFILES[options.profile].rounds_of(workload)


def deployment(
    name: str, model: Model, scratch: Path, longest_tokens: int, engines: int
) -> Deployment:
    """Of *name*, one of *engines* that run side by side, for prompts of up to *longest_tokens*."""
    block = model.engine_block_tokens
    port, store_port = free_ports(2)
    return Deployment(
        contender=name,
        folder=str(scratch / name),
        model=model.path,
        dtype=model.dtype,
        engine_id=f"bench-{os.getpid()}-{name}",
        block_tokens=block,
        device_blocks=_DEVICE_TOKENS // block,
        roomy_blocks=_ROOMY_TOKENS // block,
        host_bytes=_HOST_TOKENS * model.token_bytes,
        small_host_bytes=int(_SMALL_HOST_PROMPTS * longest_tokens * model.token_bytes),
        disk_bytes=_BELOW_TOKENS * model.token_bytes,
        max_model_tokens=model.most_tokens,
        device_share=0.9 / engines,
        port=port,
        store_port=store_port,
        token_bytes=model.token_bytes,
    )


@dataclass(frozen=True, slots=True)
class Session:
    """Runs what *folder* has not got yet. Engines keep their files below *scratch*."""

    folder: RunFolder
    options: Options
    model: Model
    machine: Machine
    begun: Begun
    scratch: Path
    progress: Progress

    def go(self) -> None:
        """Raises ``ConfigError`` if something is left to do of a run of another machine."""
        made = workloads(Path(self.options.trace) if self.options.trace else None)
        fleet: dict[str, Member] = {}
        try:
            for name in self.options.workloads:
                rounds = range(rounds_of(self.options, name))
                numbers = [number for number in rounds if not self.folder.is_done(name, number)]
                wanted = [n for n in made[name].contenders if n in self.options.contenders]
                for number in numbers:
                    self.folder.check_machine(self.machine)
                    started = self._man(fleet, wanted, name)
                    scale = self._scale()
                    self._warm_up(fleet.values() if number == numbers[0] else started, scale)
                    if self.folder.about() is None:
                        scale = self._describe(next(iter(fleet.values())), scale)
                    self.folder.note(self.begun)
                    self._round(name, made[name], number, list(fleet.values()), scale)
        finally:
            _end(fleet.values())

    def _man(self, fleet: dict[str, Member], wanted: Sequence[str], workload: str) -> list[Member]:
        """End the engines that *workload* does not need, and start those that it lacks, be it that
        they have died of what they were asked before.
        """
        left = [n for n, member in fleet.items() if n not in wanted or member.has_ended]
        _end([fleet.pop(name) for name in left])
        lacking = [name for name in wanted if name not in fleet]
        if lacking:
            self.progress.say(f"{workload}: starting {len(lacking)} engines")
        variables = environment(Path(self.options.lmcache) if self.options.lmcache else None)
        for name in lacking:
            longest = max(PROFILES[self.options.profile].prompt_tokens)
            plan = deployment(name, self.model, self.scratch, longest, len(wanted))
            fleet[name] = Member(name, plan, variables)
        for name in lacking:
            fleet[name].wait_ready()
        return [fleet[name] for name in lacking]

    def _scale(self) -> Scale:
        """With the time of a cold prompt, once it was measured."""
        profile = PROFILES[self.options.profile]
        about = self.folder.about()
        return Scale(
            prompt_tokens=profile.prompt_tokens,
            users=profile.users,
            rates=profile.rates,
            seconds=profile.seconds,
            requests=profile.requests,
            vocabulary=self.model.vocabulary,
            most_tokens=self.model.most_tokens,
            cold_seconds=about.cold_seconds if about else _ONE_SECOND,
        )

    def _describe(self, first: Member, scale: Scale) -> Scale:
        """With the time that *first* takes for a cold prompt now, in use as all are that are timed."""
        cold = min(_cold_first_token(first, scale) for _ in range(_COLD_TIMES))
        model = self.model
        self.folder.describe(About(self.machine, model.title, cold, first.name, model.token_bytes))
        return replace(scale, cold_seconds=cold)

    def _warm_up(self, fleet: Iterable[Member], scale: Scale) -> None:
        """So that no contender is asked for the first time when it counts."""
        dice = random.Random(1)
        prompt = tokens(dice, scale, COLD_TOKENS)
        for member in fleet:
            for _ in range(2):
                member.run(one_prompt(prompt, answer_tokens=4))
                member.settle()
                member.reset()

    def _round(
        self, name: str, workload: Workload, number: int, fleet: list[Member], scale: Scale
    ) -> None:
        port = next((m.store_port for m in fleet if "valkey" in CONTENDERS[m.name].services), None)
        self.folder.append(Rates(name, number, measure_rates(self.scratch, port)))
        dice = random.Random(f"{_ROUND_SEED} {name} {number}")
        steps = list(workload.steps(dice, scale))
        for place, step in enumerate(steps):
            able = [member for member in fleet if _can_take(member, step)]
            if able:
                self.progress.say(f"{name}, round {number + 1}: {step.name}")
            # Nobody always behind the same one, whose bytes are in the caches of the processor.
            random.Random(f"order {name} {number} {place}").shuffle(able)
            for member in able:
                measured = _take(member, step, scale)
                if step.measured:
                    self.folder.append(measured.of(name, number, place))
                self.progress.advance(1 / len(able) / len(steps))
        self.folder.end_round(name, number)
        self.progress.say(f"{name}, round {number + 1}")
        self.progress.end_round()


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one contender did with one step."""

    step: Step
    contender: str
    ran: Ran
    used: dict[Role, Usage]
    moved_bytes: dict[str, int]
    as_meant: bool

    def of(self, workload: str, number: int, place: int) -> Measured:
        return Measured(
            workload,
            number,
            place,
            self.step.name,
            self.contender,
            self.ran.seconds,
            self.ran.answers,
            self.used,
            self.moved_bytes,
            self.step.tier,
            self.as_meant,
            self.ran.silent_seconds,
        )


def _end(members: Collection[Member]) -> None:
    for member in members:
        member.hang_up()
    for member in members:
        member.close()


def _can_take(member: Member, step: Step) -> bool:
    if step.tier in {None, "none", "device"}:
        return True
    return CONTENDERS[member.name].can_hit(str(step.tier), step.longest_tokens)


def _cold_first_token(member: Member, scale: Scale) -> float:
    """Of a prompt that no cache has seen, not by the warm-up and not by an earlier run."""
    prompt = tokens(random.Random(), scale, COLD_TOKENS)
    seconds = member.run(one_prompt(prompt)).answers[0].first_token_seconds
    member.settle()
    return seconds


def _take(member: Member, step: Step, scale: Scale) -> _Taken:
    """What *member* did; if it died of it, that."""
    try:
        return _take_alive(member, step, scale)
    except EngineFailed as e:
        failure = str(e).partition(";")[0]
        answers = [
            Answer(talk, turn, 0, 0, 0.0, [], 0, failure)
            for talk, conversation in enumerate(step.traffic.conversations)
            for turn in range(len(conversation.turns))
        ]
        return _Taken(step, member.name, Ran(0.0, answers), {}, {}, as_meant=False)


def _take_alive(member: Member, step: Step, scale: Scale) -> _Taken:
    if step.before == "reset":
        member.reset()
    elif step.before == "restart":
        member.restart()
    # An engine in use: not one whose code has left the caches of the processor.
    member.run(Traffic([Conversation([Turn(tokens(random.Random(), scale, _WARM_TOKENS), 1)])]))
    meter = Meter(member)
    before = meter.counted
    ran = _asked(member, step, meter)
    member.settle()
    meter.pause()
    as_meant, now = all(_is_meant(answer, step) for answer in ran.answers), meter.counted
    if before and now and step.tier in {"disk", "remote"} and now.promoted_blocks:
        as_meant &= _promoted(before, now, step)
    return _Taken(step, member.name, ran, meter.used, meter.moved_bytes, as_meant)


def _asked(member: Member, step: Step, meter: Meter) -> Ran:
    if step.restart_seconds is not None:
        return run_with_restart(member, step.traffic, step.restart_seconds, meter)
    member.begin(step.traffic)
    if step.kill_server_seconds is not None:
        time.sleep(step.kill_server_seconds)
        meter.pause(busy=True)
        member.kill_server()
        meter.go_on(busy=True)
    return member.end()


def _is_meant(answer: Answer, step: Step) -> bool:
    if answer.failure is not None:
        return False
    return step.cached_tokens is None or answer.cached_tokens == step.cached_tokens


def _promoted(before: Counters, now: Counters, step: Step) -> bool:
    """All of what was reused came from the tier that it was to come from."""
    tier = str(step.tier)
    blocks = now.promoted_blocks[tier] - before.promoted_blocks.get(tier, 0)
    return blocks * _BLOCK_TOKENS == step.cached_tokens
