// Append: a block has a sequence, a head and a side (key or value); of many tokens, every so many-th page too.

#include "append_tokens.cuh"

#define MOST_THREADS 256

extern "C" __global__ void __launch_bounds__(MOST_THREADS, HADAMARD && D <= 128 ? 6 : D <= 256 ? 4 : 2) append(const AppendParams a) {
    grid_dependency_wait();
    launch_dependents();  // attention, mostly
    append_tokens(a, blockIdx.x, blockIdx.y == 0, blockIdx.z, gridDim.z);
}
