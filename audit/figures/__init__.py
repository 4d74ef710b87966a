"""What can be counted of requests: one declaration a figure, and the sums of figures."""
