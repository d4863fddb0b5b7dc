"""A panel as Grafana's JSON has it: the classic dashboard model of Grafana 11 and later.

Source: grafana.com/docs, "Dashboard JSON model"; a panel's own options: grafana/grafana, public/app/plugins/panel.
"""

from __future__ import annotations

from collections.abc import Callable

from boards.panel import Panel, Query, Shape

Json = dict[str, object]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
WORST_FIRST_CALCS = ["lastNotNull", "max"]


def panel_json(panel: Panel, number: int, x: int, y: int) -> Json:
    """`number`: unique on its board; `x`, `y`: its upper left corner on the grid."""
    common: Json = {
        "id": number,
        "type": str(panel.shape),
        "title": panel.title,
        "description": panel.description,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "options": OPTIONS[panel.shape](panel),
    }
    if panel.shape is Shape.TEXT:
        return common
    filled = common | {
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "targets": [_target(panel.shape, query, place) for place, query in enumerate(panel.queries)],
    }
    return filled | {"transformations": _one_table(panel)} if panel.shape is Shape.TABLE else filled


def row_json(title: str, number: int, y: int) -> Json:
    place = {"h": 1, "w": 24, "x": 0, "y": y}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _target(shape: Shape, query: Query, place: int) -> Json:
    form = {Shape.TABLE: "table", Shape.HEAT: "heatmap"}.get(shape, "time_series")
    instant = shape is Shape.TABLE
    return {
        "refId": chr(ord("A") + place),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "format": form,
        "instant": instant,
        "range": not instant,
        "legendFormat": query.legend or "__auto",
    }


def _defaults(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    steps += [{"color": step.color, "value": step.value} for step in panel.steps]
    by_steps = panel.shape is Shape.FIGURE
    defaults: Json = {
        "color": {"mode": "thresholds" if by_steps else "palette-classic"},
        "custom": CUSTOM[panel.shape](panel),
        "mappings": [],
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "unit": panel.unit,
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    return defaults


def _overrides(panel: Panel) -> list[Json]:
    return [
        {"matcher": {"id": "byName", "options": column}, "properties": [{"id": "unit", "value": unit}]}
        for column, unit in panel.units
    ]


def _one_table(panel: Panel) -> list[Json]:
    """The queries' tables side by side: one row per set of labels, a column per query."""
    names = {f"Value #{chr(ord('A') + place)}": query.legend for place, query in enumerate(panel.queries)}
    if len(panel.queries) == 1:
        names["Value"] = panel.queries[0].legend
    organize: Json = {"excludeByName": {"Time": True, "__name__": True}, "indexByName": {}, "renameByName": names}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}]


def _line_style(panel: Panel) -> Json:
    return {
        "axisBorderShow": False,
        "axisCenteredZero": False,
        "axisColorMode": "text",
        "axisLabel": "",
        "axisPlacement": "auto",
        "drawStyle": "line",
        "fillOpacity": 25 if panel.stacked else 8,
        "gradientMode": "none",
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "insertNulls": False,
        "lineInterpolation": "linear",
        "lineWidth": 1,
        "pointSize": 4,
        "scaleDistribution": {"type": "linear"},
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
    }


def _no_style(panel: Panel) -> Json:
    return {}


def _cell_style(panel: Panel) -> Json:
    return {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True, "inspect": False}


def _heat_style(panel: Panel) -> Json:
    hidden = {"legend": False, "tooltip": False, "viz": False}
    return {"hideFrom": hidden, "scaleDistribution": {"type": "linear"}}


def _lines(panel: Panel) -> Json:
    legend = {"calcs": WORST_FIRST_CALCS, "displayMode": "table", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _figure(panel: Panel) -> Json:
    return {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "value",
    }


def _table(panel: Panel) -> Json:
    return {"cellHeight": "sm", "showHeader": True}


def _heat(panel: Panel) -> Json:
    return {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "exponent": 0.5,
            "fill": "dark-orange",
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Oranges",
            "steps": 64,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": panel.unit},
    }


def _text(panel: Panel) -> Json:
    return {"mode": "markdown", "content": panel.text}


OPTIONS: dict[Shape, Callable[[Panel], Json]] = {
    Shape.LINES: _lines,
    Shape.FIGURE: _figure,
    Shape.TABLE: _table,
    Shape.HEAT: _heat,
    Shape.TEXT: _text,
}
CUSTOM: dict[Shape, Callable[[Panel], Json]] = {
    Shape.LINES: _line_style,
    Shape.FIGURE: _no_style,
    Shape.TABLE: _cell_style,
    Shape.HEAT: _heat_style,
}
