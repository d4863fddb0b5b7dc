"""The contract between gateways and workers: every type, key and frame that crosses that wire.

The worker is the server on this wire, so the contract lives here. `gateway` imports this package, and few others below
`workers` (the import contracts in `pyproject.toml`). This package imports the standard library and msgspec only.

Life of one call on the wire (paths are below the worker's address; each request carries the worker's `access_token`
(`control`), made from the shared secret, as `Authorization: Bearer`):

1. The gateway process holds one `GET /v1/events?gateway=<id>` open to each worker: an SSE stream (`framing`).
2. `POST /v1/submit` with a `Submit`; the worker renders, tokenises, checks the limits and answers `202 Accepted`
   with `Accepted`, or an error status with a `Failure`.
3. Each engine step in which any of this gateway's calls produced something is one SSE event whose data is a JSON
   array of `events.CallEvent`, its id `<worker boot id>-<step>`.
4. The call ends with exactly one `Finished` or `Failed` event. `POST /v1/cancel` with a `Cancel` ends calls early;
   a cancelled call emits nothing more.
"""
