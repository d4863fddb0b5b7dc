"""The accounts service, part by part."""
