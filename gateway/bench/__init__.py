"""`paddock bench`: asks an OpenAI-compatible address as many people would, and tells what they saw.

A source says what is asked (`conversations`, `traces`), `arrivals` say when, `driver` asks over `connection`. What came
is kept in a `Tape` per call, and all that is told afterwards is worked out of the tapes (`findings`).
"""
