"""`paddock bench`: loads an OpenAI-compatible address as many people would, and reports what they saw.

A source makes the requests (`conversations`, `traces`), `arrivals` times them, `driver` sends them over `connection`.
Each call is recorded on a `Tape`, and all results are computed from the tapes (`findings`).
"""
