"""Boards drawn without a Grafana, from a running Prometheus: `python deploy/grafana/preview_board.py` shows how.

source.py   asks Prometheus what a panel asks
words.py    numbers with Grafana's units
plots.py    lines and heat as SVG
page.py     the panels of a board on one page
"""
