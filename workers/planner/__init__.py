"""The planner: one of the machines on a Redis, elected, decides for all of them which models are loaded where."""
