"""One step of the engine: decides which calls run and what the step computes, runs it, and draws tokens."""
