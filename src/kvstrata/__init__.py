"""KVStrata keeps the KV cache of LLM inference alive below device memory and gives it back.

Importing this package imports neither torch nor an inference engine.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
