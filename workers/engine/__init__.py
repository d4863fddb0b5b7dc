"""Many conversations on one llama.cpp context: one thread, no HTTP, no Redis, no event loop.

`Engine.submit` takes a tokenised prompt from any thread; what comes of it leaves once per step through the `emit`
function that the engine was given. `scheduler` decides what the next step computes, `slots` who holds a place,
`sequence` what one call is at, `text` which characters may leave.
"""
