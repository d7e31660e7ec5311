"""What a model needs: bits of its layers, metrics of its queries, key scales and centers."""
