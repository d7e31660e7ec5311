/* Registers tightkv::static_attention with the libtorch of the process, when this library is
   loaded. torch's stable C functions are found by name at run time, so neither its headers nor its
   version matter to the build. */
#include "torch_shim.h"

#include <stdexcept>

namespace tightkv {
namespace {

// The numbers of torch's dtypes never change; struct operand has its own.
struct Dtype {
    int32_t torch;
    int64_t ours;
};
constexpr Dtype DTYPES[] = {{0, UINT8},    {4, INT64},     {5, FLOAT16},
                            {6, FLOAT32},  {11, BOOLEAN},  {15, BFLOAT16}};

}  // namespace

Torch torch;

void fail(const std::string &why)
{
    throw std::runtime_error("tightkv::static_attention: " + why);
}

operand Tensor::describe(const char *name, int32_t device) const
{
    operand x{};
    x.rank = -1;
    if (handle_ == nullptr)
        return x;
    int64_t *sizes = nullptr, *strides = nullptr;
    int32_t own_device = -1;
    if (torch.get_rank(handle_, &x.rank) || torch.get_sizes(handle_, &sizes) ||
        torch.get_strides(handle_, &strides) || torch.get_device(handle_, &own_device))
        fail(std::string(name) + " is not a dense tensor");
    if (own_device != device)
        fail(std::string(name) + " is not on the " + (device == CPU ? "CPU" : "GPU"));
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

namespace {

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

}  // namespace

Arguments::Arguments(Value *stack)
    : query(tensor_of(stack[0])), key(tensor_of(stack[1])), value(tensor_of(stack[2])),
      position(tensor_of(stack[3])), left_pad(optional_tensor_of(stack[4])),
      mask(optional_tensor_of(stack[5])), spec(tensor_of(stack[6])),
      feedback(optional_tensor_of(stack[7])), pages(tensor_of(stack[8])), ring(tensor_of(stack[9])),
      sinks(tensor_of(stack[10])), state(tensor_of(stack[11])),
      scale(from_value<double>(stack[12])), softcap(from_value<double>(stack[13])),
      window(from_value<int64_t>(stack[14])), causal(from_value<bool>(stack[15])),
      kernels(from_value<int64_t>(stack[16]))
{
}

AtenTensor *new_output(const operand &query, int32_t dtype, int32_t device, int32_t index)
{
    if (query.rank != 4)
        fail("query has " + std::to_string(query.rank) + " dimensions; expected 4");
    const int64_t *q = query.size;
    const int64_t size[4] = {q[0], q[2], q[1], q[3]};
    const int64_t stride[4] = {q[2] * q[1] * q[3], q[1] * q[3], q[3], 1};
    AtenTensor *out = nullptr;
    if (torch.empty_strided(4, size, stride, dtype, device, index, &out))
        fail("no memory for the output");
    return out;
}

namespace {

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
    "Tensor(c!) sinks, Tensor(d!) state, float scale, float softcap, int window, bool causal, "
    "int kernels=0) -> Tensor";

void call(Value *stack, uint64_t, uint64_t)
{
    const Arguments given(stack);
    static_args args{};
    args.query = given.query.describe("query", CPU);
    args.key = given.key.describe("key", CPU);
    args.value = given.value.describe("value", CPU);
    args.position = given.position.describe("position", CPU);
    args.left_pad = given.left_pad.describe("left_pad", CPU);
    args.mask = given.mask.describe("mask", CPU);
    args.spec = given.spec.describe("spec", CPU);
    args.feedback = given.feedback.describe("feedback", CPU);
    args.pages = given.pages.describe("pages", CPU);
    args.ring = given.ring.describe("ring", CPU);
    args.sinks = given.sinks.describe("sinks", CPU);
    args.state = given.state.describe("state", CPU);
    args.scale = given.scale, args.softcap = given.softcap;
    args.window = given.window, args.causal = given.causal;
    args.threads = threads();
    Tensor out(new_output(args.query, given.query.dtype(), CPU, -1));
    args.out = out.describe("out", CPU);
    char why[512];
    if (tightkv_static_attention(&args, why, sizeof why))
        fail(why);
    stack[0] = to_value(out.release());
}

// --- registration ---
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
    need("aoti_torch_get_device_index", torch.get_device_index);
    need("aoti_torch_delete_tensor_object", torch.delete_tensor);
    need("aoti_torch_empty_strided", torch.empty_strided);
    need("aoti_torch_copy_", torch.copy);
    need("aoti_torch__reinterpret_tensor", torch.reinterpret);
    need("aoti_torch_library_init_fragment", torch.fragment);
    need("aoti_torch_library_init_impl", torch.implementation);
    need("aoti_torch_library_def", torch.define);
    find(library, "torch_new_stable_ivalue", torch.new_value);
    find(library, "torch_delete_stable_ivalue", torch.delete_value);
    find(library, "torch_get_num_threads", torch.get_threads);
    find(library, "omp_get_max_threads", torch.get_omp_threads);
    if (!find(library, "torch_library_impl", torch.implement))
        need("aoti_torch_library_impl", torch.implement_before);
    if (!find(library, "torch_call_dispatcher", torch.call))
        need("aoti_torch_call_dispatcher", torch.call_before);
    return missing;
}

bool implement(const char *device, Kernel kernel)
{
    TorchLibrary *library = nullptr;
    const char *name = "static_attention";
    if (torch.implementation("tightkv", device, __FILE__, __LINE__, &library))
        return false;
    return 0 == (torch.implement != nullptr ? torch.implement(library, name, kernel, ABI_VERSION)
                                            : torch.implement_before(library, name, kernel));
}

std::string register_operator()
{
    void *library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr)  // linked into the program, or not there
        library = dlopen(nullptr, RTLD_NOW);
    if (const char *missing = find_torch(library))
        return "libtorch has no " + std::string(missing) +
               ": load it first (import torch), version 2.9 or later";
    TorchLibrary *fragment = nullptr;
    if (torch.fragment("tightkv", __FILE__, __LINE__, &fragment) || torch.define(fragment, SCHEMA))
        return "torch refused the operator's schema; has another copy of this library been loaded?";
    if (!implement("CPU", call) || !implement("CUDA", call_cuda))
        return "torch refused the operator's kernel";
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
    find(library, "GOMP_parallel", parallel);
    tightkv_share_threads(parallel);
    return "";
}

std::string problem = "not registered";

}  // namespace
}  // namespace tightkv

/* Registers the operator unless that has been done; returns why not, or "". Loading the library
   calls it; call it again where torch was loaded only later. */
extern "C" PUBLIC const char *tightkv_register_operator()
{
    using tightkv::problem;
    if (!problem.empty())
        problem = tightkv::register_operator();
    return problem.c_str();
}

// After `problem`: objects of a file are made in order.
[[maybe_unused]] static const bool at_load = *tightkv_register_operator() == 0;
