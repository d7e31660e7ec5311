"""What a page is: where its bytes lie, and how keys and values get into them."""
