/* torch's stable C functions, found by name in the libtorch of the process, and its tensors as the
   operator's two implementations see them. */
#ifndef TIGHTKV_TORCH_SHIM_H
#define TIGHTKV_TORCH_SHIM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <string>

extern "C" {
#include "static_cache.h"
}

namespace tightkv {

struct AtenTensor;
struct TorchLibrary;
using Value = uint64_t;  // an argument or a result, or a pointer to it
using Kernel = void (*)(Value *, uint64_t, uint64_t);

struct Torch {
    int (*get_data)(AtenTensor *, void **);
    int (*get_rank)(AtenTensor *, int64_t *);
    int (*get_sizes)(AtenTensor *, int64_t **);
    int (*get_strides)(AtenTensor *, int64_t **);
    int (*get_dtype)(AtenTensor *, int32_t *);
    int (*get_device)(AtenTensor *, int32_t *);
    int (*get_device_index)(AtenTensor *, int32_t *);
    int (*delete_tensor)(AtenTensor *);
    int (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                         AtenTensor **);
    int (*copy)(AtenTensor *, AtenTensor *, int32_t);
    int (*reinterpret)(AtenTensor *, int64_t, const int64_t *, const int64_t *, int64_t,
                       AtenTensor **);
    int (*fragment)(const char *, const char *, uint32_t, TorchLibrary **);
    int (*implementation)(const char *, const char *, const char *, uint32_t, TorchLibrary **);
    int (*define)(TorchLibrary *, const char *);
    // Where the process has them:
    int (*implement)(TorchLibrary *, const char *, Kernel, uint64_t);  // from torch 2.10 on
    int (*implement_before)(TorchLibrary *, const char *, Kernel);
    int (*call)(const char *, const char *, Value *, uint64_t);  // from torch 2.10 on
    int (*call_before)(const char *, const char *, Value *);
    int (*new_value)(Value **);    // from torch 2.13 on
    int (*delete_value)(Value *);
    int (*get_threads)(uint32_t *);
    int (*get_omp_threads)();
};
extern Torch torch;

constexpr uint64_t ABI_VERSION = 2ULL << 56 | 10ULL << 48;  // arguments are as in 2.10
constexpr int32_t CPU = 0, CUDA = 1;

[[noreturn]] void fail(const std::string &why);

class Tensor {
public:
    explicit Tensor(AtenTensor *handle) : handle_(handle) {}
    Tensor(const Tensor &) = delete;
    Tensor &operator=(const Tensor &) = delete;
    ~Tensor()
    {
        if (handle_ != nullptr)
            torch.delete_tensor(handle_);
    }
    AtenTensor *get() const { return handle_; }
    AtenTensor *release()
    {
        AtenTensor *handle = handle_;
        handle_ = nullptr;
        return handle;
    }
    int32_t dtype() const
    {
        int32_t dtype = -1;
        torch.get_dtype(handle_, &dtype);
        return dtype;
    }
    int32_t device_index() const
    {
        int32_t index = -1;
        torch.get_device_index(handle_, &index);
        return index;
    }
    operand describe(const char *name, int32_t device) const;

private:
    AtenTensor *handle_;
};

template <typename T>
T from_value(Value value)
{
    T x;
    std::memcpy(&x, &value, sizeof x);
    return x;
}

template <typename T>
Value to_value(T x)
{
    Value value = 0;
    std::memcpy(&value, &x, sizeof x);
    return value;
}

// The arguments of a call. The tensors belong to it.
struct Arguments {
    Tensor query, key, value, position, left_pad, mask, spec, feedback, pages, ring, sinks, state;
    double scale, softcap;
    int64_t window;
    bool causal;
    int64_t kernels;
    explicit Arguments(Value *stack);
};

// [B, T, Hq, D] of a query [B, Hq, T, D].
AtenTensor *new_output(const operand &query, int32_t dtype, int32_t device, int32_t index);

// A function of a loaded library; false: it has none of that name.
template <typename F>
bool find(void *library, const char *name, F &function)
{
    void *address = dlsym(library, name);
    std::memcpy(&function, &address, sizeof address);
    return address != nullptr;
}

void call_cuda(Value *stack, uint64_t, uint64_t);  // cuda_operator.cpp

}  // namespace tightkv

#endif
