"""Keeps one machine's processes alive: workers, and those that `paddock up` starts beside them. Free of llama.cpp."""
