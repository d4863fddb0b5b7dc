"""Pictures and sounds in requests: cut out of bodies, recognised, fetched, and checked against what a model reads."""
