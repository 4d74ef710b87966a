"""Token statements for billing: lines in FOCUS columns, a hash chain over them, and a signature."""
