/* Registers tightkv::static_attention with the libtorch of the process, when this library is
   loaded. torch's stable C functions are found by name at run time, so neither its headers nor its
   version matter to the build. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

extern "C" {
#include "static_cache.h"
}

namespace {

// --- torch's stable C interface ---
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
    int (*delete_tensor)(AtenTensor *);
    int (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                         AtenTensor **);
    int (*fragment)(const char *, const char *, uint32_t, TorchLibrary **);
    int (*implementation)(const char *, const char *, const char *, uint32_t, TorchLibrary **);
    int (*define)(TorchLibrary *, const char *);
    // Where the process has them:
    int (*implement)(TorchLibrary *, const char *, Kernel, uint64_t);  // from torch 2.10 on
    int (*implement_before)(TorchLibrary *, const char *, Kernel);
    int (*delete_value)(Value *);  // from torch 2.13 on
    int (*get_threads)(uint32_t *);
    int (*get_omp_threads)();
} torch;

constexpr uint64_t ABI_VERSION = 2ULL << 56 | 10ULL << 48;  // the arguments below are as in 2.10
constexpr int32_t CPU = 0;

// The numbers of torch's dtypes never change; struct operand has its own.
struct Dtype {
    int32_t torch;
    int64_t ours;
};
constexpr Dtype DTYPES[] = {{0, UINT8},    {4, INT64},     {5, FLOAT16},
                            {6, FLOAT32},  {11, BOOLEAN},  {15, BFLOAT16}};

// --- one call ---
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
    operand describe(const char *name) const;

private:
    AtenTensor *handle_;
};

[[noreturn]] void fail(const std::string &why)
{
    throw std::runtime_error("tightkv::static_attention: " + why);
}

operand Tensor::describe(const char *name) const
{
    operand x{};
    x.rank = -1;
    if (handle_ == nullptr)
        return x;
    int64_t *sizes = nullptr, *strides = nullptr;
    int32_t device = -1;
    if (torch.get_rank(handle_, &x.rank) || torch.get_sizes(handle_, &sizes) ||
        torch.get_strides(handle_, &strides) || torch.get_device(handle_, &device))
        fail(std::string(name) + " is not a dense tensor");
    if (device != CPU)
        fail(std::string(name) + " is not on the CPU");
    if (x.rank > MOST_RANK)
        fail(std::string(name) + " has " + std::to_string(x.rank) + " dimensions");
    if (torch.get_data(handle_, &x.data))
        fail(std::string(name) + " has no data");
    std::memcpy(x.size, sizes, sizeof(int64_t) * static_cast<size_t>(x.rank));
    std::memcpy(x.stride, strides, sizeof(int64_t) * static_cast<size_t>(x.rank));
    x.dtype = OTHER_DTYPE;
    for (const Dtype &entry : DTYPES)
        if (entry.torch == dtype())
            x.dtype = entry.ours;
    return x;
}

template <typename T>
T from_value(Value value)
{
    T x;
    std::memcpy(&x, &value, sizeof x);
    return x;
}

// The caller owns it.
AtenTensor *tensor_of(Value value) { return from_value<AtenTensor *>(value); }

AtenTensor *optional_tensor_of(Value value)
{
    Value *inner = from_value<Value *>(value);
    if (inner == nullptr)
        return nullptr;
    AtenTensor *handle = tensor_of(*inner);
    if (torch.delete_value != nullptr)
        torch.delete_value(inner);
    else
        delete inner;
    return handle;
}

AtenTensor *new_output(const operand &query, int32_t dtype)
{
    if (query.rank != 4)
        fail("query has " + std::to_string(query.rank) + " dimensions; expected 4");
    const int64_t *q = query.size;
    const int64_t size[4] = {q[0], q[2], q[1], q[3]};
    const int64_t stride[4] = {q[2] * q[1] * q[3], q[1] * q[3], q[3], 1};
    AtenTensor *out = nullptr;
    if (torch.empty_strided(4, size, stride, dtype, CPU, -1, &out))
        fail("no memory for the output");
    return out;
}

int64_t threads()
{
    uint32_t count = 1;
    if (torch.get_threads != nullptr)
        torch.get_threads(&count);
    else if (torch.get_omp_threads != nullptr)
        count = static_cast<uint32_t>(torch.get_omp_threads());
    return count;
}

constexpr const char *SCHEMA =
    "static_attention(Tensor query, Tensor key, Tensor value, Tensor position, Tensor? left_pad, "
    "Tensor? mask, Tensor spec, Tensor? feedback, Tensor(a!) pages, Tensor(b!) ring, "
    "Tensor(c!) sinks, Tensor(d!) state, float scale, float softcap, int window, bool causal) "
    "-> Tensor";

void call(Value *stack, uint64_t, uint64_t)
{
    const Tensor query(tensor_of(stack[0])), key(tensor_of(stack[1])), value(tensor_of(stack[2]));
    const Tensor position(tensor_of(stack[3])), left_pad(optional_tensor_of(stack[4]));
    const Tensor mask(optional_tensor_of(stack[5])), spec(tensor_of(stack[6]));
    const Tensor feedback(optional_tensor_of(stack[7])), pages(tensor_of(stack[8]));
    const Tensor ring(tensor_of(stack[9])), sinks(tensor_of(stack[10]));
    const Tensor state(tensor_of(stack[11]));
    static_args args{};
    args.query = query.describe("query");
    args.key = key.describe("key");
    args.value = value.describe("value");
    args.position = position.describe("position");
    args.left_pad = left_pad.describe("left_pad");
    args.mask = mask.describe("mask");
    args.spec = spec.describe("spec");
    args.feedback = feedback.describe("feedback");
    args.pages = pages.describe("pages");
    args.ring = ring.describe("ring");
    args.sinks = sinks.describe("sinks");
    args.state = state.describe("state");
    args.scale = from_value<double>(stack[12]);
    args.softcap = from_value<double>(stack[13]);
    args.window = from_value<int64_t>(stack[14]);
    args.causal = from_value<bool>(stack[15]);
    args.threads = threads();
    Tensor out(new_output(args.query, query.dtype()));
    args.out = out.describe("out");
    char why[512];
    if (tightkv_static_attention(&args, why, sizeof why))
        fail(why);
    AtenTensor *result = out.release();
    stack[0] = 0;
    std::memcpy(&stack[0], &result, sizeof result);
}

// --- registration ---
template <typename F>
bool find(void *library, const char *name, F &function)
{
    void *address = dlsym(library, name);
    std::memcpy(&function, &address, sizeof address);
    return address != nullptr;
}

const char *find_torch(void *library)
{
    const char *missing = nullptr;
    const auto need = [&](const char *name, auto &function) {
        if (!find(library, name, function))
            missing = name;
    };
    need("aoti_torch_get_data_ptr", torch.get_data);
    need("aoti_torch_get_dim", torch.get_rank);
    need("aoti_torch_get_sizes", torch.get_sizes);
    need("aoti_torch_get_strides", torch.get_strides);
    need("aoti_torch_get_dtype", torch.get_dtype);
    need("aoti_torch_get_device_type", torch.get_device);
    need("aoti_torch_delete_tensor_object", torch.delete_tensor);
    need("aoti_torch_empty_strided", torch.empty_strided);
    need("aoti_torch_library_init_fragment", torch.fragment);
    need("aoti_torch_library_init_impl", torch.implementation);
    need("aoti_torch_library_def", torch.define);
    find(library, "torch_delete_stable_ivalue", torch.delete_value);
    find(library, "torch_get_num_threads", torch.get_threads);
    find(library, "omp_get_max_threads", torch.get_omp_threads);
    if (!find(library, "torch_library_impl", torch.implement))
        need("aoti_torch_library_impl", torch.implement_before);
    return missing;
}

std::string register_operator()
{
    void *library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr)  // linked into the program, or not there
        library = dlopen(nullptr, RTLD_NOW);
    if (const char *missing = find_torch(library))
        return "libtorch has no " + std::string(missing) +
               ": load it first (import torch), version 2.9 or later";
    TorchLibrary *fragment = nullptr, *implementation = nullptr;
    const char *name = "static_attention";
    if (torch.fragment("tightkv", __FILE__, __LINE__, &fragment) ||
        torch.define(fragment, SCHEMA) ||
        torch.implementation("tightkv", "CPU", __FILE__, __LINE__, &implementation))
        return "torch refused the operator's schema; has another copy of this library been loaded?";
    const int failed = torch.implement != nullptr
                           ? torch.implement(implementation, name, call, ABI_VERSION)
                           : torch.implement_before(implementation, name, call);
    if (failed)
        return "torch refused the operator's kernel";
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
    find(library, "GOMP_parallel", parallel);
    tightkv_share_threads(parallel);
    return "";
}

std::string problem = "not registered";

}  // namespace

/* Registers the operator unless that has been done; returns why not, or "". Loading the library
   calls it; call it again where torch was loaded only later. */
extern "C" PUBLIC const char *tightkv_register_operator()
{
    if (!problem.empty())
        problem = register_operator();
    return problem.c_str();
}

// After `problem`: objects of a file are made in order.
[[maybe_unused]] static const bool at_load = *tightkv_register_operator() == 0;
