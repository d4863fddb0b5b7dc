"""Predicts the memory that a worker takes, on each device and in main memory, before it is started.

llama.cpp itself lays a model and its contexts out without taking memory for them (`dry_run`, in a helper process that
`prediction` starts). `predict` adds what it does not count, such as Python, and spreads the sum over GPUs. `devices`
tells what is free, `kv_plan` how many cells fit there, `taken` what a running worker takes, and `learned` keeps that
for the next prediction.
"""
