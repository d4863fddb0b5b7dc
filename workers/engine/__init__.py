"""Computes many conversations on one llama.cpp context: one thread, no HTTP, no Redis, no event loop.

`Engine.submit` takes a tokenised prompt from any thread. Once per step, the engine hands the events of all calls to its
`emit` function. `step` decides which calls run and computes one step for them, `cache` keeps their prefixes, `disk`
keeps prefixes in files that outlive the process, `adapters` the LoRA weights; `pooled` computes embeddings and scores.
"""
