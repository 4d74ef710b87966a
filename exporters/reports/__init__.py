"""What commands print, and the HTML report."""
