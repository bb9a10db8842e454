"""Breaks things on purpose and judges the result; nothing imports it."""
