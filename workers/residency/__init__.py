"""Residency: which models have workers on which machines and devices, decided by one pure function."""
