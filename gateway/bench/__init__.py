"""`paddock bench`: puts the load of many people on an OpenAI-compatible address, and reports the latencies they see.

`workload` makes the requests and the times at which to send them, and `driver` sends them over `connection`. Each call
is recorded on a `Tape`, and `findings` computes all results from the tapes.
"""
