"""What the chart's values may be: `helm/values.schema.json`, and their table in `helm/README.md`."""
