"""What operators ask of the gateway itself, with an admin's key."""
