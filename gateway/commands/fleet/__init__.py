"""The commands that show and change what runs: status, ps, top, logs, stop, run, pull."""
