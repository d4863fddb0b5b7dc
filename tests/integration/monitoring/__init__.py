"""Rules, alerts and boards on a real Prometheus."""
