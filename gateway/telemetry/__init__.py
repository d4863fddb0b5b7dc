"""What the gateway tells its operators: metrics, one log line per request, the trail that both are made from."""
