"""Every metric of gateways and workers: its name, what it says, its labels and buckets; and how they are kept.

metric.py       what is said of one metric
of_gateway.py, of_worker.py, of_process.py   the metrics
catalogue.py    all of them together
who.py          who is to blame for a request that failed
book.py         counts, and writes them down for a scrape
"""
