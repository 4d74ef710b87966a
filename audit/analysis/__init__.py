"""Why figures differ, and why prompt tokens missed the prefix cache."""
