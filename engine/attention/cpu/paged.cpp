// Attention over block tables in float32: prefill chunks, decodes and mixed steps in one call.
//
// Softmax is computed online (Milakov and Gimelshein 2018; tiled as in FlashAttention, Dao et al.
// 2022), so that no row of logits is ever whole in memory; long contexts are divided among threads
// and merged afterwards (Flash-Decoding, Dao et al. 2023). Everything is written in the compiler's
// vector extensions: one source for AVX-512, AVX2, SSE and NEON.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define LANES 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LANES 4
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

namespace {

using std::int32_t;
using std::int64_t;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float LooseVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

constexpr int kTile = 64;       // keys at a time
constexpr int kRows = 64;       // query rows (times heads of a group) at a time
constexpr int kFewRows = 3;     // up to here dot products beat turning the keys around
constexpr int kRowBlock = 6;    // rows of accumulators that stay in registers …
constexpr int kColumnBlock = LANES == 8 ? 2 : 4;  // … times vectors of columns
constexpr int kLargestDim = 256;
constexpr int kShortestSplit = 128;               // keys that are worth a part of their own
constexpr int64_t kProductsPerThread = 200000;    // some tens of microseconds
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
inline Vec splat(float x) { return Vec{} + x; }

inline float sum(Vec v) {
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < LANES / 2; ++i) total += v[i] + v[i + LANES / 2];
    return total;
#endif
}

// e^x for x <= 0, to about one unit in the last place; 0 below -87.
inline Vec exp_negative(Vec x) {
    const Vec log2e = splat(1.44269504088896341f);
    const Vec magic = splat(12582912.0f);  // adding it rounds to a whole number
    const IntVec tiny = x < splat(-87.0f);
    x = tiny ? splat(-87.0f) : x;
    Vec whole = x * log2e + magic;
    const IntVec exponent = ((IntVec)whole - 0x4B400000 + 127) << 23;
    whole -= magic;
    const Vec r = (x - whole * splat(0.693359375f)) - whole * splat(-2.12194440e-4f);
    Vec p = splat(1.0f / 5040);
    p = p * r + splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    const Vec result = p * (Vec)exponent;
    return tiny ? splat(0.0f) : result;
}

inline void zip(Vec a, Vec b, Vec& low, Vec& high) {
#if defined(__clang__)
    low = __builtin_shufflevector(a, b, ZIP_LOW);
    high = __builtin_shufflevector(a, b, ZIP_HIGH);
#else
    low = __builtin_shuffle(a, b, IntVec{ZIP_LOW});
    high = __builtin_shuffle(a, b, IntVec{ZIP_HIGH});
#endif
}

// The sum of each of LANES vectors, in one vector.
inline Vec sums(Vec* v) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) {
            Vec low, high;
            zip(v[i], v[i + half], low, high);
            v[i] = low + high;
        }
    return v[0];
}

// A square of LANES rows becomes its transpose: zipping both halves log2(LANES) times does it.
inline void transpose(const float* const* rows, int64_t column, float* out, int64_t stride) {
    Vec a[LANES], b[LANES];
    for (int i = 0; i < LANES; ++i) a[i] = load(rows[i] + column);
    for (int step = 1; step < LANES; step *= 2) {
        for (int i = 0; i < LANES / 2; ++i) zip(a[i], a[i + LANES / 2], b[2 * i], b[2 * i + 1]);
        for (int i = 0; i < LANES; ++i) a[i] = b[i];
    }
    for (int i = 0; i < LANES; ++i) store(out + i * stride, a[i]);
}

// c[ROWS][COLS vectors] = c * decay + a[ROWS][depth] x b[depth][COLS vectors]; decay null = zero.
template <int ROWS, int COLS>
inline void multiply_block(int depth, const float* a, int64_t a_stride, const float* const* b,
                           int64_t column, float* c, int64_t c_stride, const float* decay) {
    Vec sums[ROWS][COLS];
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLS; ++j)
            sums[r][j] = decay ? load(c + r * c_stride + j * LANES) * splat(decay[r]) : Vec{};
    for (int k = 0; k < depth; ++k) {
        Vec right[COLS];
        for (int j = 0; j < COLS; ++j) right[j] = load(b[k] + column + j * LANES);
        for (int r = 0; r < ROWS; ++r) {
            const Vec left = splat(a[r * a_stride + k]);
            for (int j = 0; j < COLS; ++j) sums[r][j] += left * right[j];
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLS; ++j) store(c + r * c_stride + j * LANES, sums[r][j]);
}

template <int ROWS>
inline void multiply_rows(int columns, int depth, const float* a, int64_t a_stride,
                          const float* const* b, int64_t offset, float* c, int64_t c_stride,
                          const float* decay) {
    int j = 0;
    for (; j + kColumnBlock * LANES <= columns; j += kColumnBlock * LANES)
        multiply_block<ROWS, kColumnBlock>(depth, a, a_stride, b, offset + j, c + j, c_stride,
                                           decay);
    for (; j < columns; j += LANES)
        multiply_block<ROWS, 1>(depth, a, a_stride, b, offset + j, c + j, c_stride, decay);
}

// c [rows, columns] = c * decay + a [rows, depth] x b [depth, columns], b given by its rows.
// `columns` is a multiple of LANES.
void multiply(int rows, int columns, int depth, const float* a, int64_t a_stride,
              const float* const* b, int64_t offset, float* c, int64_t c_stride,
              const float* decay) {
    for (int r = 0; r < rows;) {
        const float* left = a + r * a_stride;
        float* out = c + r * c_stride;
        const float* d = decay ? decay + r : nullptr;
        switch (rows - r) {
#define CASE(N)                                                                             \
    case N:                                                                                 \
        multiply_rows<N>(columns, depth, left, a_stride, b, offset, out, c_stride, d);      \
        r += N;                                                                             \
        break;
            CASE(1)
            CASE(2)
            CASE(3)
            CASE(4)
            CASE(5)
#undef CASE
            default:
                multiply_rows<kRowBlock>(columns, depth, left, a_stride, b, offset, out, c_stride,
                                         d);
                r += kRowBlock;
        }
    }
}

struct Problem {
    const float *query, *keys, *values;
    float* output;
    int64_t query_row, query_head;  // strides; keys, values and output are contiguous
    int heads, kv_heads, group, dim, padded;
    const int64_t *lengths, *contexts, *first_rows, *table_starts;
    const int64_t* tables;
    int64_t block_size;
    float scale, softcap;
    int64_t window;

    const float* key_at(const float* pool, const int64_t* table, int64_t position) const {
        const int64_t slot = table[position / block_size] * block_size + position % block_size;
        return pool + slot * kv_heads * dim;
    }
};

// Brings rows near a little at a time, in the order of memory, while others are worked on. A decode
// does little else than read, and reads by heads jump about.
class Fetcher {
  public:
    void clear() { count_ = row_ = 0; }
    void add(const float* row) { rows_[count_++] = row; }
    // All rows are to be there after `steps` calls of `advance`; each is `floats` long.
    void start(int64_t floats, int64_t steps) {
        floats_ = floats;
        at_ = 0;
        share_ = (count_ * ((floats + kLine - 1) / kLine) + steps - 1) / steps;
    }
    void advance() {
        for (int64_t i = 0; i < share_ && row_ < count_; ++i) {
            __builtin_prefetch(rows_[row_] + at_, 0, 2);
            at_ += kLine;
            if (at_ >= floats_) {
                at_ = 0;
                ++row_;
            }
        }
    }

  private:
    static constexpr int64_t kLine = 16;  // floats in a cache line
    const float* rows_[2 * kTile];
    int64_t count_ = 0, row_ = 0, floats_ = 0, at_ = 0, share_ = 0;
};

// Some query rows and heads of a segment against a range of its keys.
struct Item {
    int segment;
    int64_t first_row, rows;
    int first_head, heads;
    int64_t first_key, last_key;
    int64_t partial;  // where its state goes when other items have the other keys; -1 = alone
};

struct Workspace {
    std::vector<float> query, output, logits, turned, key_copy, value_copy, top, total, decay;
};

// What an item knows of a row so far: the largest logit, the sum of exponentials, the output.
class Tiles {
  public:
    Tiles(const Problem& p, const Item& item, Workspace& w)
        : p_(p), item_(item), w_(w), rows_(int(item.rows) * p.group), d_(p.padded) {
        const size_t all = size_t(rows_) * item.heads;
        grow(w.query, all * d_);
        grow(w.output, all * d_);
        grow(w.logits, size_t(rows_) * item.heads * kTile);
        grow(w.top, all);
        grow(w.total, all);
        grow(w.decay, all);
        grow(w.turned, size_t(kTile) * d_);
        if (p.dim != p.padded) {
            grow(w.key_copy, size_t(kTile) * d_ * item.heads);
            grow(w.value_copy, size_t(kTile) * d_ * item.heads);
        }
        std::fill_n(w.top.data(), all, kNothing);
        std::fill_n(w.total.data(), all, 0.0f);
        std::fill_n(w.output.data(), all * d_, 0.0f);
        read_queries();
        for (int i = 0; i < d_; ++i) turned_rows_[i] = w.turned.data() + i * kTile;
    }

    void run() {
        const int64_t* table = p_.tables + p_.table_starts[item_.segment];
        for (int64_t key = item_.first_key; key < item_.last_key; key += kTile) {
            const int count = int(std::min<int64_t>(kTile, item_.last_key - key));
            for (int i = 0; i < count; ++i) {
                key_rows_[i] = p_.key_at(p_.keys, table, key + i);
                value_rows_[i] = p_.key_at(p_.values, table, key + i);
            }
            if (rows_ <= kFewRows) expect_next(table, key + kTile);
            head_stride_ = p_.dim;
            head_offset_ = int64_t(item_.first_head) * p_.dim;
            if (p_.dim != p_.padded) copy_padded(count);
            if (rows_ <= kFewRows)
                dot_products(count);
            else
                for (int h = 0; h < item_.heads; ++h) products(h, count);
            for (int h = 0; h < item_.heads; ++h) {
                for (int r = 0; r < rows_; ++r) softmax(h, r, key, count);
                add_values(h, count);
            }
        }
    }

    void write() const {
        for (int h = 0; h < item_.heads; ++h)
            for (int r = 0; r < rows_; ++r) {
                const float total = w_.total[h * rows_ + r];
                float* to = p_.output + target(h, r);
                const float* from = w_.output.data() + size_t(h * rows_ + r) * d_;
                const float factor = total > 0 ? 1.0f / total : 0.0f;
                for (int i = 0; i < p_.dim; ++i) to[i] = from[i] * factor;
            }
    }

    // [heads, rows, 2 + dim]: largest logit, sum, output not divided by it yet
    void write_partial(float* to) const {
        for (int i = 0; i < item_.heads * rows_; ++i, to += 2 + p_.dim) {
            to[0] = w_.top[i];
            to[1] = w_.total[i];
            std::memcpy(to + 2, w_.output.data() + size_t(i) * d_, sizeof(float) * p_.dim);
        }
    }

    int64_t target(int h, int r) const {
        const int64_t row = p_.first_rows[item_.segment] + item_.first_row + r / p_.group;
        const int64_t head = (item_.first_head + h) * p_.group + r % p_.group;
        return (row * p_.heads + head) * p_.dim;
    }

  private:
    static void grow(std::vector<float>& v, size_t size) {
        if (v.size() < size) v.resize(size);
    }

    float* logits(int h, int r) { return w_.logits.data() + (size_t(h) * rows_ + r) * kTile; }
    float* output(int h, int r) { return w_.output.data() + (size_t(h) * rows_ + r) * d_; }
    const float* query(int h, int r) const {
        return w_.query.data() + (size_t(h) * rows_ + r) * d_;
    }
    void expect_next(const int64_t* table, int64_t first) {
        const int64_t last = std::min<int64_t>(first + kTile, item_.last_key);
        const int64_t from = int64_t(item_.first_head) * p_.dim;
        fetcher_.clear();
        for (const float* pool : {p_.keys, p_.values})
            for (int64_t key = first; key < last; ++key)
                fetcher_.add(p_.key_at(pool, table, key) + from);
        fetcher_.start(int64_t(item_.heads) * p_.dim, item_.heads * (kTile / LANES * 2));
    }

    int64_t offset(int h) const { return head_offset_ + h * head_stride_; }

    void read_queries() {
        for (int h = 0; h < item_.heads; ++h)
            for (int r = 0; r < rows_; ++r) {
                const int64_t row = p_.first_rows[item_.segment] + item_.first_row + r / p_.group;
                const int64_t head = (item_.first_head + h) * p_.group + r % p_.group;
                const float* from = p_.query + row * p_.query_row + head * p_.query_head;
                float* to = w_.query.data() + (size_t(h) * rows_ + r) * d_;
                for (int i = 0; i < p_.dim; ++i) to[i] = from[i] * p_.scale;
                for (int i = p_.dim; i < d_; ++i) to[i] = 0;
            }
    }

    // Heads that do not fill whole vectors: the tile is copied and filled up with zeros, since
    // reading on would leave the row, and after the last slot the pool.
    void copy_padded(int count) {
        for (int i = 0; i < count; ++i) {
            float* key = w_.key_copy.data() + size_t(i) * d_ * item_.heads;
            float* value = w_.value_copy.data() + size_t(i) * d_ * item_.heads;
            for (int h = 0; h < item_.heads; ++h) {
                const int64_t from = head_offset_ + int64_t(h) * p_.dim;
                for (int j = 0; j < d_; ++j) {
                    key[h * d_ + j] = j < p_.dim ? key_rows_[i][from + j] : 0.0f;
                    value[h * d_ + j] = j < p_.dim ? value_rows_[i][from + j] : 0.0f;
                }
            }
            key_rows_[i] = key;
            value_rows_[i] = value;
        }
        head_stride_ = d_;
        head_offset_ = 0;
    }

    // A few keys at a time through all heads, close to the order in which they lie in memory.
    void dot_products(int count) {
        pad_rows(count);
        for (int i = 0; i < count; i += LANES)
            for (int h = 0; h < item_.heads; ++h) {
                fetcher_.advance();
                for (int r = 0; r < rows_; ++r) {
                    const float* q = query(h, r);
                    Vec parts[LANES] = {};
                    for (int j = 0; j < d_; j += LANES) {
                        const Vec left = load(q + j);
                        for (int k = 0; k < LANES; ++k)
                            parts[k] += left * load(key_rows_[i + k] + offset(h) + j);
                    }
                    store(logits(h, r) + i, sums(parts));
                }
            }
    }

    // Rows up to the next whole vector repeat the last one, so that no other is read.
    void pad_rows(int count) {
        for (int i = count; i % LANES; ++i) key_rows_[i] = key_rows_[count - 1];
    }

    // One head's logits as a matrix product with the keys turned around.
    void products(int h, int count) {
        const int filled = (count + LANES - 1) / LANES * LANES;
        pad_rows(count);
        for (int i = 0; i < filled; i += LANES)
            for (int j = 0; j < d_; j += LANES)
                transpose(key_rows_ + i, offset(h) + j, w_.turned.data() + j * kTile + i, kTile);
        multiply(rows_, filled, d_, query(h, 0), d_, turned_rows_, 0, logits(h, 0), kTile,
                 nullptr);
    }

    // The output of a head so far, decayed, and the values of the tile by their weights.
    void add_values(int h, int count) {
        const int part = rows_ <= kFewRows ? LANES : kTile;
        const float* decay = w_.decay.data() + h * rows_;
        const float ones[kFewRows] = {1, 1, 1};
        for (int i = 0; i < count; i += part, decay = ones) {
            if (rows_ <= kFewRows) fetcher_.advance();
            multiply(rows_, d_, std::min(part, count - i), logits(h, 0) + i, kTile,
                     value_rows_ + i, offset(h), output(h, 0), d_, decay);
        }
    }

    // Logits of a row in the tile to exponentials under its new maximum.
    void softmax(int h, int r, int64_t first, int count) {
        float* row = logits(h, r);
        const int64_t position =
            p_.contexts[item_.segment] + item_.first_row + r / p_.group;
        const int64_t from = p_.window ? position - p_.window + 1 - first : 0;
        const int begin = int(std::clamp<int64_t>(from, 0, count));
        const int end = int(std::clamp<int64_t>(position + 1 - first, begin, count));
        float& top = w_.top[h * rows_ + r];
        float& decay = w_.decay[h * rows_ + r];
        if (begin == end) {
            decay = 1;
            std::fill_n(row, count, 0.0f);
            return;
        }
        if (p_.softcap > 0)
            for (int i = begin; i < end; ++i) row[i] = p_.softcap * std::tanh(row[i] / p_.softcap);
        const int filled = (count + LANES - 1) / LANES * LANES;
        std::fill_n(row, begin, kNothing);
        std::fill(row + end, row + filled, kNothing);
        Vec most = splat(top);
        for (int i = 0; i < filled; i += LANES) {
            const Vec x = load(row + i);
            most = x > most ? x : most;
        }
        float largest = most[0];
        for (int i = 1; i < LANES; ++i) largest = std::max(largest, most[i]);
        decay = top == kNothing ? 0.0f : std::exp(top - largest);
        top = largest;
        Vec total{};
        for (int i = 0; i < filled; i += LANES) {
            const Vec x = exp_negative(load(row + i) - splat(largest));
            store(row + i, x);
            total += x;
        }
        w_.total[h * rows_ + r] = w_.total[h * rows_ + r] * decay + sum(total);
    }

    const Problem& p_;
    const Item& item_;
    Workspace& w_;
    Fetcher fetcher_;
    const int rows_, d_;
    int64_t head_stride_ = 0, head_offset_ = 0;
    const float* key_rows_[kTile];
    const float* value_rows_[kTile];
    const float* turned_rows_[kLargestDim];
};

struct Split {
    int item, parts;  // the first of its items, and how many
};

// Cut the step into items of about equal work, several a thread.
void divide(const Problem& p, int segments, int threads, std::vector<Item>& items,
            std::vector<Split>& splits, int64_t& partial_size) {
    const int64_t tile = std::max(1, kRows / p.group);
    int64_t work = 0;
    for (int s = 0; s < segments; ++s)
        work += p.lengths[s] * (p.contexts[s] + p.lengths[s]) * p.kv_heads;
    const int64_t share = threads > 1 ? std::max<int64_t>(1, work / (threads * 4)) : work + 1;
    partial_size = 0;
    for (int s = 0; s < segments; ++s) {
        const bool together = p.lengths[s] * p.group <= kFewRows;
        const int heads = together ? p.kv_heads : 1;
        for (int64_t row = 0; row < p.lengths[s]; row += tile) {
            const int64_t rows = std::min(tile, p.lengths[s] - row);
            const int64_t position = p.contexts[s] + row;
            const int64_t last = position + rows;
            const int64_t first = p.window ? std::max<int64_t>(0, position - p.window + 1) : 0;
            const int64_t wanted = (rows * (last - first) * heads + share - 1) / share;
            const int parts = int(std::clamp<int64_t>((last - first) / kShortestSplit, 1, wanted));
            const int64_t size = (last - first + parts - 1) / parts;
            for (int h = 0; h < p.kv_heads; h += heads) {
                if (parts > 1) splits.push_back({int(items.size()), parts});
                for (int i = 0; i < parts; ++i) {
                    const int64_t from = first + i * size;
                    Item item{s, row, rows, h, heads, from, std::min(last, from + size), -1};
                    if (parts > 1) {
                        item.partial = partial_size;
                        partial_size += rows * p.group * heads * (2 + p.dim);
                    }
                    items.push_back(item);
                }
            }
        }
    }
}

// Threads that have enough to do: waking one takes longer than a short decode.
int worthwhile(const Problem& p, int segments, int threads) {
    int64_t products = 0;
    for (int s = 0; s < segments; ++s)
        products += p.lengths[s] * (p.contexts[s] + p.lengths[s]) * p.heads * p.dim;
    return int(std::clamp<int64_t>(products / kProductsPerThread, 1, std::max(1, threads)));
}

void merge(const Problem& p, const Item* items, int parts, const float* partials) {
    const int rows = int(items[0].rows) * p.group;
    const int64_t stride = 2 + p.dim;
    for (int h = 0; h < items[0].heads; ++h)
        for (int r = 0; r < rows; ++r) {
            const int64_t at = (int64_t(h) * rows + r) * stride;
            float top = kNothing, total = 0;
            for (int i = 0; i < parts; ++i) top = std::max(top, partials[items[i].partial + at]);
            const int64_t row = p.first_rows[items[0].segment] + items[0].first_row + r / p.group;
            const int64_t head = (items[0].first_head + h) * p.group + r % p.group;
            float* to = p.output + (row * p.heads + head) * p.dim;
            std::fill_n(to, p.dim, 0.0f);
            for (int i = 0; i < parts; ++i) {
                const float* part = partials + items[i].partial + at;
                if (part[0] == kNothing) continue;
                const float factor = std::exp(part[0] - top);
                total += part[1] * factor;
                for (int j = 0; j < p.dim; ++j) to[j] += part[2 + j] * factor;
            }
            const float factor = total > 0 ? 1.0f / total : 0.0f;
            for (int j = 0; j < p.dim; ++j) to[j] *= factor;
        }
}

}  // namespace

extern "C" {

// 0, or 1 when there was not enough memory for the work space.
int cbviz_paged_attention(const float* query, int64_t query_row, int64_t query_head,
                          const float* keys, const float* values, float* output, int64_t heads,
                          int64_t kv_heads, int64_t dim, int64_t segments, const int64_t* lengths,
                          const int64_t* contexts, const int64_t* first_rows,
                          const int64_t* table_starts, const int64_t* tables, int64_t block_size,
                          float scale, int64_t window, float softcap, int64_t threads) {
    Problem p{query,    keys,      values,       output,    query_row,  query_head,
              int(heads), int(kv_heads), int(heads / kv_heads), int(dim),
              int((dim + LANES - 1) / LANES * LANES),
              lengths,  contexts,  first_rows,   table_starts, tables,  block_size,
              scale,    softcap,   window};
    bool failed = false;
    try {
        std::vector<Item> items;
        std::vector<Split> splits;
        int64_t partial_size = 0;
        const int team = worthwhile(p, int(segments), int(threads));
        divide(p, int(segments), team, items, splits, partial_size);
        std::vector<float> partials(partial_size);
        const int count = int(items.size());
#pragma omp parallel num_threads(team) if (team > 1 && count > 1)
        {
            static thread_local Workspace workspace;
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < count; ++i) {
                try {
                    Tiles tiles(p, items[i], workspace);
                    tiles.run();
                    if (items[i].partial < 0)
                        tiles.write();
                    else
                        tiles.write_partial(partials.data() + items[i].partial);
                } catch (const std::exception&) {
#pragma omp atomic write
                    failed = true;
                }
            }
#pragma omp for schedule(static)
            for (int i = 0; i < int(splits.size()); ++i)
                merge(p, &items[splits[i].item], splits[i].parts, partials.data());
        }
    } catch (const std::exception&) {
        failed = true;
    }
    return failed ? 1 : 0;
}
}
