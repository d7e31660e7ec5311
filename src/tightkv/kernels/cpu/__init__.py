"""Native kernels in C with SIMD, for caches on the CPU."""
