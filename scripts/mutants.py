"""Break the vLLM adapter in ways that must not go unnoticed, and see which test notices.

    python scripts/mutants.py [words of a mutant's name]

Each mutant is one change of the source, made in a copy of the working tree in which the scheduler
tests then run until the first one fails. A line for each says which test that was. Exits with 1
unless a test has failed with every mutant: where the tests hang, none has.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = "src/kvstrata/integration/vllm"
TESTS = (
    "tests/vllm/test_scheduler_saves.py",
    "tests/vllm/test_scheduler_failures.py",
    "tests/vllm/test_scheduler_loads.py",
    "tests/vllm/test_scheduler_ends.py",
    "tests/vllm/test_layerwise.py",
    "tests/vllm/test_at_once.py",
    "tests/vllm/test_siblings.py",
    "tests/vllm/test_states.py",
    "tests/vllm/test_schedulers_machine.py",
)
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fate:
    kind: Literal["killed", "TIMED OUT", "SURVIVED"]
    how: str = ""


MUTANTS = (
    Mutant(
        "frontier: one token too many at the end",
        "scheduler.py",
        "min(computed, request.num_tokens - 1)",
        "min(computed + 1, request.num_tokens)",
    ),
    Mutant(
        "frontier: placeholders count as tokens",
        "scheduler.py",
        "computed = min(computed, request.num_tokens)",
        "pass",
    ),
    Mutant(
        "frontier: what vLLM tells of placeholders is not heard",
        "scheduler.py",
        " - placeholders(output, request_id)",
        "",
    ),
    Mutant(
        "frontier: drafts count as confirmed",
        "scheduler.py",
        "computed = min(computed, request.num_tokens)",
        "computed = request.num_tokens_with_spec",
    ),
    Mutant(
        "frontier: a load that runs counts as computed",
        "scheduler.py",
        "self._saves_wanted and not loading:",
        "self._saves_wanted:",
    ),
    Mutant(
        "frontier: what another connector has yet to load counts as computed",
        "scheduler.py",
        " or request.request_id in self._parked\n",
        "\n",
    ),
    Mutant(
        "frontier: what stands on another connector's failed load is saved",
        "scheduler.py",
        "            self._saves.reset()\n            for each",
        "            for each",
    ),
    Mutant(
        "frontier: who is let in is not looked at",
        "scheduler.py",
        "            self._due.look(request.request_id)\n",
        "            pass\n",
    ),
    Mutant(
        "frontier: who is looked at is not again",
        "scheduler.py",
        "            self._due.look(request_id, max(missing, 1))\n",
        "",
    ),
    Mutant(
        "lease: kept when its request is aborted",
        "loads.py",
        "        self._drop(request_id)\n        self._awaits.finished",
        "        self._awaits.finished",
    ),
    Mutant(
        "lease: kept over a reset",
        "loads.py",
        "        for request_id in list(self._lookups):\n            self._drop(request_id)",
        "        return",
    ),
    Mutant(
        "lease: kept when vLLM takes nothing of a match",
        "loads.py",
        "            self._link.abandon(lookup.pending, lookup.connection)\n            return []",
        "            return []",
    ),
    Mutant(
        "lease: requests in line have all of host memory",
        "loads.py",
        "if self.ahead.fits(self._missing_blocks(request, computed)):",
        "if True:",
    ),
    Mutant(
        "lease: all whose turn has come have all of host memory",
        "loads.py",
        "return is_first or self.ahead.fits(self._loading_blocks + blocks, AT_ITS_TURN)",
        "return True",
    ),
    Mutant(
        "load: copies nothing",
        "pieces.py",
        "[self._piece(load, 0, len(load.slots))]",
        "[Piece([], len(load.slots))]",
    ),
    Mutant(
        "failure: of a load is not reported",
        "worker.py",
        "self._not_received.add(task.request_id)\n",
        "pass\n",
    ),
    Mutant(
        "failure: of a load is reported of another request",
        "worker.py",
        "self._not_received.add(task.request_id)",
        'self._not_received.add("r1" if task.request_id == "r0" else "r0")',
    ),
    Mutant(
        "failure: of a load is forgotten, and it is tried for ever",
        "loads.py",
        "self._refused.add(load.request_id)",
        "pass",
    ),
    Mutant(
        "failure: of a save is ignored",
        "saves.py",
        "failed.get(task_id, save.whole_blocks)",
        "save.whole_blocks",
    ),
    Mutant(
        "report: of a save, twice by one rank, stands for another",
        "saves.py",
        "save.workers_left &= ~workers",
        "save.workers_left >>= 1",
    ),
    Mutant(
        "report: of a load, twice by one rank, stands for another",
        "loads.py",
        "load.workers_left &= ~workers",
        "load.workers_left >>= 1",
    ),
    Mutant(
        "touch: not at all",
        "blocks.py",
        "        self._pool.touch(blocks)\n",
        "",
    ),
    Mutant(
        "touch: blocks are neither held nor freed",
        "blocks.py",
        "        self._pool = pool\n        self._limit",
        "        self._pool = pool\n"
        "        self._pool = type('Idle', (), {'touch': print, 'free_blocks': print, "
        "'blocks': pool.blocks})\n"
        "        self._limit",
    ),
    Mutant(
        "free: twice",
        "blocks.py",
        "        self._pool.free_blocks(reversed(blocks))\n",
        "        self._pool.free_blocks(reversed(blocks))\n"
        "        self._pool.free_blocks(reversed(blocks))\n",
    ),
    Mutant(
        "free: never",
        "blocks.py",
        "        self._pool.free_blocks(reversed(blocks))\n",
        "",
    ),
    Mutant(
        "state: that of a whole prompt is loaded",
        "blocks.py",
        "(request.num_tokens - 1) // self.tokens\n",
        "request.num_tokens // self.tokens\n",
    ),
    Mutant(
        "state: loaded to where nobody looks",
        "blocks.py",
        "block_ids[g][end // self.groups[g].device_tokens - 1]",
        "block_ids[g][0]",
    ),
    Mutant(
        "state: saved under the name of the block before",
        "saves.py",
        "        key = math.key(request, blocks - 1)\n",
        "        key = math.key(request, max(0, blocks - 2))\n",
    ),
    Mutant(
        "state: believed to be saved when it is gone",
        "saves.py",
        "                self._known.pop(name_of_state(key), None)\n",
        "                pass\n",
    ),
    Mutant(
        "state: groups change places",
        "saves.py",
        "held = self._held.hold([device_blocks[group] for group in groups])",
        "held = self._held.hold([device_blocks[group] for group in groups[::-1]])",
    ),
    Mutant(
        "state: that of a reset request is saved",
        "scheduler.py",
        "            if tracked is None or tracked.offered_blocks == sys.maxsize:\n"
        "                continue\n"
        "            blocks, rest",
        "            if tracked is None:\n                continue\n            blocks, rest",
    ),
    Mutant(
        "layerwise: who shares a failed load goes on from it",
        "layerwise.py",
        "            request.num_computed_tokens = min(\n"
        "                request.num_computed_tokens, first_block * device_tokens\n"
        "            )\n",
        "            pass\n",
    ),
    Mutant(
        "layerwise: vLLM gives a failed load to others",
        "scheduler.py",
        "        self._pool.evict_blocks({block.block_id for block in self._pool.blocks})\n",
        "",
    ),
    Mutant(
        "layerwise: what stands on a failed load is saved",
        "scheduler.py",
        "        self._saves.withdraw_offers()\n",
        "",
    ),
    Mutant(
        "layerwise: a load writes the device block that is computed",
        "loads.py",
        "runs_at_once=True)",
        "runs_at_once=False)",
    ),
    Mutant(
        "at once: a request waits on top of what may fail",
        "loads.py",
        "if computed and self._at_once.has_begun:",
        "if False:",
    ),
    Mutant(
        "at once: a step loads without an end",
        "loads.py",
        "            self._at_once.take(len(load.slots))\n",
        "            pass\n",
    ),
    Mutant(
        "at once: a failed load is told of as if its request waited",
        "worker.py",
        "        if task.at_once:  # vLLM",
        "        if False:  # vLLM",
    ),
    Mutant(
        "pipeline: no step is planned before the one before it has ended",
        "scheduler.py",
        "further_stages: int = vllm_config.parallel_config.pipeline_parallel_size - 1",
        "further_stages = 0",
    ),
)


def run(tree: Path, mutant: Mutant) -> Fate:
    """What becomes of *mutant*, and the test that kills it."""
    file = tree / ADAPTER / mutant.file
    source = file.read_text()
    if source.count(mutant.old) != 1:
        sys.exit(f"mutant {mutant.name!r}: its text is {source.count(mutant.old)} times in {file}")
    file.write_text(source.replace(mutant.old, mutant.new))
    try:
        return first_failure(tree)
    finally:
        file.write_text(source)


def first_failure(tree: Path) -> Fate:
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:randomly", "-p", "no:logging"]
    command += ["-o", "faulthandler_timeout=0"]  # which would end them without a word of a test
    path = f"{tree / 'src'}:{tree}"
    environment = os.environ | {"PYTHONPATH": path, "HYPOTHESIS_PROFILE": "find"}
    try:
        done = subprocess.run(
            [*command, "--show-capture=no", *TESTS],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Fate("TIMED OUT", f"after {TIMEOUT_SECONDS} s, and no test has failed")
    if done.returncode == 0:
        return Fate("SURVIVED")
    found = re.search(r"^(?:FAILED|ERROR) \S*/(\S+)", done.stdout, re.MULTILINE)
    if found is None:
        sys.exit(f"the tests do not run:\n{done.stdout}{done.stderr}")
    return Fate("killed", f"by {found[1]}")


def all_are_killed(fates: Counter[str]) -> bool:
    """Of those that were tried, and there were some."""
    return set(fates) == {"killed"}


def main() -> None:
    words = " ".join(sys.argv[1:])
    fates = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for mutant in MUTANTS:
            if words not in mutant.name:
                continue
            fate = run(tree, mutant)
            fates[fate.kind] += 1
            print(f"{mutant.name:56}  {fate.kind} {fate.how}".rstrip(), flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(fates.items())))
    sys.exit(0 if all_are_killed(fates) else 1)


if __name__ == "__main__":
    main()
