"""What computes plans: `fake` needs numpy only and ships with the product."""
