"""Engines of ``kvstrata bench`` for benches that ask them something of their own."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec.structs import replace

from kvstrata.bench.fleet import Member, environment
from kvstrata.bench.models import Model, random_model
from kvstrata.bench.session import deployment
from kvstrata.bench.traffic import Conversation, Traffic, Turn

__all__ = ["MakeModel", "asked_at_once", "roomy_members"]

MakeModel = Callable[[Path, bool], Model]


@contextmanager
def roomy_members(
    names: Sequence[str], folder: Path | None, make_model: MakeModel = random_model
) -> Iterator[tuple[dict[str, Member], Model]]:
    """Contenders that are ready, whose device caches hold 131,072 tokens, and the model they run.

    They keep their files in a folder of their own below *folder*, and end with the context.
    """
    from vllm.platforms import current_platform

    variables = environment(None)
    with (
        tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=folder) as scratch,
        ExitStack() as started,
    ):
        model = make_model(Path(scratch, "model"), current_platform.is_cpu())
        members = {}
        for name in names:
            plan = deployment(name, model, Path(scratch), model.most_tokens, len(names))
            members[name] = Member(name, replace(plan, device_blocks=plan.roomy_blocks), variables)
            started.callback(members[name].close)
        for member in members.values():
            member.wait_ready()
        yield members, model


def asked_at_once(
    prompts: Sequence[list[int]], answer_tokens: int = 1, *, blend: bool = False
) -> Traffic:
    """All of *prompts* together."""
    talks = [Conversation([Turn(prompt, answer_tokens)]) for prompt in prompts]
    return Traffic(talks, users=len(talks), blend=blend)
