"""A fleet of real processes under mixed load and faults for a long time: what grows, and what is left behind."""
