"""One worker as an ASGI server: submit, cancel, event stream, heartbeat, metrics. It knows the engine by Protocols."""
