"""The console: pages that show and change the fleet in a browser. Their sources are in `web`, built into `static`."""
