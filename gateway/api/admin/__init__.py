"""Routes on which operators ask the gateway about itself, with an admin's key."""
