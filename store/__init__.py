"""Bytes at rest: object stores, the job log, manifests, verify and restore. Knows no torch and no network service."""
