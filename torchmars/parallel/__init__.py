"""Who is who among the ranks."""
