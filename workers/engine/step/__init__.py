"""One step of the engine: which calls run, what the step computes, how tokens are drawn."""
