"""The boards of Grafana, as values; `python deploy/grafana/write_boards.py` writes them to helm/files/dashboards.

promql.py   expressions that the boards share
panel.py    what one panel shows; shapes.py: its JSON
board.py    a board: rows of panels, variables, links
the rest    one file per board
"""
