// Sealing with feedback, by itself or beside an append of few tokens: then both are one launch before attention.

#include "append_tokens.cuh"
#include "seal_pages.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, D <= 256 ? 4 : 2)
    seal(const AppendParams a, const float *factors, int batch) {
    extern __shared__ __align__(128) char memory[];
    // What is read was there before the append that this follows, and that has begun.
    launch_dependents();
    seal_pages(a, factors, batch, blockIdx.x, gridDim.x, memory);
    grid_dependency_wait();  // who waits for this waits for the append
}

// The first `sealing` blocks seal: they take longer. It is for few blocks, so they have many registers.
extern "C" __global__ void __launch_bounds__(32 * WARPS, D > 256 || (D == 64 && KEY_BITS == 2) ? 2 : 3)
    append_and_seal(const AppendParams a, const float *factors, int batch, int sealing) {
    extern __shared__ __align__(128) char memory[];
    grid_dependency_wait();
    launch_dependents();  // attention, mostly
    const int number = (int)blockIdx.x - sealing;
    if (number < 0)
        seal_pages(a, factors, batch, blockIdx.x, sealing, memory);
    else if (D == 256)  // the other way would leave too few registers for sealing
        append_tokens(a, number / 2, number % 2 == 0, 0, 1);
    else
        append_few_tokens<1>(a, number / 2, number / 2 + 1, number % 2 == 0);
}
