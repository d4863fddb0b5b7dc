"""The disk tier: saved KV in sealed files, which outlive the worker and may be shared by several."""
