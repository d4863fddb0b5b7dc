"""Many conversations on one llama.cpp context: one thread, no HTTP, no Redis, no event loop.

`Engine.submit` takes a tokenised prompt from any thread; what comes of it leaves once per step through the `emit`
function that the engine was given. `stepper` is the step itself, `roster` decides who runs and who waits, `scheduler`
what the next step computes, `cache` keeps the prefixes; `sequence` is what one call is at, `text` which characters may
leave.
"""
