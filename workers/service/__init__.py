"""The ASGI side of one worker: submit, cancel, the event stream, heartbeat, metrics. The engine behind it is a port."""
