"""What the scripts that run other test suites read from reports and metadata."""

from collections import Counter
from pathlib import Path

import pytest
from scripts import compatibility, mutants, vllm_tests

REPORT = """<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1">
<testcase name="good"/><testcase name="also"/>
<testcase name="bad"><failure/></testcase>
<testcase name="broken"><error/></testcase>
<testcase name="left out"><skipped/></testcase>
</testsuite></testsuites>"""


def distribution(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    info.joinpath("METADATA").write_text(
        "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires)]) + "\n"
    )


def test_errors_are_failures() -> None:
    outcome = compatibility.outcome_of(REPORT)
    assert outcome == compatibility.Outcome(passed=2, failed=2, skipped=1)
    assert str(outcome) == "2 passed, **2 failed**, 1 skipped"
    assert str(compatibility.Outcome()) == "0 passed"


def test_matrix_has_a_row_a_version_and_says_why_one_is_refused() -> None:
    rows: dict[str, dict[str, str] | str] = {
        "0.32.0": {"scheduler": "3 passed", "restart": "1 passed"},
        "0.29.0": "vLLM 0.29.0 lacks everything",
    }
    assert compatibility.matrix(rows, ("scheduler", "restart")).splitlines() == [
        "| vLLM | scheduler | restart |",
        "|---|---|---|",
        "| 0.32.0 | 3 passed | 1 passed |",
        "| 0.29.0 | refused: vLLM 0.29.0 lacks everything |  |",
    ]


def test_folder_needs_what_neither_it_nor_this_environment_has(tmp_path: Path) -> None:
    distribution(
        tmp_path,
        "engine",
        "1.0",
        "pytest>=1",  # here
        "pytest-not-there>=2",
        "beside==2.0",  # in the folder
        "numpy<0.1",  # here, too new
        "torchvision",  # left out
        "windows-only; sys_platform == 'win32'",
        "optional; extra == 'more'",
    )
    distribution(tmp_path, "beside", "2.0", "deeper")
    assert compatibility.unmet(tmp_path) == ["deeper", "numpy<0.1", "pytest-not-there>=2"]


def test_folder_that_is_complete_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[list[str]] = []

    def install(wanted: list[str], folder: Path) -> None:
        installed.append(wanted)
        if len(installed) == 1:
            distribution(folder, "engine", "1.0", "other-engine>=3")
        else:
            distribution(folder, "other-engine", "3.1")

    monkeypatch.setattr(compatibility, "_install", install)
    folder = compatibility.make_overlay("engine", "1.0", tmp_path)
    assert installed == [["engine==1.0"], ["other-engine>=3"]]
    assert compatibility.make_overlay("engine", "1.0", tmp_path) == folder
    assert len(installed) == 2


def test_needs_that_never_end_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(wanted: list[str], folder: Path) -> None:
        if wanted == ["engine==1.0"]:
            distribution(folder, "engine", "1.0", "nobody-has-it")

    monkeypatch.setattr(compatibility, "_install", install)
    with pytest.raises(SystemExit, match=r"engine 1\.0: still unmet: nobody-has-it"):
        compatibility.make_overlay("engine", "1.0", tmp_path)


def test_tests_that_fail_only_with_kvstrata_are_told() -> None:
    plain = vllm_tests.outcomes(REPORT)
    assert plain == {
        "good": "passed",
        "also": "passed",
        "bad": "failed",
        "broken": "failed",
        "left out": "skipped",
    }
    assert vllm_tests.count(plain) == "2 passed, 2 failed, 1 skipped"
    pointed = {**plain, "good": "skipped", "bad": "passed"}
    assert vllm_tests.worse(plain, pointed) == {"good": "skipped"}
    assert vllm_tests.worse(plain, {"good": "passed"}) == {"also": "failed"}


def test_tests_that_have_run_kvstrata_are_counted() -> None:
    name, value = vllm_tests._IN_A_STEP
    noted = f'<properties><property name="{name}" value="{value}"/></properties>'
    report = REPORT.replace('name="good"/>', f'name="good">{noted}</testcase>').replace(
        "<failure/>", f"{noted}<failure/>"
    )
    assert (vllm_tests.in_a_step(REPORT), vllm_tests.in_a_step(report)) == (0, 2)
    assert vllm_tests.outcomes(report) == vllm_tests.outcomes(REPORT)


def test_engine_that_is_refused_is_told_apart_from_a_failure() -> None:
    report = REPORT.replace(
        "<error/>", "<error>kvstrata.core.errors.ConfigError: the model has X</error>"
    )
    pointed = vllm_tests.outcomes(report)
    assert pointed["broken"] == "refused"
    assert vllm_tests.worse({"broken": "passed"}, pointed) == {"broken": "refused"}


def test_what_is_known_of_a_test_explains_no_other_end_of_it() -> None:
    known = "test_scheduler.py::test_preempt_during_execution"
    assert "waits for them" in vllm_tests.reason(known, "failed")
    for test, how in [
        (known, "refused"),
        (known, "skipped"),
        ("test_async_scheduler.py::test_preempt_during_execution", "failed"),
        ("test_scheduler.py::test_schedule_order[True]", "refused"),
        ("test_scheduler.py::test_schedule_order[False]", "failed"),
    ]:
        assert vllm_tests.reason(test, how) == vllm_tests.UNEXPLAINED
    refused = vllm_tests.reason("test_scheduler.py::test_schedule_order[False]", "refused")
    assert "neither chunked prefill" in refused


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_changes_one_place_of_the_source(mutant: mutants.Mutant) -> None:
    source = (mutants.ROOT / mutants.ADAPTER / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")


@pytest.mark.parametrize(
    ("test", "fate"),
    [
        ("assert False", mutants.Fate("killed", "by test_it.py::test_it")),
        ("pass", mutants.Fate("SURVIVED")),
        (
            "import time; time.sleep(60)",
            mutants.Fate("TIMED OUT", "after 5 s, and no test has failed"),
        ),
    ],
    ids=["killed", "survived", "hung"],
)
def test_fate_of_a_mutant_is_told_by_its_tests(
    test: str, fate: mutants.Fate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(f"def test_it():\n    {test}\n")
    monkeypatch.setattr(mutants, "TESTS", ["tests/test_it.py"])
    seconds = 5 if fate.kind == "TIMED OUT" else 120  # to start pytest on a loaded machine
    monkeypatch.setattr(mutants, "TIMEOUT_SECONDS", seconds)
    assert mutants.first_failure(tmp_path) == fate


def test_only_a_test_that_fails_kills_a_mutant() -> None:
    assert mutants.all_are_killed(Counter({"killed": 32}))
    assert not mutants.all_are_killed(Counter({"killed": 31, "TIMED OUT": 1}))
    assert not mutants.all_are_killed(Counter({"killed": 31, "SURVIVED": 1}))
    assert not mutants.all_are_killed(Counter())
