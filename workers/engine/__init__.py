"""Many conversations on one llama.cpp context: one thread, no HTTP, no Redis, no event loop.

`Engine.submit` takes a tokenised prompt from any thread; its events leave once per step through the `emit` function
that the engine was given. `stepper` is the step itself. `roster` decides which calls run and which wait, `scheduler`
what the next step computes. `cache` keeps the prefixes, `sequence` the state of one call, `text` decides which
characters may leave.
"""
