// CPU kernels that give a token the same logits whether it is computed alone, in a draft or in a long prompt, and that read
// weights from memory as fast as it allows.
//
// Some of llama.cpp's kernels sum in another order for single tokens than for several, so that checking a draft could
// change the reply. On Linux, a function of a library that was loaded earlier takes precedence over one of the same
// name. edgespec/backends/llamacpp/native.py loads this library before llama.cpp, and replaces these functions:
//
// - Matrix products. llamafile's kernels are used only for weights for which they sum like the kernel for one token.
//   Products with F16 and Q8_0 weights have kernels below, because those for F16 sum in another order, and read Q8_0 slowly.
// - Products with Q4_K, Q5_K and Q6_K weights on processors with AVX2. llama.cpp has fast kernels for 4 or 8 tokens and
//   more. The kernels below for fewer tokens sum in the same order.
// - Products with Q4_0 weights for one token on processors with AVX2. They sum like those of llama.cpp.
//
// Decoding is limited by how fast weights are read. The kernels for one token therefore ask for weights ahead of time.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ggml.h"

// The first members of llama.cpp's structure, whose header is not installed.
struct ggml_compute_params {
    int thread, threads;
    size_t work_size;
    void * work;
    void * pool;
};

namespace {
using Params = ggml_compute_params;
using Multiply = bool (*)(
    const Params * params, int64_t m, int64_t n, int64_t k, const void * a, int64_t lda, const void * b, int64_t ldb,
    void * c, int64_t ldc, int a_type, int b_type, int c_type);

// llama.cpp's functions. See `edgespec_set_functions`.
Multiply llamafile = nullptr;
struct {
    void (*barrier)(void * pool);
    void (*set_chunk)(void * pool, int chunk);
    int (*next_chunk)(void * pool, int count);
} threads = {};

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

// How far ahead weights are requested, in bytes. Measured on a server processor: 2 to 8 KiB are equally fast.
constexpr int AHEAD = 4096;

// Ask for the weights that are needed soon, because processors do not read far enough ahead by themselves.
template <typename Block>
void prefetch(const Block * block) {
    for (size_t line = 0; line < sizeof(Block); line += 64) {
        __builtin_prefetch(reinterpret_cast<const char *>(block) + AHEAD + line, 0, 2);
    }
}

struct FourActivations {  // block_q8_Kx4: a block of each of 4 tokens
    float scale[4];
    int8_t elements[32][4][8];  // 8 elements of each token, for each of 32 parts
    int16_t sums[4][4][4];      // of 16 elements each: 4 of each token, for each of 4 parts
};
struct BlockQ8 {  // 32 elements
    uint16_t scale;
    int8_t elements[32];
};
struct FourBlocksQ8 {  // block_q8_0x4: a block of each of 4 tokens
    uint16_t scale[4];
    int8_t elements[4][4][8];  // 8 elements of each token, for each of 4 parts
};
struct EightBlocksQ4 {  // block_q4_0x8: a block of 32 elements of each of 8 rows
    uint16_t scale[8];
    uint8_t low[4][32];  // rows 0 to 3, then 4 to 7: elements 0 to 7 with 16 to 23, then 8 to 15 with 24 to 31
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

// Return sum + a * b, rounded as in llama.cpp's tiles. Those for AVX-512 multiply and add in two steps, which GCC fuses
// and Clang does not.
float add_product(float sum, float a, float b) {
#if defined(CLANG_TILES) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
    float product = a * b;
    asm("" : "+x"(product));  // The compiler must not fuse it with the addition.
    return sum + product;
#else
    return std::fma(a, b, sum);
#endif
}

// Return a 16-bit element of each half of a vector, repeated in that half.
template <int INDEX>
__m256i repeat(__m256i v) {
    return _mm256_shuffle_epi8(v, _mm256_set1_epi16(2 * INDEX + 256 * (2 * INDEX + 1)));
}

// A block of 256 weights as unsigned bytes, with the scale of each pair of 16 bits that maddubs makes of them.
struct Unpacked {
    __m256i bytes[8], scales[8];
};

// Unpack 64 weights of Q4_K or Q5_K, which are the parts 2 * PAIR and 2 * PAIR + 1 of a block.
template <int PAIR, typename Block>
void unpack_pair(Unpacked & to, const Block & block, __m256i scales) {
    const __m256i packed = load(block.low + 32 * PAIR), mask = _mm256_set1_epi8(15);
    __m256i first = _mm256_and_si256(packed, mask), second = _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask);
    if constexpr (std::is_same_v<Block, BlockQ5K>) {
        const __m256i high = _mm256_srli_epi16(load(block.high), 2 * PAIR);
        first = _mm256_or_si256(first, _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi8(1)), 4));
        second = _mm256_or_si256(second, _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi8(2)), 3));
    }
    to.bytes[2 * PAIR] = first, to.bytes[2 * PAIR + 1] = second;
    to.scales[2 * PAIR] = repeat<2 * PAIR>(scales), to.scales[2 * PAIR + 1] = repeat<2 * PAIR + 1>(scales);
}

// Q4_K and Q5_K have a minimum for each 32 weights.
template <typename Block>
struct UnpackedBlock : Unpacked {
    float scale, min_scale;
    __m128i minimums;

    explicit UnpackedBlock(const Block & block) : scale(_cvtsh_ss(block.scale)), min_scale(_cvtsh_ss(block.min_scale)) {
        const __m128i both = unpack_scales(block.scales);
        const __m256i scales_of_parts = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(both));
        minimums = _mm_cvtepu8_epi16(_mm_unpackhi_epi64(both, both));
        unpack_pair<0>(*this, block, scales_of_parts);
        unpack_pair<1>(*this, block, scales_of_parts);
        unpack_pair<2>(*this, block, scales_of_parts);
        unpack_pair<3>(*this, block, scales_of_parts);
    }

    float scaled(__m256i total, const Activations & inputs) const {
        const __m256i sums = load(inputs.sums);
        const __m128i pairs = _mm_hadd_epi16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        const float product = scale * sum(total);
        return std::fma(-min_scale, static_cast<float>(sum(_mm_madd_epi16(pairs, minimums))), product);
    }
};

// Unpack 128 weights of Q6_K.
template <int HALF>
void unpack_half(Unpacked & to, const BlockQ6K & block, __m256i scales) {
    const __m256i first = load(block.low + 64 * HALF), second = load(block.low + 64 * HALF + 32);
    const __m256i high = load(block.high + 32 * HALF), mask = _mm256_set1_epi8(15), bits = _mm256_set1_epi8(48);
    __m256i * bytes = to.bytes + 4 * HALF;
    bytes[0] = _mm256_or_si256(_mm256_and_si256(first, mask), _mm256_and_si256(_mm256_slli_epi16(high, 4), bits));
    bytes[1] = _mm256_or_si256(_mm256_and_si256(second, mask), _mm256_and_si256(_mm256_slli_epi16(high, 2), bits));
    bytes[2] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(first, 4), mask), _mm256_and_si256(high, bits));
    bytes[3] = _mm256_or_si256(
        _mm256_and_si256(_mm256_srli_epi16(second, 4), mask), _mm256_and_si256(_mm256_srli_epi16(high, 2), bits));
    to.scales[4 * HALF] = repeat<4 * HALF>(scales), to.scales[4 * HALF + 1] = repeat<4 * HALF + 1>(scales);
    to.scales[4 * HALF + 2] = repeat<4 * HALF + 2>(scales), to.scales[4 * HALF + 3] = repeat<4 * HALF + 3>(scales);
}

// Q6_K has a signed scale for each 16 weights, which are stored 32 too large.
template <>
struct UnpackedBlock<BlockQ6K> : Unpacked {
    float scale;
    __m256i scales_of_16;

    explicit UnpackedBlock(const BlockQ6K & block) : scale(_cvtsh_ss(block.scale)) {
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(block.scales));
        // Even scales, then odd ones, because a vector of 32 weights has two scales.
        const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        const __m256i ordered = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(packed, order));
        scales_of_16 = _mm256_cvtepi8_epi16(packed);
        unpack_half<0>(*this, block, ordered);
        unpack_half<1>(*this, block, ordered);
    }

    float scaled(__m256i total, const Activations & inputs) const {
        const __m256i excess = _mm256_madd_epi16(load(inputs.sums), scales_of_16);
        return scale * sum(_mm256_sub_epi32(total, _mm256_slli_epi32(excess, 5)));
    }
};

// Multiply a row of Q4_K, Q5_K or Q6_K weights by some tokens. Like llama.cpp's tiles, add up a block's integers before
// scaling them.
template <int WIDTH, typename Block>
void multiply_row(int64_t n, const Block * weights, const Activations * inputs, int64_t stride, float (&results)[WIDTH]) {
    std::fill(results, results + WIDTH, 0.0f);
    for (int64_t i = 0; i < n; ++i) {
        prefetch(weights + i);
        const UnpackedBlock<Block> block(weights[i]);
        for (int t = 0; t < WIDTH; ++t) {
            const Activations & input = inputs[t * stride + i];
            __m256i total = _mm256_setzero_si256();
            for (int part = 0; part < 8; ++part) {
                const __m256i products = _mm256_maddubs_epi16(block.bytes[part], load(input.elements + 32 * part));
                total = _mm256_add_epi32(total, _mm256_madd_epi16(products, block.scales[part]));
            }
            results[t] = add_product(results[t], block.scaled(total, input), input.scale);
        }
    }
}

template <typename Block>
void multiply_one(int n, const Block * weights, const void * inputs, float * result) {
    float results[1];
    multiply_row(n / 256, weights, static_cast<const Activations *>(inputs), 0, results);
    *result = results[0];
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
        prefetch(&block);
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
            const uint32_t pair_sums = ((sums[0] + sums[1]) & 0xffff) | static_cast<uint32_t>(sums[2] + sums[3]) << 16;
            const __m256i minimums = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));  // of both parts, row by row
            const __m256i total_shift = _mm256_madd_epi16(minimums, _mm256_set1_epi32(static_cast<int>(pair_sums)));
            shift = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total_shift), min_scale, shift);
        }
    }
    return _mm256_sub_ps(result, shift);
}

// As many 32-bit floats as llama.cpp's kernel for 16-bit weights keeps in a register.
#if defined(__AVX512F__)
using Floats = __m512;
constexpr int ROWS = 4;
Floats zeros() { return _mm512_setzero_ps(); }
Floats widen(const uint16_t * at) { return _mm512_cvtph_ps(load(at)); }
Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
float total(Floats v) { return _mm512_reduce_add_ps(v); }
#else
using Floats = __m256;
constexpr int ROWS = 2;
Floats zeros() { return _mm256_setzero_ps(); }
Floats widen(const uint16_t * at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at))); }
Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
float total(Floats v) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)), quarter = _mm_hadd_ps(half, half);
    return _mm_cvtss_f32(_mm_hadd_ps(quarter, quarter));
}
#endif
constexpr int LANES = sizeof(Floats) / sizeof(float), STEP = 4 * LANES;
// The largest number of tokens at once, so that ROWS * TOKENS sums stay in registers.
constexpr int TOKENS = 6;

// A product of matrices, as in llama.cpp: c[token * c_stride + row] is the sum of the products of a[row * a_stride + i] and
// b[token * b_stride + i] for i < n, where a and b consist of F16 numbers or of blocks.
template <typename Block, typename Input = Block>
struct Product {
    int64_t n;
    const Block * a;
    int64_t a_stride;
    const Input * b;
    int64_t b_stride;
    float * c;
    int64_t c_stride;
};

// Multiply some rows and tokens, and ask for as many rows from `next` on. ggml_vec_dot_f16 keeps four sums per row, of
// every fourth register. Computing one after another for all rows and tokens leaves registers for more of them.
template <int COUNT, int WIDTH>
void multiply_tile(const Product<uint16_t> & p, int64_t row, int64_t token, int64_t next) {
    Floats quarters[4][COUNT][WIDTH];
    for (int quarter = 0; quarter < 4; ++quarter) {
        Floats sums[COUNT][WIDTH];
        for (auto & of_row : sums) {
            std::fill(of_row, of_row + WIDTH, zeros());
        }
        const uint16_t * a = p.a + row * p.a_stride + quarter * LANES;
        const uint16_t * b = p.b + token * p.b_stride + quarter * LANES;
        const uint16_t * ahead = p.a + (next + quarter * COUNT / 4) * p.a_stride;
        for (int64_t i = 0; i < p.n; i += STEP) {
            for (int line = 0; line < STEP; line += 32) {
                __builtin_prefetch(ahead + i + line, 0, 2);
            }
            Floats inputs[WIDTH];
            for (int t = 0; t < WIDTH; ++t) {
                inputs[t] = widen(b + t * p.b_stride + i);
            }
            for (int r = 0; r < COUNT; ++r) {
                const Floats weights = widen(a + r * p.a_stride + i);
                for (int t = 0; t < WIDTH; ++t) {
                    sums[r][t] = multiply_add(weights, inputs[t], sums[r][t]);
                }
            }
        }
        std::memcpy(quarters[quarter], sums, sizeof sums);
    }
    for (int r = 0; r < COUNT; ++r) {
        for (int t = 0; t < WIDTH; ++t) {
            const Floats even = add(quarters[0][r][t], quarters[2][r][t]), odd = add(quarters[1][r][t], quarters[3][r][t]);
            p.c[(token + t) * p.c_stride + row + r] = total(add(even, odd));
        }
    }
}

// Products of Q8_0 blocks: of two rows in one register, if it has 512 bits.
#if defined(__AVX512VNNI__) && defined(__AVX512DQ__)
using Bytes = __m512i;
using Scales = __m512;
constexpr int GROUP = 2;
Bytes load_rows(const BlockQ8 & a, const BlockQ8 & b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load(a.elements)), load(b.elements), 1);
}
Scales load_scales(const BlockQ8 & a, const BlockQ8 & b) {
    const __m512 low = _mm512_set1_ps(_cvtsh_ss(a.scale));
    return _mm512_insertf32x8(low, _mm256_set1_ps(_cvtsh_ss(b.scale)), 1);
}
// One factor must be unsigned, so 128 is added to the inputs, and 128 times the weights are subtracted from the products.
Bytes prepare_inputs(const BlockQ8 & b) {
    return _mm512_xor_si512(_mm512_broadcast_i64x4(load(b.elements)), _mm512_set1_epi8(-128));
}
Bytes prepare_sums(Bytes weights) {
    const Bytes sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), weights);
    return _mm512_sub_epi32(_mm512_setzero_si512(), sums);
}
Scales multiply_bytes(Bytes weights, Bytes inputs, Bytes sums) {
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(sums, inputs, weights));
}
Scales multiply_scales(Scales a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
Scales add_scaled(Scales scale, Scales parts, Scales sums) { return _mm512_fmadd_ps(scale, parts, sums); }
__m256 part_of(Scales v, int row) { return row == 0 ? _mm512_castps512_ps256(v) : _mm512_extractf32x8_ps(v, 1); }
#else
using Bytes = __m256i;
using Scales = __m256;
constexpr int GROUP = 1;
Bytes load_rows(const BlockQ8 & a, const BlockQ8 &) { return load(a.elements); }
Scales load_scales(const BlockQ8 & a, const BlockQ8 &) { return _mm256_set1_ps(_cvtsh_ss(a.scale)); }
Bytes prepare_inputs(const BlockQ8 & b) { return load(b.elements); }
// One factor must be unsigned, so the signs of the weights are moved to the inputs.
Bytes prepare_sums(Bytes weights) { return _mm256_sign_epi8(weights, weights); }
Scales multiply_bytes(Bytes weights, Bytes inputs, Bytes sizes) {
    const Bytes products = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(inputs, weights));
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
Scales multiply_scales(Scales a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
Scales add_scaled(Scales scale, Scales parts, Scales sums) { return _mm256_fmadd_ps(scale, parts, sums); }
__m256 part_of(Scales v, int) { return v; }
#endif

// Multiply some rows and tokens, and ask for as many rows from `next` on. The order is that of ggml_vec_dot_q8_0_q8_0.
template <int COUNT, int WIDTH>
void multiply_tile(const Product<BlockQ8> & p, int64_t row, int64_t token, int64_t next) {
    constexpr int GROUPS = (COUNT + GROUP - 1) / GROUP;
    const BlockQ8 * a = p.a + row * p.a_stride;
    const BlockQ8 * b = p.b + token * p.b_stride;
    const BlockQ8 * ahead = p.a + next * p.a_stride;
    // A single row takes both places of a group.
    const int64_t second = COUNT > 1 ? p.a_stride : 0;
    Scales sums[GROUPS][WIDTH] = {};
    for (int64_t i = 0; i < p.n; ++i) {
        Bytes weights[GROUPS], prepared[GROUPS];
        Scales scales[GROUPS];
        for (int r = 0; r < COUNT; ++r) {
            __builtin_prefetch(ahead + r * p.a_stride + i, 0, 2);
        }
        for (int g = 0; g < GROUPS; ++g) {
            const BlockQ8 * block = a + g * GROUP * p.a_stride + i;
            weights[g] = load_rows(block[0], block[second]);
            scales[g] = load_scales(block[0], block[second]);
            prepared[g] = prepare_sums(weights[g]);
        }
        for (int t = 0; t < WIDTH; ++t) {
            const BlockQ8 & input = b[t * p.b_stride + i];
            const Bytes inputs = prepare_inputs(input);
            const float scale = _cvtsh_ss(input.scale);
            for (int g = 0; g < GROUPS; ++g) {
                const Scales parts = multiply_bytes(weights[g], inputs, prepared[g]);
                sums[g][t] = add_scaled(multiply_scales(scales[g], scale), parts, sums[g][t]);
            }
        }
    }
    for (int r = 0; r < COUNT; ++r) {
        for (int t = 0; t < WIDTH; ++t) {
            const __m256 lanes = part_of(sums[r / GROUP][t], r % GROUP);
            __m128 v = _mm_add_ps(_mm256_extractf128_ps(lanes, 1), _mm256_castps256_ps128(lanes));
            v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            p.c[(token + t) * p.c_stride + row + r] = _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
        }
    }
}

template <int COUNT, int WIDTH, typename Block>
void multiply_tile(const Product<Block, Activations> & p, int64_t row, int64_t token, int64_t) {
    for (int r = 0; r < COUNT; ++r) {
        float results[WIDTH];
        multiply_row<WIDTH>(p.n, p.a + (row + r) * p.a_stride, p.b + token * p.b_stride, p.b_stride, results);
        for (int t = 0; t < WIDTH; ++t) {
            p.c[(token + t) * p.c_stride + row + r] = results[t];
        }
    }
}

// Multiply rows `row` to `end`. Only the first tokens read the weights from memory.
template <int WIDTH, typename Block, typename Input>
void multiply_rows(const Product<Block, Input> & p, int64_t row, int64_t end, int64_t token, bool is_first) {
    for (; row + ROWS <= end; row += ROWS) {
        multiply_tile<ROWS, WIDTH>(p, row, token, is_first ? row + ROWS : row);
    }
    for (; row < end; ++row) {
        multiply_tile<1, WIDTH>(p, row, token, row);
    }
}

// Multiply all rows by all tokens. Each thread takes the next chunk of rows when it has finished one, because cores differ
// in speed. If the tokens take several turns, a chunk has at most 256 KiB of weights, so that they stay in the cache.
template <typename Block, typename Input>
void multiply(const Params & params, const Product<Block, Input> & p, int64_t rows, int64_t tokens) {
    using Rows = void (*)(const Product<Block, Input> &, int64_t, int64_t, int64_t, bool);
    constexpr Rows for_width[TOKENS] = {multiply_rows<1, Block, Input>, multiply_rows<2, Block, Input>,
                                        multiply_rows<3, Block, Input>, multiply_rows<4, Block, Input>,
                                        multiply_rows<5, Block, Input>, multiply_rows<6, Block, Input>};
    const int64_t groups = (rows + ROWS - 1) / ROWS, parts = (tokens + TOKENS - 1) / TOKENS;
    const int64_t most = parts > 1 ? (256 << 10) / (ROWS * p.n * sizeof(Block)) : groups;
    const int64_t size = ROWS * std::max<int64_t>(1, std::min(most, groups / (4 * params.threads)));
    const int64_t chunks = (rows + size - 1) / size;
    const bool is_shared = params.threads > 1;
    if (is_shared) {
        if (params.thread == 0) {
            threads.set_chunk(params.pool, params.threads);
        }
        threads.barrier(params.pool);
    }
    for (int64_t chunk = params.thread; chunk < chunks; chunk = is_shared ? threads.next_chunk(params.pool, 1) : chunk + 1) {
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t token = tokens * part / parts, width = tokens * (part + 1) / parts - token;
            for_width[width - 1](p, chunk * size, std::min((chunk + 1) * size, rows), token, part == 0);
        }
    }
    if (is_shared) {
        threads.barrier(params.pool);
    }
}

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
__m512i repeat_bytes(const int8_t * eight) {
    int64_t bytes;
    std::memcpy(&bytes, eight, 8);
    return _mm512_set1_epi64(bytes);
}

// Return a in the low half and b in the high half.
__m512 join(float a, float b) { return _mm512_insertf32x8(_mm512_set1_ps(a), _mm256_set1_ps(b), 1); }

__m512 widen_both(const uint16_t * eight) {
    return _mm512_broadcast_f32x8(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(eight))));
}

// Multiply 8 rows of Q4_K weights by 4 tokens, like multiply_eight_q4. A register holds 8 results of two tokens.
void multiply_eight_q4_by_four(
    int n, const EightBlocksQ4K * weights, const FourActivations * inputs, float * to, size_t stride) {
    const __m512i mask = _mm512_set1_epi8(15);
    // Repeat the scale of each row, one per 64 bits.
    const __m512i each_row = _mm512_setr_epi64(
        0x0100010001000100, 0x0302030203020302, 0x0504050405040504, 0x0706070607060706, 0x0908090809080908,
        0x0b0a0b0a0b0a0b0a, 0x0d0c0d0c0d0c0d0c, 0x0f0e0f0e0f0e0f0e);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512i sums_of[2] = {
        _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
        _mm512_setr_epi32(4, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5)};
    __m512 results[2] = {}, shifts[2] = {};
    for (int i = 0; i < n / 256; ++i) {
        const EightBlocksQ4K & block = weights[i];
        prefetch(&block);
        const FourActivations & input = inputs[i];
        __m512 scales[2], min_scales[2];
        for (int half = 0; half < 2; ++half) {
            const __m512 input_scales = join(input.scale[2 * half], input.scale[2 * half + 1]);
            scales[half] = _mm512_mul_ps(widen_both(block.scale), input_scales);
            min_scales[half] = _mm512_mul_ps(widen_both(block.min_scale), input_scales);
        }
        for (int pair = 0; pair < 4; ++pair) {
            __m512i first[4] = {}, second[4] = {};
            for (int chunk = 0; chunk < 4; ++chunk) {
                const __m512i packed = _mm512_loadu_si512(block.low + 256 * pair + 64 * chunk);
                const __m512i low = _mm512_and_si512(packed, mask);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
                for (int t = 0; t < 4; ++t) {
                    const __m512i a = repeat_bytes(input.elements[8 * pair + chunk][t]);
                    const __m512i b = repeat_bytes(input.elements[8 * pair + 4 + chunk][t]);
                    first[t] = _mm512_add_epi16(first[t], _mm512_maddubs_epi16(low, a));
                    second[t] = _mm512_add_epi16(second[t], _mm512_maddubs_epi16(high, b));
                }
            }
            const __m128i a = unpack_scales(block.scales[2 * pair]), b = unpack_scales(block.scales[2 * pair + 1]);
            const __m512i scales_a = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_cvtepu8_epi16(a)), each_row);
            const __m512i scales_b = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_cvtepu8_epi16(b)), each_row);
            const __m512i minimums = _mm512_broadcast_i64x4(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)));
            // The sums of both parts of each token, as pairs of 16 bits.
            const __m256i sums = _mm256_madd_epi16(load(input.sums[pair]), _mm256_set1_epi16(1));
            const __m512i pair_sums = _mm512_castsi256_si512(_mm256_packs_epi32(sums, sums));
            for (int half = 0; half < 2; ++half) {
                __m512i totals[2];
                for (int t = 0; t < 2; ++t) {
                    totals[t] = _mm512_add_epi32(
                        _mm512_madd_epi16(first[2 * half + t], scales_a), _mm512_madd_epi16(second[2 * half + t], scales_b));
                }
                const __m512i total = _mm512_add_epi32(
                    _mm512_permutex2var_epi32(totals[0], even, totals[1]), _mm512_permutex2var_epi32(totals[0], odd, totals[1]));
                results[half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scales[half], results[half]);
                const __m512i shift = _mm512_madd_epi16(minimums, _mm512_permutexvar_epi32(sums_of[half], pair_sums));
                shifts[half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(shift), min_scales[half], shifts[half]);
            }
        }
    }
    for (int half = 0; half < 2; ++half) {
        const __m512 both = _mm512_sub_ps(results[half], shifts[half]);
        _mm256_storeu_ps(to + 2 * half * stride, _mm512_castps512_ps256(both));
        _mm256_storeu_ps(to + (2 * half + 1) * stride, _mm512_extractf32x8_ps(both, 1));
    }
}
#endif

// Multiply 8 rows of Q4_0 weights by inputs whose sums of 32 elements are given, like ggml_gemv_q4_0_8x8_q8_0.
__m256 multiply_eight_q4_0(int n, const EightBlocksQ4 * weights, const BlockQ8 * inputs, const int32_t * input_sums) {
    const __m256i mask = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(8), ones = _mm256_set1_epi16(1);
    const __m128i order = _mm_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);  // that of hadd below
    __m256 result = _mm256_setzero_ps();
    for (int i = 0; i < n / 32; ++i) {
        prefetch(weights + i);
        __m256i rows[2];
        for (int half = 0; half < 2; ++half) {
            __m256i products[2];
            for (int part = 0; part < 2; ++part) {
                const __m256i packed = load(weights[i].low[2 * part + half]);
                // Elements are stored as signed 4-bit numbers. Add 8 to each, because one factor must be unsigned.
                const __m256i first = _mm256_xor_si256(_mm256_and_si256(packed, mask), sign);
                const __m256i second = _mm256_xor_si256(_mm256_and_si256(_mm256_srli_epi16(packed, 4), mask), sign);
                int64_t a, b;
                std::memcpy(&a, inputs[i].elements + 8 * part, 8), std::memcpy(&b, inputs[i].elements + 16 + 8 * part, 8);
                products[part] = _mm256_add_epi16(
                    _mm256_maddubs_epi16(first, _mm256_set1_epi64x(a)), _mm256_maddubs_epi16(second, _mm256_set1_epi64x(b)));
            }
            rows[half] = _mm256_madd_epi16(_mm256_add_epi16(products[0], products[1]), ones);
        }
        const __m256i excess = _mm256_set1_epi32(8 * input_sums[i]);
        const __m256i total = _mm256_sub_epi32(_mm256_hadd_epi32(rows[0], rows[1]), excess);
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(weights[i].scale));
        const __m256 scale = _mm256_cvtph_ps(_mm_shuffle_epi8(halves, order));
        const __m256 input_scale = _mm256_set1_ps(_cvtsh_ss(inputs[i].scale));
        result = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(scale, input_scale), result);
    }
    return _mm256_permutevar8x32_ps(result, _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
}

#if defined(__AVX512VNNI__) && defined(__AVX512DQ__)
// Multiply 8 rows of Q4_0 weights by 4 tokens, like multiply_eight_q4_0. A register holds 8 results of two tokens.
// `minus_sums` are -8 times the sums of the tokens' inputs of each block.
void multiply_eight_q4_0_by_four(
    int n, const EightBlocksQ4 * weights, const FourBlocksQ8 * inputs, const int32_t * minus_sums, float * to, size_t stride) {
    const __m512i mask = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(static_cast<char>(0x88));
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512 results[2] = {};
    for (int i = 0; i < n / 32; ++i) {
        prefetch(weights + i);
        // Elements are stored as signed 4-bit numbers. Add 8 to each, because one factor must be unsigned.
        const __m512i first = _mm512_xor_si512(_mm512_loadu_si512(weights[i].low[0]), sign);
        const __m512i second = _mm512_xor_si512(_mm512_loadu_si512(weights[i].low[2]), sign);
        const __m512i parts[4] = {
            _mm512_and_si512(first, mask), _mm512_and_si512(second, mask), _mm512_and_si512(_mm512_srli_epi16(first, 4), mask),
            _mm512_and_si512(_mm512_srli_epi16(second, 4), mask)};
        const __m512 scales = widen_both(weights[i].scale);
        for (int half = 0; half < 2; ++half) {
            __m512i totals[2];
            for (int t = 0; t < 2; ++t) {
                // One of the two sums of each row starts with the excess.
                totals[t] = _mm512_maskz_set1_epi32(0x5555, minus_sums[4 * i + 2 * half + t]);
                for (int part = 0; part < 4; ++part) {
                    totals[t] =
                        _mm512_dpbusd_epi32(totals[t], parts[part], repeat_bytes(inputs[i].elements[part][2 * half + t]));
                }
            }
            const __m512i total = _mm512_add_epi32(
                _mm512_permutex2var_epi32(totals[0], even, totals[1]), _mm512_permutex2var_epi32(totals[0], odd, totals[1]));
            const uint16_t * input_scales = inputs[i].scale + 2 * half;
            const __m512 scale = _mm512_mul_ps(scales, join(_cvtsh_ss(input_scales[0]), _cvtsh_ss(input_scales[1])));
            results[half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scale, results[half]);
        }
    }
    for (int half = 0; half < 2; ++half) {
        _mm256_storeu_ps(to + 2 * half * stride, _mm512_castps512_ps256(results[half]));
        _mm256_storeu_ps(to + (2 * half + 1) * stride, _mm512_extractf32x8_ps(results[half], 1));
    }
}
#endif

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
        // In this order, NaNs are treated like llama.cpp treats them.
        __m128 four = _mm_max_ps(_mm256_extractf128_ps(largest, 1), _mm256_castps256_ps128(largest));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        const float size = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
        float high = -INFINITY;
        for (int j = 0; j < 8; ++j) {
            high = std::max(high, highest[j]);
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
            const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
            to->sums[j / 16] = static_cast<int16_t>(sum(_mm_madd_epi16(pairs, _mm_set1_epi16(1))));
        }
    }
}
#endif
}  // namespace

// Set llama.cpp's functions, which this library cannot find by name because it is loaded first.
extern "C" void edgespec_set_functions(
    Multiply multiply, void (*barrier)(void *), void (*set_chunk)(void *, int), int (*next_chunk)(void *, int)) {
    llamafile = multiply;
    threads = {barrier, set_chunk, next_chunk};
}

// Multiply two matrices, or return false if llama.cpp's own kernel has to do it.
extern "C" bool llamafile_sgemm(
    const Params * params, int64_t m, int64_t n, int64_t k, const void * a, int64_t lda, const void * b, int64_t ldb, void * c,
    int64_t ldc, int a_type, int b_type, int c_type) {
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    const auto multiply_blocks = [&](auto block, auto input) {
        const Product<decltype(block), decltype(input)> product{
            k,   static_cast<const decltype(block) *>(a), lda, static_cast<const decltype(input) *>(b),
            ldb, static_cast<float *>(c),                 ldc};
        multiply(*params, product, m, n);
        return true;
    };
    const bool can_multiply = k > 0 && c_type == GGML_TYPE_F32 && (params->threads == 1 || threads.barrier != nullptr);
    if (can_multiply && b_type == GGML_TYPE_Q8_K) {
        switch (a_type) {
            case GGML_TYPE_Q4_K: return multiply_blocks(BlockQ4K(), Activations());
            case GGML_TYPE_Q5_K: return multiply_blocks(BlockQ5K(), Activations());
            case GGML_TYPE_Q6_K: return multiply_blocks(BlockQ6K(), Activations());
            default: return false;
        }
    }
    if (can_multiply && a_type == b_type) {
        if (a_type == GGML_TYPE_F16 && k % STEP == 0) {
            return multiply_blocks(uint16_t(), uint16_t());
        }
        if (a_type == GGML_TYPE_Q8_0) {
            return multiply_blocks(BlockQ8(), BlockQ8());
        }
    }
#endif
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
    multiply_one(n, static_cast<const BlockQ4K *>(weights), inputs, result);
}

extern "C" void ggml_vec_dot_q5_K_q8_K(
    int n, float * result, size_t, const void * weights, size_t, const void * inputs, size_t, int) {
    multiply_one(n, static_cast<const BlockQ5K *>(weights), inputs, result);
}

extern "C" void ggml_vec_dot_q6_K_q8_K(
    int n, float * result, size_t, const void * weights, size_t, const void * inputs, size_t, int) {
    multiply_one(n, static_cast<const BlockQ6K *>(weights), inputs, result);
}

// Multiply all rows of repacked weights, 8 at a time, for one token.
extern "C" void ggml_gemv_q4_K_8x8_q8_K(
    int n, float * result, size_t, const void * weights, const void * inputs, int, int rows) {
    const EightBlocksQ4K * blocks = static_cast<const EightBlocksQ4K *>(weights);
    for (int row = 0; row < rows; row += 8, blocks += n / 256) {
        _mm256_storeu_ps(result + row, multiply_eight_q4(n, blocks, static_cast<const Activations *>(inputs)));
    }
}

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
// Multiply all rows of repacked weights by groups of 4 tokens.
extern "C" void ggml_gemm_q4_K_8x8_q8_K(
    int n, float * result, size_t stride, const void * weights, const void * inputs, int tokens, int rows) {
    const EightBlocksQ4K * blocks = static_cast<const EightBlocksQ4K *>(weights);
    for (int row = 0; row < rows; row += 8, blocks += n / 256) {
        const FourActivations * four = static_cast<const FourActivations *>(inputs);
        for (int token = 0; token < tokens; token += 4, four += n / 256) {
            multiply_eight_q4_by_four(n, blocks, four, result + token * stride + row, stride);
        }
    }
}
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512DQ__)
extern "C" void ggml_gemm_q4_0_8x8_q8_0(
    int n, float * result, size_t stride, const void * weights, const void * inputs, int tokens, int rows) {
    const EightBlocksQ4 * blocks = static_cast<const EightBlocksQ4 *>(weights);
    const FourBlocksQ8 * all = static_cast<const FourBlocksQ8 *>(inputs);
    const int count = tokens / 4 * (n / 32);
    thread_local std::vector<int32_t> minus_sums;
    minus_sums.assign(4 * count, 0);
    for (int i = 0; i < count; ++i) {
        for (const auto & part : all[i].elements) {
            for (int t = 0; t < 4; ++t) {
                minus_sums[4 * i + t] -= 8 * std::accumulate(part[t], part[t] + 8, 0);
            }
        }
    }
    for (int row = 0; row < rows; row += 8, blocks += n / 32) {
        for (int token = 0; token < tokens; token += 4) {
            const int first = token / 4 * (n / 32);
            float * to = result + token * stride + row;
            multiply_eight_q4_0_by_four(n, blocks, all + first, minus_sums.data() + 4 * first, to, stride);
        }
    }
}
#endif

extern "C" void ggml_gemv_q4_0_8x8_q8_0(
    int n, float * result, size_t, const void * weights, const void * inputs, int, int rows) {
    const EightBlocksQ4 * blocks = static_cast<const EightBlocksQ4 *>(weights);
    const BlockQ8 * row_inputs = static_cast<const BlockQ8 *>(inputs);
    thread_local std::vector<int32_t> sums;
    sums.resize(n / 32);
    for (int i = 0; i < n / 32; ++i) {
        sums[i] = std::accumulate(row_inputs[i].elements, row_inputs[i].elements + 32, 0);
    }
    for (int row = 0; row < rows; row += 8, blocks += n / 32) {
        _mm256_storeu_ps(result + row, multiply_eight_q4_0(n, blocks, row_inputs, sums.data()));
    }
}
#endif
