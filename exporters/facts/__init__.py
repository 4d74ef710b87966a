"""Requests as rows: replayed from journals or kept as Parquet, and asked in SQL."""
