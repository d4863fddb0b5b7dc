"""Keeps the processes of one machine alive: workers, and what `paddock up` starts beside them. Free of llama.cpp."""
