// CPU kernels that give a token the same logits whether it is computed alone, in a draft or in a long prompt.
//
// Some of llama.cpp's kernels sum in another order for single tokens than for several, so that checking a draft could
// change the reply. On Linux, a function of a library that was loaded earlier takes precedence over one of the same
// name. edgespec/backends/llamacpp/native.py loads this library before llama.cpp, and replaces two functions:
//
// - Matrix products. llamafile's kernels are used only for weights for which they sum like the kernel for one token.
// - Attention over f16 or f32 keys and values. llama.cpp has a fast kernel for 64 tokens and more, another one for fewer,
//   and a third for one token in a long context. The kernel below replaces the latter two, and computes each token
//   exactly as the first one does. It also reads each key and value only once for all query heads that share them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ggml.h"

// As in ggml-cpu-impl.h of the llama.cpp for which scripts/setup compiles this file.
struct ggml_compute_params {
    int thread, threads;
    size_t work_size;
    void * work;
    void * threadpool;
    bool use_ref;  // whether to use the attention kernel for fewer than 64 tokens in any case
};

namespace {
using Params = ggml_compute_params;
using Multiply = bool (*)(
    const Params * params, int64_t m, int64_t n, int64_t k, const void * a, int64_t lda, const void * b, int64_t ldb,
    void * c, int64_t ldc, int a_type, int b_type, int c_type);
using Attend = void (*)(const Params * params, ggml_tensor * result);
using ToFloat = void (*)(const ggml_fp16_t * from, float * to, int64_t n);
using Softmax = double (*)(int n, float * to, const float * from, float max);

// llama.cpp's functions. See `edgespec_set_kernels`.
Multiply llamafile = nullptr;
Attend attend = nullptr;
ToFloat to_float = nullptr;
Softmax softmax = nullptr;

// Return whether llamafile's kernel for a type of weights sums like the kernel for a single token.
bool sums_alike(int type) {
#if defined(__x86_64__)
    return (type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q5_0 || type == GGML_TYPE_Q8_0) && __builtin_cpu_supports("avx2");
#else
    return type < 0;
#endif
}

// The sizes of llama.cpp's tiles, in tokens. The result depends on the number of keys per tile.
constexpr int QUERIES = 64, KEYS = 64;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

Vector & vector(float * at) { return *reinterpret_cast<Vector *>(at); }
const Vector & vector(const float * at) { return *reinterpret_cast<const Vector *>(at); }

// Add a[ROWS, depth] times b[depth, columns] to COLUMNS vectors of each row of c[ROWS, columns]. Products are added one
// by one in order of depth, as in llama.cpp's simd_gemm.
template <int ROWS, int COLUMNS>
void multiply_block(float * c, const float * a, const float * b, int depth, int columns) {
    Vector sums[ROWS][COLUMNS];
    for (int row = 0; row < ROWS; ++row) {
        for (int column = 0; column < COLUMNS; ++column) {
            sums[row][column] = vector(c + row * columns + column * LANES);
        }
    }
    for (int i = 0; i < depth; ++i) {
        for (int row = 0; row < ROWS; ++row) {
            for (int column = 0; column < COLUMNS; ++column) {
                sums[row][column] += vector(b + i * columns + column * LANES) * a[row * depth + i];
            }
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int column = 0; column < COLUMNS; ++column) {
            vector(c + row * columns + column * LANES) = sums[row][column];
        }
    }
}

// Add a[ROWS, depth] times b[depth, columns] to c[ROWS, columns].
template <int ROWS>
void multiply_rows(float * c, const float * a, const float * b, int depth, int columns) {
    constexpr int WIDE = ROWS > 3 ? 2 : 4;  // chosen: the sums of a block fit the processor's registers
    int column = 0;
    for (; column + WIDE * LANES <= columns; column += WIDE * LANES) {
        multiply_block<ROWS, WIDE>(c + column, a, b + column, depth, columns);
    }
    for (; column < columns; column += LANES) {
        multiply_block<ROWS, 1>(c + column, a, b + column, depth, columns);
    }
}

// Add a[rows, depth] times b[depth, columns] to c[rows, columns].
void multiply(float * c, const float * a, const float * b, int rows, int depth, int columns) {
    while (rows > 0) {
        const int block = rows >= 6 ? 6 : rows >= 3 ? 3 : rows;
        switch (block) {
            case 6: multiply_rows<6>(c, a, b, depth, columns); break;
            case 3: multiply_rows<3>(c, a, b, depth, columns); break;
            case 2: multiply_rows<2>(c, a, b, depth, columns); break;
            default: multiply_rows<1>(c, a, b, depth, columns);
        }
        rows -= block, c += block * columns, a += block * depth;
    }
}

const float * floats(const ggml_tensor * tensor, const char * from, float * buffer, int64_t n) {
    if (tensor->type == GGML_TYPE_F32) {
        return reinterpret_cast<const float *>(from);
    }
    to_float(reinterpret_cast<const ggml_fp16_t *>(from), buffer, n);
    return buffer;
}

float maximum(const float * values) {
    Vector largest = vector(values);
    for (int i = LANES; i < KEYS; i += LANES) {
        const Vector next = vector(values + i);
        largest = next > largest ? next : largest;
    }
    float result = largest[0];
    for (int i = 1; i < LANES; ++i) {
        result = largest[i] > result ? largest[i] : result;
    }
    return result;
}

// Write rows of a[8, columns] as columns of b[columns, KEYS].
void transpose(float * b, const float * const a[8], int columns) {
    typedef float Eight __attribute__((vector_size(32), aligned(4)));
    for (int column = 0; column < columns; column += 8) {
        Eight r[8], s[8];
        for (int i = 0; i < 8; ++i) {
            r[i] = *reinterpret_cast<const Eight *>(a[i] + column);
        }
        for (int i = 0; i < 8; i += 2) {
            s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
            s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
        }
        for (int i = 0; i < 8; i += 4) {
            for (int j = 0; j < 2; ++j) {
                r[i + 2 * j] = __builtin_shufflevector(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
                r[i + 2 * j + 1] = __builtin_shufflevector(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
            }
        }
        for (int i = 0; i < 4; ++i) {
            float * to = b + (column + i) * KEYS;
            *reinterpret_cast<Eight *>(to) = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
            *reinterpret_cast<Eight *>(to + 4 * KEYS) = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        }
    }
}

// The operands of one attention, and how its query rows are shared out. A group consists of the query heads that share
// a key and value head. Its rows are ordered by token, then by head.
struct Attention {
    const ggml_tensor *queries, *keys, *values, *mask, *sinks;
    ggml_tensor * result;
    float scale, max_bias, softcap;
    int key_size, value_size;
    int64_t tokens, heads, group_heads, groups, rows;

    explicit Attention(ggml_tensor * output)
        : queries(output->src[0]), keys(output->src[1]), values(output->src[2]), mask(output->src[3]), sinks(output->src[4]),
          result(output), key_size(keys->ne[0]), value_size(values->ne[0]), tokens(queries->ne[1]), heads(queries->ne[2]) {
        std::memcpy(&scale, output->op_params, sizeof(float));
        std::memcpy(&max_bias, output->op_params + 1, sizeof(float));
        std::memcpy(&softcap, output->op_params + 2, sizeof(float));
        if (softcap != 0.0f) {
            scale /= softcap;
        }
        group_heads = keys->ne[2] == values->ne[2] ? heads / keys->ne[2] : 1;
        groups = queries->ne[3] * heads / group_heads;
        rows = tokens * group_heads;
    }

    // Return whether llama.cpp would use its kernel for 64 tokens if there were as many.
    bool has_tiles() const {
        return queries->type == GGML_TYPE_F32 && keys->type == values->type &&
               (keys->type == GGML_TYPE_F16 || keys->type == GGML_TYPE_F32);
    }

    bool fits_vectors() const { return key_size % 8 == 0 && value_size % LANES == 0; }

    // Return the slope of a head's position bias (ALiBi, arXiv 2108.12409).
    float slope(int head) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        const uint32_t power = 1u << static_cast<uint32_t>(std::floor(std::log2(static_cast<uint32_t>(heads))));
        const bool is_first = static_cast<uint32_t>(head) < power;
        const float base = std::pow(2.0f, -(is_first ? max_bias : max_bias / 2.0f) / power);
        return std::pow(base, static_cast<float>(is_first ? head + 1 : 2 * (head - static_cast<int>(power)) + 1));
    }

    // Return into how many parts each group is split, so that all threads finish early. Each part converts all keys and
    // values, which takes about as long as 3 rows (chosen).
    int64_t parts(int threads) const {
        int64_t best = 1, least = INT64_MAX;
        for (int64_t parts = (rows + QUERIES - 1) / QUERIES; parts <= std::min<int64_t>(rows, 64); ++parts) {
            const int64_t time = (groups * parts + threads - 1) / threads * (3 + (rows + parts - 1) / parts);
            if (time < least) {
                best = parts, least = time;
            }
        }
        return best;
    }

    void run(int64_t group, int64_t first, int count, float * work) const;
};

// Compute `count` rows of a group, at most QUERIES. `work` is the memory of this thread.
void Attention::run(int64_t group, int64_t first, int count, float * work) const {
    const int64_t batch = group / (heads / group_heads), first_head = group % (heads / group_heads) * group_heads;
    const char * key = static_cast<const char *>(keys->data) + first_head / (heads / keys->ne[2]) * keys->nb[2] +
                       batch / (queries->ne[3] / keys->ne[3]) * keys->nb[3];
    const char * value = static_cast<const char *>(values->data) + first_head / (heads / values->ne[2]) * values->nb[2] +
                         batch / (queries->ne[3] / values->ne[3]) * values->nb[3];
    float * query = work;                             // [count, key_size]
    float * scores = query + QUERIES * key_size;      // [count, KEYS]
    float * biases = scores + QUERIES * KEYS;         // [count, KEYS]
    float * sums = biases + QUERIES * KEYS;           // [count, value_size]
    float * tile_values = sums + QUERIES * value_size;  // [KEYS, value_size]
    float * tile_keys = tile_values + KEYS * value_size;  // [key_size, KEYS]
    float total[QUERIES], max[QUERIES], slopes[QUERIES];
    const char * masks[QUERIES];
    for (int i = 0; i < count; ++i) {
        const int64_t token = (first + i) / group_heads, head = first_head + (first + i) % group_heads;
        std::memcpy(
            query + i * key_size,
            static_cast<const char *>(queries->data) + token * queries->nb[1] + head * queries->nb[2] + batch * queries->nb[3],
            key_size * sizeof(float));
        total[i] = 0.0f, max[i] = -INFINITY, slopes[i] = slope(head);
        masks[i] = mask ? static_cast<const char *>(mask->data) + token * mask->nb[1] + head % mask->ne[2] * mask->nb[2] +
                              batch % mask->ne[3] * mask->nb[3]
                        : nullptr;
    }
    std::memset(sums, 0, count * value_size * sizeof(float));
    std::memset(tile_values, 0, KEYS * value_size * sizeof(float));
    std::memset(tile_keys, 0, KEYS * key_size * sizeof(float));

    for (int64_t start = 0; start < keys->ne[1]; start += KEYS) {
        const int tile = std::min<int64_t>(KEYS, keys->ne[1] - start);
        bool is_masked = mask != nullptr;
        for (int i = 0; mask && i < count; ++i) {
            float * bias = biases + i * KEYS;
            if (i > 0 && masks[i] == masks[i - 1] && slopes[i] == slopes[i - 1]) {
                std::memcpy(bias, bias - KEYS, KEYS * sizeof(float));
                continue;
            }
            to_float(reinterpret_cast<const ggml_fp16_t *>(masks[i]) + start, bias, tile);
            std::fill(bias + tile, bias + KEYS, -INFINITY);
            for (int k = 0; k < KEYS; ++k) {
                bias[k] *= slopes[i];
            }
            is_masked = is_masked && maximum(bias) == -INFINITY;
        }
        if (is_masked) {
            continue;
        }

        for (int k = 0; k < tile; k += 8) {
            const float * rows_of_keys[8];
            for (int i = 0; i < 8; ++i) {
                // The values of this tile are not needed yet, so their memory holds the converted keys.
                float * buffer = tile_values + i * key_size;
                rows_of_keys[i] = floats(keys, key + (start + std::min(k + i, tile - 1)) * keys->nb[1], buffer, key_size);
            }
            transpose(tile_keys + k, rows_of_keys, key_size);
        }
        std::memset(scores, 0, count * KEYS * sizeof(float));
        multiply(scores, query, tile_keys, count, key_size, KEYS);
        for (int i = 0; i < count * KEYS; ++i) {
            scores[i] *= scale;
        }
        if (softcap != 0.0f) {
            for (int i = 0; i < count * KEYS; ++i) {
                scores[i] = std::tanh(scores[i]);
            }
            for (int i = 0; i < count * KEYS; ++i) {
                scores[i] *= softcap;
            }
        }
        for (int i = 0; i < count; ++i) {
            float *score = scores + i * KEYS, *sum = sums + i * value_size;
            std::fill(score + tile, score + KEYS, -INFINITY);
            for (int k = 0; mask && k < KEYS; ++k) {
                score[k] += biases[i * KEYS + k];
            }
            const float largest = maximum(score);
            if (largest == -INFINITY) {
                std::fill(score, score + KEYS, 0.0f);
                continue;
            }
            if (largest > max[i]) {
                const float factor = std::exp(max[i] - largest);
                for (int v = 0; v < value_size; ++v) {
                    sum[v] *= factor;
                }
                total[i] *= factor;
                max[i] = largest;
            }
            total[i] += softmax(KEYS, score, score, max[i]);
        }
        for (int k = 0; k < tile; ++k) {
            float * to = tile_values + k * value_size;
            const float * from = floats(values, value + (start + k) * values->nb[1], to, value_size);
            if (from != to) {
                std::memcpy(to, from, value_size * sizeof(float));
            }
        }
        multiply(sums, scores, tile_values, count, KEYS, value_size);
    }

    for (int i = 0; i < count; ++i) {
        const int64_t token = (first + i) / group_heads, head = first_head + (first + i) % group_heads;
        float * sum = sums + i * value_size;
        if (sinks) {
            const float sink = static_cast<const float *>(sinks->data)[head];
            float factor = 1.0f, added = 1.0f;
            if (sink > max[i]) {
                factor = std::exp(max[i] - sink);
                for (int v = 0; v < value_size; ++v) {
                    sum[v] *= factor;
                }
            } else {
                added = std::exp(sink - max[i]);
            }
            total[i] = total[i] * factor + added;
        }
        const float factor = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
        for (int v = 0; v < value_size; ++v) {
            sum[v] *= factor;
        }
        std::memcpy(
            static_cast<char *>(result->data) + (batch * result->ne[2] * result->ne[1] + head + token * result->ne[1]) * result->nb[1],
            sum, value_size * sizeof(float));
    }
}
}  // namespace

extern "C" void edgespec_set_kernels(Multiply multiply, Attend attention, ToFloat convert, Softmax exponentials) {
    llamafile = multiply, attend = attention, to_float = convert, softmax = exponentials;
}

// Multiply two matrices, or return false if llama.cpp's own kernel has to do it.
extern "C" bool llamafile_sgemm(
    const Params * params, int64_t m, int64_t n, int64_t k, const void * a, int64_t lda, const void * b, int64_t ldb, void * c,
    int64_t ldc, int a_type, int b_type, int c_type) {
    if (llamafile == nullptr || !sums_alike(a_type)) {
        return false;
    }
    return llamafile(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}

// Compute attention with a kernel whose result for a token does not depend on the number of tokens.
extern "C" void ggml_compute_forward_flash_attn_ext(const Params * params, ggml_tensor * result) {
    const Attention attention(result);
    if (!attention.has_tiles()) {
        attend(params, result);  // has a single kernel for these types
        return;
    }
    if (!attention.fits_vectors()) {
        Params changed = *params;
        changed.use_ref = true;
        attend(&changed, result);
        return;
    }
    if (attention.tokens >= QUERIES) {
        attend(params, result);
        return;
    }
    // The memory for one thread has the size that llama.cpp's tiles need.
    constexpr int64_t CACHE_LINE = 16;
    const int64_t needed = (QUERIES + KEYS) * (attention.key_size + attention.value_size) + 2 * QUERIES * KEYS + CACHE_LINE;
    float * work = static_cast<float *>(params->work) + params->thread * needed;
    const int64_t parts = attention.parts(params->threads), size = (attention.rows + parts - 1) / parts;
    for (int64_t i = params->thread; i < attention.groups * parts; i += params->threads) {
        const int64_t first = i % parts * size, end = std::min(first + size, attention.rows);
        if (first < end) {
            attention.run(i / parts, first, end - first, work);
        }
    }
}
