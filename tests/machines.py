"""How long the state machines run."""

from hypothesis import settings


def machine_settings(*, examples: int, steps: int) -> settings:
    """So many runs of so many steps; with the nightly profile 1000 runs at least.

    That is more than 20,000 steps a machine. A run of the server's takes a second.
    """
    nightly = settings().max_examples // 20
    return settings(
        max_examples=max(examples, nightly),
        stateful_step_count=steps,
        deadline=None,
        derandomize=False,  # with it, which is the default where CI is set, each time would be the same
    )


def some_of(numbers: range, first: int) -> range:
    """Every third from the *first* on, modulo three; with the nightly profile all of them."""
    return numbers if is_nightly() else numbers[first % 3 :: 3]


def is_nightly() -> bool:
    return settings().max_examples >= 20_000
