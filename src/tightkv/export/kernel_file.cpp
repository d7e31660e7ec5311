#include "kernel_file.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

extern "C" {
#include "native.h"
}

namespace tightkv {
namespace {

constexpr char MAGIC[] = "TIGHTKVG";
constexpr int64_t VERSION = 2, MOST = 1 << 30;

class Reader {
public:
    Reader(const char *data, size_t size) : at_(data), end_(data + size) {}

    bool at_end() const { return at_ == end_; }

    const char *take(size_t size)
    {
        if (size > static_cast<size_t>(end_ - at_))
            throw std::runtime_error("it ends too early");
        const char *here = at_;
        at_ += size;
        return here;
    }

    int64_t number(int64_t low = 0, int64_t high = MOST)
    {
        int64_t value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        if (value < low || value > high)
            throw std::runtime_error("it has the number " + std::to_string(value) + "; allowed: " +
                                     std::to_string(low) + " to " + std::to_string(high));
        return value;
    }

    std::vector<std::string> blocks()
    {
        std::vector<std::string> all(static_cast<size_t>(number(0, 1 << 16)));
        for (std::string &block : all) {
            const size_t size = static_cast<size_t>(number());
            block.assign(take(size), size);
            take((8 - size % 8) % 8);
        }
        return all;
    }

private:
    const char *at_, *end_;
};

size_t width_of(int64_t what) { return what == COUNT || what == SCALE ? 4 : 8; }

Launch read_launch(Reader &r, const KernelSet &set, const Program &program)
{
    Launch x;
    x.cubin = r.number(0, static_cast<int64_t>(set.cubins.size()) - 1);
    for (int64_t &n : x.grid)
        n = r.number(1);
    x.threads = r.number(1, 1024), x.shared = r.number(0, 1 << 20);
    x.arguments = r.blocks();
    if (x.arguments.empty())
        throw std::runtime_error("a launch has no name");
    x.name = x.arguments.front();
    x.arguments.erase(x.arguments.begin());
    x.relocations.resize(static_cast<size_t>(r.number(0, 1 << 16)));
    const int64_t constants = CONSTANTS + static_cast<int64_t>(set.constants.size());
    const int64_t scratch = SCRATCH + static_cast<int64_t>(program.scratch.size());
    for (Relocation &y : x.relocations) {
        y.argument = r.number(0, static_cast<int64_t>(x.arguments.size()) - 1);
        y.at = r.number(), y.what = r.number(), y.offset = r.number(0, INT64_MAX);
        const size_t size = x.arguments[static_cast<size_t>(y.argument)].size();
        const bool known = y.what < OPERANDS || y.what == COUNT || y.what == SCALE ||
                           (y.what >= CONSTANTS && y.what < constants) ||
                           (y.what >= SCRATCH && y.what < scratch);
        if (!known || static_cast<size_t>(y.at) + width_of(y.what) > size)
            throw std::runtime_error("a launch has an argument that is no operand's");
    }
    return x;
}

std::shared_ptr<const KernelSet> read_set(const std::string &data)
{
    Reader r(data.data(), data.size());
    auto set = std::make_shared<KernelSet>();
    KernelSet &s = *set;
    for (int64_t *field : {&s.major, &s.minor, &s.bf16, &s.batch, &s.query_heads, &s.heads, &s.dim,
                           &s.ring, &s.sinks, &s.pages, &s.record_bytes, &s.max_tokens, &s.feedback,
                           &s.window})
        *field = r.number();
    s.ring_codes = s.bf16 & 2, s.bf16 &= 1;
    const int64_t softcap = r.number(INT64_MIN, INT64_MAX);
    std::memcpy(&s.softcap, &softcap, sizeof softcap);
    s.cubins = r.blocks(), s.constants = r.blocks();
    s.programs.resize(static_cast<size_t>(r.number(1, 1 << 12)));
    for (Program &p : s.programs) {
        p.kind = r.number(APPEND, ATTEND_NEW), p.tokens = r.number(1);
        p.scratch.resize(static_cast<size_t>(r.number(0, 1 << 8)));
        for (int64_t &bytes : p.scratch)
            bytes = r.number(0, INT64_MAX / 2);
        const int64_t launches = r.number(1, 1 << 8);
        for (int64_t k = 0; k < launches; k++)
            p.launches.push_back(read_launch(r, s, p));
    }
    if (!r.at_end())
        throw std::runtime_error("it goes on after its end");
    return set;
}

std::mutex mutex;
std::map<int64_t, std::shared_ptr<const KernelSet>> sets;

}  // namespace

void add_kernels(const char *data, size_t size)
{
    Reader r(data, size);
    if (size < sizeof MAGIC - 1 || std::memcmp(r.take(sizeof MAGIC - 1), MAGIC, sizeof MAGIC - 1))
        throw std::runtime_error("it is no file of tightkv's kernels");
    if (r.number() != VERSION)
        throw std::runtime_error("another version wrote it: export the model again");
    std::map<int64_t, std::shared_ptr<const KernelSet>> found;
    for (int64_t count = r.number(0, 1 << 12); count > 0; count--) {
        const int64_t key = r.number(1, INT64_MAX);
        const std::vector<std::string> blocks = r.blocks();
        if (blocks.size() != 1)
            throw std::runtime_error("a set of kernels is not whole");
        found[key] = read_set(blocks[0]);
    }
    if (!r.at_end())
        throw std::runtime_error("it goes on after its end");
    const std::lock_guard<std::mutex> lock(mutex);
    sets.insert(found.begin(), found.end());  // the same key is the same set
}

std::shared_ptr<const KernelSet> find_kernels(int64_t key)
{
    const std::lock_guard<std::mutex> lock(mutex);
    const auto at = sets.find(key);
    return at == sets.end() ? nullptr : at->second;
}

}  // namespace tightkv

/* Both return why not, or "" (until the next call of the thread). */
extern "C" PUBLIC const char *tightkv_add_kernels(const char *data, size_t size)
{
    thread_local std::string problem;
    problem.clear();
    try {
        tightkv::add_kernels(data, size);
    } catch (const std::exception &error) {
        problem = error.what();
    }
    return problem.c_str();
}

extern "C" PUBLIC const char *tightkv_load_kernels(const char *path)
{
    thread_local std::string problem;
    std::string data;
    FILE *file = std::fopen(path, "rb");
    if (file != nullptr) {
        char part[1 << 16];
        for (size_t n; (n = std::fread(part, 1, sizeof part, file)) > 0;)
            data.append(part, n);
    }
    if (file == nullptr || std::ferror(file))
        problem = std::string(path) + " cannot be read";
    else if (*(problem = tightkv_add_kernels(data.data(), data.size())).c_str())
        problem = std::string(path) + ": " + problem;
    if (file != nullptr)
        std::fclose(file);
    return problem.c_str();
}
