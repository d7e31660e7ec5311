// Append: a block has a head of a sequence and a side (key or value); of many tokens, every so many-th page too.

#include "append_tokens.cuh"

#define MOST_THREADS 256
#define MOST_HEADS 4  // of a block that has several

extern "C" __global__ void __launch_bounds__(MOST_THREADS, HADAMARD && D <= 128 ? 6 : D <= 256 ? 4 : 2)
    append(const AppendParams a) {
    grid_dependency_wait();
    launch_dependents();  // attention, mostly
    append_tokens(a, blockIdx.x, blockIdx.y == 0, blockIdx.z, gridDim.z);
}

// A block has as many as `own` of all `heads`, of which a warp has one.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, D <= 128 ? 4 : 2)
    append_few(const AppendParams a, int heads, int own) {
    grid_dependency_wait();
    launch_dependents();  // attention, mostly
    const int first = blockIdx.x * own;
    append_few_tokens<MOST_HEADS>(a, first, min(first + own, heads), blockIdx.y == 0);
}
