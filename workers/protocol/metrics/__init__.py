"""Declares every metric of gateways and workers (name, meaning, labels, buckets), counts them and answers scrapes.

metric.py       the declaration of one metric
of_gateway.py, of_worker.py, of_process.py   the metrics
catalogue.py    all of them together
who.py          who is to blame for a request that failed
book.py         opens the families that count, and renders them for a scrape
"""
