"""The metrics of a worker, and the parts of metrics that gateways use too, based on `prometheus_client`.

types.py      counters, gauges and histograms, bounded and cheap: declared, created, collected
worker.py     a worker's metrics that are counted as calls start and end
readings.py   a worker's metrics whose values are read at a scrape, such as those of its engine
page.py       answers scrapes
"""
