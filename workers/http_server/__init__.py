"""The HTTP server that gateways and workers share: uvicorn's, with bounds on what a peer may send."""
