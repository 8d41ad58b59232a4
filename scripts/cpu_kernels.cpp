// CPU kernels that give a token the same logits whether it is computed alone, in a draft or in a long prompt.
//
// Some of llama.cpp's kernels sum in another order for single tokens than for several, so that checking a draft could
// change the reply. On Linux, a function of a library that was loaded earlier takes precedence over one of the same
// name. edgespec/backends/llamacpp/native.py loads this library before llama.cpp, and replaces these functions:
//
// - Matrix products. llamafile's kernels are used only for weights for which they sum like the kernel for one token.
// - Products with Q4_K, Q5_K and Q6_K weights on processors with AVX2. llama.cpp has fast kernels for 4 or 8 tokens and
//   more. The kernels below for fewer tokens sum in the same order.
// - Attention over f16 or f32 keys and values. llama.cpp has a fast kernel for 64 tokens and more, another one for fewer,
//   and a third for one token in a long context. The kernel below replaces the latter two, and computes each token
//   exactly as the first one does. It also reads each key and value only once for all query heads that share them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
// Blocks of 256 elements, as in ggml-common.h.
struct Activations {  // block_q8_K
    float scale;
    int8_t elements[256];
    int16_t sums[16];  // of 16 elements each
};
struct BlockQ4K {
    uint16_t scale, min_scale;
    uint8_t scales[12], low[128];
};
struct BlockQ5K {
    uint16_t scale, min_scale;
    uint8_t scales[12], high[32], low[128];
};
struct BlockQ6K {
    uint8_t low[128], high[64];
    int8_t scales[16];
    uint16_t scale;
};
struct EightBlocksQ4K {  // block_q4_Kx8: a block of each of 8 rows
    uint16_t scale[8], min_scale[8];
    uint8_t scales[8][12], low[1024];  // 12 bytes with the scales and minimums of 8 rows, for each of 8 parts
};

__m256i load(const void * at) { return _mm256_loadu_si256(static_cast<const __m256i *>(at)); }

// Unpack 8 scales (first 8 bytes) and 8 minimums (last 8 bytes) of 6 bits each.
__m128i unpack_scales(const uint8_t * packed) {
    uint32_t a, b, c;
    std::memcpy(&a, packed, 4), std::memcpy(&b, packed + 4, 4), std::memcpy(&c, packed + 8, 4);
    return _mm_setr_epi32(
        a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 6 & 0x03030303) << 4, b & 0x3f3f3f3f,
        (c >> 4 & 0x0f0f0f0f) | (b >> 6 & 0x03030303) << 4);
}

int sum(__m128i v) {
    v = _mm_add_epi32(v, _mm_unpackhi_epi64(v, v));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 1)));
}

int sum(__m256i v) { return sum(_mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1))); }

// Return a 16-bit element of each half of a vector, repeated in that half.
template <int INDEX>
__m256i repeat(__m256i v) {
    return _mm256_shuffle_epi8(v, _mm256_set1_epi16(2 * INDEX + 256 * (2 * INDEX + 1)));
}

// Add 64 products of weights and activations to `total`, for the parts 2 * PAIR and 2 * PAIR + 1 of a block.
template <int PAIR, typename Block>
void add_pair(__m256i & total, const Block & weights, const Activations & inputs, __m256i scales) {
    const __m256i packed = load(weights.low + 32 * PAIR), mask = _mm256_set1_epi8(15);
    __m256i first = _mm256_and_si256(packed, mask), second = _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask);
    if constexpr (std::is_same_v<Block, BlockQ5K>) {
        const __m256i high = _mm256_srli_epi16(load(weights.high), 2 * PAIR);
        first = _mm256_or_si256(first, _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi8(1)), 4));
        second = _mm256_or_si256(second, _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi8(2)), 3));
    }
    first = _mm256_maddubs_epi16(first, load(inputs.elements + 64 * PAIR));
    second = _mm256_maddubs_epi16(second, load(inputs.elements + 64 * PAIR + 32));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(first, repeat<2 * PAIR>(scales)));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(second, repeat<2 * PAIR + 1>(scales)));
}

// Multiply a row of Q4_K or Q5_K weights. Like llama.cpp's tiles, add up a block's integers before scaling them.
template <typename Block>
float multiply_with_minimums(int n, const Block * weights, const Activations * inputs) {
    float result = 0.0f;
    for (int i = 0; i < n / 256; ++i) {
        const __m128i unpacked = unpack_scales(weights[i].scales);
        const __m128i scales = _mm_cvtepu8_epi16(unpacked), minimums = _mm_cvtepu8_epi16(_mm_unpackhi_epi64(unpacked, unpacked));
        const __m256i both = _mm256_broadcastsi128_si256(scales), sums = load(inputs[i].sums);
        __m256i total = _mm256_setzero_si256();
        add_pair<0>(total, weights[i], inputs[i], both);
        add_pair<1>(total, weights[i], inputs[i], both);
        add_pair<2>(total, weights[i], inputs[i], both);
        add_pair<3>(total, weights[i], inputs[i], both);
        const __m128i pairs = _mm_hadd_epi16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        const float scaled = _cvtsh_ss(weights[i].scale) * sum(total);
        const float shift = sum(_mm_madd_epi16(pairs, minimums));
        const float product = std::fma(-_cvtsh_ss(weights[i].min_scale), shift, scaled);
        result = std::fma(product, inputs[i].scale, result);
    }
    return result;
}

// Add 128 products of Q6_K weights and activations to `total`.
template <int HALF>
void add_half(__m256i & total, const BlockQ6K & weights, const Activations & inputs, __m256i scales) {
    const __m256i first = load(weights.low + 64 * HALF), second = load(weights.low + 64 * HALF + 32);
    const __m256i high = load(weights.high + 32 * HALF), mask = _mm256_set1_epi8(15), bits = _mm256_set1_epi8(48);
    const __m256i parts[4] = {
        _mm256_or_si256(_mm256_and_si256(first, mask), _mm256_and_si256(_mm256_slli_epi16(high, 4), bits)),
        _mm256_or_si256(_mm256_and_si256(second, mask), _mm256_and_si256(_mm256_slli_epi16(high, 2), bits)),
        _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(first, 4), mask), _mm256_and_si256(high, bits)),
        _mm256_or_si256(
            _mm256_and_si256(_mm256_srli_epi16(second, 4), mask), _mm256_and_si256(_mm256_srli_epi16(high, 2), bits)),
    };
    const int8_t * elements = inputs.elements + 128 * HALF;
    const __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(parts[0], load(elements)), repeat<4 * HALF>(scales));
    const __m256i b = _mm256_madd_epi16(_mm256_maddubs_epi16(parts[1], load(elements + 32)), repeat<4 * HALF + 1>(scales));
    const __m256i c = _mm256_madd_epi16(_mm256_maddubs_epi16(parts[2], load(elements + 64)), repeat<4 * HALF + 2>(scales));
    const __m256i d = _mm256_madd_epi16(_mm256_maddubs_epi16(parts[3], load(elements + 96)), repeat<4 * HALF + 3>(scales));
    total = _mm256_add_epi32(total, _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d)));
}

// Multiply a row of Q6_K weights. Like llama.cpp's tiles, add up a block's integers before scaling them.
float multiply_q6(int n, const BlockQ6K * weights, const Activations * inputs) {
    // Even scales, then odd ones, because a vector of 32 elements has two scales.
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    float result = 0.0f;
    for (int i = 0; i < n / 256; ++i) {
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(weights[i].scales));
        const __m256i scales = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(packed, order));
        // The stored elements are 32 too large.
        const __m256i excess = _mm256_madd_epi16(load(inputs[i].sums), _mm256_cvtepi8_epi16(packed));
        __m256i total = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(excess, 5));
        add_half<0>(total, weights[i], inputs[i], scales);
        add_half<1>(total, weights[i], inputs[i], scales);
        result = std::fma(_cvtsh_ss(weights[i].scale) * sum(total), inputs[i].scale, result);
    }
    return result;
}

// Multiply 8 rows of Q4_K weights. Like llama.cpp's kernel for 4 tokens, add up the integers of 64 elements before scaling them.
__m256 multiply_eight_q4(int n, const EightBlocksQ4K * weights, const Activations * inputs) {
    const __m256i mask = _mm256_set1_epi8(15), order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    // Repeat the scales of rows 0 to 3 and 4 to 7, one per 64 bits.
    const __m256i scales_0 = _mm256_setr_epi64x(0x0100010001000100, 0x0302030203020302, 0x0504050405040504, 0x0706070607060706);
    const __m256i scales_4 = _mm256_add_epi8(scales_0, _mm256_set1_epi8(8));
    __m256 result = _mm256_setzero_ps(), shift = _mm256_setzero_ps();
    for (int i = 0; i < n / 256; ++i) {
        const EightBlocksQ4K & block = weights[i];
        const Activations & input = inputs[i];
        const __m256 input_scale = _mm256_set1_ps(input.scale);
        const __m256 scale =
            _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(block.scale))), input_scale);
        const __m256 min_scale =
            _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(block.min_scale))), input_scale);
        for (int pair = 0; pair < 4; ++pair) {
            __m256i first_0 = _mm256_setzero_si256(), first_4 = first_0, second_0 = first_0, second_4 = first_0;
            for (int chunk = 0; chunk < 4; ++chunk) {
                const uint8_t * packed = block.low + 256 * pair + 64 * chunk;
                const __m256i rows_0 = load(packed), rows_4 = load(packed + 32);
                int64_t elements[2];
                std::memcpy(elements, input.elements + 64 * pair + 8 * chunk, 8);
                std::memcpy(elements + 1, input.elements + 64 * pair + 32 + 8 * chunk, 8);
                const __m256i first = _mm256_set1_epi64x(elements[0]), second = _mm256_set1_epi64x(elements[1]);
                first_0 = _mm256_add_epi16(first_0, _mm256_maddubs_epi16(_mm256_and_si256(rows_0, mask), first));
                first_4 = _mm256_add_epi16(first_4, _mm256_maddubs_epi16(_mm256_and_si256(rows_4, mask), first));
                second_0 = _mm256_add_epi16(
                    second_0, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(rows_0, 4), mask), second));
                second_4 = _mm256_add_epi16(
                    second_4, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(rows_4, 4), mask), second));
            }
            const __m128i a = unpack_scales(block.scales[2 * pair]), b = unpack_scales(block.scales[2 * pair + 1]);
            const __m256i first = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(a));
            const __m256i second = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(b));
            const __m256i rows_0 = _mm256_add_epi32(
                _mm256_madd_epi16(first_0, _mm256_shuffle_epi8(first, scales_0)),
                _mm256_madd_epi16(second_0, _mm256_shuffle_epi8(second, scales_0)));
            const __m256i rows_4 = _mm256_add_epi32(
                _mm256_madd_epi16(first_4, _mm256_shuffle_epi8(first, scales_4)),
                _mm256_madd_epi16(second_4, _mm256_shuffle_epi8(second, scales_4)));
            const __m256i total = _mm256_permutevar8x32_epi32(_mm256_hadd_epi32(rows_0, rows_4), order);
            result = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, result);
            const int16_t * sums = input.sums + 4 * pair;
            const int pair_sums = ((sums[0] + sums[1]) & 0xffff) | (sums[2] + sums[3]) << 16;
            const __m256i minimums = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));  // of both parts, row by row
            const __m256i total_shift = _mm256_madd_epi16(minimums, _mm256_set1_epi32(pair_sums));
            shift = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total_shift), min_scale, shift);
        }
    }
    return _mm256_sub_ps(result, shift);
}

// Round n inputs to 8 bits exactly as llama.cpp does for four tokens at once (ggml_quantize_mat_q8_K_4x8).
void quantise(const float * inputs, Activations * to, int64_t n) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    for (int64_t i = 0; i < n / 256; ++i, inputs += 256, ++to) {
        __m256 largest = _mm256_setzero_ps(), highest = _mm256_set1_ps(-INFINITY);
        for (int j = 0; j < 256; j += 8) {
            const __m256 v = _mm256_loadu_ps(inputs + j);
            largest = _mm256_max_ps(largest, _mm256_and_ps(v, magnitude));
            highest = _mm256_max_ps(highest, v);
        }
        float size = 0.0f, high = -INFINITY;
        for (int j = 0; j < 8; ++j) {
            size = std::max(size, largest[j]), high = std::max(high, highest[j]);
        }
        const float factor = size == 0.0f ? 0.0f : (high == size ? -127.0f : 127.0f) / size;
        to->scale = size == 0.0f ? 0.0f : 1.0f / factor;
        for (int j = 0; j < 256; j += 16) {
            const __m256 scale = _mm256_set1_ps(factor);
            const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(inputs + j), scale));
            const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(inputs + j + 8), scale));
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
            const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(to->elements + j), bytes);
            to->sums[j / 16] = static_cast<int16_t>(sum(_mm256_add_epi32(a, b)));
        }
    }
}
#endif

// The sizes of llama.cpp's tiles, in tokens. The result depends on the number of keys per tile.
constexpr int QUERIES = 64, KEYS = 64;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

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
    for (int column = 0; column < columns; column += 8) {
#if defined(__AVX__)
        __m256 rows[8], pairs[8], fours[8];
        for (int i = 0; i < 8; ++i) {
            rows[i] = _mm256_loadu_ps(a[i] + column);
        }
        for (int i = 0; i < 8; i += 2) {
            pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
            pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
            fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
            fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
            fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            float * to = b + (column + i) * KEYS;
            _mm256_storeu_ps(to, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
            _mm256_storeu_ps(to + 4 * KEYS, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
        }
#else
        for (int i = 0; i < 64; ++i) {
            b[(column + i / 8) * KEYS + i % 8] = a[i % 8][column + i / 8];
        }
#endif
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

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
extern "C" void quantize_row_q8_K(const float * inputs, void * to, int64_t n) {
    quantise(inputs, static_cast<Activations *>(to), n);
}

extern "C" void ggml_vec_dot_q4_K_q8_K(
    int n, float * result, size_t, const void * weights, size_t, const void * inputs, size_t, int) {
    *result = multiply_with_minimums(n, static_cast<const BlockQ4K *>(weights), static_cast<const Activations *>(inputs));
}

extern "C" void ggml_vec_dot_q5_K_q8_K(
    int n, float * result, size_t, const void * weights, size_t, const void * inputs, size_t, int) {
    *result = multiply_with_minimums(n, static_cast<const BlockQ5K *>(weights), static_cast<const Activations *>(inputs));
}

extern "C" void ggml_vec_dot_q6_K_q8_K(
    int n, float * result, size_t, const void * weights, size_t, const void * inputs, size_t, int) {
    *result = multiply_q6(n, static_cast<const BlockQ6K *>(weights), static_cast<const Activations *>(inputs));
}

// Multiply all rows of repacked weights, 8 at a time, for one token.
extern "C" void ggml_gemv_q4_K_8x8_q8_K(
    int n, float * result, size_t, const void * weights, const void * inputs, int, int rows) {
    const EightBlocksQ4K * blocks = static_cast<const EightBlocksQ4K *>(weights);
    for (int row = 0; row < rows; row += 8, blocks += n / 256) {
        _mm256_storeu_ps(result + row, multiply_eight_q4(n, blocks, static_cast<const Activations *>(inputs)));
    }
}
#endif

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
