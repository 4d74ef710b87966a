"""Explanations made from accounts: why figures differ, and why prompt tokens missed the prefix cache."""
