/* tightkv::static_attention on a GPU: launches of the kernels in a kernel file, on the stream of the
   call. Nothing waits for the device, except where many tokens come at once; so steps can be captured
   in a CUDA graph, and a step that is refused is reported by the next call. */
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernel_file.h"
#include "torch_shim.h"

namespace tightkv {
namespace {

constexpr int64_t MOST_QUERIES = 32;  // of a program that attends
constexpr int32_t TORCH_INT64 = 4;

// --- the CUDA driver ---
struct Attribute {  // CUlaunchAttribute
    int id, pad, value;
    char rest[60];
};
struct LaunchConfig {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned count;
};
constexpr int OVERLAP = 6;                          // programmatic stream serialization
constexpr int MAX_DYNAMIC_SHARED = 8, PREFERRED_CARVEOUT = 9;  // of CUfunction_attribute
constexpr int CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76;  // of CUdevice_attribute

struct Driver {
    int (*module_load)(void **, const void *);
    int (*module_function)(void **, void *, const char *);
    int (*set_attribute)(void *, int, int);
    int (*launch)(const LaunchConfig *, void *, void **, void **);
    int (*allocate)(uint64_t *, size_t);
    int (*copy_to_device)(uint64_t, const void *, size_t);
    int (*copy_to_host)(void *, uint64_t, size_t, void *);
    int (*fill)(uint64_t, unsigned char, size_t, void *);
    int (*synchronize)(void *);
    int (*allocate_host)(void **, size_t, unsigned);
    int (*host_address)(uint64_t *, void *, unsigned);
    int (*get_device)(int *);
    int (*device_attribute)(int *, int, int);
    int (*error_text)(int, const char **);
    // of libtorch_cuda
    int (*current_stream)(int32_t, void **);
    int (*new_guard)(int32_t, void **);
    int (*delete_guard)(void *);
};

const Driver &driver()
{
    static const Driver found = [] {
        Driver d{};
        void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
        void *own = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
        if (own == nullptr)
            own = dlopen(nullptr, RTLD_NOW);
        const char *missing = cuda == nullptr ? "libcuda.so.1" : nullptr;
        const auto need = [&](void *library, const char *name, auto &function) {
            if (missing == nullptr && !find(library, name, function))
                missing = name;
        };
        need(cuda, "cuModuleLoadData", d.module_load);
        need(cuda, "cuModuleGetFunction", d.module_function);
        need(cuda, "cuFuncSetAttribute", d.set_attribute);
        need(cuda, "cuLaunchKernelEx", d.launch);
        need(cuda, "cuMemAlloc_v2", d.allocate);
        need(cuda, "cuMemcpyHtoD_v2", d.copy_to_device);
        need(cuda, "cuMemcpyDtoHAsync_v2", d.copy_to_host);
        need(cuda, "cuMemsetD8Async", d.fill);
        need(cuda, "cuStreamSynchronize", d.synchronize);
        need(cuda, "cuMemHostAlloc", d.allocate_host);
        need(cuda, "cuMemHostGetDevicePointer_v2", d.host_address);
        need(cuda, "cuCtxGetDevice", d.get_device);
        need(cuda, "cuDeviceGetAttribute", d.device_attribute);
        need(cuda, "cuGetErrorString", d.error_text);
        need(own, "aoti_torch_get_current_cuda_stream", d.current_stream);
        need(own, "aoti_torch_create_cuda_guard", d.new_guard);
        need(own, "aoti_torch_delete_cuda_guard", d.delete_guard);
        if (missing != nullptr)
            fail(std::string(missing) + " was not found; GPUs need libtorch with CUDA");
        return d;
    }();
    return found;
}

void check(int status, const char *what)
{
    const char *text = nullptr;
    if (status == 0)
        return;
    driver().error_text(status, &text);
    fail(std::string("could not ") + what + ": " + (text != nullptr ? text : "unknown error"));
}

class DeviceGuard {
public:
    explicit DeviceGuard(int32_t index)
    {
        if (driver().new_guard(index, &guard_))
            fail("device " + std::to_string(index) + " cannot be chosen");
    }
    DeviceGuard(const DeviceGuard &) = delete;
    DeviceGuard &operator=(const DeviceGuard &) = delete;
    ~DeviceGuard() { driver().delete_guard(guard_); }

private:
    void *guard_ = nullptr;
};

// --- a set of kernels on a device ---
struct Loaded {
    std::shared_ptr<const KernelSet> set;
    std::vector<void *> modules;
    std::vector<uint64_t> constants;
    std::map<const Launch *, void *> functions;
    volatile int *refused;  // memory of the host that kernels write
    uint64_t refused_address;
    unsigned attributes;
};

std::mutex loading;

Loaded load(std::shared_ptr<const KernelSet> set)
{
    const Driver &d = driver();
    Loaded x{};
    int device = 0, major = 0, minor = 0;
    check(d.get_device(&device), "find the device");
    check(d.device_attribute(&major, CAPABILITY_MAJOR, device), "ask the device");
    check(d.device_attribute(&minor, CAPABILITY_MINOR, device), "ask the device");
    if (major != set->major || minor < set->minor)
        fail("its kernels are for sm_" + std::to_string(10 * set->major + set->minor) +
             "; this GPU is sm_" + std::to_string(10 * major + minor) + ": export the model on it");
    for (const std::string &cubin : set->cubins) {
        void *module = nullptr;
        check(d.module_load(&module, cubin.data()), "load kernels");
        x.modules.push_back(module);
    }
    for (const std::string &data : set->constants) {
        uint64_t address = 0;
        check(d.allocate(&address, data.empty() ? 1 : data.size()), "allocate");
        check(d.copy_to_device(address, data.data(), data.size()), "copy tables");
        x.constants.push_back(address);
    }
    for (const Program &program : set->programs)
        for (const Launch &launch : program.launches) {
            void *function = nullptr, *module = x.modules[static_cast<size_t>(launch.cubin)];
            check(d.module_function(&function, module, launch.name.c_str()), "find a kernel");
            // more than 48 KiB, what a kernel has of its own among them, must be asked for
            if (launch.shared > 0)
                check(d.set_attribute(function, MAX_DYNAMIC_SHARED, static_cast<int>(launch.shared)),
                      "give a kernel its shared memory");
            // all of them the most, in percent: blocks of the next kernel can start beside this one's
            check(d.set_attribute(function, PREFERRED_CARVEOUT, 100), "split the memory of processors");
            x.functions[&launch] = function;
        }
    void *flag = nullptr;
    constexpr unsigned MAPPED = 2;
    check(d.allocate_host(&flag, sizeof(int), MAPPED), "allocate");
    check(d.host_address(&x.refused_address, flag, 0), "map memory");
    x.refused = static_cast<volatile int *>(flag);
    *x.refused = 0;
    x.attributes = major >= 9;
    x.set = std::move(set);
    return x;
}

// Kept for good: a CUDA graph may hold its kernels.
const Loaded &loaded(int64_t key, int32_t device)
{
    static std::map<std::pair<int64_t, int32_t>, Loaded> all;
    const std::lock_guard<std::mutex> lock(loading);
    const auto at = all.find({key, device});
    if (at != all.end())
        return at->second;
    std::shared_ptr<const KernelSet> set = find_kernels(key);
    if (set == nullptr)
        fail("the model's kernels are not loaded: call tightkv_load_kernels with the file "
             "model.kernels that lies beside it");
    return all.emplace(std::make_pair(key, device), load(set)).first->second;
}

// --- operands ---
std::string shape_of(const operand &x)
{
    std::string text = "[";
    for (int64_t k = 0; k < x.rank; k++)
        text += (k ? ", " : "") + std::to_string(x.size[k]);
    return text + "]";
}

bool is_contiguous(const operand &x)
{
    int64_t step = 1;
    bool is = true;
    for (int64_t k = x.rank - 1; k >= 0; k--) {
        is = is && (x.size[k] == 1 || x.stride[k] == step);
        step *= x.size[k];
    }
    return is || step == 0;
}

void expect(const char *name, const operand &x, int64_t dtype, std::vector<int64_t> size)
{
    operand wanted{};
    wanted.rank = static_cast<int64_t>(size.size());
    std::copy(size.begin(), size.end(), wanted.size);
    if (x.rank != wanted.rank || !std::equal(size.begin(), size.end(), x.size))
        fail(std::string(name) + " has shape " + shape_of(x) + "; expected " + shape_of(wanted));
    if (x.dtype != dtype)
        fail(std::string(name) + " has another dtype than the kernels were made for");
}

// [B, H, T, D] whose memory is [B, T, H, D], for reads of 16 bytes: itself, or a copy.
class Packed {
public:
    Packed(const Tensor &tensor, const operand &x) : copy_(nullptr), x_(x)
    {
        const int64_t *n = x.size, tokens = n[1] * n[3], row = n[2] * tokens;
        const int64_t stride[4] = {row, n[3], tokens, 1};
        bool is = reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
        for (int k = 0; k < 4; k++)
            is = is && (n[k] == 1 || x.stride[k] == stride[k]);
        if (is)
            return;
        AtenTensor *made = nullptr;
        if (torch.empty_strided(4, n, stride, tensor.dtype(), CUDA, tensor.device_index(), &made))
            fail("no memory for a copy");
        copy_ = made;
        if (torch.copy(made, tensor.get(), 0) || torch.get_data(made, &x_.data)) {
            torch.delete_tensor(made);
            fail("the new tokens cannot be copied");
        }
    }
    Packed(const Packed &) = delete;
    Packed &operator=(const Packed &) = delete;
    ~Packed()
    {
        if (copy_ != nullptr)
            torch.delete_tensor(copy_);
    }
    char *data() const { return static_cast<char *>(x_.data); }

private:
    AtenTensor *copy_;
    operand x_;
};

struct Call {
    const Loaded &kernels;
    void *stream;
    int32_t device;
    char *at[OPERANDS];
    float scale;
};

// --- launches ---
void run(const Call &call, const Program &program, int64_t count)
{
    int64_t bytes = 0;
    std::vector<int64_t> offsets;
    for (const int64_t size : program.scratch)
        offsets.push_back(bytes), bytes += (size + 255) / 256 * 256;
    const int64_t one = 1;
    AtenTensor *handle = nullptr;
    if (torch.empty_strided(1, &bytes, &one, 0, CUDA, call.device, &handle))
        fail("no memory for partial results");
    const Tensor scratch(handle);
    void *base = nullptr;
    torch.get_data(handle, &base);
    for (const Launch &launch : program.launches) {
        std::vector<std::string> arguments = launch.arguments;
        for (const Relocation &r : launch.relocations) {
            char *to = &arguments[static_cast<size_t>(r.argument)][static_cast<size_t>(r.at)];
            if (r.what == COUNT) {
                const int32_t tokens = static_cast<int32_t>(count);
                std::memcpy(to, &tokens, sizeof tokens);
            } else if (r.what == SCALE) {
                std::memcpy(to, &call.scale, sizeof call.scale);
            } else {
                const uint64_t start =
                    r.what < OPERANDS ? reinterpret_cast<uint64_t>(call.at[r.what])
                    : r.what < SCRATCH ? call.kernels.constants[static_cast<size_t>(r.what - CONSTANTS)]
                                       : reinterpret_cast<uint64_t>(base) +
                                             static_cast<uint64_t>(
                                                 offsets[static_cast<size_t>(r.what - SCRATCH)]);
                const uint64_t address = start ? start + static_cast<uint64_t>(r.offset) : 0;
                std::memcpy(to, &address, sizeof address);
            }
        }
        std::vector<void *> pointers;
        for (std::string &argument : arguments)
            pointers.push_back(&argument[0]);
        Attribute overlap{};
        overlap.id = OVERLAP, overlap.value = 1;
        LaunchConfig config{};
        for (int k = 0; k < 3; k++)
            config.grid[k] = static_cast<unsigned>(launch.grid[k]), config.block[k] = 1;
        config.block[0] = static_cast<unsigned>(launch.threads);
        config.shared = static_cast<unsigned>(launch.shared), config.stream = call.stream;
        config.attributes = &overlap, config.count = call.kernels.attributes;
        check(driver().launch(&config, call.kernels.functions.at(&launch), pointers.data(), nullptr),
              launch.name.c_str());
    }
}

const Program &program_of(const KernelSet &set, Kind kind, int64_t tokens)
{
    for (const Program &p : set.programs)
        if (p.kind == kind && (kind == APPEND ? p.tokens >= tokens : p.tokens == tokens))
            return p;
    fail(std::to_string(tokens) + " tokens; the cache has room for " +
         std::to_string(set.max_tokens));
}

Value optional_value(double x)
{
    Value *value = nullptr;
    if (torch.new_value == nullptr || torch.new_value(&value))
        value = new Value;
    *value = to_value(x);
    return to_value(value);
}

// A part of a [B, H, T, D] tensor: row `b`, tokens from `skip` on; b < 0: all of it.
AtenTensor *part_of(const Tensor &tensor, const operand &x, int64_t b, int64_t skip)
{
    int64_t size[4] = {x.size[0], x.size[1], x.size[2] - skip, x.size[3]}, offset = 0;
    if (b >= 0)
        size[0] = 1, offset = b * x.stride[0];
    AtenTensor *part = nullptr;
    if (torch.reinterpret(tensor.get(), 4, size, x.stride, offset + skip * x.stride[2], &part))
        fail("a tensor cannot be cut");
    return part;
}

// torch's causal attention among the new tokens of row `b`, without the first `skip`.
void attend_new(const Arguments &given, const static_args &x, const Tensor &out, int64_t b,
                int64_t skip)
{
    operand result = x.out;  // [B, T, Hq, D] as [B, Hq, T, D]
    std::swap(result.size[1], result.size[2]), std::swap(result.stride[1], result.stride[2]);
    Value stack[8] = {
        to_value(part_of(given.query, x.query, b, skip)),
        to_value(part_of(given.key, x.key, b, skip)),
        to_value(part_of(given.value, x.value, b, skip)),
        0,                                                        // no mask
        to_value(0.0),                                            // no dropout
        to_value(true),                                           // causal
        optional_value(given.scale),
        to_value(x.query.size[1] != x.key.size[1]),               // grouped queries
    };
    const char *name = "aten::scaled_dot_product_attention";
    if (torch.call != nullptr ? torch.call(name, "", stack, ABI_VERSION)
                              : torch.call_before(name, "", stack))
        fail("torch's attention failed");
    const Tensor found(from_value<AtenTensor *>(stack[0]));
    const Tensor to(part_of(out, result, b, skip));
    if (torch.copy(to.get(), found.get(), 0))
        fail("the output cannot be copied");
}

// Attention among the new tokens with a window or a soft cap. Each launch has as many queries; the
// last ones may have been in the one before.
void attend_pieces(const Call &call, const static_args &x)
{
    const KernelSet &set = *call.kernels.set;
    const Program &program = program_of(set, ATTEND_NEW, MOST_QUERIES);
    const int64_t count = x.query.size[2], last = count - MOST_QUERIES, words = STATE_WORDS, one = 1;
    AtenTensor *handle = nullptr;
    void *state = nullptr;
    if (torch.empty_strided(1, &words, &one, TORCH_INT64, CUDA, call.device, &handle))
        fail("no memory for counters");
    const Tensor counters(handle);
    torch.get_data(handle, &state);
    for (int64_t b = 0; b < x.query.size[0]; b++)
        for (int64_t next = 0; next < count; next += MOST_QUERIES) {
            const int64_t from = std::min(next, last), row = 2 * b * count * set.dim;
            const int64_t query = (row + 2 * from * set.dim) * set.query_heads;
            Call piece = call;
            piece.at[AT_QUERY] += query, piece.at[AT_OUT] += query;
            piece.at[AT_KEY] += row * set.heads, piece.at[AT_VALUE] += row * set.heads;
            piece.at[AT_POSITION] += 8 * from;
            if (piece.at[AT_LEFT_PAD] != nullptr)
                piece.at[AT_LEFT_PAD] += 8 * b;
            piece.at[AT_STATE] = static_cast<char *>(state);
            run(piece, program, MOST_QUERIES);
        }
}

template <typename T>
std::vector<T> to_host(const Call &call, const void *from, size_t count)
{
    std::vector<T> numbers(count);
    check(driver().copy_to_host(numbers.data(), reinterpret_cast<uint64_t>(from), count * sizeof(T),
                                call.stream),
          "read positions");
    check(driver().synchronize(call.stream),
          "wait for positions (more than 32 tokens cannot be captured in a CUDA graph)");
    return numbers;
}

void append_many(Call &call, const Arguments &given, const static_args &x, const Tensor &out)
{
    const KernelSet &set = *call.kernels.set;
    const int64_t batch = x.query.size[0], count = x.query.size[2];
    const Program &append = program_of(set, APPEND, count);  // or there is no room
    const bool at_start = to_host<int64_t>(call, x.position.data, 1)[0] == 0;
    if (at_start && (set.softcap != 0.0 || (set.window != 0 && set.window < count))) {
        attend_pieces(call, x);
        run(call, append, count);
        return;
    }
    if (at_start) {
        std::vector<int64_t> pads(static_cast<size_t>(batch), 0);
        if (x.left_pad.rank >= 0)
            pads = to_host<int64_t>(call, x.left_pad.data, pads.size());
        if (std::count(pads.begin(), pads.end(), 0) == batch) {
            attend_new(given, x, out, -1, 0);
        } else {
            const int64_t bytes = 2 * batch * count * set.query_heads * set.dim;
            check(driver().fill(reinterpret_cast<uint64_t>(x.out.data), 0, static_cast<size_t>(bytes),
                                call.stream),
                  "clear the output");
            for (int64_t b = 0; b < batch; b++)
                if (const int64_t pad = pads[static_cast<size_t>(b)]; pad >= 0 && pad < count)
                    attend_new(given, x, out, b, pad);
        }
        run(call, append, count);
        return;
    }
    if (batch > 1)
        fail("more than 32 tokens of several rows must begin at position 0");
    // a piece sees the pieces before it as the cache has them
    for (int64_t from = 0; from < count; from += MOST_QUERIES) {
        const int64_t tokens = std::min(MOST_QUERIES, count - from);
        Call piece = call;
        const int64_t row = 2 * from * set.dim;
        piece.at[AT_QUERY] += row * set.query_heads, piece.at[AT_OUT] += row * set.query_heads;
        piece.at[AT_KEY] += row * set.heads, piece.at[AT_VALUE] += row * set.heads;
        piece.at[AT_POSITION] += 8 * from;
        run(piece, program_of(set, STEP, tokens), tokens);
    }
}

void check_operands(const Arguments &given, const static_args &x, const KernelSet &s)
{
    const int64_t dtype = s.bf16 ? BFLOAT16 : FLOAT16, tokens = x.query.rank == 4 ? x.query.size[2] : 0;
    expect("query", x.query, dtype, {s.batch, s.query_heads, tokens, s.dim});
    expect("key", x.key, dtype, {s.batch, s.heads, tokens, s.dim});
    expect("value", x.value, dtype, {s.batch, s.heads, tokens, s.dim});
    expect("position", x.position, INT64, {tokens});
    expect("pages", x.pages, UINT8, {s.batch, s.pages, s.heads, s.record_bytes});
    if (s.ring_codes)
        expect("ring", x.ring, UINT8, {s.batch, s.ring, s.heads, s.dim * 5 / 2 + 4});
    else
        expect("ring", x.ring, dtype, {2, s.batch, s.ring, s.heads, s.dim});
    expect("sinks", x.sinks, dtype, {2, s.batch, s.sinks, s.heads, s.dim});
    expect("state", x.state, INT64, {s.batch, STATE_WORDS});
    if (x.left_pad.rank >= 0)
        expect("left_pad", x.left_pad, INT64, {s.batch});
    if ((x.feedback.rank >= 0) != (s.feedback != 0))
        fail("feedback is not as its kernels were made for");
    if (s.feedback)
        expect("feedback", x.feedback, FLOAT32, {s.heads, s.dim, s.dim});
    const std::pair<const char *, const operand *> packed[] = {
        {"position", &x.position}, {"pages", &x.pages}, {"ring", &x.ring}, {"sinks", &x.sinks},
        {"state", &x.state}, {"left_pad", &x.left_pad}, {"feedback", &x.feedback},
    };
    for (const auto &[name, operand] : packed)
        if (operand->rank >= 0 && !is_contiguous(*operand))
            fail(std::string(name) + " must be contiguous");
    const std::pair<const char *, const Tensor *> tensors[] = {
        {"key", &given.key}, {"value", &given.value}, {"position", &given.position},
        {"pages", &given.pages}, {"ring", &given.ring}, {"sinks", &given.sinks},
        {"state", &given.state}, {"left_pad", &given.left_pad}, {"feedback", &given.feedback},
    };
    for (const auto &[name, tensor] : tensors)
        if (tensor->get() != nullptr && tensor->device_index() != given.query.device_index())
            fail(std::string(name) + " is on another GPU than the query");
    if (given.mask.get() != nullptr || !given.causal)
        fail("masks, and attention to later tokens, are not supported on a GPU; left_pad is");
    if (given.window != s.window || given.softcap != s.softcap)
        fail("window=" + std::to_string(given.window) + " and softcap=" +
             std::to_string(given.softcap) + "; its kernels were made for " +
             std::to_string(s.window) + " and " + std::to_string(s.softcap));
}

}  // namespace

void call_cuda(Value *stack, uint64_t, uint64_t)
{
    const Arguments given(stack);
    static_args x{};
    x.query = given.query.describe("query", CUDA);
    x.key = given.key.describe("key", CUDA);
    x.value = given.value.describe("value", CUDA);
    x.position = given.position.describe("position", CUDA);
    x.left_pad = given.left_pad.describe("left_pad", CUDA);
    x.feedback = given.feedback.describe("feedback", CUDA);
    x.pages = given.pages.describe("pages", CUDA);
    x.ring = given.ring.describe("ring", CUDA);
    x.sinks = given.sinks.describe("sinks", CUDA);
    x.state = given.state.describe("state", CUDA);
    const int32_t device = given.query.device_index();
    const DeviceGuard guard(device);
    const Loaded &kernels = loaded(given.kernels, device);
    check_operands(given, x, *kernels.set);
    if (*kernels.refused) {
        *kernels.refused = 0;
        fail("a step before this one had positions that do not follow the cache's tokens, or a state "
             "that this operator did not write: begin at position 0");
    }
    Tensor out(new_output(x.query, given.query.dtype(), CUDA, device));
    x.out = out.describe("out", CUDA);
    const int64_t count = x.query.size[2];
    if (count > 0) {
        const Packed query(given.query, x.query), key(given.key, x.key), value(given.value, x.value);
        Call call{kernels, nullptr, device, {}, static_cast<float>(given.scale)};
        if (driver().current_stream(device, &call.stream))
            fail("there is no stream");
        void *const at[OPERANDS] = {
            query.data(), key.data(), value.data(), x.position.data, x.left_pad.data,
            x.feedback.data, x.pages.data, x.ring.data, x.sinks.data, x.state.data, x.out.data,
            reinterpret_cast<void *>(kernels.refused_address),
        };
        for (int k = 0; k < OPERANDS; k++)
            call.at[k] = static_cast<char *>(at[k]);
        if (count > MOST_QUERIES)
            append_many(call, given, x, out);
        else
            run(call, program_of(*kernels.set, STEP, count), count);
    }
    stack[0] = to_value(out.release());
}

}  // namespace tightkv
