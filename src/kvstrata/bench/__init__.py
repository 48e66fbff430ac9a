"""Measures KVStrata in vLLM beside its peers: the same prompts, in turn, on the same machine."""
