"""Many conversations on one llama.cpp context: one thread, no HTTP, no Redis, no event loop.

`Engine.submit` takes a tokenised prompt from any thread; its events leave once per step through the `emit` function
that the engine was given. `step` decides which calls run and computes one step for them, `cache` keeps their prefixes,
`disk` what outlives the process, `adapters` the LoRA weights; `pooled` is the engine for embeddings and scores.
"""
