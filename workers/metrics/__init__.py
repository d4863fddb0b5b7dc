"""The metrics of a worker, and the parts of metrics that gateways use too, on Prometheus' own client.

types.py      counters, gauges and histograms, bounded and cheap: declared, created, collected
worker.py     the metrics of a worker that are counted by call
readings.py   those that are read when somebody scrapes, its engine's among them
page.py       answers scrapes
"""
