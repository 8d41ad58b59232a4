// Let llama.cpp use llamafile's matrix kernels for quantised weights only.
//
// For 16-bit and 32-bit weights, these kernels sum in another order than the kernel for a single token, so that a draft could
// not be checked without changing the reply. For quantised weights, the sums are the same, and prompts are read up to 1.7 times
// as fast. llama.cpp cannot choose by type, but on Linux a function of a library that was loaded earlier takes precedence over
// one of the same name. edgespec/backends/llamacpp/native.py loads this library before llama.cpp.
#include <cstdint>

namespace {
// The values of GGML_TYPE_F32, GGML_TYPE_F16 and GGML_TYPE_BF16.
constexpr int F32 = 0, F16 = 1, BF16 = 30;

using Multiply = bool (*)(
    const void * params, int64_t m, int64_t n, int64_t k, const void * a, int64_t lda, const void * b, int64_t ldb, void * c,
    int64_t ldc, int a_type, int b_type, int c_type);

Multiply llamafile = nullptr;
}  // namespace

extern "C" void edgespec_set_llamafile(Multiply function) { llamafile = function; }

// Multiply two matrices, or return false if llama.cpp's own kernel has to do it.
extern "C" bool llamafile_sgemm(
    const void * params, int64_t m, int64_t n, int64_t k, const void * a, int64_t lda, const void * b, int64_t ldb, void * c,
    int64_t ldc, int a_type, int b_type, int c_type) {
    if (llamafile == nullptr || a_type == F32 || a_type == F16 || a_type == BF16) {
        return false;
    }
    return llamafile(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
}
