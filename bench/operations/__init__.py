"""Counts what the hot paths do, in operations: ``python -m bench.operations``."""
