"""A trace as tables, time series, Parquet files, data frames and a timeline."""
