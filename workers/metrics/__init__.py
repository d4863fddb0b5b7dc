"""The metrics of a worker, and the parts of metrics that gateways use too, on Prometheus' own client.

declaration.py   the declaration of one metric, and the buckets: plain data
types.py         counters, gauges and histograms, bounded and cheap
groups.py        creates them in a registry, in the groups that docs/metrics.md lists
process.py       the metrics of any process
worker.py        the metrics of a worker that are counted by call
readings.py      those that are read when somebody scrapes, its engine's among them
page.py          answers scrapes
"""
