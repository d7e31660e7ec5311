/* The kernels of static caches on a GPU, as export/cuda_programs.py wrote them. Whoever makes such a
   file decides what runs: it is as trusted as the model beside it. Sizes and numbers are checked, so
   that a damaged file is refused. */
#ifndef TIGHTKV_KERNEL_FILE_H
#define TIGHTKV_KERNEL_FILE_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tightkv {

enum Place {  // what a launch gets in place of the bytes in the file
    AT_QUERY, AT_KEY, AT_VALUE, AT_POSITION, AT_LEFT_PAD, AT_FEEDBACK, AT_PAGES, AT_RING, AT_SINKS,
    AT_STATE, AT_OUT, AT_REFUSED, OPERANDS,
    COUNT = 100, SCALE = 101, CONSTANTS = 1000, SCRATCH = 2000
};

struct Relocation {
    int64_t argument, at, what, offset;
};

struct Launch {
    int64_t cubin, grid[3], threads, shared;
    std::string name;
    std::vector<std::string> arguments;
    std::vector<Relocation> relocations;
};

enum Kind { APPEND, STEP, ATTEND_NEW };  // of programs: recorder.py

struct Program {
    int64_t kind, tokens;
    std::vector<int64_t> scratch;
    std::vector<Launch> launches;
};

struct KernelSet {
    int64_t major, minor, bf16, batch, query_heads, heads, dim, ring, sinks, pages, record_bytes;
    int64_t max_tokens, feedback, window;  // window 0: none
    bool ring_codes;
    double softcap;                        // 0: none
    std::vector<std::string> cubins, constants;
    std::vector<Program> programs;
};

/* Adds the sets of a file to those that calls may name; throws std::runtime_error. */
void add_kernels(const char *data, size_t size);
std::shared_ptr<const KernelSet> find_kernels(int64_t key);  // null: none of that name

}  // namespace tightkv

#endif
